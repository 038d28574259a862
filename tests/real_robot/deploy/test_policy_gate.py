"""Only one policy's answers act: another is held back until somebody agrees, and never where it does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from watch_bench import served

from real_robot.client_package.vla_rl_client import PolicyClientError, ServerUnavailable
from real_robot.deploy.policy_gate import PolicyChanged, PolicyGate
from real_robot.serving.client import PolicyClient
from real_robot.serving.requests import PolicyFacts, PolicyIdentity
from real_robot.types import RobotObservation
from vla_rl.types import ActionChunk, Observation

A, B = PolicyIdentity("a", "a 1", "1" * 64), PolicyIdentity("b", "b 2", "2" * 64)
SEEN = RobotObservation({}, np.zeros(1, np.float32), "go", 0.0)


class Server:
    """Says whose answer it is; `down`: fails instead."""

    def __init__(self, policy: PolicyIdentity) -> None:
        self.policy, self.down = policy, ""

    def act(self, observation: RobotObservation, **options: Any) -> dict[str, Any]:
        if self.down:
            raise ServerUnavailable(self.down)
        return {"policy": self.policy, "actions": np.zeros((1, 1))}


def test_another_policy_is_held_back_until_an_episode_begins() -> None:
    server = Server(A)
    gate = PolicyGate(server.act)
    gate.act(SEEN)
    assert gate.policy == A and not gate.trouble and not gate.take_news()
    server.policy = B
    for _ in range(3):
        with pytest.raises(PolicyChanged, match="now serves b 2, in place of a 1: it acts from the next episode on"):
            gate.act(SEEN)
    assert gate.policy == A and gate.waits_for_a_person
    assert "b 2" in gate.take_news() and gate.take_news() == "", "told once"
    gate.agree()
    gate.act(SEEN)
    assert gate.policy == B and not gate.trouble and not gate.waits_for_a_person


def test_the_old_policy_may_come_back() -> None:
    server = Server(A)
    gate = PolicyGate(server.act)
    gate.act(SEEN)
    server.policy = B
    with pytest.raises(PolicyChanged):
        gate.act(SEEN)
    server.policy = A
    gate.act(SEEN)
    assert gate.policy == A and not gate.waits_for_a_person and not gate.trouble


def test_an_allowed_change_still_costs_the_first_answer_so_that_the_queue_is_dropped() -> None:
    server = Server(A)
    gate = PolicyGate(server.act, allow_change=True)
    gate.act(SEEN)
    server.policy = B
    with pytest.raises(PolicyChanged):
        gate.act(SEEN)
    assert gate.policy == A and not gate.waits_for_a_person
    gate.act(SEEN)
    assert gate.policy == B and gate.take_news()


@pytest.mark.parametrize("allow", [False, True])
def test_a_policy_that_does_not_fit_never_acts(allow: bool) -> None:
    def check(policy: PolicyIdentity) -> None:
        if policy == B:
            raise PolicyClientError("the failure detector was fitted on 111111111111")

    server = Server(A)
    gate = PolicyGate(server.act, allow, check)
    gate.act(SEEN)
    server.policy = B
    for _ in range(3):
        with pytest.raises(PolicyChanged, match="in place of a 1: the failure detector was fitted on 111111111111"):
            gate.act(SEEN)
        gate.agree()
    assert gate.policy == A and gate.waits_for_a_person and "detector" in gate.trouble


def test_what_a_request_failed_with_is_told_until_one_succeeds() -> None:
    server = Server(A)
    gate = PolicyGate(server.act)
    server.down = "lost the policy server at ws://robot:8000"
    with pytest.raises(ServerUnavailable):
        gate.act(SEEN)
    assert gate.trouble == server.down and not gate.waits_for_a_person
    server.down = ""
    gate.act(SEEN)
    assert not gate.trouble


class Still:
    """Zeros."""

    num_embedded = 0

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(np.zeros((obs.batch_size, 4, 3), np.float32))


def test_over_a_real_socket_a_swap_behind_the_address_is_noticed_and_a_restart_is_not() -> None:
    def facts(version: str) -> PolicyFacts:
        return PolicyFacts("toy", version, (), (32, 32), 1, True, 4, 3, can_embed=False, policy_hash=version * 64)

    with served(Still(), facts=facts("1")) as port:
        client = PolicyClient(f"127.0.0.1:{port}", infer_timeout=60.0, retry_after=0).connect()
        gate = PolicyGate(client.act)
        gate.act(SEEN)
    client.close()
    with served(Still(), facts=facts("1"), port=port):
        gate.act(SEEN)
    client.close()
    with served(Still(), facts=facts("2"), port=port), pytest.raises(PolicyChanged):
        gate.act(SEEN)
    client.close()
