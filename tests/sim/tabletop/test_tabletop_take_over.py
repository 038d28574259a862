"""The tabletop's expert takes over from another driver: it begins at the stage that fits what it finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sim.tabletop import TabletopConfig
from vla_rl.types import EpisodeSpec

mujoco = pytest.importorskip("mujoco")

from sim.tabletop import scene as sc  # noqa: E402
from sim.tabletop.env import TabletopEnv  # noqa: E402
from sim.tabletop.expert import Stage  # noqa: E402

TASKS = ("push_to_zone", "pick_place", "pick_colour", "stack", "bowl_push")
NEUTRAL = np.zeros(7, np.float32)  # stays, and leaves the gripper as it is
UP = np.array([0, 0, 1, 0, 0, 0, 0], np.float32)
ENOUGH = 100  # control steps


@pytest.fixture(scope="module")
def env() -> TabletopEnv:
    return TabletopConfig().make()


def drive_until(env: TabletopEnv, task: str, reached: Callable[[], bool], index: int = 0) -> None:
    """Start an episode and let the expert drive to a situation; then somebody else has the robot for two steps."""
    env._start(EpisodeSpec(task, "train", index))
    for _ in range(ENOUGH):
        if reached():
            break
        env.apply(env.expert_action())
    assert reached(), "the situation did not come about"
    wait(env)


def wait(env: TabletopEnv, action: np.ndarray = NEUTRAL, steps: int = 2) -> None:
    for _ in range(steps):
        env.apply(action)


def solve(env: TabletopEnv) -> list[np.ndarray]:
    """The expert's actions until the task is solved."""
    actions = []
    for _ in range(ENOUGH):
        actions.append(env.expert_action())
        if env.apply(np.clip(actions[-1], -1, 1)):
            return actions
    raise AssertionError("not solved")


def put(env: TabletopEnv, name: str, x: float, y: float, z: float) -> None:
    address, speed = env._scene.qpos[name], env._scene.qvel[name]
    env._now.qpos[address : address + 7] = (x, y, z, 1, 0, 0, 0)
    env._now.qvel[speed : speed + 6] = 0


@pytest.mark.parametrize("task", TASKS[1:])
def test_a_block_that_is_held_is_carried_on(env: TabletopEnv, task: str) -> None:
    drive_until(env, task, lambda: env._view.position("block")[2] > 0.06)
    actions = solve(env)
    first_open = next(i for i, action in enumerate(actions) if action[6] < 0)
    closed = [action[6] for action in actions[:first_open]]
    assert closed and min(closed) > 0
    if task != "bowl_push":
        assert len(actions) < 16, "carried, let go, and no more"


def test_what_else_is_held_is_let_go(env: TabletopEnv) -> None:
    drive_until(env, "pick_colour", lambda: env._view.position("block")[2] > 0.05)
    x, y, z = env._view.position("block").copy()
    bx, by, bz = env._view.position("block_b").copy()
    put(env, "block", bx, by, bz)  # As if it had picked up another one: they change places.
    put(env, "block_b", x, y, z)
    env.apply(NEUTRAL)
    first = env.expert_action()
    assert env._expert.stage == Stage.OPEN and first[6] < 0 and np.abs(first[:3]).max() < 0.01
    env.apply(first)
    assert len(solve(env)) < 32


def test_a_block_between_open_fingers_is_grasped_and_not_left(env: TabletopEnv) -> None:
    """Somebody let the block go where it was grasped: the same picture as before the first grasp, the same action."""
    drive_until(env, "pick_place", lambda: env._expert.stage == Stage.CARRY)
    wait(env, np.array([0, 0, 0, 0, 0, 0, -1], np.float32), 5)
    actions = solve(env)
    closes = next(i for i, action in enumerate(actions) if action[6] > 0)
    assert closes <= 3 and all(action[2] < 0.3 for action in actions[:closes])


def test_fingers_closed_on_nothing_open_before_they_go_down(env: TabletopEnv) -> None:
    env._start(EpisodeSpec("pick_place", "train", 0))
    while env._expert.stage != Stage.GRASP:
        env.apply(env.expert_action())
    x, y, z = env._view.position("block").copy()
    put(env, "block", x, y + 0.09 * (1 if y < 0 else -1), z)  # It was beside the block.
    wait(env, np.array([0, 0, 0, 0, 0, 0, 1], np.float32), 6)
    actions = solve(env)
    rises = next(i for i, action in enumerate(actions) if action[2] > 0.5)
    assert all(action[6] < 0 and np.abs(action[:3]).max() < 0.01 for action in actions[:rises])


@pytest.mark.parametrize("task", ["pick_place", "pick_colour", "stack"])
def test_what_is_placed_stays(env: TabletopEnv, task: str) -> None:
    drive_until(env, task, lambda: env._expert.stage == Stage.RETREAT)
    actions = solve(env)
    assert len(actions) <= 6 and all(action[6] < 0 and action[2] >= 0 for action in actions)


def test_a_block_in_the_bowl_stays_there(env: TabletopEnv) -> None:
    drive_until(env, "bowl_push", lambda: env._expert.stage == Stage.BEHIND)
    wait(env, UP)
    actions = solve(env)
    assert env._view.apart("block", "bowl") < 0.045
    assert all(action[6] > 0 for action in actions), "the hand stays closed to push, and takes nothing out"


@pytest.mark.parametrize("task", ["push_to_zone", "bowl_push"])
def test_a_push_goes_on_where_it_is(env: TabletopEnv, task: str) -> None:
    drive_until(env, task, lambda: env._expert.stage == Stage.PUSH and env._expert.timer > 1)
    env.expert_action()
    assert env._expert.stage == Stage.PUSH


@pytest.mark.parametrize("task", TASKS)
def test_from_the_start_it_begins_as_ever(env: TabletopEnv, task: str) -> None:
    env._start(EpisodeSpec(task, "train", 1))
    first = env.expert_action()
    env._start(EpisodeSpec(task, "train", 1))
    env.apply(NEUTRAL)
    wait(env)
    np.testing.assert_allclose(env.expert_action(), first, atol=0.02)


@pytest.mark.parametrize("task", TASKS)
def test_it_solves_what_random_driving_has_left(env: TabletopEnv, task: str) -> None:
    solved = []
    for index in range(6):
        env._start(EpisodeSpec(task, "train", 20 + index))
        rng = np.random.default_rng(index)
        for _ in range(index * 3):
            env.apply(env.expert_action())
        for _ in range(3):
            env.apply(rng.uniform(-1, 1, 7))
        solved.append(any(env.apply(np.clip(env.expert_action(), -1, 1)) for _ in range(ENOUGH)))
    assert sum(solved) >= 5


@pytest.mark.parametrize("task", TASKS)
def test_what_remains_becomes_less_as_it_is_done(env: TabletopEnv, task: str) -> None:
    env._start(EpisodeSpec(task, "train", 3))
    remaining = [env.expert_remaining()]
    for _ in range(ENOUGH):
        done = env.apply(env.expert_action())
        remaining.append(env.expert_remaining())
        if done:
            break
    assert remaining[-1] == 0 and 0.6 < remaining[0] / len(remaining) < 1.6
    for earlier, later in zip(remaining, remaining[10:], strict=False):
        assert later < earlier - 1 or later == 0, "no ten steps without progress"


def test_a_dropped_block_is_a_setback(env: TabletopEnv) -> None:
    drive_until(env, "pick_place", lambda: env._expert.stage == Stage.CARRY)
    wait(env, UP, 1)
    before = env.expert_remaining()
    x, y, _ = env._view.position("block").copy()
    put(env, "block", x - 0.1, y, sc.HALF)
    env.apply(NEUTRAL)
    assert env.expert_remaining() > before + 4


def test_the_memory_of_who_drove_is_kept_with_the_state(env: TabletopEnv) -> None:
    drive_until(env, "pick_place", lambda: env._view.position("block")[2] > 0.06)
    keyframe = env.save_state()
    truth = env.expert_action()
    other = TabletopConfig().make()
    other.reset(EpisodeSpec("pick_place", "eval", 5, keyframe=keyframe))
    np.testing.assert_array_equal(other.expert_action(), truth)
    assert other._expert.stage == Stage.CARRY


@pytest.mark.parametrize(
    ("task", "y", "in_reach"),
    [
        ("push_to_zone", 0.16, True),
        ("push_to_zone", 0.25, False),
        ("pick_place", 0.23, True),
        ("pick_place", 0.27, False),
    ],
)
def test_what_is_out_of_reach_never_ends(env: TabletopEnv, task: str, y: float, in_reach: bool) -> None:
    env._start(EpisodeSpec(task, "train", 0))
    put(env, "block", 0.0, y, sc.HALF)
    assert np.isfinite(env.expert_remaining()) == in_reach
    if in_reach:
        solve(env)
    else:
        with pytest.raises(AssertionError, match="not solved"):
            solve(env)
