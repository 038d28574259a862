"""What those who drive a robot tell one another on its graph: who they are, which topics, whether it is stopped."""

from __future__ import annotations

import datetime
import os
import socket
import time
import uuid
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, ValidationError

from real_robot.finite_config import FiniteConfig

TOPIC = "/vla_rl/drivers"  # std_msgs/String, JSON
Role = Literal["deploy", "guarded deploy", "robot-guard"]
TOGETHER = {"guarded deploy", "robot-guard"}  # the only two that may have one robot


class Lease(FiniteConfig):
    """One process' word, repeated several times a second."""

    id: str = Field(max_length=80, description="Of the process; the smaller of two that claim a robot at once wins.")
    role: Role = Field(description="What the process is.")
    state: Literal["claims", "yields", "holds", "leaves"] = Field(description="How far it has come.")
    robot: str = Field(max_length=200, description="The robot's name in its contract.")
    topics: tuple[str, ...] = Field(max_length=256, description="The topics of the robot's driver that it means.")
    host: str = Field(max_length=300, description="Its machine.")
    pid: int = Field(description="Its process id there.")
    since: float = Field(description="When it started, seconds since the epoch by its clock.")
    epoch: int = Field(default=0, ge=0, description="Counts the stops and resets that people made; the newest is true.")
    stopped: str = Field(default="", max_length=1000, description="Why the robot is stopped, by a person; empty: not.")

    def excludes(self, other: Lease) -> bool:
        """Whether the two may not drive at once."""
        return self.is_of(other) and {self.role, other.role} != TOGETHER

    def is_of(self, other: Lease) -> bool:
        """Whether the two mean the same robot, or parts of one."""
        return bool(set(self.topics) & set(other.topics))

    def describe(self) -> str:
        """Who this is, for people."""
        since = datetime.datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        return f"vla-rl {self.role.split()[-1]} on {self.host}, process {self.pid}, since {since}"


def new_lease(role: Role, robot: str, topics: Iterable[str]) -> Lease:
    """The lease with which this process begins."""
    return Lease(
        id=f"{time.time_ns():020d} {uuid.uuid4().hex}",
        role=role,
        state="claims",
        robot=robot[:200],
        topics=tuple(f"/{topic.lstrip('/')}" for topic in topics),
        host=socket.gethostname()[:300],
        pid=os.getpid(),
        since=time.time(),
    )


def read_lease(text: str) -> Lease | None:
    """The lease in a message; None where it is none."""
    try:
        return Lease.model_validate_json(text)
    except (ValidationError, ValueError):
        return None
