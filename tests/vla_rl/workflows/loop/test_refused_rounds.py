"""Rounds that are refused: the loop ends with the round before, and says why."""

# ruff: noqa: F811  (fixtures of the file beside this one)

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_loop import recipe, started, two  # noqa: F401  (fixtures)

from vla_rl.cli.options import PROGRAM
from vla_rl.config import apply_overrides
from vla_rl.data.keyframes import KeyframeError
from vla_rl.evaluation.probability import CalibrationError
from vla_rl.evaluation.results import Evaluation
from vla_rl.interfaces import TrustError
from vla_rl.recipe.recipe import Recipe, read_recipe
from vla_rl.training.run import NoSuccessError
from vla_rl.workflows.loop import closed_loop as loop
from vla_rl.workflows.loop.rounds import Round, RoundsTable


@pytest.mark.slow
@pytest.mark.parametrize("error", [TrustError, NoSuccessError])
def test_a_later_round_that_is_refused_ends_the_loop_with_the_round_before(two, error, tmp_path, monkeypatch):
    run = loop.run_beside_controls

    def refuse_the_second(
        recipe: Recipe, controls: Sequence[str], done: Round, before: Round | None, *rest: Any
    ) -> None:
        if before is not None:
            raise error("False successes: too many")
        run(recipe, controls, done, before, *rest)

    monkeypatch.setattr(loop, "run_beside_controls", refuse_the_second)
    told: list[str] = []
    folder = started(two, tmp_path / "run")
    last = loop.loop(two, folder, PROGRAM, told.append)
    assert last.folder.name == "round_1" and "round 2 of 2: no RL. False successes: too many" in told
    first, second = RoundsTable.model_validate_json((folder / "rounds.json").read_text()).rows
    assert (first.refused, second.refused) == ("", "False successes: too many")
    assert second.real == first.real and second.episodes.rollouts == 16, "collected, so counted"
    assert "no RL: False successes: too many" in (folder / "report.html").read_text()
    final = Evaluation.load(folder / "evaluations" / "final.json")
    assert final.episodes == Evaluation.load(last.run / "evaluations" / "final.json").episodes


def without(world_model: Path, **facts: Any) -> Path:
    """The world model, with other facts in its metadata."""
    file = world_model / "world_model.json"
    values = json.loads(file.read_text())
    values["facts"] |= facts
    file.write_text(json.dumps(values))
    return world_model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threshold", "keyframe", "reward"])
def test_a_later_round_whose_episodes_say_too_little_ends_the_loop_with_the_round_before(
    two, tmp_path, monkeypatch, kind
):
    """As of a policy that hardly fails any more. It ends the same when it is resumed."""
    two = read_recipe(apply_overrides(two.model_dump(mode="json"), ["loop.controls=[]", "eval.videos=0"]))
    fit, mine = loop.fit_world_model, loop.mine_keyframes
    message = "calibration: 3 failed episodes"

    def fit_first(recipe: Recipe, folder: Path, *more: Any, **options: Any) -> Path:
        if "round_2" in folder.parts and kind == "threshold":
            raise CalibrationError(message)
        result = fit(recipe, folder, *more, **options)
        return without(result, no_threshold=message) if "round_2" in folder.parts and kind == "reward" else result

    def mine_first(recipe: Recipe, world_model: Path, datasets: Any, file: Path) -> Path:
        if "round_2" in file.parts and kind == "keyframe":
            raise KeyframeError(message)
        return mine(recipe, world_model, datasets, file)

    monkeypatch.setattr(loop, "fit_world_model", fit_first)
    monkeypatch.setattr(loop, "mine_keyframes", mine_first)
    folder = started(two, tmp_path / "run")
    for _ in range(2):
        told: list[str] = []
        last = loop.loop(two, folder, PROGRAM, told.append)
        assert last.folder.name == "round_1" and any("round 2 of 2: no RL. " in text for text in told)
        assert message in (folder / "round_2" / "refused.txt").read_text()
    rows = RoundsTable.model_validate_json((folder / "rounds.json").read_text()).rows
    assert message in rows[1].refused and rows[1].episodes.held_out == 24 and rows[1].before, "paid for, so counted"
    assert message in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "facts", "message"),
    [
        (["env.imagination.reward=success"], {"no_threshold": "3 failed"}, r"no threshold of success.* 3 failed"),
        (["env.imagination.reward=probability"], {"success_probability": None}, r"probability"),
        (["env.imagination.reward=objects"], {}, "objects"),
        (["env.imagination.branch_frames=2"], {}, "value"),
        (["sampling.keyframe_share=0.5", "world_model.keyframes.kinds=[uncertain]"], {}, "value"),
    ],
)
def test_a_fit_that_lost_what_rl_asks_for_is_a_refusal(recipe, tmp_path, options, facts, message):
    world_model = without(shutil.copytree(recipe.env.path, tmp_path / "world_model"), **facts)
    options = ["env.imagination.dual_noise=0", *options]
    asking = read_recipe(apply_overrides(recipe.model_dump(mode="json"), options))
    with pytest.raises(TrustError, match=f"the fit left nothing that RL could be paid by or start from: .*{message}"):
        loop.check_parts(asking, world_model)
    loop.check_parts(recipe, recipe.env.path)
