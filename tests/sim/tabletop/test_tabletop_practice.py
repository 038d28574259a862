"""The task that undoes another one, in its scene: initial states, expert, success; the scene as one leaves it."""

from __future__ import annotations

import numpy as np
import pytest

from sim.tabletop import TabletopConfig, tasks
from sim.tabletop.tasks import HORIZONS, INSTRUCTIONS, PARAPHRASES, RESET_TASKS
from vla_rl.types import EpisodeSpec

mujoco = pytest.importorskip("mujoco")

from sim.tabletop import scene as sc  # noqa: E402
from sim.tabletop.env import TabletopEnv  # noqa: E402
from sim.tabletop.tasks import CLEAR_OF_PLATE, HOME, is_solved_now  # noqa: E402

PAIR = ("pick_place", "take_off")
STAY = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


@pytest.fixture(scope="module")
def env() -> TabletopEnv:
    return TabletopConfig(tasks=PAIR, image_size=32).make()


def solve(env: TabletopEnv, noise: float = 0.0) -> int:
    """Control steps that the expert needs from here; 0 if the horizon passes."""
    rng = np.random.default_rng(0)
    for step in range(env.horizon):
        action = env.expert_action()
        action[:6] += noise * rng.normal(size=6)
        if env.apply(np.clip(action, -1, 1)):
            return step + 1
    return 0


def put(env: TabletopEnv, x: float, y: float, z: float) -> None:
    address, speed = env._scene.qpos["block"], env._scene.qvel["block"]
    env._now.qpos[address : address + 7] = (x, y, z, 1, 0, 0, 0)
    env._now.qvel[speed : speed + 6] = 0


def test_a_section_without_tasks_has_none_that_undoes_another() -> None:
    tasks = tuple(TabletopConfig().env_spec().tasks)
    assert tasks == ("push_to_zone", "pick_place", "pick_colour", "stack", "bowl_push")
    assert tuple(INSTRUCTIONS) == (*tasks, "take_off"), "an initial state is drawn by its task's place: add at the end"
    assert set(PARAPHRASES) == set(HORIZONS) == set(INSTRUCTIONS)


@pytest.mark.parametrize(("reset", "forward"), RESET_TASKS.items())
def test_tasks_of_a_scene_have_the_same_bodies_in_the_same_places(reset: str, forward: str) -> None:
    assert (sc.MOVABLE[reset], sc.FIXED[reset]) == (sc.MOVABLE[forward], sc.FIXED[forward])
    assert sc.mjcf(reset).partition("\n")[2] == sc.mjcf(forward).partition("\n")[2], "but for the model's name"


@pytest.mark.parametrize("index", range(20))
def test_the_block_starts_at_rest_on_the_plate(env: TabletopEnv, index: int) -> None:
    env._start(EpisodeSpec("take_off", "train", index))
    start = env._view.position("block").copy()
    assert env._view.apart("block", "plate") < 0.03
    assert is_solved_now("pick_place", env._view)
    assert not any(env.apply(STAY) for _ in range(6))
    assert np.linalg.norm(env._view.position("block") - start) < 0.003


@pytest.mark.parametrize(("apart", "solved"), [(0.0, False), (0.075, False), (0.1, True), (0.15, True)])
def test_taken_off_means_flat_on_the_table_and_clear_of_the_plate(env: TabletopEnv, apart: float, solved: bool) -> None:
    env._start(EpisodeSpec("take_off"))
    x, y, _ = env._view.position("plate")
    put(env, x, y - np.sign(y) * apart, sc.HALF + (sc.PLATE_HEIGHT if apart < CLEAR_OF_PLATE else 0))
    assert any([env.apply(STAY) for _ in range(12)]) is solved


def test_the_expert_takes_it_off_from_all_but_few_states(env: TabletopEnv) -> None:
    steps = []
    for index in range(40):
        env._start(EpisodeSpec("take_off", "eval", index))
        remaining = env.expert_remaining()
        steps.append(solve(env))
        assert abs(remaining - steps[-1]) < 8
    assert np.mean(np.array(steps) > 0) >= 0.95 and np.mean(steps) < HORIZONS["take_off"] / 1.5


def test_each_task_begins_in_the_scene_that_the_other_has_left(env: TabletopEnv) -> None:
    """To the bit: physics, look and the way the hand points; steps, expert and instruction begin anew."""
    one = TabletopConfig(tasks=PAIR, image_size=32, looks=1).make()
    one.reset(EpisodeSpec("pick_place", "train", 3))
    for task in ("take_off", "pick_place", "take_off"):
        assert solve(one)
        left = one.drive_home()
        assert left is not None and left.step == 0
        shown = one.observe()
        np.testing.assert_allclose(one.proprioception()[:3], HOME, atol=0.005)
        assert one._view.opening > 0.1 and not one._view.gripper_touches()
        for other in (one, env):
            seen = other.reset(EpisodeSpec(task, "train", 99, keyframe=left))
            assert np.array_equal(seen.images["agentview"], shown.images["agentview"])
            assert np.array_equal(seen.state, shown.state)
            assert seen.instruction == INSTRUCTIONS[task]
            assert np.array_equal(other._scene_arrays()["physics"], left.arrays["physics"])
            assert (other.num_steps, other._held, other.horizon) == (0, 0, HORIZONS[task])


def test_a_state_within_an_episode_begins_one_of_the_other_task(env: TabletopEnv) -> None:
    env.reset(EpisodeSpec("pick_place", "train", 4))
    assert solve(env)
    env.num_steps = 20
    state = env.save_state()
    obs = env.reset(EpisodeSpec("take_off", "train", 4, keyframe=state))
    assert obs.instruction == INSTRUCTIONS["take_off"] and env.num_steps == 0
    assert np.array_equal(env._scene_arrays()["physics"], state.arrays["physics"])
    assert solve(env)


def test_other_scenes_are_refused(env: TabletopEnv) -> None:
    other = TabletopConfig(tasks=("stack",), image_size=32).make()
    other.reset(EpisodeSpec("stack"))
    with pytest.raises(ValueError, match=r"tabletop/stack.*tabletop/take_off, whose scene is another"):
        env.reset(EpisodeSpec("take_off", keyframe=other.save_state()))


def test_a_block_that_is_held_is_let_go_and_the_same_task_goes_on(env: TabletopEnv) -> None:
    env.reset(EpisodeSpec("pick_place", "train", 5))
    while env._view.position("block")[2] < 0.06:
        env.apply(env.expert_action())
    left = env.drive_home()
    assert left is not None
    env.reset(EpisodeSpec("pick_place", "train", 6, keyframe=left))
    assert env._view.position("block")[2] < 0.06 and not env._view.gripper_touches() and solve(env)


def test_what_no_robot_can_go_on_with_is_left_to_a_person(env: TabletopEnv) -> None:
    env.reset(EpisodeSpec("take_off", "train", 0))
    put(env, 0.33, 0.0, sc.HALF)
    assert env.drive_home() is None, "out of reach, though the task itself is done"
    env.reset(EpisodeSpec("take_off", "train", 0))
    env._now.qvel[:] = np.nan
    env.apply(STAY)
    assert env.drive_home() is None, "the physics is broken"
    env.reset(EpisodeSpec("take_off", "train", 0))
    assert env.drive_home() is not None


def test_a_knock_comes_in_an_episode_and_not_on_the_way_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "KNOCK_STEPS", (0, 0))
    env = TabletopConfig(tasks=PAIR, image_size=32, knock=1).make()
    env._start(EpisodeSpec("take_off", "train", 1))
    before = env._view.position("block").copy()
    left = env.drive_home()
    assert left is not None and np.linalg.norm(env._view.position("block") - before) < 0.003
    env.reset(EpisodeSpec("take_off", "train", 2, keyframe=left))
    env.apply(STAY)
    assert env._view.speed("block") > 0.1, "the next episode has its own"
