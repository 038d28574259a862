"""The study of which trust figure predicts RL's gain: correlations by hand, what is refused, and one for real."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_loop import make_recipe
from trust_study import correlations, study

from vla_rl.cli.options import PROGRAM
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.workflows.imagination.fit_world_model import fit_world_model

GAINS = {"push": {"sampled": [0.0, 0.1, 0.2, 0.3, 0.4]}, "stack": {"sampled": [0.1, 0.0, 0.3, 0.2, 0.5]}}


def test_a_figure_in_the_order_of_the_gains_comes_first_and_a_constant_one_not_at_all():
    figures = {
        task: {"noise": [3.0, 1.0, 2.0, 3.0, 1.0], "agreement": [1.0, 2.0, 4.0, 8.0, 9.0], "majority": [0.6] * 5}
        for task in GAINS
    }
    first, second = correlations(figures, GAINS)
    assert (first.figure, second.figure) == ("agreement", "noise")
    assert first.by_task == pytest.approx((1, 0.8)) and first.mean == pytest.approx(0.9)
    assert second.interval.low < 0 < second.interval.high, "five world models say nothing of noise"
    assert first.interval.low > second.interval.low


def test_the_interval_covers_a_correlation_that_is_there():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        quality = rng.normal(size=16)
        gains = {"push": {"sampled": quality + rng.normal(size=16)}}
        (found,) = correlations({"push": {"skill": quality + rng.normal(size=16)}}, gains)
        covered += found.interval.low <= 6 / np.pi * np.arcsin(0.5 / 2) <= found.interval.high  # of a normal pair
    assert covered > 85


@pytest.mark.parametrize(
    ("world_models", "tasks", "message"),
    [(["a", "b", "c"], ["push"], "needs 4 at least"), (["a"] * 4, ["push"], "each once"), (list("abcd"), [], "--task")],
)
def test_a_study_that_could_say_nothing_is_refused(tmp_path, world_models, tasks, message):
    with pytest.raises(ConfigError, match=message):
        study("tabletop_imagination", (), world_models, tasks, tmp_path, program=PROGRAM)


def test_a_folder_of_other_world_models_is_refused(tmp_path):
    (tmp_path / "world_models.json").write_text('["a", "b", "c", "d"]')
    with pytest.raises(ConfigError, match="holds a study of a, b, c, d"):
        study("tabletop_imagination", (), list("abdc"), ["push"], tmp_path, program=PROGRAM)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_study_of_four_world_models(tmp_path):
    recipe = make_recipe(tmp_path, "loop.controls=[]")
    file = tmp_path / "tiny.yaml"
    file.write_text(dump_yaml(recipe))
    fits = [
        fit_world_model(recipe.model_copy(update={"seed": n}), tmp_path / f"fit_{n}", [tmp_path / "episodes"])
        for n in range(4)
    ]
    shown: list[str] = []
    arguments = (str(file), (), [str(path) for path in fits], ["reach_red"], tmp_path / "study")
    found = study(*arguments, program=PROGRAM, show=shown.append)
    assert len(found.gains["reach_red"]["sampled"]) == 4 and found.num_episodes == 4
    assert len(found.figures["reach_red"]["psnr"]) == 4
    assert json.loads((tmp_path / "study" / "study.json").read_text())["tasks"] == ["reach_red"]
    assert "| - (before) |" in Path(tmp_path / "study" / "study.md").read_text()
    assert study(*arguments, program=PROGRAM, show=shown.append) == found and "found finished" in shown[-1]
