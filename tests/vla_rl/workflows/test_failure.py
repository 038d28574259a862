"""`vla-rl failure fit | eval` on a tiny policy, from episodes to the page; and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import recorded_episodes
import yaml
from tiny_run import save_policy
from typer.testing import CliRunner, Result

from real_robot.failure.conformal import EpisodesConfig
from real_robot.operator.recorder import Recording
from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import load_recipe
from vla_rl.workflows.failure_detection import embedded

RECIPE = """
run: failure
name: tiny
num_threads: 1
env: {{kind: 'sim.dummy:DummyConfig', num_envs: 16, tasks: [reach_red], horizon: 16}}
policy: {{kind: openvla, path: {policy}}}
failure:
  kind: conformal
  alpha: 0.4
  detectors: [rnd, safe_mlp]
  min_failures: 5
  fit_on: {{episodes_per_task: 80}}
  calibrate_on: {{episodes_per_task: 80, start_index: 100}}
  evaluate_on: {{episodes_per_task: 60, split: eval}}
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["failure", *arguments])


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(RECIPE.format(policy=save_policy(tmp_path / "policy")))
    return file


@pytest.mark.slow
def test_fit_and_eval(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fitted = run("fit", str(recipe), "-o", str(folder))
    assert fitted.exit_code == 0, fitted.output
    assert f"detector: {folder / 'detectors' / 'rnd'}" in fitted.output
    written = (folder / "embeddings" / "fit_on" / "embeddings.safetensors").stat().st_mtime_ns
    assert run("fit", str(recipe), "-o", str(folder), "--resume").exit_code == 0
    assert (folder / "embeddings" / "fit_on" / "embeddings.safetensors").stat().st_mtime_ns == written
    other = run("fit", str(recipe), "failure.alpha=0.3", "--episodes-of", str(folder), "-o", str(tmp_path / "other"))
    assert other.exit_code == 0, other.output
    assert not (tmp_path / "other" / "embeddings").exists()
    measured = run("eval", str(recipe), str(folder))
    assert measured.exit_code == 0, measured.output
    result = json.loads((folder / "failure.json").read_text())
    assert result["facts"]["num_episodes"] == 60
    assert set(result["figures"]) == {"rnd", "safe_mlp", "clock"}
    assert (folder / "failure.html").is_file()
    changed = run("eval", str(recipe), str(folder), "failure.evaluate_on.episodes_per_task=61")
    assert changed.exit_code == 2
    assert "holds episodes embedded for another policy, environment or source" in changed.output


def test_a_folder_without_detectors_is_refused_before_episodes_are_run(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.workflows.failure_detection.embedded", lambda *_: pytest.fail("ran episodes"))
    for folder in (tmp_path, tmp_path / "nosuch"):
        found = run("eval", str(recipe), str(folder))
        assert found.exit_code == 2 and f"{folder}: no detectors in it; `vla-rl failure fit RECIPE" in found.output


def test_episodes_noted_with_the_fields_in_another_order_are_used_again(recipe: Path, tmp_path: Path) -> None:
    """The version before wrote `kind` and `num_envs` of the environment after other fields."""
    loaded = load_recipe(recipe)
    few = EpisodesConfig(episodes_per_task=2)
    embedded(loaded, few, tmp_path / "fit_on", print)
    note = tmp_path / "fit_on.yaml"
    values = yaml.safe_load(note.read_text())
    moved = {name: values.pop(name) for name in ("kind", "num_envs")}
    note.write_text(yaml.safe_dump(values | moved, sort_keys=False))
    assert len(embedded(loaded, few, tmp_path / "fit_on", print)) == 2
    note.write_text(yaml.safe_dump(values | moved | {"horizon": 17}, sort_keys=False))
    with pytest.raises(ConfigError, match="another policy, environment or source"):
        embedded(loaded, few, tmp_path / "fit_on", print)


def test_a_dataset_that_was_recorded_anew_is_not_taken_for_the_one_before(recipe: Path, tmp_path: Path) -> None:
    """`fit` says how many episodes are missing; more are recorded under the same name."""
    folder, loaded = tmp_path / "fit", load_recipe(recipe)
    values = {"datasets": str(folder), "same_policy": False}

    def record(count: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        recording = Recording(folder, 10, "toy")
        for index in range(count):
            recording.add(recorded_episodes.episode(index, ["policy"] * 4, True), {"agentview": (32, 32)})
        recording.close()

    record(2)
    config = EpisodesConfig.model_validate(values)
    assert len(embedded(loaded, config, tmp_path / "fit_on", print)) == 2
    assert len(embedded(loaded, config, tmp_path / "fit_on", print)) == 2
    record(3)
    with pytest.raises(ConfigError, match="or of datasets that have changed since"):
        embedded(loaded, config, tmp_path / "fit_on", print)
    shutil.rmtree(folder)
    assert len(embedded(loaded, config, tmp_path / "fit_on", print)) == 2  # What was embedded is still good.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("failure=null", "failure: got None. A section is needed"),
        ("failure.detectors=[oracle]", "failure.detectors.0: got 'oracle'"),
        ("failure.alpha=0", "failure.alpha: got 0"),
        ("failure.alfa=0.1", "Did you mean 'alpha'?"),
        ("failure.kind=magic", "failure.kind: got 'magic'"),
        ("policy.path=null", "a failure detector belongs to one checkpoint"),
        ("failure.every=3", "new episodes are embedded once a chunk (4 steps)"),
    ],
)
def test_what_is_refused(recipe: Path, tmp_path: Path, override: str, message: str) -> None:
    result = run("fit", str(recipe), override, "-o", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert message in result.output
