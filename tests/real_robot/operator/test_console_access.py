"""Who comes into the console: a stop when all places are taken, names of strangers, mute sockets, encryption."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from certificates import Authority
from console_robot import ConsoleBench, console_bench
from processes import until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from real_robot.client_package.vla_rl_client import open_connection
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.console.server import ConsoleServer

PATIENCE = 60.0
TOKEN = "a-token-of-sixteen-signs"


def open_socket(stack: ExitStack, bench: ConsoleBench) -> ClientConnection:
    return stack.enter_context(connect(f"ws://127.0.0.1:{bench.port}/socket", open_timeout=PATIENCE))


def say(connection: ClientConnection, **message: object) -> None:
    connection.send(json.dumps(message))


def ask(bench: ConsoleBench, method: str, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", bench.port, timeout=PATIENCE)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.getheaders())
    finally:
        connection.close()


def run_policy(bench: ConsoleBench) -> None:
    bench.intervention.begin("test")
    until(lambda: bench.last_twist()[0] != 0, "motion")


def test_a_stop_fits_when_sixteen_viewers_watch() -> None:
    with console_bench(token=TOKEN) as bench, ExitStack() as stack:
        viewers = [open_socket(stack, bench) for _ in range(16)]
        for viewer in viewers:
            viewer.recv(timeout=PATIENCE)
            say(viewer, type="alive", sent=time.monotonic())
        until(lambda: ask(bench, "GET", "/socket")[0] == 503, "all places taken")
        with pytest.raises(InvalidStatus, match="503"):
            open_socket(stack, bench)
        run_policy(bench)
        asked = time.monotonic()
        status, text, _ = ask(bench, "POST", "/stop")
        assert (status, text) == (202, "the robot stops at its next control tick\n")
        until(lambda: bench.supervisor.state.mode == "stopped" and bench.last_twist() == [0, 0, 0], "the stop")
        assert bench.supervisor.state.reason == "console: POST from 127.0.0.1"
        ticks = [tick for tick in list(bench.ticks) if tick.sent is not None and tick.sent.values is not None]
        still = next(i for i in reversed(range(len(ticks))) if np.any(ticks[i].sent.values[:6] != 0)) + 1
        after = ticks[still].time + ticks[still].latency - asked
        print(f"POST /stop with 16 viewers: standstill sent after {1000 * after:.0f} ms")
        assert after < 1.0, "a stop waits for a tick, not for a viewer"


def test_a_stop_is_a_post_and_none_of_a_strangers_page() -> None:
    with console_bench(origins=("http://bench2:8080",)) as bench:
        run_policy(bench)
        for method, headers, status in (
            ("GET", {}, 405),
            ("PUT", {}, 405),
            ("POST", {"Origin": "https://evil.example"}, 403),
            ("POST", {"Origin": "http://[evil"}, 403),
            ("POST", {"Host": "evil.example"}, 403),
        ):
            assert ask(bench, method, "/stop", **headers)[0] == status, (method, headers)
        assert ask(bench, "POST", "/")[0] == 405 and ask(bench, "POST", "/socket")[0] == 405
        assert bench.supervisor.state.mode == "running"
        status, _, answer = ask(bench, "POST", "/stop", Origin="http://bench2:8080")
        assert status == 202 and answer["Access-Control-Allow-Origin"] == "http://bench2:8080"
        until(lambda: bench.supervisor.state.mode == "stopped", "the stop")


def test_mute_sockets_keep_no_browser_out() -> None:
    with console_bench() as bench, ExitStack() as stack:
        mute = [open_socket(stack, bench) for _ in range(16)]
        browser = open_socket(stack, bench)
        assert json.loads(browser.recv(timeout=PATIENCE))["type"] == "hello"
        say(browser, type="take_control", name="anna", token="", force=False)
        with pytest.raises(ConnectionClosed) as told:
            while True:
                mute[0].recv(timeout=PATIENCE)
        assert told.value.rcvd is not None and told.value.rcvd.code == 1013
        for _ in range(16):
            open_socket(stack, bench)
        until(lambda: bench.console.controller_silence < PATIENCE, "control")
        assert browser.close_code is None, "who has spoken keeps the place"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        (socket.gethostname(), 200),
        ("robot.lab:8080", 200),
        ("bench2", 200),
        ("evil.example", 403),
        ("10.99.99.99", 403),
    ],
)
def test_beyond_loopback_too_the_page_answers_to_its_own_names(host: str, status: int) -> None:
    config = {"host": "0.0.0.0", "token": TOKEN, "allow_host": ("robot.lab",), "origins": ("http://bench2:8080",)}
    with console_bench(**config) as bench:
        got, text, _ = ask(bench, "GET", "/", Host=host)
        assert got == status and (status == 200 or repr(host) in text)
        assert ask(bench, "GET", "/socket", Host=host)[0] == (426 if status == 200 else 403)


def test_an_encrypted_console_serves_its_page_and_sockets(tmp_path: Path) -> None:
    lab = Authority(tmp_path)
    certificate, key = lab.sign("localhost", "127.0.0.1")
    trust = ssl.create_default_context(cafile=lab.pem)
    with console_bench(certificate=certificate, key=key) as bench:
        page = f"https://127.0.0.1:{bench.port}"
        with urllib.request.urlopen(page, timeout=PATIENCE, context=trust) as answer:
            assert b"E-stop" in answer.read()
        with urllib.request.urlopen(f"{page}/dialog.js", timeout=PATIENCE, context=trust) as answer:
            assert answer.headers["Content-Type"].startswith("text/javascript")
        with open_connection(f"wss://127.0.0.1:{bench.port}/socket", trust, PATIENCE, origin=page) as browser:
            assert json.loads(browser.recv(timeout=PATIENCE))["type"] == "hello"
        run_policy(bench)
        stop = urllib.request.Request(f"{page}/stop", method="POST")
        with urllib.request.urlopen(stop, timeout=PATIENCE, context=trust) as answer:
            assert answer.status == 202
        until(lambda: bench.supervisor.state.mode == "stopped", "the stop")
        config = ConsoleConfig(port=0, certificate=certificate, key=key)
        other = ConsoleServer(config, bench.console, bench.supervisor)
        with other.running() as port:
            assert other.url == f"https://127.0.0.1:{port}"
