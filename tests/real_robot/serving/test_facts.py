"""What clients are told of a policy: its sizes, and whether it embeds and continues."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from watch_bench import served

from real_robot.serving.client import PolicyClient
from real_robot.serving.requests import PolicyFacts
from real_robot.serving.server import ServeConfig, load_for_serving, policy_facts
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation


class Still(Policy):
    """Zeros; `embed` is the contract's, which raises."""

    chunk_size, action_dim, cameras, uses_state, state_dim = 4, 7, ("agentview",), True, 8
    image_size = (32, 32)
    num_embedded = 0  # For `served`.

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(np.zeros((obs.batch_size, self.chunk_size, self.action_dim), np.float32))


class Embedding(Still):
    """It has features."""

    def embed(self, obs: Observation) -> Any:
        return obs.state


class Refusing(Still):
    """It overrides `embed`, and cannot."""

    def embed(self, obs: Observation) -> Any:
        raise NotImplementedError("no features in this precision")


def facts_of(policy: Policy) -> PolicyFacts:
    return policy_facts(policy, "x", "x", "", ServeConfig())


def test_sizes_of_an_openvla_policy() -> None:
    policy, facts = load_for_serving("pretrained:tabletop_base", ServeConfig(device="cpu"))
    assert (facts.image_size, facts.state_dim, facts.uses_state) == ((64, 64), 8, True)
    assert (policy.image_size, policy.state_dim) == ((64, 64), 8)
    assert not facts.can_continue


@pytest.mark.parametrize(("policy", "embeds"), [(Embedding(), True), (Still(), False), (Refusing(), False)])
def test_only_a_policy_that_embeds_is_announced_as_one(policy: Policy, embeds: bool) -> None:
    with served(policy, facts=facts_of(policy)) as port, PolicyClient(f"127.0.0.1:{port}") as client:
        assert client.metadata["embedding"] is embeds
        assert client.metadata["image_size"] == [32, 32] and client.metadata["state_dim"] == 8
