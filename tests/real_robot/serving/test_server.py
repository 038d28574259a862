"""The policy server in a process of its own: openpi's protocol, several clients, tokens, clients that leave."""

from __future__ import annotations

import http.client
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from openpi_like import OpenpiClient
from processes import until
from toy_server import ToyServer, ToyThread, observation, toy_server, toy_thread
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from real_robot.client_package.vla_rl_client import NotAuthorized, ServerError, ServerUnavailable
from real_robot.client_package.vla_rl_client.wire import pack, unpack
from real_robot.serving.client import PolicyClient
from real_robot.serving.network import is_loopback
from real_robot.serving.server import PolicyServer, ServeConfig
from real_robot.types import RobotObservation
from vla_rl.config import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[ToyThread]:
    with toy_thread(max_batch=4) as running:
        yield running


def client(server: ToyThread, **options: Any) -> PolicyClient:
    return PolicyClient(server.address, **{"infer_timeout": 20.0, **options})


def healthz(server: ToyServer | ToyThread) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def openpi_observation(x: float) -> dict[str, Any]:
    return {
        "observation/image": np.zeros((224, 224, 3), np.uint8),
        "observation/wrist_image": np.zeros((224, 224, 3), np.uint8),
        "observation/state": np.array([x, 0, 0, 0, 0]),
        "prompt": "pick up the block",
    }


def test_an_openpi_client_works_unchanged(server: ToyThread) -> None:
    theirs = OpenpiClient(server.port)
    assert theirs.metadata["chunk_size"] == 4 and theirs.metadata["cameras"] == ["agentview", "wrist"]
    first, second = theirs.infer(openpi_observation(2.0)), theirs.infer(openpi_observation(3.0))
    np.testing.assert_array_equal(first["actions"][:, 0], [2, 3, 4, 5])
    np.testing.assert_array_equal(second["actions"][:, 2], [3, 4, 5, 6])
    assert set(first) == {"actions", "policy", "server_timing"}
    assert first["server_timing"]["infer_ms"] >= 0 and "prev_total_ms" not in first["server_timing"]
    assert second["server_timing"]["prev_total_ms"] > 0
    with pytest.raises(RuntimeError, match="no image of camera 'agentview'"):
        theirs.infer({"observation/state": np.zeros(5), "prompt": "go"})
    with pytest.raises(ConnectionClosed):
        theirs.connection.recv(timeout=20)
    assert theirs.connection.close_code == 1011


def test_openpis_own_client_works(server: ToyThread) -> None:
    """`pip install --no-deps openpi-client==0.1.2`: its pins want numpy 1, its code does not."""
    theirs = pytest.importorskip("openpi_client.websocket_client_policy", reason="openpi-client is not installed")
    policy = theirs.WebsocketClientPolicy("127.0.0.1", server.port)
    assert policy.get_server_metadata()["server"] == "vla-rl"
    np.testing.assert_array_equal(policy.infer(openpi_observation(1.0))["actions"][:, 0], [1, 2, 3, 4])
    with pytest.raises(RuntimeError, match="Error in inference server"):
        policy.infer({"prompt": 1})


def test_our_client(server: ToyThread) -> None:
    images = {name: np.zeros((48, 64, 3), np.uint8) for name in ("agentview", "wrist", "not_read")}
    seen = RobotObservation(images, np.arange(5, dtype=np.float32), "go", 0.0)
    with client(server) as ours:
        assert ours.metadata["action_names"] == ["x", "y", "z"] and ours.metadata["control_hz"] == 20.0
        assert "embedding" not in ours.act(seen)
        reply = ours.act(seen, embedding=True)
        np.testing.assert_array_equal(reply["embedding"], np.arange(5) * 2)
        assert reply["actions"].shape == (4, 3) and reply["actions"].dtype == np.float32
        continued = ours.act(seen, prefix=np.full((3, 3), 9.0), num_frozen=2)["actions"]
        assert continued[:, 0].tolist() == [9, 9, 2, 3]


def changed(**changes: Any) -> dict[str, Any]:
    message = {**observation(), **changes}
    return {key: value for key, value in message.items() if value is not ...}


IMAGE = np.zeros((8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (changed(images={"agentview": IMAGE}), "no image of camera 'wrist'"),
        (changed(images=3), "images: expected a map"),
        (changed(images={"agentview": IMAGE + np.float32(255), "wrist": IMAGE}), "floats from 0 to 1, got .* 255 to"),
        (changed(images={"agentview": IMAGE.astype(np.int16), "wrist": IMAGE}), "uint8 or floats .* got int16"),
        (changed(images={"agentview": np.full((8, 8, 3), np.nan), "wrist": IMAGE}), "got float64 .* from nan"),
        (changed(images={"agentview": IMAGE[None], "wrist": IMAGE}), r"got uint8 \(1, 8, 8, 3\)"),
        (changed(images={"agentview": IMAGE[:0], "wrist": IMAGE}), "pixels"),
        (changed(images={"agentview": np.zeros((2049, 1, 3), np.uint8), "wrist": IMAGE}), "pixels"),
        (changed(state=...), "state: expected numbers"),
        (changed(state=np.zeros(4)), "state: expected 5 numbers, got 4"),
        (changed(state=np.array([0, 0, 0, 0, np.nan])), "state: holds NaN"),
        (changed(state=np.array([0, 0, 0, 0, 1e300])), "number too large"),
        (changed(state=np.zeros((1, 5))), "1 dimension"),
        (changed(state=["a"] * 5), "state: expected numbers"),
        (changed(state=[10**400] * 5), "cannot be packed|too large"),
        (changed(instruction=" "), "expected a text"),
        (changed(instruction=3), "expected a text"),
        (changed(embedding="yes"), "embedding: expected true or false"),
        (changed(prefix=np.zeros((2, 4))), "prefix: expected 1 to 4 actions of 3 numbers"),
        (changed(prefix=np.zeros((5, 3))), "prefix: expected 1 to 4"),
        (changed(prefix=np.zeros((2, 3)), num_frozen=3), "num_frozen: expected 0 to 2"),
        (changed(prefix=np.zeros((2, 3)), execution_horizon=0), "execution_horizon: expected 1 to 10000"),
        (changed(prefix=np.zeros((2, 3)), max_guidance_weight=-1.0), "max_guidance_weight: expected a number above 0"),
        (changed(prefix=np.zeros((2, 3)), max_guidance_weight=np.ones(2)), "max_guidance_weight: expected a number"),
        (changed(prefix=np.zeros((2, 3)), prefix_attention_schedule=["EXP"]), "expected one of ZEROS, ONES"),
        (changed(prompts="go"), "unknown key 'prompts'"),
    ],
)
def test_a_request_it_cannot_answer_is_told_why(server: ToyThread, message: dict[str, Any], what: str) -> None:
    with client(server) as ours, pytest.raises((ServerError, ValueError), match=what):
        ours.infer(message)


def test_text_and_garbage_close_the_connection_and_nothing_more(server: ToyThread) -> None:
    for data, what in (("hello", "got text"), (b"\xc1\xc1", "not a valid msgpack"), (b"", "not a valid msgpack")):
        theirs = OpenpiClient(server.port)
        theirs.connection.send(data)
        with pytest.raises(RuntimeError, match=what):
            theirs._receive()
    with connect(f"ws://{server.address}", max_size=None) as big:
        big.recv(timeout=20)
        with pytest.raises(ConnectionClosed):
            big.send(b"0" * 2_000_000)
            big.recv(timeout=20)
        assert big.close_code == 1009, "larger than max_message_bytes"
    assert healthz(server) == (200, "OK\n")


def test_a_policy_that_fails_costs_one_request(server: ToyThread) -> None:
    with client(server) as ours:
        for instruction, what in (("fail", "RuntimeError: told to fail"), ("nan", "NaN among them")):
            with pytest.raises(ServerError, match=what):
                ours.infer(observation(0, instruction))
        assert ours.infer(observation(1))["actions"][0, 0] == 1
        assert ours.generation == 3


def test_clients_share_a_forward_pass_and_get_their_own_answers(server: ToyThread) -> None:
    def ask(x: int) -> tuple[float, int]:
        with client(server) as ours:
            reply = ours.infer(observation(x, {0: "wait", 5: "fail"}.get(x, "go")))
            return reply["actions"][0, 0], reply["server_timing"]["batch_size"]

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(ask, 0)]
        with server.computing():
            for x in range(1, 6):
                futures.append(pool.submit(ask, x))
                until(lambda x=x: server.server.num_waiting() == x, "its turn in the queue")
        answers = [future.result() for future in futures[:5]]
        with pytest.raises(ServerError, match="told to fail"):
            futures[5].result()
    assert [x for x, _ in answers] == [0, 1, 2, 3, 4]
    assert [size for _, size in answers] == [1, 4, 4, 4, 4]


def test_a_request_that_fails_costs_those_that_it_was_computed_with_nothing(server: ToyThread) -> None:
    with ThreadPoolExecutor(3) as pool, client(server) as first, client(server) as second, client(server) as third:
        before = pool.submit(first.infer, observation(0, "wait"))
        with server.computing():
            fails = pool.submit(second.infer, observation(1, "fail"))
            until(lambda: server.server.num_waiting() == 1, "the bad request")
            good = pool.submit(third.infer, observation(2))
            until(lambda: server.server.num_waiting() == 2, "the good one")
        assert before.result()["actions"][0, 0] == 0
        with pytest.raises(ServerError, match="told to fail"):
            fails.result()
        reply = good.result()
        assert reply["actions"][0, 0] == 2 and reply["server_timing"]["batch_size"] == 1


def test_the_event_loop_answers_while_the_policy_computes(server: ToyThread) -> None:
    with client(server) as ours, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ours.infer, observation(0, "wait"))
        with server.computing():
            assert healthz(server)[0] == 200
            with client(server) as other:
                assert other.metadata["server"] == "vla-rl" and not slow.done()
        slow.result()


def test_a_client_that_leaves_gives_its_place_back() -> None:
    with toy_thread(max_clients=3) as server:
        with client(server) as ours, ThreadPoolExecutor(1) as pool:
            leaving = [connect(f"ws://{server.address}") for _ in range(2)]
            for one in leaving:
                one.recv(timeout=20)
            leaving[0].send(pack(observation(0, "wait")))
            with server.computing():
                leaving[1].send(pack(observation(0)))
                until(lambda: server.server.num_waiting() == 1, "the second request")
                for one in leaving:
                    one.socket.close()  # as a crash does
                until(lambda: len(server.server._slots) == 1, "the loss to be seen")
                asked = pool.submit(ours.infer, observation(7))
                until(lambda: server.server.num_waiting() == 2, "the third")
            reply = asked.result()
            assert reply["actions"][0, 0] == 7
            assert reply["server_timing"]["batch_size"] == 1, "the second, who waited too, was computed all the same"
        others = [client(server).connect() for _ in range(3)]
        for other in others:
            other.infer(observation())
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://{server.address}")
        assert refused.value.response.status_code == 503
        for other in others:
            other.close()
        with client(server) as ours:
            ours.infer(observation())


def test_it_is_not_ready_before_the_policy_is_warm() -> None:
    may_load = threading.Event()
    with toy_thread(wait=False, may_load=lambda: may_load.wait(60)) as server:
        assert healthz(server) == (503, "the policy is loading\n")
        with pytest.raises(ServerUnavailable, match=r"not ready in 0\.2 s"):
            client(server, ready_timeout=0.2).connect()
        may_load.set()
        with client(server, ready_timeout=30.0) as ours:
            assert healthz(server)[0] == 200
            ours.infer(observation())


def test_health_tells_of_a_policy_that_hangs() -> None:
    with toy_server("--hang-after", "0.3") as server:
        connection = connect(f"ws://{server.address}")
        connection.recv(timeout=20)
        connection.send(pack(observation(0, "wait")))
        until(lambda: healthz(server)[0] == 503, "the policy to be missed")
        assert "has not returned" in healthz(server)[1]
        server.signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0, "it can be ended all the same"


def test_without_the_token_nobody_gets_in() -> None:
    token = "0123456789abcdef"
    with toy_thread(token=token) as server:
        given, where = "the token given is not the server's", "Give --token-file a copy of the file that `vla-rl serve"
        for wrong, what in ((None, "the server wants a token"), ("0123456789abcdeF", given), ("x", given)):
            with pytest.raises(NotAuthorized, match=rf"\(401\): {what}\. {where}"):
                client(server, token=wrong).connect()
        with client(server, token=token) as ours:
            ours.infer(observation())
        theirs = OpenpiClient(server.port, {"Authorization": f"Api-Key {token}"})
        assert theirs.infer(openpi_observation(1.0))["actions"].shape == (4, 3)
        assert healthz(server)[0] == 200


def test_web_pages_may_not_connect(server: ToyThread) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{server.address}", origin="https://example.org")  # type: ignore[arg-type]
    assert refused.value.response.status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "gpu-box"])
def test_beyond_loopback_a_token_is_required(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="a token is required"):
        PolicyServer(lambda: pytest.fail("loaded"), ServeConfig(host=host))
    assert all(is_loopback(own) for own in ("127.0.0.1", "::1", "localhost", "127.1.2.3"))


def test_answers_are_openpis(server: ToyThread) -> None:
    with connect(f"ws://{server.address}") as raw:
        raw.recv(timeout=20)
        raw.send(pack(observation(4)))
        reply = raw.recv(timeout=20)
        assert isinstance(reply, bytes) and unpack(reply)["actions"][0, 0] == 4
