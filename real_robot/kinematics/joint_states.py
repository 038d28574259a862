"""Joints as the robot publishes them, for the checks alone: the policy's state need not have them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from real_robot.checks import Newest
from real_robot.contract.model import ModelConfig
from real_robot.transports.base import Transport
from real_robot.transports.messages import JointState, Message


@dataclass(frozen=True)
class JointSample:
    """Newest joints.

    Attributes:
        stamp: monotonic seconds when they arrived.
        position, effort: the file's joint -> radians (meters), Nm (N); only those that the message had.
    """

    stamp: float
    position: dict[str, float]
    effort: dict[str, float]


class JointStates:
    """The newest message of `model.joint_states`. Messages that are not finite or lack a joint count as none.

    Args:
        needed: joints of the file whose position must be there. with_effort: joints whose effort must be.
    """

    def __init__(
        self,
        model: ModelConfig,
        transport: Transport,
        needed: tuple[str, ...],
        with_effort: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._needed, self._with_effort = model, needed, with_effort
        self._newest = Newest[tuple[dict[str, float], dict[str, float]]](model.joint_states, "the joints", clock)
        transport.subscribe(model.joint_states, JointState, model.joint_states_qos, self._receive)

    def newest(self) -> JointSample | None:
        """What arrived last; None before the first."""
        shown = self._newest.get()
        return None if shown is None else JointSample(shown[0], *shown[1])

    def trouble(self, limit: float) -> str | None:
        """Why the joints are not known: nothing in `limit` seconds; or None."""
        return self._newest.trouble(limit)

    def _receive(self, message: Message) -> None:
        assert isinstance(message, JointState)
        position = self._read(message.name, message.position)
        effort = self._read(message.name, message.effort, with_units=False)
        fault = next((f"no position of {j}" for j in self._needed if j not in position), "")
        fault = fault or next((f"no effort of {j}" for j in self._with_effort if j not in effort), "")
        if fault:
            self._newest.refuse(fault)
        else:
            self._newest.show((position, effort))

    def _read(self, names: tuple[str, ...], values: np.ndarray, with_units: bool = True) -> dict[str, float]:
        """Joint of the file -> its number; those that are not finite are left out."""
        if len(values) != len(names):
            return {}
        found: dict[str, float] = {}
        for name, value in zip(names, values, strict=True):
            if (link := self._model.joint_of(name)) is None:
                continue
            number = link.scale * float(value) + link.offset if with_units else float(value)
            if np.isfinite(number):
                found[link.joint] = number
        return found
