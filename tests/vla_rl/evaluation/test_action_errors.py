"""Action errors on held-out recordings: by hand, and of a policy through the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from own_recordings import SIZE, so101
from typer.testing import CliRunner, Result

from vla_rl.cli.app import app
from vla_rl.evaluation.recorded import ActionErrors, Track, action_errors, errors_of

ABOUT = {"name": "policy", "policy": "p", "policy_hash": "", "datasets": ("d",), "unseen": "", "control_hz": 10.0}


def track(actions: list[list[float]], moments: list[int], predicted: list[list[list[float]]]) -> Track:
    return Track("t", "go", np.array(actions), np.array(moments), np.array(predicted), math.nan)


def test_errors_by_hand() -> None:
    # Dimension 0 counts up; the policy is right at once and 1 off a step later. Dimension 1 never changes.
    one = track([[0, 5], [1, 5], [2, 5], [3, 5]], [1, 3], [[[1, 5], [3, 5]], [[3, 6], [9, 9]]])
    policy, repeated = errors_of(one)
    np.testing.assert_allclose(policy, [[0, 0.5], [1, 0]])  # The chunk's second step at moment 3 is past the end.
    np.testing.assert_allclose(repeated, [[1, 0], [2, 0]])
    result, (told,) = action_errors([one], ("x", "still"), **ABOUT)
    x, still = result.dimensions
    assert (x.error.value, x.repeated.value, x.ratio.value) == (0.5, 1.5, pytest.approx(1 / 3))
    assert still.spread == 0 and math.isnan(still.ratio.value) and math.isnan(x.error.low)
    assert [step.error.value * x.spread for step in result.steps] == pytest.approx([0, 1])
    assert told.error == pytest.approx(0.5 / x.spread) and result.num_moments == 2
    assert ActionErrors.model_validate_json(result.model_dump_json()).ratio.value == pytest.approx(1 / 3)


def test_the_verdict_needs_an_interval_on_one_side() -> None:
    rng = np.random.default_rng(0)
    walks = [np.cumsum(rng.normal(size=(20, 1)), 0) for _ in range(8)]

    def said(factor: float) -> str:
        tracks = [
            track(walk.tolist(), [*range(1, 20)], (walk[1:, None] + factor * np.diff(walk, axis=0)[:, None]).tolist())
            for walk in walks
        ]
        return action_errors(tracks, ("x",), **ABOUT)[0].headline()

    assert "has learned something" in said(0.3)
    assert "worse than doing nothing new" in said(3)
    assert "no better is shown" in said(1)


RECIPE = """
run: sft
name: arm
env: {{kind: robot, dataset: {data}}}
policy: {{kind: openvla, preset: tiny, image_size: 32, cameras: [front], action_bins: 32, chunk_size: 4}}
sft: {{datasets: {data}, steps: 2, batch_size: 4, validation_fraction: 0.4}}
"""


@pytest.fixture(scope="module")
def cloned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recordings, a recipe and a policy that was cloned from them."""
    folder = tmp_path_factory.mktemp("cloned")
    so101(folder / "data", episodes=5, videos=False)
    (folder / "arm.yaml").write_text(RECIPE.format(data=folder / "data"))
    done = run("sft", folder / "arm.yaml", "-o", folder / "run")
    assert done.exit_code == 0, done.output
    return folder


def run(*command: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, command)])


def test_eval_measures_a_policy_on_the_episodes_that_its_cloning_held_out(cloned: Path, tmp_path: Path) -> None:
    recipe, policy = cloned / "run" / "config.yaml", f"policy.path={cloned / 'run' / 'policy'}"
    done = run("eval", recipe, policy, "-o", tmp_path / "eval")
    assert done.exit_code == 0, done.output
    assert "An action error is not success" in done.output and "shoulder_pan.pos" in done.output
    found = json.loads((tmp_path / "eval" / "action_errors" / "policy.json").read_text())
    assert found["num_episodes"] == 2 and len(found["steps"]) == 4 and len(found["dimensions"]) == 6
    assert found["unseen"] == "They were held out when the policy was cloned."
    page = (tmp_path / "eval" / "report.html").read_text()
    assert "An action error is not success" in page and page.count('<svg class="figure"') == 3 and SIZE == 48
    assert run("report", tmp_path / "eval").exit_code == 0  # The run's page in its place still says it.
    assert "On recordings, policy: The action error is" in (tmp_path / "eval" / "report.html").read_text()
    again = run("eval", recipe, policy, "-o", tmp_path / "eval")
    assert again.exit_code == 2 and "already holds an evaluation" in again.stderr


def test_joints_in_degrees_are_no_actions_of_a_simulators_scale(cloned: Path, tmp_path: Path) -> None:
    done = run("sft", cloned / "arm.yaml", "sft.action_scale=environment", "-o", tmp_path / "run")
    assert done.exit_code == 2 and "sft.action_scale: got 'environment'" in done.stderr and "to 100" in done.stderr


def test_eval_refuses_episodes_that_the_policy_has_learned(cloned: Path, tmp_path: Path) -> None:
    recipe, policy = cloned / "run" / "config.yaml", f"policy.path={cloned / 'run' / 'policy'}"
    for change, said in (
        ("seed=1", "seed: got 1, and"),
        ("sft.validation_fraction=0.2", "sft.validation_fraction: got 0.2, and"),
        (f"eval.datasets={cloned / 'data'}", "is one of the datasets that"),
        ("sft.validation_fraction=0", "eval.datasets: without a simulator"),
        ("eval.temperatures=[1]", "eval.temperatures: got (1.0,); on recordings the likeliest actions"),
        ("eval.videos=5", "eval.videos: got 5; on recordings"),
    ):
        done = run("eval", recipe, policy, change, "-o", tmp_path / "eval")
        assert done.exit_code == 2 and said in done.stderr, done.output
    other = so101(tmp_path / "other", episodes=2, videos=False)
    done = run("eval", recipe, policy, f"eval.datasets={other}", "-o", tmp_path / "eval")
    assert done.exit_code == 0 and "on 2 held-out episodes" in " ".join(done.stdout.split()), done.output


def test_offline_is_measured_before_and_after_on_other_recordings(cloned: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "offline.yaml"
    other = so101(tmp_path / "other", episodes=2, videos=False)
    text = RECIPE.format(data=cloned / "data").replace("run: sft", "run: offline").replace("0.4", "0")
    recipe.write_text(text + "offline: {kind: cloning}\n")
    command = ("train", recipe, f"policy.path={cloned / 'run' / 'policy'}", "-o", tmp_path / "run")
    done = run(*command)
    assert done.exit_code == 2 and "eval.datasets: without a simulator" in done.stderr, done.output
    done = run(*command, f"eval.datasets={other}")
    assert done.exit_code == 0, done.output
    for name in ("base", "final"):
        assert (tmp_path / "run" / "action_errors" / name / "report.html").is_file()
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'href="action_errors/final/report.html">action errors of final<' in page
    assert "On recordings, base: The action error is" in page and "An action error is not success" in page
