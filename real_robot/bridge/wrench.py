"""Whether the force and torque that a robot reports are within `safety.wrench`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from real_robot.checks import Newest
from real_robot.contract.safety import WrenchLimits
from real_robot.transports.base import Transport
from real_robot.transports.messages import Message, WrenchStamped
from real_robot.types import RobotObservation


def sizes_of(wrench: WrenchStamped) -> np.ndarray:
    """How long force and torque are, (2,) in N and Nm."""
    return np.array([np.linalg.norm(wrench.force), np.linalg.norm(wrench.torque)])


class WrenchCheck:
    """A state check of the supervisor: the wrench is known, and within its limits.

    It comes more often than observations, and a blow is short: what counts is the largest since it was asked last.

    Args:
        timeout: seconds without a wrench after which it is not known. Messages that are not finite count as none.
    """

    name = "wrench"

    def __init__(
        self,
        limits: WrenchLimits,
        timeout: float,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._timeout = limits, timeout
        self._newest = Newest[np.ndarray](limits.topic, "force and torque", clock)
        self._lock = threading.Lock()
        self._last = self._most = np.zeros(2)  # N, Nm: of the newest message, and largest since it was asked
        transport.subscribe(limits.topic, WrenchStamped, limits.qos, self._receive)

    def _receive(self, message: Message) -> None:
        assert isinstance(message, WrenchStamped)
        sizes = sizes_of(message)
        if not np.isfinite(sizes).all():
            return self._newest.refuse("NaN or infinity")
        with self._lock:
            self._last, self._most = sizes, np.maximum(self._most, sizes)
        return self._newest.show(sizes)

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        if trouble := self._newest.trouble(self._timeout):
            return trouble
        with self._lock:
            most, self._most = self._most, self._last
        return self._limits.trouble(*most)

    def restart(self) -> None:
        with self._lock:
            self._most = self._last
