"""Two whole robot sides, with real consoles, and a hub between them, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from console_robot import ConsoleBench, console_bench

from real_robot.operator.console.config import ConsoleConfig
from real_robot.operator.hub.hub import Hub
from real_robot.operator.hub.hub_log import HubLog, read_log
from real_robot.operator.hub.hub_server import HubServer
from real_robot.operator.hub.run_hub import RobotConfig, make_links

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


@contextmanager
def hub_bench(folder: Path, link_timeout: float = 2.0) -> Iterator[HubBench]:
    token = folder / "token"
    token.touch(0o600)
    token.write_text(ROBOT_TOKEN)
    with ExitStack() as stack:
        timeout = max(1.0, link_timeout)
        robots = {
            name: stack.enter_context(console_bench(token=ROBOT_TOKEN, link_timeout=timeout))
            for name in ("left", "right")
        }
        configs = {n: RobotConfig(url=f"ws://127.0.0.1:{b.port}", token_file=token) for n, b in robots.items()}
        log = stack.enter_context(HubLog(folder / "hub.jsonl"))
        hub = Hub(make_links(configs), log, 30.0, link_timeout)
        port = stack.enter_context(HubServer(ConsoleConfig(port=0, link_timeout=link_timeout), hub).running())
        yield HubBench(robots, hub, port, folder / "hub.jsonl")
