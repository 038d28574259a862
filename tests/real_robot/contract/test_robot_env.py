"""`env.kind: robot`: what a contract or a dataset says of a robot, and that nothing is stepped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from own_recordings import FPS, INSTRUCTION, SIZE, SO101, robomimic, so101
from typer.testing import CliRunner

from real_robot.contract.env import RobotEnvConfig
from vla_rl.cli.app import app
from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import DataNeeds, open_dataset
from vla_rl.data.source import grippers_of
from vla_rl.data.statistics import compute_statistics
from vla_rl.recipe.checks import HIL
from vla_rl.recipe.recipe import check, load_recipe, read_recipe


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return so101(tmp_path_factory.mktemp("robot") / "so101", episodes=3, videos=False)


def test_a_dataset_says_what_robot_it_is_of(recorded: Path) -> None:
    spec = RobotEnvConfig(dataset=str(recorded)).env_spec()
    assert (spec.kind, spec.state_dim, spec.action_dim, spec.control_hz) == ("robot", 6, 6, FPS)
    assert spec.action_names == spec.state_names == tuple(f"{name}.pos" for name in SO101)
    assert spec.cameras == ("front", "wrist") and spec.image_size == (SIZE, SIZE)
    assert spec.tasks == {"go_to_the_bar": INSTRUCTION} and 28 <= spec.horizon["go_to_the_bar"] < 36
    actions = open_dataset(DatasetConfig(path=str(recorded)), DataNeeds((), 6)).actions
    np.testing.assert_allclose(spec.action_low, actions.min(0), rtol=1e-5)
    np.testing.assert_allclose(spec.action_high, actions.max(0), rtol=1e-5)


def test_a_contract_says_it_without_a_dataset_and_both_must_agree(recorded: Path) -> None:
    told = RobotEnvConfig(contract="so101", instructions=("pick up the cube",)).env_spec()
    assert (told.action_low[0], told.action_high[5], told.control_hz) == (-110, 100, 30)
    assert told.tasks == {"pick_up_the_cube": "pick up the cube"} and told.image_size == (224, 224)
    both = RobotEnvConfig(contract="so101", dataset=str(recorded)).env_spec()
    assert both.action_names == SO101 and list(both.tasks.values()) == [INSTRUCTION]
    with pytest.raises(ConfigError, match=r"contract aloha has 14 numbers of the action, dataset .* 6"):
        RobotEnvConfig(contract="aloha", dataset=str(recorded)).env_spec()
    with pytest.raises(ConfigError, match=r"env\.cameras: got 'top'; the robot has front, wrist"):
        RobotEnvConfig(dataset=str(recorded), cameras=("top",)).env_spec()
    with pytest.raises(ConfigError, match=r"give env\.dataset=FOLDER"):
        validate(RobotEnvConfig, {})
    with pytest.raises(ConfigError, match="a contract names no task"):
        validate(RobotEnvConfig, {"contract": "so101"})


def test_a_gripper_is_what_is_named_one() -> None:
    assert grippers_of([f"{name}.pos" for name in SO101]) == (5,)
    assert grippers_of(("left_gripper", "joint", "right_gripper")) == (0, 2)
    assert grippers_of([f"joint_{number}" for number in range(7)]) == ()


def test_the_last_joint_is_normalized_like_the_others(recorded: Path) -> None:
    data = open_dataset(DatasetConfig(path=str(recorded)), DataNeeds(("front",), 6))
    assert data.grippers == (5,) and data.keyframes is not None
    assert compute_statistics([data])["action"]["mask"] == [True] * 6  # 0 to 100 is no number of a policy's own.


@pytest.mark.parametrize(
    "command",
    [
        ["train", "tabletop_grpo", "policy.path=pretrained:tabletop_clean"],
        ["collect", "robot_sft"],
        ["online", "tabletop_online"],
        ["failure", "fit", "tabletop_failure"],
    ],
)
def test_what_needs_steps_is_refused_and_says_what_would_do(command: list[str], recorded: Path) -> None:
    name = command[0]
    command = ["train" if name == "online" else name, *command[1:]]
    done = CliRunner().invoke(app, [*command, "env=robot", f"env.dataset={recorded}"])
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert "nothing that answers an action" in said and "simulator" in said and "world-model fit" in said


def test_the_shipped_recipe_is_one_of_a_robot() -> None:
    recipe = load_recipe("robot_sft")
    assert recipe.env.kind == "robot" and recipe.env.not_stepped
    with pytest.raises(ConfigError, match="nothing that answers"):
        recipe.env.build()


def test_hil_learns_from_recordings_and_acts_in_a_simulator_alone(recorded: Path) -> None:
    hil = {"evaluate": "never", "prior": "none", "warm_updates": 0}
    values: dict[str, Any] = {
        "run": "hil",
        "name": "own",
        "env": {"kind": "robot", "dataset": str(recorded)},
        "policy": {"kind": "openvla", "path": "pretrained:tabletop_clean"},
    }
    check(read_recipe(values | {"hil": {**hil, "actor": "recordings", "recordings": "data"}}), HIL)
    with pytest.raises(ConfigError, match="nothing that answers"):
        check(read_recipe(values | {"hil": hil}), HIL)


WORLD_MODEL = """
run: fit
name: own
env: {{kind: robot, dataset: {data}}}
policy: {{kind: openvla, preset: tiny, cameras: [agentview]}}
world_model:
  kind: latent_video
  datasets: {data}
  model:
    autoencoder: {{channels: [4, 8], blocks: [1, 1], latent_channels: 4}}
    dynamics: {{width: 32, depth: 1, heads: 2, patch: 4, memory: 2}}
    success: {{width: 32, depth: 1}}
    frame_steps: 4
  clip_frames: 4
  holdout: 0.5
  max_false_success: 0.99
  min_failures: 1
  autoencoder: {{steps: 2, batch_size: 4}}
  dynamics: {{steps: 2, batch_size: 4}}
  success: {{steps: 2, batch_size: 4}}
"""


@pytest.mark.slow
def test_a_world_model_is_fitted_on_recordings_alone(tmp_path: Path) -> None:
    file, data, recipe = robomimic(tmp_path / "demos.hdf5", 16), tmp_path / "data", tmp_path / "fit.yaml"
    raw: Any
    with h5py.File(file, "a") as raw:
        for number in range(0, 16, 2):
            raw[f"data/demo_{number}/rewards"][...] = 0  # A failure.
    run = CliRunner().invoke
    assert run(app, ["import", str(file), "-o", str(data), "--instruction", "lift it"]).exit_code == 0
    recipe.write_text(WORLD_MODEL.format(data=data))
    done = run(app, ["world-model", "fit", str(recipe), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert any((tmp_path / "run" / "world_model").glob("*.safetensors"))
