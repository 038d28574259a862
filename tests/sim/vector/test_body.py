"""The robot simulated alone: equal to the whole simulator until something is touched, and through what it touches."""

from __future__ import annotations

import os
import signal

import numpy as np

from sim.tabletop.env import TabletopConfig
from sim.vector.processes import BodyProcesses
from vla_rl.rollout.body import EmbodiedConfig
from vla_rl.types import EpisodeSpec

CONFIG = TabletopConfig(block_yaw=0.0)
SPEC = EpisodeSpec("pick_place")


def in_the_whole_scene(spec: EpisodeSpec, actions: np.ndarray) -> np.ndarray:
    """States (T, 8) after each action (T, 7)."""
    env, states = CONFIG.make(), []
    env.begin(spec)
    for action in actions:
        env.apply(action)
        states.append(env.proprioception())
    return np.array(states)


def upward(seed: int, steps: int = 16) -> np.ndarray:
    actions = np.random.default_rng(seed).uniform(-0.3, 0.3, (steps, 7)).astype(np.float32)
    actions[:, 2] += 0.3
    return actions


def solving(spec: EpisodeSpec) -> np.ndarray:
    """The expert's actions of a whole episode, which ends with the block let go."""
    env, actions, done = CONFIG.make(), [], False
    env.begin(spec)
    while not done and len(actions) < 200:
        actions.append(env.expert_action())
        done = env.apply(actions[-1])
    assert done
    return np.array(actions)


def test_bodies_move_as_in_the_whole_scene_and_apart_from_one_another() -> None:
    assert isinstance(CONFIG, EmbodiedConfig)
    body, specs = CONFIG.build_body(), [SPEC, EpisodeSpec("stack", "validation", 4), EpisodeSpec("pick_place", index=1)]
    actions = np.stack([upward(seed) for seed in range(3)])
    expected = [in_the_whole_scene(spec, one) for spec, one in zip(specs, actions, strict=True)]
    start, before = body.begin(specs)
    for state, spec in zip(before, specs, strict=True):
        np.testing.assert_array_equal(state, CONFIG.build(1).reset([spec]).state[0])
    half, first = body.step(start, actions[:, :8])
    _, second = body.step(half, actions[:, 8:])
    np.testing.assert_array_equal(np.concatenate([first, second], 1), np.array(expected))
    assert [keyframe.step for keyframe in half] == [8, 8, 8]
    again = body.step(half[1:2], actions[1:2, 8:])[1]
    np.testing.assert_array_equal(again, second[1:2])  # Where it is stands in the keyframe alone.
    body.close()


def test_fingers_close_on_nothing_and_the_scene_is_solid_again_afterwards() -> None:
    actions = solving(SPEC)
    real = in_the_whole_scene(SPEC, actions)
    body = CONFIG.build_body()
    _, states = body.step(body.begin([SPEC])[0], actions[None])
    gap = [one[:, 6] - one[:, 7] for one in (real, states[0])]
    assert gap[0].min() > 0.02 and gap[1].min() < 0.005  # A block of some centimeters, and none.
    np.testing.assert_allclose(states[0, :, :3], real[:, :3], atol=0.005)
    np.testing.assert_array_equal(in_the_whole_scene(SPEC, actions), real)


def test_actions_are_clipped() -> None:
    body = CONFIG.build_body()
    far = upward(0, 4)[None] + np.float32(3)
    one, other = (body.step(body.begin([SPEC])[0], actions)[1] for actions in (far, np.clip(far, -1, 1)))
    np.testing.assert_array_equal(one, other)


def test_processes_share_the_bodies_and_move_them_as_one_does() -> None:
    specs, actions = [EpisodeSpec("pick_place", index=i) for i in range(5)], np.stack([upward(i, 8) for i in range(5)])
    alone, shared = CONFIG.build_body(), CONFIG.model_copy(update={"num_workers": 2}).build_body()
    assert isinstance(shared, BodyProcesses)
    (one, before), (other, same) = alone.begin(specs), shared.begin(specs)
    np.testing.assert_array_equal(before, same)
    os.kill(shared.worker_pids[1], signal.SIGKILL)  # What a body is stands in its keyframe: another process goes on.
    (one, states), (other, told) = alone.step(one, actions), shared.step(other, actions)
    np.testing.assert_array_equal(states, told)
    assert [body.step for body in other] == [body.step for body in one] == [8] * 5
    np.testing.assert_array_equal(alone.step(one[:1], actions[:1])[1], shared.step(other[:1], actions[:1])[1])
    for body in (alone, shared):
        body.close()
        body.close()
