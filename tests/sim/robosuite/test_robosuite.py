"""robosuite's tasks: the options, and (slow) that our stepping is robosuite's, and that the experts solve them."""

import subprocess
import sys

import numpy as np
import pytest

from sim.robosuite.env import RobosuiteConfig, RobosuiteEnv
from sim.robosuite.expert import TASKS, WITH_EXPERT, tasks_with
from vla_rl.config import ConfigError, build_component
from vla_rl.types import EpisodeSpec, Keyframe


def test_facts_need_no_robosuite() -> None:
    code = (
        "import sys; from sim.robosuite.env import RobosuiteConfig; print(*RobosuiteConfig().env_spec().tasks); "
        "assert not {'robosuite', 'mujoco', 'torch'} & set(sys.modules), sorted(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout.split() == list(tasks_with(1)), run.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ["Lif"]}, "unknown robosuite task 'Lif'. Did you mean 'Lift'"),
        ({"cameras": ["front"]}, "cameras are some of agentview, wrist, second_wrist, each once; got front"),
        ({"horizons": {"Lift": 0}}, "horizon of 'Lift' must be at least 1"),
        ({"horizons": {"Can": 5}}, "unknown robosuite task 'Can'"),
        ({"image_size": 8}, "env.image_size"),
        ({"tasks": ["Lift", "TwoArmLift"]}, "env.tasks: TwoArmLift has 2 arms (14 actions), env.arms is 1"),
        ({"tasks": ["Lift"], "arms": 2}, "env.tasks: Lift has 1 arm (7 actions), env.arms is 2"),
        ({"cameras": ["second_wrist"]}, "second_wrist is on the second arm"),
    ],
)
def test_bad_options(values: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_component("env", {"kind": "robosuite", **values})
    assert message in str(error.value)


def make(task: str) -> RobosuiteEnv:
    return RobosuiteConfig.model_validate({"image_size": 32, "tasks": (task,), "arms": len(TASKS[task].robots)}).make()


@pytest.fixture(scope="module")
def env() -> RobosuiteEnv:
    pytest.importorskip("robosuite", reason="robosuite is not installed")
    return RobosuiteConfig(image_size=64, cameras=("agentview", "wrist")).make()


def test_two_arms_have_twice_the_actions_and_state() -> None:
    spec = RobosuiteConfig(arms=2).env_spec()
    assert list(spec.tasks) == ["TwoArmLift", "TwoArmPegInHole", "TwoArmHandover"]
    assert (spec.action_dim, spec.state_dim, spec.action_low.shape) == (14, 16, (14,))
    assert set(RobosuiteConfig().without_expert()) == set(tasks_with(1)) - set(WITH_EXPERT)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Stack", "Wipe", "TwoArmPegInHole"])
def test_stepping_is_robosuites_own(task: str) -> None:
    """The same actions move the same joints as in `robosuite`'s env.step, over a chaotic second of contacts."""
    robosuite = pytest.importorskip("robosuite", reason="robosuite is not installed")
    from robosuite.controllers import load_controller_config

    env = make(task)
    env.reset(EpisodeSpec(task, "train", 3))
    np.random.seed(0)  # of which sizes are drawn
    theirs = robosuite.make(
        task,
        robots=list(TASKS[task].robots),
        controller_configs=load_controller_config(default_controller="OSC_POSE"),
        has_offscreen_renderer=False,
        use_camera_obs=False,
        control_freq=20,
        ignore_done=True,
        hard_reset=False,
    )
    theirs.sim.data._data.qpos[:] = env._scene.data.qpos
    theirs.sim.model._model.body_pos[:] = env._scene.model.body_pos
    theirs.sim.forward()
    for robot in theirs.robots:
        robot.controller.update(force=True)
        robot.controller.reset_goal()
        robot.controller.initial_joint = np.array(robot.controller.joint_pos)
    rng = np.random.default_rng(0)
    has_gripper = theirs.action_dim % 7 == 0
    for _ in range(20):
        action = rng.uniform(-1, 1, env.spec.action_dim)
        succeeded = env.apply(action)
        parts = action.reshape(-1, 7)
        theirs.step(parts.ravel() if has_gripper else parts[:, :6].ravel())
        assert succeeded == theirs._check_success()
    moved = np.abs(env._scene.data.qpos - theirs.sim.data._data.qpos)
    assert moved.max() < 1e-6
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", list(TASKS))
def test_every_task_steps_and_continues_exactly_from_a_keyframe(task: str) -> None:
    """Members of a group begin equal; a saved state goes on to the bit after another episode in the same scene."""
    pytest.importorskip("robosuite", reason="robosuite is not installed")
    env = make(task)
    spec = EpisodeSpec(task, "train", 4)
    first = env.reset(spec)
    assert first.instruction and first.state.shape == (env.spec.state_dim,)
    model = env._scene.model
    placed, start = model.body_pos.copy(), env._scene.data.qpos.copy()
    rng = np.random.default_rng(1)
    actions = rng.uniform(-1, 1, (8, env.spec.action_dim)).astype(np.float32)
    assert not any([env.apply(action) for action in actions[:4]])
    env.num_steps = 4
    seen = env.observe()
    keyframe = env.save_state()
    for action in actions[4:]:
        env.apply(action)
    ahead, end = env._scene.data.qpos.copy(), env.observe()

    other = env.reset(EpisodeSpec(task, "train", 5))
    assert not (np.array_equal(env._scene.data.qpos, start) and np.array_equal(model.body_pos, placed))
    assert not np.array_equal(other.state, first.state)
    again = env.reset(EpisodeSpec(task, "train", 4, keyframe=keyframe))
    np.testing.assert_array_equal(again.images["agentview"], seen.images["agentview"])
    np.testing.assert_array_equal(again.state, seen.state)
    for action in actions[4:]:
        env.apply(action)
    np.testing.assert_array_equal(env._scene.data.qpos, ahead)
    np.testing.assert_array_equal(env.observe().images["agentview"], end.images["agentview"])

    member = env.reset(spec)
    np.testing.assert_array_equal(env._scene.data.qpos, start)
    np.testing.assert_array_equal(model.body_pos, placed)
    np.testing.assert_array_equal(member.images["agentview"], first.images["agentview"])
    env.close()


@pytest.mark.slow
def test_dirt_is_wiped_kept_in_a_keyframe_and_back_in_the_next_episode() -> None:
    pytest.importorskip("robosuite", reason="robosuite is not installed")
    env = RobosuiteConfig(image_size=64, tasks=("Wipe",)).make()
    clean = env.reset(EpisodeSpec("Wipe", "train", 0))
    scene = env._scene
    markers = scene.env.model.mujoco_arena.markers
    for _ in range(100):
        left = [marker for marker in markers if marker not in scene.env.wiped_markers]
        if len(left) < len(markers) - 3:
            break
        target = scene.data.body(left[0].root_body).xpos
        offset = target - scene.data.site_xpos[scene.arms[0].control.site]
        down = offset[2] - 0.02 if np.linalg.norm(offset[:2]) < 0.05 else max(offset[2] + 0.05, -0.02)
        env.apply(np.clip([*(20 * offset[:2]), 20 * down, 0, 0, 0, 0], -1, 1))
    wiped = len(scene.env.wiped_markers)
    assert wiped > 3
    seen = env.observe()
    keyframe = env.save_state()
    assert keyframe.arrays["wiped"].sum() == wiped
    again = env.reset(EpisodeSpec("Wipe", "train", 0))
    assert not scene.env.wiped_markers
    np.testing.assert_array_equal(again.images["agentview"], clean.images["agentview"])
    back = env.reset(EpisodeSpec("Wipe", "train", 0, keyframe=keyframe))
    np.testing.assert_array_equal(back.images["agentview"], seen.images["agentview"])
    assert len(scene.env.wiped_markers) == wiped
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", WITH_EXPERT)
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
