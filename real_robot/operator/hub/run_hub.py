"""`vla-rl hub serve`: which robots, how they are reached, and the process that stands between them and a person."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, NonNegativeFloat

from real_robot.finite_config import FiniteConfig
from real_robot.operator.console.config import ConsoleConfig
from real_robot.operator.console.door import SOCKET_PATH
from real_robot.operator.hub.help_queue import HEAD_START
from real_robot.operator.hub.hub import Hub
from real_robot.operator.hub.hub_log import HubLog
from real_robot.operator.hub.hub_server import HubServer
from real_robot.operator.hub.robot_link import RobotLink
from real_robot.serving.address import AddressError, server_url
from real_robot.serving.protocol import read_token
from real_robot.serving.tls import client_context
from vla_rl.config import Config, ConfigError, merge, read_yaml, validate

MAX_ROBOTS = 64


def console_url(text: str) -> str:
    """The address of a console's socket, from what a person writes: host:port, ws://..., or its page's address.

    Raises:
        AddressError: it is none, or the port is missing.
    """
    address = text.strip().replace("http://", "ws://", 1).replace("https://", "wss://", 1).rstrip("/")
    url = server_url(address)
    parts, told = urlsplit(url), urlsplit(address if "://" in address else f"ws://{address}")
    if told.port is None:
        raise AddressError(f"a robot's console {text[:80]!r}: the port is missing; allowed: host:port, ws://host:port")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{SOCKET_PATH}"


class RobotConfig(Config):
    """A robot of the hub: the console of its `vla-rl deploy`."""

    url: Annotated[str, AfterValidator(console_url)] = Field(description="Of its console, such as ws://bench1:8080.")
    token_file: Path | None = Field(default=None, description="File with the token that its console wants.")
    ca: Path | None = Field(default=None, description="With wss://: who signed its certificate; else the system's.")


class HubFile(FiniteConfig):
    """The file that `vla-rl hub serve` reads."""

    robots: dict[str, RobotConfig] = Field(
        min_length=1, max_length=MAX_ROBOTS, description="Name -> how to reach it; the names are the person's."
    )
    head_start: NonNegativeFloat = Field(
        default=HEAD_START,
        description="Seconds that a robot whose score is twice its threshold counts as if it had waited longer.",
    )


def load_hub(file: Path | None, robots: Sequence[str] = ()) -> HubFile:
    """The file's robots, and those of `--robot NAME=ADDRESS`.

    Raises:
        ConfigError: neither names a robot, or one of them wrongly.
    """
    named: dict[str, dict[str, str]] = {}
    for text in robots:
        name, separator, url = text.partition("=")
        if not (separator and name.strip() and url.strip()):
            raise ConfigError(f"--robot: got {text[:80]!r}, expected NAME=ADDRESS, such as left=ws://bench1:8080")
        if name.strip() in named:
            raise ConfigError(f"--robot: {name.strip()!r} is given twice; each robot has a name of its own")
        named[name.strip()] = {"url": url.strip()}
    values = read_yaml(file) if file is not None else {}
    if not named and not values:
        raise ConfigError("hub: no robots; give a file (docs/hub.md), or --robot NAME=ws://HOST:PORT for each")
    return validate(HubFile, merge(values, {"robots": named}) if named else values, prefix="hub")


def make_links(robots: Mapping[str, RobotConfig]) -> dict[str, RobotLink]:
    """A line to each robot, not connected yet.

    Raises:
        ConfigError: a token or a certificate that cannot be read.
    """
    links = {}
    for name, robot in robots.items():
        token = read_token(robot.token_file) if robot.token_file else ""
        ssl = client_context(robot.ca) if robot.url.startswith("wss://") else None
        links[name] = RobotLink(name, robot.url, token, ssl)
    return links


def run_hub(config: HubFile, page: ConsoleConfig, log: Path | None, say: Callable[[str], None]) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigError: see `make_links` and `HubServer`. OSError: the port is taken, or the log cannot be written.
    """
    links = make_links(config.robots)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: over.set())
    with HubLog(log) as events:
        hub = Hub(links, events, config.head_start, page.link_timeout)
        server = HubServer(page, hub)
        with server.running():
            say(f"hub: {server.url}")
            while not over.wait(0.2) and server.failure is None:
                pass
        if server.failure is not None:
            raise OSError(f"the hub ended and its robots hold: {server.failure}")
        events("end")
    say("the hub has ended: its robots hold")
