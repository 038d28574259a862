"""Ten thousand mutated messages against a running policy server: it neither crashes, nor hangs, nor grows."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_server import ToyServer, observation, toy_server
from websockets.exceptions import ConnectionClosed, InvalidMessage
from websockets.sync.client import ClientConnection, connect

from real_robot.client_package.vla_rl_client.wire import MiB, pack
from real_robot.serving.client import PolicyClient

MAX_GROWTH = 120 * MiB
GOOD = [
    pack(observation(1.0, size=8)),
    pack({"observation/image": observation(size=8)["images"]["wrist"], "prompt": "go", "observation/state": [0.0] * 5}),
    pack(
        {**observation(size=4), "prefix": [[0.0] * 3] * 2, "num_frozen": 1, "execution_horizon": 3, "embedding": True}
    ),
]
# Lengths and types that msgpack reads first: huge strings, lists, maps, extensions.
HEADERS = [bytes([code]) + b"\xff" * n for code in range(0xC0, 0xE0) for n in (0, 1, 2, 4)]


def mutate(rng: random.Random) -> bytes | str:
    data = bytearray(rng.choice(GOOD))
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(rng.randbytes(rng.randrange(200)))
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 2:
        return bytes(data) * rng.randrange(2, 5)
    if kind == 3:
        place = rng.randrange(len(data))
        return bytes(data[:place] + rng.choice(HEADERS) + data[place:])
    if kind == 4:
        return b"\x81\xa6images" + bytes([rng.choice((0x91, 0x81, 0xDC, 0xDD, 0xDF))]) * rng.randrange(1, 50_000)
    if kind == 5:
        return data.decode("latin-1")[: rng.randrange(100)]
    for _ in range(rng.randrange(1, 20)):
        data[rng.randrange(len(data)) if kind == 6 else rng.randrange(60)] = rng.randrange(256)
    return bytes(data)


def enter(server: ToyServer) -> ClientConnection:
    """Connect as any client does: anew where the flood of sockets from the same address has cost the place."""
    for _ in range(100):
        try:
            return connect(f"ws://{server.address}", compression=None, close_timeout=0.2, open_timeout=60)
        except InvalidMessage:
            time.sleep(0.05)
    raise AssertionError("turned away 100 times")


def throw(server: ToyServer, count: int, seed: int) -> int:
    """Send mutated messages, anew after each refusal. Returns how many got an answer or a refusal."""
    rng = random.Random(seed)
    answered = 0
    while answered < count:
        with enter(server) as connection:
            connection.recv(timeout=60)
            try:
                while answered < count:
                    connection.send(mutate(rng))
                    reply = connection.recv(timeout=60)  # TimeoutError: it hangs
                    answered += 1
                    if isinstance(reply, str):
                        break
            except ConnectionClosed:
                answered += 1
    return answered


def throw_raw(server: ToyServer, count: int, seed: int) -> None:
    """Bytes that are no WebSocket handshake, or whose frames are broken."""
    rng = random.Random(seed)
    hello = (
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw:
            start = bytearray(hello)
            if rng.random() < 0.5:
                start[rng.randrange(len(start))] = rng.randrange(256)
            raw.sendall(start + rng.randbytes(rng.randrange(300)))


def survives(count: int) -> None:
    with toy_server() as server:
        throw(server, 50, seed=999)
        before = server.memory()
        with ThreadPoolExecutor(4) as pool:
            parts = [pool.submit(throw, server, count // 4, seed) for seed in range(4)]
            raw = pool.submit(throw_raw, server, count // 20, 5)
            assert sum(part.result() for part in parts) >= count // 4 * 4
            raw.result()
        assert server.process.poll() is None, "it crashed"
        grown = server.memory() - before
        assert grown < MAX_GROWTH, f"grew by {grown / MiB:.0f} MiB"
        with PolicyClient(server.address, infer_timeout=30) as client:
            assert client.infer(observation(6.0))["actions"][0, 0] == 6


def test_it_survives_mutated_messages() -> None:
    survives(200)


@pytest.mark.slow
def test_it_survives_ten_thousand_mutated_messages() -> None:
    survives(10_000)
