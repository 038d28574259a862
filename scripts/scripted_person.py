"""A scripted person at a hub: does over the hub's own socket what a person's page does, and nothing else.

The person goes to the first in the queue, needs `hand_over` seconds to get there, takes over, and drives as an expert
would, until the episode is over; gives up where that gets nowhere or cannot be done; hands back, and goes to the next.
A policy that was interrupted by something else than an alarm is told to go on. Robots that are ready get a new scene
and are started, while there is work; a policy that drives for longer than its horizon is visited, and its episode
ended. What the person knows of the robots is what the hub's overview says, and what a `SceneObserver` sees.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sim_observer import SceneObserver, SceneView
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from real_robot.operator.sim_interventions import LOWERING, SIDEWAYS, WHO, ProgressAlarm
from real_robot.operator.teleop import AXES
from vla_rl.types import EpisodeSpec

DRIVE_EVERY = 0.05  # seconds between two words of the person's hands
ALIVE_EVERY = 0.2
AGAIN = 1.0  # seconds after which a button that has changed nothing is pressed again
STALE = 0.5  # seconds: who sees nothing new for so long lets go
DRIVEN = ("recovery", "correction")
MAX_MESSAGE_BYTES = 8 * 1024 * 1024  # a picture


@dataclass(frozen=True)
class PersonOptions:
    """How the person works; seconds are of the wall clock.

    Attributes:
        hand_over: seconds from when the person turns to a robot until it is driven.
        patience: control steps without progress after which the person gives up.
        operator_steps: control steps that the person drives in an episode, at most.
        horizon: task -> seconds after which a policy that has not solved it is not waited for any longer.
        settle: seconds that a new scene is left to stand before the robot is started.
        full: (6,) twist, m/s and rad/s, of hands at full deflection.
    """

    hand_over: float = 1.0
    patience: int = 80
    operator_steps: int = 400
    horizon: Mapping[str, float] = field(default_factory=dict)
    settle: float = 0.5
    full: tuple[float, ...] = (1.0, 1.0, 1.0, 10.0, 10.0, 10.0)


@dataclass
class _Place:
    """What the person remembers of one robot."""

    episode: int = 0  # number of the scene that was laid out last
    spec: EpisodeSpec | None = None
    laid: float | None = None  # when the scene was seen to stand
    began: float | None = None  # when the policy was seen to drive
    is_noted: bool = False  # it was told to start
    is_open: bool = False  # it was seen to run, and has not been seen to be over


class ScriptedPerson:
    """What the person decides; `run_person` is the line to the hub.

    Args:
        observers: robot -> what is seen of it. work: the episodes, given to whichever robot is ready.

    Attributes:
        journal: an entry for each episode that was started, in order: robot, its number there, task, split, index.
        interrupted: times that a policy was told to go on after something else than an alarm.
        refused: what the hub refused.
    """

    def __init__(
        self,
        observers: Mapping[str, SceneObserver],
        work: Iterable[EpisodeSpec],
        options: PersonOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.observers, self.work, self.options, self._clock = dict(observers), deque(work), options, clock
        self.places = {name: _Place() for name in self.observers}
        self.journal: list[dict[str, Any]] = []
        self.interrupted = 0
        self.refused: list[str] = []
        self.helping: str | None = None
        self._phase = ""
        self._arrives = float("inf")
        self._progress, self._driven, self._counted = ProgressAlarm(options.patience), 0, 0
        self._said: dict[str, float] = {}

    @property
    def is_done(self) -> bool:
        """No work is left, and no episode runs."""
        busy = any(place.is_open or place.spec is not None for place in self.places.values())
        return not self.work and self.helping is None and not busy

    # --- what the hub's page shows ----------------------------------------------------------------

    def hear(self, overview: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the person does on seeing the overview: messages to the hub."""
        self.refused += overview["refused"]
        if not overview["in_control"]:
            self.helping = None
            return self._once("take_control", name=WHO, token="", force=False)
        rows = {row["name"]: row for row in overview["robots"]}
        if overview["helping"] != self.helping:
            self.helping = overview["helping"]
            self._arrives = self._clock() + self.options.hand_over
            self._progress, self._driven = ProgressAlarm(self.options.patience), 0
        messages: list[dict[str, Any]] = []
        for name, row in rows.items():
            messages += self._watch(name, row)
        if self.helping is not None:
            self._phase = rows[self.helping]["phase"]
            return messages + self._help(self.helping, rows[self.helping])
        if overview["queue"]:
            return messages + self._once("help", robot="")
        overdue = [name for name in rows if self._is_overdue(name)]
        return messages + (self._once("help", robot=overdue[0]) if overdue else [])

    def _watch(self, name: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Note where an episode stands; give a robot that is ready its next one."""
        place, now = self.places[name], self._clock()
        if row["phase"] == "autonomous" and row["mode"] != "stopped":
            place.began = now if place.began is None else place.began
        if row["phase"] not in ("idle", "ended"):
            place.is_open = True
            return []
        if place.is_open:
            place = self.places[name] = _Place(place.episode)
        if row["state"] != "ready" or not row["ours"]:
            return []
        if place.spec is None:
            if not self.work:
                return []
            place.spec, place.episode = self.work.popleft(), place.episode + 1
        number = self._number(name)
        sight = self.observers[name].sight
        if sight.episode != number or sight.is_over:
            self.observers[name].lay_out(number, place.spec)
            return []
        place.laid = now if place.laid is None else place.laid
        if now - place.laid < self.options.settle:
            return []
        told = self._once("press", robot=name, button="start")
        if told and not place.is_noted:  # The overview may show the last episode's end for a while.
            place.is_noted = True
            self._note(name, place)
        return told

    def _number(self, name: str) -> int:
        """A number for the simulator that no other run has used."""
        return 1000 + self.places[name].episode

    def _note(self, name: str, place: _Place) -> None:
        assert place.spec is not None, "its scene stands"
        told = {"robot": name, "number": place.episode, "task": place.spec.task}
        self.journal.append({**told, "split": place.spec.split, "index": place.spec.index})

    def _is_overdue(self, name: str) -> bool:
        place = self.places[name]
        if place.began is None or place.spec is None or not place.is_open:
            return False
        return self._clock() - place.began > self.options.horizon.get(place.spec.task, float("inf"))

    # --- with a robot -----------------------------------------------------------------------------

    def _help(self, name: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        phase = row["phase"]
        if phase in ("idle", "ended"):
            return self._once("hand_back")
        if self._clock() < self._arrives:
            return []
        if row["mode"] == "stopped":
            return self._once("reset", robot=name, name=WHO)
        if phase == "autonomous":
            return self._press(name, "failure") if self._is_overdue(name) else self._once("hand_back")
        if phase == "paused" and "(detector)" not in row["event"]:
            told = self._press(name, "resume")
            self.interrupted += len(told)
            return told
        sight = self.observers[name].sight
        if not np.isfinite(sight.remaining) or self._gets_nowhere(sight):
            return self._press(name, "failure")
        if phase == "paused":
            return self._press(name, "take_over")
        if phase == "recovery" and _is_lowering(sight):
            return self._press(name, "recovery_done")
        return []

    def _gets_nowhere(self, sight: SceneView) -> bool:
        """Count each new sight while the person drives."""
        if self._phase not in DRIVEN or sight.number == self._counted:
            return False
        self._counted = sight.number
        self._driven += 1
        return self._progress.update(sight.remaining) or self._driven > self.options.operator_steps

    def drive(self) -> dict[str, Any] | None:
        """What the person's hands do now; None while they hold nothing."""
        if self.helping is None or self._phase not in DRIVEN or self._clock() < self._arrives:
            return None
        sight, now = self.observers[self.helping].sight, self._clock()
        message: dict[str, Any] = {"type": "drive", "robot": self.helping, "sent": now}
        if sight.twist is None or now - sight.at > STALE:
            return {**message, "axes": {}, "gripper": None, "held": False}
        hands = np.clip(sight.twist / self.options.full, -1, 1)
        axes = {axis: round(float(value), 5) for axis, value in zip(AXES, hands, strict=True)}
        grip = None if sight.grip == 0 else "open" if sight.grip < 0 else "close"
        return {**message, "axes": axes, "gripper": grip, "held": True}

    def _press(self, robot: str, button: str) -> list[dict[str, Any]]:
        return self._once("press", robot=robot, button=button)

    def _once(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """The message, unless it was sent just now."""
        message = {"type": kind, **fields}
        key, now = json.dumps(message), self._clock()
        if now - self._said.get(key, float("-inf")) < AGAIN:
            return []
        self._said[key] = now
        return [message]


def _is_lowering(sight: SceneView) -> bool:
    """Whether the expert's hand goes down where it is: what is left is the sub-task itself."""
    if sight.twist is None:
        return False
    return bool(sight.twist[2] < LOWERING and np.abs(sight.twist[:2]).max() <= SIDEWAYS)


async def run_person(
    url: str, person: ScriptedPerson, seconds: float = float("inf"), check: Callable[[], None] = lambda: None
) -> None:
    """Be at the hub until the work is done.

    Args:
        url: of the hub's socket, ws://host:port/socket. seconds: after which it raises.
        check: called many times a second; what it raises ends the work.

    Raises:
        TimeoutError: the work is not done in time. OSError, WebSocketException: the hub is gone.
    """
    deadline = time.monotonic() + seconds
    async with connect(url, compression=None, max_size=MAX_MESSAGE_BYTES, proxy=None) as connection:
        hands = asyncio.ensure_future(_move_hands(connection, person))
        overviews = pictures = 0
        try:
            async for data in connection:
                if isinstance(data, bytes):
                    pictures += 1
                    continue
                overview = json.loads(data)
                if overview["type"] != "hub":
                    continue
                overviews += 1
                check()
                answers = [{"type": "seen", "statuses": overviews, "pictures": pictures}, *person.hear(overview)]
                for message in answers:
                    await connection.send(json.dumps({"sent": time.monotonic(), **message}))
                if person.is_done:
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the person's work: {len(person.work)} episodes left after {seconds:.0f} s")
                if hands.done():
                    await hands
        finally:
            hands.cancel()
            with suppress(asyncio.CancelledError, WebSocketException, OSError):
                await hands


async def _move_hands(connection: ClientConnection, person: ScriptedPerson) -> None:
    """Say that the person is there, and what the hands do."""
    alive = 0.0
    while True:
        now = time.monotonic()
        if now - alive >= ALIVE_EVERY:
            alive = now
            await connection.send(json.dumps({"type": "alive", "sent": now}))
        drive = person.drive()
        if drive is not None:
            await connection.send(json.dumps(drive))
        await asyncio.sleep(DRIVE_EVERY)
