"""LIBERO's arm simulated alone, beside the arm in the whole scene."""

import numpy as np
import pytest
from libero_setup import ASSETS, needs_assets

from sim.libero import LiberoConfig
from vla_rl.types import EpisodeSpec

pytestmark = [pytest.mark.slow, needs_assets]
CONFIG = LiberoConfig(suite="libero_object", tasks=("0", "1"), assets_path=ASSETS, image_size=32)
SOUP, CHEESE = CONFIG.task_names()


def in_the_whole_scene(spec: EpisodeSpec, actions: np.ndarray) -> np.ndarray:
    """States (T, 8) after each action (T, 7)."""
    env, states = CONFIG.make(), []
    env.begin(spec)
    for action in actions:
        env.apply(action)
        states.append(env.proprioception())
    env.close()
    return np.array(states)


def test_the_arm_is_where_the_simulator_has_it_while_it_touches_nothing() -> None:
    """40 steps of large, turning moves above the objects; of two tasks at once, of whose scenes one is left."""
    specs = [EpisodeSpec(SOUP, "eval", 3), EpisodeSpec(CHEESE, "train", 7)]
    actions = np.clip(np.random.default_rng(0).normal(0, 0.5, (2, 40, 7)), -1, 1).astype(np.float32)
    actions[..., 2] = 0.2 * np.abs(actions[..., 2])
    body = CONFIG.build_body()
    (bodies, _), states = body.begin(specs), []
    for chunk in range(0, 40, 8):
        bodies, moved = body.step(bodies, actions[:, chunk : chunk + 8])
        states.append(moved)
    body.close()
    for told, spec, one in zip(np.concatenate(states, 1), specs, actions, strict=True):
        real = in_the_whole_scene(spec, one)
        assert np.abs(real[-1, :3] - real[0, :3]).max() > 0.03
        np.testing.assert_allclose(told[:, :3], real[:, :3], atol=0.0005)
        np.testing.assert_allclose(told[:, 3:6], real[:, 3:6], atol=0.001)
        np.testing.assert_allclose(told[:, 6:], real[:, 6:], atol=0.0005)


def test_an_object_in_the_way_stops_the_simulators_arm_alone() -> None:
    spec = EpisodeSpec(SOUP, "eval", 0)
    env, actions, held = CONFIG.make(), [], np.zeros(8)
    env.begin(spec)
    while held[6] - held[7] > 0.075 or len(actions) < 20:  # Until the expert has closed the fingers on the can.
        actions.append(env.expert_action())
        env.apply(actions[-1])
        held = env.proprioception()
    for _ in range(10):
        actions.append(env.expert_action())
        env.apply(actions[-1])
    held = env.proprioception()
    env.close()
    body = CONFIG.build_body()
    _, states = body.step(body.begin([spec])[0], np.array(actions)[None])
    body.close()
    assert held[6] - held[7] > 0.03
    assert states[0, -1, 6] - states[0, -1, 7] < 0.01
