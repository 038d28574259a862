"""robosuite's tasks: the options, and (slow) that our stepping is robosuite's, and that the experts solve them."""

import subprocess
import sys

import numpy as np
import pytest

from sim.robosuite.env import CAMERAS, HORIZONS, INSTRUCTIONS, RobosuiteConfig, RobosuiteEnv
from vla_rl.config import ConfigError, build_component
from vla_rl.types import EpisodeSpec, Keyframe


def test_facts_need_no_robosuite() -> None:
    code = (
        "import sys; from sim.robosuite.env import RobosuiteConfig; print(*RobosuiteConfig().env_spec().tasks); "
        "assert not {'robosuite', 'mujoco', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == list(INSTRUCTIONS) == list(HORIZONS), run.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ["Lif"]}, "unknown robosuite task 'Lif'. Did you mean 'Lift'"),
        ({"cameras": ["front"]}, "cameras are some of agentview, wrist, each once; got front"),
        ({"horizons": {"Lift": 0}}, "horizon of 'Lift' must be at least 1"),
        ({"horizons": {"Can": 5}}, "unknown robosuite task 'Can'"),
        ({"image_size": 8}, "env.image_size"),
    ],
)
def test_bad_options(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_component("env", {"kind": "robosuite", **values})
    assert message in str(error.value)


@pytest.fixture(scope="module")
def env() -> RobosuiteEnv:
    pytest.importorskip("robosuite", reason="robosuite is not installed")
    return RobosuiteConfig(image_size=64, cameras=tuple(CAMERAS)).make()


@pytest.mark.slow
def test_stepping_is_robosuites_own(env: RobosuiteEnv) -> None:
    """The same actions move the same joints as in `robosuite`'s env.step, over a chaotic second of contacts."""
    import robosuite
    from robosuite.controllers import load_controller_config

    env.reset(EpisodeSpec("Stack", "train", 3))
    theirs = robosuite.make(
        "Stack",
        robots="Panda",
        controller_configs=load_controller_config(default_controller="OSC_POSE"),
        has_offscreen_renderer=False,
        use_camera_obs=False,
        control_freq=20,
        ignore_done=True,
        hard_reset=False,
    )
    theirs.sim.data._data.qpos[:] = env._scene.data.qpos
    theirs.sim.forward()
    controller = theirs.robots[0].controller
    controller.update(force=True)
    controller.reset_goal()
    controller.initial_joint = np.array(controller.joint_pos)
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.uniform(-1, 1, 7)
        env.apply(action)
        theirs.step(action)
    moved = np.abs(env._scene.data.qpos - theirs.sim.data._data.qpos)
    assert moved.max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("task", list(INSTRUCTIONS))
def test_expert_solves_within_the_horizon(env: RobosuiteEnv, task: str) -> None:
    solved = 0
    for index in range(4):
        env.reset(EpisodeSpec(task, "validation", index))
        solved += any(env.apply(np.clip(env.expert_action(), -1, 1)) for _ in range(env.horizon))
    assert solved >= 3


@pytest.mark.slow
def test_images_are_upright_and_not_mirrored(env: RobosuiteEnv) -> None:
    """The robot comes from the top of agentview; robosuite's -y, where PickPlaceCan has its can, is on the left."""
    image = env.reset(EpisodeSpec("PickPlaceCan", "train", 0)).images["agentview"].astype(int)
    red = (image[..., 0] > 100) & (image[..., 1] < 60) & (image[..., 2] < 60)
    rows, columns = np.nonzero(red)
    assert len(rows) > 3, "the can is red"
    assert columns.mean() < 32, "the can stands in the left bin"
    assert 16 < rows.mean() < 48
    white = image.min(2) > 180
    assert white[:16].sum() > 2 * white[48:].sum(), "the white arm is at the top"


@pytest.mark.slow
def test_keyframe_of_another_scene(env: RobosuiteEnv) -> None:
    env.reset(EpisodeSpec("Lift"))
    arrays = env.save_state().arrays
    with pytest.raises(ValueError, match="'physics': expected shape"):
        env.reset(EpisodeSpec("Stack", keyframe=Keyframe("robosuite", "Stack", 0, arrays)))
    with pytest.raises(ValueError, match="this keyframe is of robosuite/Lift"):
        env.reset(EpisodeSpec("Stack", keyframe=Keyframe("robosuite", "Lift", 0, arrays)))
