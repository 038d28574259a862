"""What a world model says chunks are worth, in a world that can be worked out by hand: by its own past alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from toy import GAIN, GOAL, toy_env, toy_valued, toy_world_model

from vla_rl.algorithms.base import ActionValues
from vla_rl.config import ConfigError, build_component
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import collect
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Keyframe, Observation
from world_model.env import action_values
from world_model.env.action_values import WorldModelValuesConfig

HORIZON = 24


class Pusher(torch.nn.Module, Policy):
    """Pushes ahead by as much as it draws; greedily with 0.5."""

    chunk_size, action_dim, cameras, uses_state = 4, 3, ("wrist",), True

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, 4, 3), np.float32)
        drawn = torch.rand(obs.batch_size, 1, generator=generator).numpy()
        actions[..., 0] = drawn if temperature else 0.5
        return ActionChunk(actions)


def values(monkeypatch: pytest.MonkeyPatch, noise: float = 0.0, policy: Any = None, **options: Any) -> ActionValues:
    monkeypatch.setattr(action_values, "load_world_model", lambda path, device: toy_valued(noise))
    config = build_component("values", {"kind": "world_model", "path": "toy", **options})
    assert isinstance(config, WorldModelValuesConfig)
    return config.build(cast(Policy, policy or Pusher()))


@pytest.fixture
def episodes() -> list[Episode]:
    specs = [EpisodeSpec("reach", "train", i) for i in range(5)]
    return collect(cast(Any, Pusher()), toy_env(num_envs=5), specs, seed=0)


def pushes(amounts: list[list[float]]) -> np.ndarray:
    """Chunks (N, K, 4, 3) that push ahead by so much at each step."""
    chunks = np.zeros((*np.shape(amounts), 4, 3), np.float32)
    chunks[..., 0] = np.array(amounts)[..., None]
    return chunks


def by_hand(position: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-(2 * (position - GOAL + 4 * (HORIZON - steps) / HORIZON - 2) + 0.5)))


def test_a_chunk_is_worth_the_value_of_what_it_leads_to(monkeypatch, episodes):
    monkeypatch.setattr("world_model.env.action_values.CHUNKS_AT_ONCE", 3)
    episode, chunk = np.array([0, 3, 3, 4]), np.array([0, 2, 1, 1])
    amounts = np.array([[0.1, 0.9], [0.4, 0.4], [0.0, 1.0], [-0.5, 0.2]])
    found = values(monkeypatch).of(episodes, episode, chunk, pushes(amounts.tolist()))
    seen = np.array([episodes[e].obs.state[c, 0] for e, c in zip(episode, chunk, strict=True)])
    position = seen[:, None] + 4 * GAIN * amounts
    np.testing.assert_allclose(found, by_hand(position, 4 * (chunk + 1)[:, None]), atol=0.02)
    assert found[1, 0] == found[1, 1]


def test_an_episode_from_a_keyframe_has_the_time_that_was_left_there(monkeypatch, episodes):
    where = (np.array([0]), np.array([1]))
    spec = replace(episodes[0].spec, keyframe=Keyframe("toy", "reach", 8, {}))
    found = values(monkeypatch).of([replace(episodes[0], spec=spec)], *where, pushes([[0.1, 0.9]]))
    position = episodes[0].obs.state[1, 0] + 4 * GAIN * np.array([[0.1, 0.9]])
    np.testing.assert_allclose(found, by_hand(position, np.array([[8 + 4 + 4]])), rtol=0.1)


def test_nothing_after_the_decision_changes_the_values(monkeypatch, episodes):
    """Not the outcome, nor what was seen and done later, nor the executed chunk itself, nor who else is valued."""
    source = values(monkeypatch, noise=0.3)
    where = (np.array([2, 2]), np.array([0, 1]))
    chunks = pushes([[0.1, 0.5, 0.5], [0.2, 0.3, 0.9]])
    before = source.of(episodes, *where, chunks)
    other = episodes[2]
    later = other.obs.state.copy()
    later[2:] += 5
    done = other.chunks.actions.copy()
    done[1:] = 1.0
    changed = replace(
        other,
        obs=replace(other.obs, state=later),
        chunks=ActionChunk(done),
        reward=1 - other.reward,
        success=not other.success,
    )
    np.testing.assert_array_equal(source.of([changed], np.zeros(2, int), where[1], chunks), before)
    assert before[0, 1] == before[0, 2], "chunks of a decision are imagined with the same noise"


def test_what_was_done_before_is_remembered(monkeypatch, episodes):
    source = values(monkeypatch)
    seen: list[torch.Tensor] = []
    extend = source.world_model.extend

    def recorded(memory, frames, actions):
        seen.append(actions.values[:, 0, :, 0])
        return extend(memory, frames, actions)

    monkeypatch.setattr(source.world_model, "extend", recorded)
    source.of(episodes, np.array([1]), np.array([2]), pushes([[0.1]]))
    np.testing.assert_array_equal(torch.cat(seen).numpy(), episodes[1].chunks.actions[:2, :, 0])


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"algo\.values\.path: shows .* the policy also reads \['front'\]"):
        policy = Pusher()
        policy.cameras = ("front",)
        values(monkeypatch, policy=policy)
    with pytest.raises(ValueError, match=r"algo\.values\.path: has frames of 4 control steps"):
        policy = Pusher()
        policy.chunk_size = 8
        values(monkeypatch, policy=policy)
    monkeypatch.setattr(action_values, "load_world_model", lambda path, device: toy_world_model())
    with pytest.raises(ConfigError, match="has no value"):
        WorldModelValuesConfig(path="toy").build(cast(Policy, Pusher()))
