"""Two whole robot sides, with real consoles, and a hub between them, in this process; and a page of the hub's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from console_robot import ConsoleBench, console_bench
from websockets.sync.client import connect

from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.hub.hub import Hub
from real_robot.operator.hub.hub_log import HubLog, read_log
from real_robot.operator.hub.hub_server import HubServer, RobotConfig, make_links

ROBOT_TOKEN = "the-robots-own-token"


class HubBench:
    """Two robots, the hub between them, its log."""

    def __init__(self, robots: dict[str, ConsoleBench], hub: Hub, port: int, log: Path) -> None:
        self.robots, self.hub, self.port, self.log = robots, hub, port, log
        self.left, self.right = robots["left"], robots["right"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_log(self.log) if event["event"] == kind]


class Page:
    """What the hub's page does, without a page."""

    def __init__(self, port: int) -> None:
        self.socket = connect(f"ws://127.0.0.1:{port}/socket", open_timeout=60).__enter__()
        self.hubs = self.pictures = 0
        self.robot: dict[str, Any] = {}
        self.refused: list[str] = []
        self.alive = True

    def say(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def hear(self) -> dict[str, Any]:
        """The next overview."""
        while True:
            data = self.socket.recv(timeout=60)
            if isinstance(data, bytes):
                self.pictures += 1
                continue
            message = json.loads(data)
            if message["type"] == "hub":
                self.hubs += 1
                self.refused += message["refused"]
                self.say("seen", statuses=self.hubs, pictures=self.pictures)
                if self.alive:
                    self.say("alive", sent=time.monotonic())
                return message
            self.robot = message if message["type"] == "status" else self.robot

    def until(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 60) -> dict[str, Any]:
        end, overview = time.monotonic() + seconds, {}
        while time.monotonic() < end:
            overview = self.hear()
            if condition(overview):
                return overview
        raise AssertionError(f"not in {seconds} s; the last: {overview}; refused: {self.refused}")

    def enter(self, name: str = "anna") -> None:
        """In control of the hub and of its robots."""
        self.say("take_control", name=name, token="", force=False)
        self.until(lambda o: o["in_control"] and all(r["ours"] for r in o["robots"]))

    def press(self, robot: str, button: str, late: float = 0.0) -> None:
        self.say("press", robot=robot, button=button, sent=time.monotonic() - late)

    def states(self, **wanted: str) -> dict[str, Any]:
        """Wait until robots are in these states."""
        return self.until(lambda o: all(state(o, name) == wanted[name] for name in wanted))


def state(overview: dict[str, Any], robot: str) -> str:
    return next(r["state"] for r in overview["robots"] if r["name"] == robot)


@contextmanager
def hub_bench(folder: Path, link_timeout: float = 30.0) -> Iterator[HubBench]:
    token = folder / "token"
    token.touch(0o600)
    token.write_text(ROBOT_TOKEN)
    with ExitStack() as stack:
        robots = {
            name: stack.enter_context(console_bench(token=ROBOT_TOKEN, link_timeout=link_timeout))
            for name in ("left", "right")
        }
        configs = {n: RobotConfig(url=f"ws://127.0.0.1:{b.port}", token_file=token) for n, b in robots.items()}
        log = stack.enter_context(HubLog(folder / "hub.jsonl"))
        hub = Hub(make_links(configs), log, 30.0, link_timeout)
        port = stack.enter_context(HubServer(ConsoleConfig(port=0, link_timeout=link_timeout), hub).running())
        yield HubBench(robots, hub, port, folder / "hub.jsonl")
