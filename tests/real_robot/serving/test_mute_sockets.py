"""Connections that say nothing: they keep nobody out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import until
from toy_server import ToyThread, observation, toy_thread
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from real_robot.client_package.vla_rl_client import ServerUnavailable
from real_robot.serving import server as server_module
from real_robot.serving.client import PolicyClient
from real_robot.serving.connections import MAX_MUTE_PER_ADDRESS

PATIENCE = 60.0
UPGRADE = (
    "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@contextmanager
def raw_sockets(server: ToyThread, number: int, say: str = "") -> Iterator[list[socket.socket]]:
    """Sockets that send a text, and then neither send nor read: they answer no ping either."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE))
            for _ in range(number)
        ]
        for mute in sockets:
            mute.sendall(say.encode())
            if say:
                assert mute.recv(12) == b"HTTP/1.1 101"
        yield sockets


def ask(server: ToyThread, x: float) -> float:
    with PolicyClient(server.address, connect_timeout=20.0, infer_timeout=PATIENCE) as client:
        return float(client.infer(observation(x))["actions"][0, 0])


def test_sixteen_mute_sockets_do_not_keep_a_client_out() -> None:
    with toy_thread() as server, raw_sockets(server, 16, UPGRADE):
        assert ask(server, 3) == 3
        clients = [PolicyClient(server.address, infer_timeout=PATIENCE).connect() for _ in range(16)]
        for x, client in enumerate(clients):
            assert client.infer(observation(x))["actions"][0, 0] == x
        assert [client.generation for client in clients] == [1] * 16, "none lost its place to another that spoke"
        for client in clients:
            client.close()


def test_who_has_spoken_keeps_the_place_and_the_oldest_mute_one_loses_it() -> None:
    with toy_thread(max_clients=3) as server, ExitStack() as stack:

        def enter() -> ClientConnection:
            connection = stack.enter_context(connect(f"ws://{server.address}"))
            connection.recv(timeout=PATIENCE)
            return connection

        speaker = stack.enter_context(PolicyClient(server.address, infer_timeout=PATIENCE))
        assert speaker.infer(observation(1))["actions"][0, 0] == 1
        older, younger, newest = enter(), enter(), enter()
        with pytest.raises(ConnectionClosed) as told:
            older.recv(timeout=PATIENCE)
        assert told.value.rcvd is not None and told.value.rcvd.code == 1013 and "said nothing" in told.value.rcvd.reason
        assert younger.close_code is None and newest.close_code is None
        assert speaker.infer(observation(2))["actions"][0, 0] == 2 and speaker.generation == 1


def test_a_client_that_waited_and_lost_its_place_gets_one_with_its_next_request() -> None:
    with (
        toy_thread(max_clients=2) as server,
        PolicyClient(server.address, infer_timeout=PATIENCE, retry_after=0) as waiting,
        raw_sockets(server, 2, UPGRADE),
    ):
        until(lambda: waiting._connection is not None and waiting._connection.close_code, "the loss")
        assert waiting.infer(observation(4))["actions"][0, 0] == 4 and waiting.generation == 2


def test_when_all_places_speak_the_next_is_told() -> None:
    with toy_thread(max_clients=2) as server, ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(PolicyClient(server.address, infer_timeout=PATIENCE))
            client.infer(observation())
        with pytest.raises(ServerUnavailable, match=r"503.*too many clients"):
            PolicyClient(server.address).connect()


def test_where_one_address_has_too_many_without_a_request_the_oldest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 10 * PATIENCE)
    with toy_thread() as server, raw_sockets(server, MAX_MUTE_PER_ADDRESS + 16) as mute:
        for oldest in mute[:16]:
            assert oldest.recv(1) == b"", "closed"
        assert ask(server, 5) == 5
        for other in mute[-16:]:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)


def test_a_handshake_has_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.3)

    def files() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    with toy_thread() as server:
        before = files()
        with raw_sockets(server, 32) as mute:
            for silent in mute:
                assert silent.recv(1) == b"", "timed out"
            until(lambda: files() < before + len(mute) + 16, "closed files")
