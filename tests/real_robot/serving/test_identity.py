"""Who made a chunk: told with every answer, and unknown where a server does not say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from toy_server import observation, toy_thread
from watch_bench import served
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from real_robot.client_package.vla_rl_client.wire import pack
from real_robot.serving.client import PolicyClient
from real_robot.serving.requests import UNKNOWN, PolicyFacts, PolicyIdentity, read_identity
from vla_rl.types import ActionChunk, Observation

PATIENCE = 60.0


class Still:
    """Zeros."""

    num_embedded = 0  # For `served`.

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(np.zeros((obs.batch_size, 4, 3), np.float32))


def facts(name: str, policy_hash: str) -> PolicyFacts:
    sizes = (("agentview", "wrist"), (32, 32), 5, True, 4, 3)
    return PolicyFacts(name, f"{name} {policy_hash[:4]}", *sizes, can_embed=False, policy_hash=policy_hash)


@contextmanager
def foreign_server(metadata: dict[str, Any], *replies: dict[str, Any]) -> Iterator[str]:
    """A server that is not ours: sends what it was given, whatever is asked. Gives its address."""

    def handle(connection: ServerConnection) -> None:
        try:
            connection.send(pack(metadata))
            for reply in replies:
                connection.recv()
                connection.send(pack({"actions": np.zeros((4, 3), np.float32), **reply}))
            connection.recv()
        except ConnectionClosed:
            pass

    with serve(handle, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_every_answer_says_who_made_it() -> None:
    with toy_thread() as server, PolicyClient(server.address, infer_timeout=PATIENCE) as client:
        assert client.identity == PolicyIdentity("toy", "1", ""), "the metadata's, before the first answer"
        assert client.infer(observation())["policy"] == client.identity == PolicyIdentity("toy", "1", "")


def test_a_policy_that_is_swapped_behind_the_same_address_is_told_apart() -> None:
    first, second = facts("first", "a" * 64), facts("second", "b" * 64)
    with served(Still(), facts=first) as port:
        client = PolicyClient(f"127.0.0.1:{port}", infer_timeout=PATIENCE, retry_after=0).connect()
        before = client.infer(observation())["policy"]
    client.close()
    with served(Still(), facts=second, port=port):
        after = client.infer(observation())["policy"]
    client.close()
    assert (before, after) == (first.identity, second.identity) and before != after
    assert str(after) == "second bbbb" and client.identity == after


def test_a_policy_that_is_swapped_within_a_connection_is_told_apart() -> None:
    """As behind a proxy, or a server that loads another checkpoint: the metadata stay those of the first."""
    first, second = facts("first", "a" * 64).identity, facts("second", "b" * 64).identity
    replies = [{"policy": identity.to_wire()} for identity in (first, second)]
    with (
        foreign_server({"policy_version": "first aaaa"}, *replies) as address,
        PolicyClient(address, infer_timeout=PATIENCE) as client,
    ):
        assert [client.infer(observation())["policy"] for _ in range(2)] == [first, second]
        assert client.generation == 1


def test_a_server_that_does_not_say_is_an_unknown_policy() -> None:
    with foreign_server({}, {}, {"policy": 7}) as address, PolicyClient(address, infer_timeout=PATIENCE) as client:
        for _ in range(2):
            identity = client.infer(observation())["policy"]
            assert identity == UNKNOWN and not identity.is_known and "unknown policy" in str(identity)


@pytest.mark.parametrize(
    ("reply", "metadata", "expected"),
    [
        ({}, {"checkpoint": "a", "policy_version": "a 1", "policy_hash": "1"}, PolicyIdentity("a", "a 1", "1")),
        ({"policy": {"hash": "2"}}, {"checkpoint": "a", "policy_hash": "1"}, PolicyIdentity(hash="2")),
        ({"policy": {"name": 3, "hash": None}}, {}, UNKNOWN),
        ({"policy": None}, {"policy_hash": ["1"]}, UNKNOWN),
    ],
)
def test_an_answer_says_it_before_the_connection_does(
    reply: dict[str, Any], metadata: dict[str, Any], expected: PolicyIdentity
) -> None:
    assert read_identity(reply, metadata) == expected
