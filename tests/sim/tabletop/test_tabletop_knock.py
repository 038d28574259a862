"""Knocks on the tabletop: drawn from the episode, the same again, part of the saved state, and off by default."""

from __future__ import annotations

import numpy as np
import pytest

from sim.tabletop import TabletopConfig, tasks
from vla_rl.types import EpisodeSpec

mujoco = pytest.importorskip("mujoco")

from sim.tabletop.env import TabletopEnv  # noqa: E402
from sim.tabletop.tasks import Knock, draw_knock, knocked_velocity  # noqa: E402

TASKS = ("push_to_zone", "pick_place", "pick_colour", "stack", "bowl_push")
STAY = np.zeros(7, np.float32)


def knocking() -> TabletopEnv:
    return TabletopConfig(knock=1).make()


def block(env: TabletopEnv) -> np.ndarray:
    return env._view.position("block").copy()


def test_the_share_of_episodes_and_the_steps_are_as_said() -> None:
    knocks = [draw_knock(EpisodeSpec("stack", "train", i), 0.3) for i in range(600)]
    steps = [k.step for k in knocks if k.step >= 0]
    assert 0.24 < len(steps) / len(knocks) < 0.36
    assert set(steps) == set(range(4, 13))
    assert np.allclose([np.hypot(*k.velocity) for k in knocks], tasks.KNOCK_SPEED)
    none = [draw_knock(EpisodeSpec("stack", "train", i), 0) for i in range(100)]
    assert {k.step for k in none} == {-1}


@pytest.mark.parametrize("task", TASKS)
def test_the_block_slides_at_that_step_and_not_before(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "KNOCK_STEPS", (4, 4))
    env = knocking()
    env._start(EpisodeSpec(task, "train", 3))
    places = [block(env)]
    for _ in range(10):
        env.run_chunk(STAY[None])
        places.append(block(env))
    moved = [float(np.hypot(*(p - places[0])[:2])) for p in places]
    assert max(moved[:5]) < 0.002
    assert moved[5] > 0.03 and (0.05 < moved[-1] < 0.08 or task != "push_to_zone")  # others have things in the way


def test_near_the_edge_it_is_knocked_inwards() -> None:
    knock = Knock(0, (2.0, -1.0))
    assert knocked_velocity(knock, np.array([0.0, 0.0, 0.03])) == (2.0, -1.0)
    assert knocked_velocity(knock, np.array([0.15, -0.15, 0.03])) == (-2.0, 1.0)
    assert knocked_velocity(knock, np.array([-0.15, 0.15, 0.03])) == (2.0, -1.0)


def test_a_restored_episode_is_knocked_as_the_original_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "KNOCK_STEPS", (6, 6))
    env, spec = knocking(), EpisodeSpec("push_to_zone", "train", 1)
    env.reset(spec)
    env.run_chunk(np.stack([STAY] * 4))
    keyframe = env.save_state()
    env.run_chunk(np.stack([STAY] * 6))
    end = block(env)
    calm = TabletopConfig().make()  # The knock belongs to the saved episode, whoever goes on with it.
    calm.reset(EpisodeSpec("push_to_zone", "train", 2, keyframe=keyframe))
    calm.run_chunk(np.stack([STAY] * 6))
    assert np.array_equal(block(calm), end)


def test_the_expert_copes() -> None:
    env = TabletopConfig(knock=1, horizons={"push_to_zone": 64}).make()
    solved = 0
    for index in range(30):
        env._start(EpisodeSpec("push_to_zone", "eval", index))
        solved += any(_advance(env) for _ in range(env.horizon))
    assert solved >= 28


def _advance(env: TabletopEnv) -> bool:
    done = env.apply(np.clip(env.expert_action(), -1, 1))
    env.num_steps += 1
    return done
