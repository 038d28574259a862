"""`vla-rl eval --perturb`: one table, picture and file, paired with the clean episodes, on the real tabletop."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.robustness import Robustness
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows.evaluate_policy import chosen


def command(folder: Path, *more: str) -> Result:
    env = ("env.num_envs=4", "env.num_workers=0", "env.tasks=[push_to_zone]")
    options = (*env, "eval.episodes_per_task=4", "eval.temperatures=[0]", "eval.videos=0", "log.tensorboard=false")
    arguments = ["eval", "tabletop_grpo", *options, "-o", str(folder), *more]
    return CliRunner().invoke(app, arguments)


def test_it_gives_one_table_paired_with_the_clean_episodes(tmp_path: Path) -> None:
    result = command(tmp_path / "run", "--perturb", "camera,wording", "--levels", "3,1")
    assert result.exit_code == 0, result.output
    assert "what one change costs" in result.output and "…" not in result.output
    robustness = Robustness.load(tmp_path / "run/robustness.json")
    cells = [(rate.axis, rate.level) for rate in robustness.rates]
    assert cells == [("clean", 0), ("camera", 1), ("camera", 3), ("wording", 1), ("wording", 3)]
    assert (tmp_path / "run/robustness.png").read_bytes()[:4] == b"\x89PNG"
    clean = Evaluation.load(tmp_path / "run/evaluations/policy.json")
    for rate in robustness.rates[1:]:
        perturbed = Evaluation.load(tmp_path / f"run/perturbed/{rate.axis}-{rate.level}.json")
        assert perturbed.meta.env_title == f"tabletop/{rate.axis}-{rate.level}"
        assert [(e.task, e.index) for e in perturbed.episodes] == [(e.task, e.index) for e in clean.episodes]
        assert rate.rate == perturbed.rate("greedy").rate
        assert rate.difference == pytest.approx(rate.rate - clean.rate("greedy").rate)


def test_each_axis_is_filmed_at_its_highest_level_and_shown(tmp_path: Path) -> None:
    assert command(tmp_path / "run", "--perturb", "camera,noise", "--levels", "1,2", "eval.videos=1").exit_code == 0
    films = sorted((tmp_path / "run/perturbed").glob("*.mp4"))
    assert [film.stem for film in films] == ["camera-2", "noise-2"]
    page = (tmp_path / "run/report.html").read_text()
    assert all(base64.b64encode(film.read_bytes()).decode() in page for film in films)
    assert "<figcaption>camera, level 2</figcaption>" in page


def test_what_a_stopped_run_has_finished_is_not_run_again(tmp_path: Path) -> None:
    assert command(tmp_path / "run", "--perturb", "noise", "--levels", "1").exit_code == 0
    file = tmp_path / "run/perturbed/noise-1.json"
    before = file.stat().st_mtime_ns
    (tmp_path / "run/evaluations/policy.json").unlink()
    assert command(tmp_path / "run", "--perturb", "noise", "--levels", "1").exit_code == 0
    assert file.stat().st_mtime_ns == before
    clean = (tmp_path / "run/evaluations/policy.json").stat().st_mtime_ns
    for name in ("robustness.json", "report.html"):  # As where it was stopped while the clean episodes were filmed.
        (tmp_path / "run" / name).unlink()
    assert command(tmp_path / "run", "--perturb", "noise", "--levels", "1").exit_code == 0
    assert (tmp_path / "run/robustness.json").is_file() and (tmp_path / "run/report.html").is_file()
    assert (tmp_path / "run/evaluations/policy.json").stat().st_mtime_ns == clean
    (tmp_path / "run/evaluations/policy.json").unlink()
    file.write_text(re.sub('"policy_hash": "[0-9a-f]+"', '"policy_hash": "other"', file.read_text()))
    refused = command(tmp_path / "run", "--perturb", "noise", "--levels", "1")
    assert refused.exit_code != 0 and "of other weights" in f"{refused.output}{refused.exception}"


def test_levels_of_nothing_and_no_axis_are_refused(tmp_path: Path) -> None:
    refused = command(tmp_path / "run", "--levels", "3")
    assert refused.exit_code == 2 and "--levels: got '3' without --perturb" in refused.stderr
    refused = command(tmp_path / "run", "--perturb", "")
    assert refused.exit_code == 2 and "--perturb: got ''; tabletop has: camera" in refused.stderr


@pytest.mark.parametrize(
    ("recipe", "overrides", "axes", "levels", "said"),
    [
        ("tabletop_grpo", "", "camera,fog", "1", "--perturb: got 'fog'; tabletop has: camera, light"),
        ("tabletop_grpo", "", "all", "1,4", "--levels: got '4'; levels are 1, 2 and 3"),
        ("robotwin_grpo", "", "all", "1", "--perturb: robotwin has no perturbations; tabletop and libero have"),
        ("tabletop_grpo", "env.perturb={axis: light, level: 3}", "noise", "1", "env.perturb: got light-3 with --pert"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(
    recipe: str, overrides: str, axes: str, levels: str, said: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        chosen(load_recipe(recipe, [overrides] if overrides else []), axes, levels)
    assert said in str(raised.value)


def test_all_is_every_axis_of_the_environment_at_each_level() -> None:
    found = chosen(load_recipe("tabletop_grpo"), "all", "1,2,3")
    assert len(found) == 24 and found[:3] == [("camera", 1), ("camera", 2), ("camera", 3)]
