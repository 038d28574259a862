"""The LeRobot transport: a robot of LeRobot's, such as an SO-101 on USB, behind the interface of ROS topics.

Its topics: `observation` (JointState, LeRobot's names: shoulder_pan.pos), `action` (the same, complete), and one for
each camera (Image). One thread does everything on the robot's bus, which LeRobot does not guard against two: it reads
`read_hz` times a second, and sends the newest command. So a bus that hangs delays nothing but itself: no new
observation comes, and the supervisor holds. Meanwhile its set-point may have run ahead of the arm: after an outage no
command is sent that would make the arm jump.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from real_robot.transports.base import Handler, Publisher, QosConfig, Transport, TransportConfig, TransportError
from real_robot.transports.lerobot_devices import (
    DeviceError,
    camera_names,
    connect_device,
    let_go,
    make_device,
    number_names,
)
from real_robot.transports.messages import Image, JointState, Message

_log = logging.getLogger(__name__)
OBSERVATION, ACTION, DISCONNECT = "observation", "action", "disconnect"
_NONE = np.zeros(0)


class PortLock:
    """An exclusive lock (`flock`) on a device file, held until `close` or the end of the process.

    Programs that lock their ports, such as pyserial with `exclusive`, are kept out too. Nothing is locked where there
    is no such port, which the driver tells better, or where the system opens a port for one process alone (Windows).

    Raises:
        TransportError: another process has it.
    """

    def __init__(self, port: str) -> None:
        self._file = -1
        if os.name != "posix":
            return
        try:
            self._file = os.open(port, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError:  # Whoever opens it in earnest says so.
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = os.fstat(self._file)
            self.close()
            raise TransportError(
                f"port {port} is driven already, by {_holder(found)}. End that first: two that speak on one bus "
                "move the arm as neither meant"
            ) from error

    def close(self) -> None:
        """Free the port. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _holder(file: os.stat_result) -> str:
    """Which process holds a lock on that file, as far as Linux says."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:05:123 0 EOF
            if device in fields and "FLOCK" in fields:
                pid = int(fields[fields.index(device) - 1])
                since = datetime.fromtimestamp(Path(f"/proc/{pid}").stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {pid} on {socket.gethostname()}, since {since} ({name[:80]})"
    except (OSError, ValueError):
        pass  # Not Linux, or it has ended in the meantime: the lock itself is sure all the same.
    return "another process"


class LeRobotConfig(TransportConfig):
    """A robot of LeRobot's, on this machine: `robot` and the settings of its LeRobot config class."""

    kind: Literal["lerobot"] = "lerobot"
    robot: str = Field(description="LeRobot's name of the robot, such as so101_follower.")
    id: str = Field(default="", description="The name under which the robot was calibrated.")
    port: str = Field(default="", description="Serial port, such as /dev/ttyACM0; empty for robots without one.")
    cameras: dict[str, dict[str, Any]] = Field(
        default={},
        description="Camera name -> `type` (opencv, intelrealsense) and settings of LeRobot's camera config.",
    )
    settings: dict[str, Any] = Field(default={}, description="Other fields of the robot's LeRobot config.")
    modules: tuple[str, ...] = Field(
        default=(), description="Python modules to import first: they may register robots and cameras with LeRobot."
    )
    read_hz: float = Field(default=30.0, gt=0, le=1000, description="Reads a second of joints and cameras.")
    max_command_age: float = Field(
        default=0.25,
        gt=0,
        description="Seconds: a command that waited longer for the bus is dropped.",
    )
    resume_within: float = Field(
        default=3.0,
        gt=0,
        description="After an outage longer than max_command_age, commands are withheld until one lies within this of "
        "where every joint is, in the robot's units.",
    )
    patience: float = Field(
        default=1.0,
        gt=0,
        description="Seconds that the bus may fail or not answer before the robot is stopped until a person resets it; "
        "it holds earlier, when its observation is too old.",
    )

    def open(self) -> Transport:
        """Connect; see `LeRobotTransport`."""
        return LeRobotTransport(self)


def device_values(config: LeRobotConfig) -> dict[str, Any]:
    """Fields of the robot's own LeRobot config."""
    named = {"id": config.id, "port": config.port, "cameras": config.cameras}
    return {**config.settings, **{name: value for name, value in named.items() if value}}


class LeRobotTransport:
    """See the module. Connects at once, which turns the motors on; `close` disconnects, which turns an SO arm's off.

    Raises:
        TransportError: LeRobot does not know the robot, a library or its calibration is missing, it does not answer.
    """

    def __init__(self, config: LeRobotConfig) -> None:
        self._config = config
        calibrate = f"lerobot-calibrate --robot.type={config.robot} --robot.port={config.port} --robot.id={config.id}"
        self._port = PortLock(config.port) if config.port else None
        try:
            self._robot = make_device("robots", config.robot, device_values(config), config.modules)
            connect_device(self._robot, config.robot, calibrate)
        except DeviceError as error:
            self._unlock()
            raise TransportError(f"transport lerobot: {error}") from error
        self._cameras = camera_names(self._robot.observation_features)
        self._state_names = number_names(self._robot.observation_features)
        self._action_names = number_names(self._robot.action_features)
        self._handlers: dict[str, list[Handler]] = {}
        self._advertised = False
        self._unreadable: Counter[str] = Counter()
        self._newest_frame: dict[str, float] = {}
        self._wake = threading.Condition()
        self._command: tuple[JointState, float] | None = None
        self._closing = False
        self._busy_since: float | None = None
        self._failing: dict[str, tuple[float, str]] = {}  # since when, and the last error
        self._after_outage = False  # until a command is near where the joints are
        self._withheld: float | None = None  # when the first command since then was
        self._measured: dict[str, float] = {}  # since the last outage
        self._thread = threading.Thread(target=self._run, name=f"lerobot {config.robot}", daemon=True)
        self._thread.start()

    # --- as every transport ---------------------------------------------------------------------

    @property
    def fault(self) -> str | None:
        """What has gone on for longer than `patience`: a call that does not return, or reads or writes that fail.

        Also, for as long as that, that commands are withheld after an outage.
        """
        now, limit, name = time.monotonic(), self._config.patience, self._config.robot
        busy = self._busy_since
        if busy is not None and now - busy > limit:
            return f"{name} does not answer"
        for what, (since, error) in dict(self._failing).items():
            if now - since > limit:
                return f"{name}: {what}: {error}"
        if self._withheld is not None and now - self._withheld < limit:  # then a person can reset
            return f"{name} did not answer for a while, and is not where it was told to be"
        return None

    @property
    def unreadable(self) -> dict[str, int]:
        """Reads ("observation") and commands ("action") that failed; others not sent ("old", "withheld")."""
        return dict(self._unreadable)

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        """
        Raises:
            TransportError: the robot has no such topic.
        """
        kinds = {OBSERVATION: JointState, **dict.fromkeys(self._cameras, Image)}
        self._check_topic(topic, message_type, kinds)
        self._handlers[topic] = [*self._handlers.get(topic, []), handler]

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        """
        Raises:
            TransportError: it is not `action`, or was advertised before: a command is one message.
        """
        self._check_topic(topic, message_type, {ACTION: JointState})
        if self._advertised:
            raise TransportError(f"transport lerobot: one entry of the contract's actions gives all of {ACTION!r}")
        self._advertised = True

        def publish(message: Message) -> None:
            assert isinstance(message, JointState), "checked when advertised"
            with self._wake:
                self._command = (message, time.monotonic())
                self._wake.notify()

        return publish

    def joints_of(self, topic: str) -> tuple[str, ...] | None:
        return {OBSERVATION: self._state_names, ACTION: self._action_names}.get(topic)

    def has_listener(self, topic: str) -> bool:
        return True

    def close(self) -> None:
        """Disconnect, on the bus's own thread. Waits at most `patience` for a call that does not return."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(self._config.patience + 1.0)
        if self._thread.is_alive():
            _log.error(
                "%s does not answer, so it is not disconnected: ITS MOTORS MAY STILL BE ON. Cut their power",
                self._config.robot,
            )
        else:
            self._unlock()

    def _unlock(self) -> None:
        if self._port is not None:
            self._port.close()

    # --- the bus's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            trouble = self._guarded(DISCONNECT, lambda: let_go(self._robot))
            if trouble := trouble or self._failing.get(DISCONNECT, (0.0, ""))[1]:
                _log.error("%s: not disconnected, so ITS MOTORS MAY STILL BE ON: %s", self._config.robot, trouble)

    def _serve(self) -> None:
        """Write each command as it comes, read at the rate, until closed."""
        period = 1 / self._config.read_hz
        due = time.monotonic()
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._closing or self._command is not None, max(0.0, due - time.monotonic())
                )
                command, self._command = self._command, None
                if self._closing:
                    return
            if command is not None:
                self._send(*command)
            now = time.monotonic()
            if now >= due:
                self._read()
                due = max(due + period, now)

    def _guarded(self, what: str, call: Callable[[], Any]) -> Any:
        """Do something on the bus. A failure is counted and kept; None then."""
        self._busy_since = begun = time.monotonic()
        try:
            result = call()
        except Exception as error:  # A pulled cable is OSError, termios.error or TypeError, as the driver likes.
            self._unreadable[what] += 1
            since = self._failing.get(what, (begun, ""))[0]
            self._failing[what] = (since, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return None
        finally:
            self._busy_since = None
        begun, _ = self._failing.pop(what, (begun, ""))
        if time.monotonic() - begun > self._config.max_command_age:
            self._after_outage, self._withheld, self._measured = True, None, {}
        return result

    def _send(self, message: JointState, asked: float) -> None:
        if time.monotonic() - asked > self._config.max_command_age:
            self._unreadable["old"] += 1
            return
        values = {name: float(v) for name, v in zip(message.name, message.position, strict=True)}
        if self._after_outage and not self._is_near(values):
            self._unreadable["withheld"] += 1
            self._withheld = self._withheld or time.monotonic()
            return
        self._after_outage, self._withheld = False, None
        self._guarded(ACTION, lambda: self._robot.send_action(values))

    def _is_near(self, values: dict[str, float]) -> bool:
        """Whether joints that are measured are measured near there, since the outage."""
        common = [name for name in values if name in self._state_names]
        near = self._config.resume_within
        return all(name in self._measured and abs(values[name] - self._measured[name]) <= near for name in common)

    def _read(self) -> None:
        stamp = time.time_ns()  # Before the reading, so that one that takes long is as old as it is.
        now = time.perf_counter()
        frames = {name: self._frame_time(name) or now for name in self._cameras if name in self._handlers}

        def read() -> tuple[dict[str, Any], np.ndarray]:
            observation = self._robot.get_observation()
            return observation, np.array([float(observation[name]) for name in self._state_names])

        found = self._guarded(OBSERVATION, read)
        if found is None:
            return
        observation, values = found
        self._measured = dict(zip(self._state_names, values.tolist(), strict=True))
        joints = JointState(stamp=stamp, name=self._state_names, position=values, velocity=_NONE, effort=_NONE)
        self._deliver(OBSERVATION, joints)
        for name, taken in frames.items():
            if taken != self._newest_frame.get(name):
                self._newest_frame[name] = taken
                self._deliver_frame(name, observation.get(name), stamp - round(max(0.0, now - taken) * 1e9))

    def _frame_time(self, name: str) -> float | None:
        """When a camera's newest frame was taken, seconds of `perf_counter`; None where the camera does not say.

        LeRobot's cameras run by themselves, and give a frame again until there is another: up to half a second old.
        """
        return getattr((getattr(self._robot, "cameras", None) or {}).get(name), "latest_timestamp", None)

    def _deliver_frame(self, name: str, picture: Any, stamp: int) -> None:
        array = np.asarray(picture)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
            self._unreadable[name] += 1
            return
        height, width = array.shape[:2]
        data = np.ascontiguousarray(array).tobytes()
        self._deliver(name, Image(stamp=stamp, height=height, width=width, encoding="rgb8", step=3 * width, data=data))

    def _deliver(self, topic: str, message: Message) -> None:
        for handler in self._handlers.get(topic, []):
            handler(message)

    def _check_topic(self, topic: str, message_type: type[Message], kinds: dict[str, type[Message]]) -> None:
        expected = kinds.get(topic)
        if expected is None:
            raise TransportError(
                f"transport lerobot: {self._config.robot} has no topic {topic!r} for this; it has: {', '.join(kinds)}"
            )
        if message_type is not expected:
            raise TransportError(f"transport lerobot: {topic}: type is {expected.TYPE}, got {message_type.TYPE}")
