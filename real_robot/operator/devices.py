"""Teleoperation devices at the robot's own computer: LeRobot's leader arms, gamepads and phones, and a SpaceMouse.

Each is read in a thread of its own, so that one that hangs delays nothing: it is silent then, and the robot holds.
LeRobot's classes keep what a device said last: a phone out of the network, or a pad without its cable, would go on
pressing. Here it is at rest.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from real_robot.bridge.codec import read_action, write_action
from real_robot.contract.contract import RobotContract
from real_robot.contract.sections import DeviceConfig
from real_robot.operator.teleop import Axes, GripperCommand
from real_robot.transports.lerobot_devices import DeviceError, connect_device, let_go, make_device, number_names
from real_robot.transports.messages import Float64MultiArray, JointState, JointTrajectory, MessageError
from vla_rl.config import ConfigError

if TYPE_CHECKING:
    from lerobot.utils.rotation import Rotation

PHONE_SILENCE = 0.25  # seconds without another pose; a hand is never that still
PHONE_PATIENCE = 120.0  # seconds in which a person connects the phone, and presses once
PHONE_DEAD_ZONE = 0.1  # of full deflection, around where it was pressed
LOOK_EVERY = 0.5  # seconds between two looks whether a pad is still there
PRESSED = 0.5  # of an analog input
SILENCE = 0.25  # seconds after which what a device said no longer counts
DEAD_ZONE = 0.05  # of full deflection: a SpaceMouse at rest is not quite at zero
_DELTAS = ("delta_x", "delta_y", "delta_z")
HANDHELD = ("gamepad", "phone")  # of LeRobot's; `--teleop` knows them without lerobot:
_GRIPPER: dict[int, GripperCommand] = {0: "close", 2: "open"}  # LeRobot's; 1 leaves it as it is
_NONE = np.zeros(0)


class PhoneAxes:
    """A phone as a stick: while pressed, the further from where it was pressed, the faster, along and about each axis.

    Args:
        reach, turn: meters and radians from there that are full deflection.
    """

    def __init__(self, reach: float, turn: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._reach, self._turn, self._clock = reach, turn, clock
        self._pressed_at: Rotation | None = None  # the rotation when it was pressed; None: not pressed
        self._seen: tuple[bytes, float] = (b"", float("-inf"))
        self._lost = False

    def read(self, action: Mapping[str, Any]) -> Axes | None:
        """What LeRobot's phone says; None where it is not pressed, or has said nothing new.

        One that fell silent while it was pressed counts only once it has been let go.
        """
        if not action or not action["phone.enabled"]:
            self._pressed_at, self._lost = None, False
            return None
        now = self._clock()
        position, rotation = np.asarray(action["phone.pos"], np.float64), action["phone.rot"]
        seen = position.tobytes() + np.asarray(rotation.as_quat()).tobytes()
        if seen != self._seen[0]:
            self._seen = (seen, now)
        self._lost = self._lost or now - self._seen[1] > PHONE_SILENCE
        if self._lost:
            return None
        start = self._pressed_at = rotation if self._pressed_at is None else self._pressed_at
        x, y, z = position / self._reach
        turned = np.asarray((rotation * start.inv()).as_rotvec()) / self._turn
        # LeRobot's MapPhoneActionToRobotAction has the phone's frame so to the robot's.
        values = np.array([-y, x, z, turned[1], turned[0], -turned[2]])
        values = np.where(np.abs(values) < PHONE_DEAD_ZONE, 0.0, np.clip(values, -1, 1))
        return Axes(values.astype(np.float32), phone_gripper(action["phone.raw_inputs"]))


def phone_gripper(inputs: Mapping[str, Any]) -> GripperCommand | None:
    """Android's button A opens and B closes; on iOS the slider a3 does, up and down."""
    wanted = float(inputs.get("reservedButtonA", 0)) - float(inputs.get("reservedButtonB", 0))
    wanted += float(inputs.get("a3", 0.0))
    return "open" if wanted > PRESSED else "close" if wanted < -PRESSED else None


def connect_phone(device: Any, config: DeviceConfig) -> None:
    """Connect LeRobot's phone, which waits for the person to press once.

    Raises:
        DeviceError: nobody did, or its server or app cannot be reached.
    """
    failure: list[DeviceError] = []

    def connect() -> None:
        try:
            connect_device(device, config.teleoperator, "")
        except DeviceError as error:
            failure.append(error)

    thread = threading.Thread(target=connect, name="phone", daemon=True)
    thread.start()
    thread.join(PHONE_PATIENCE)
    if failure:
        raise failure[0]
    if thread.is_alive():
        raise DeviceError(
            f"phone: it was not pressed within {PHONE_PATIENCE:g} s. Android: open https://THIS-MACHINE:4443 in Chrome "
            "and touch the page; iOS: open HEBI Mobile I/O in the same network and hold B1 "
            "(teleop.device.settings.phone_os)"
        )


class PadPresence:
    """Whether LeRobot's gamepad is still plugged in. Called with each reading; looks now and then.

    Raises:
        DeviceError: there is none. Of a radio pad only the dongle is seen.
    """

    def __init__(self, device: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._pad, self._clock = device.gamepad, clock
        self._looked = float("-inf")
        self._is_there = True

    def check(self) -> None:
        """
        Raises:
            DeviceError: see the class.
        """
        now = self._clock()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._is_there = bool(self._pad.running) and self._is_plugged_in()
        if not self._is_there:
            raise DeviceError(
                "gamepad: none is plugged in, or this user may not read it (/dev/input). LeRobot takes the first that "
                "pygame finds; where it finds none: teleop.device.settings.hidapi_fallback=true"
            )

    def _is_plugged_in(self) -> bool:
        info = getattr(self._pad, "device_info", None)
        if info is None:  # pygame's; LeRobot's reading has handled its events just before.
            return sys.modules["pygame"].joystick.get_count() > 0
        known = sys.modules["hid"].enumerate(info["vendor_id"], info["product_id"])
        return any(each["path"] == info["path"] for each in known)


def device_overrides(name: str) -> tuple[str, ...]:
    """The contract overrides that `--teleop NAME` means: gamepad, phone, spacemouse, or lerobot: and a teleoperator.

    Raises:
        ConfigError: something else.
    """
    kind, _, teleoperator = name.partition(":")
    if not name:
        return ()
    if name in HANDHELD:
        kind, teleoperator = "lerobot", name
    if kind == "lerobot" and teleoperator:
        return "teleop.device.kind=lerobot", f"teleop.device.teleoperator={teleoperator}"
    if name == "spacemouse":
        return ("teleop.device.kind=spacemouse",)
    raise ConfigError(
        f"--teleop: got {name!r}; allowed: gamepad, phone, spacemouse, or lerobot:NAME, such as lerobot:so101_leader"
    )


class Polled[T]:
    """What a device said last, read again and again in a thread.

    Args:
        read: called `hz` times a second. close: called at the end, in the same thread.
    """

    def __init__(self, read: Callable[[], T], close: Callable[[], object], hz: float) -> None:
        self._read, self._close, self._period = read, close, 1 / hz
        self._newest: tuple[T, float] | None = None
        self._closing = threading.Event()
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="person's device", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> tuple[T, float] | None:
        """What it said, and when reading it began, monotonic seconds; None before the first time."""
        return self._newest

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            begun = time.monotonic()
            try:
                self._newest = (self._read(), begun)
                self.error = ""
            except Exception as error:  # A driver's own, as when its cable is pulled: the device is silent.
                self.error = f"{type(error).__name__}: {error}"
        self._close()

    def close(self) -> None:
        """Let go of the device. Waits a second for one that hangs."""
        self._closing.set()
        self._thread.join(1.0)


class LeaderArm:
    """Joint targets of a LeRobot leader, as commands in the contract's units; one with motors may be driven.

    One thread reads and drives: they share the bus. Its torque goes off when nobody has asked for `SILENCE` seconds.
    """

    def __init__(self, device: Any, config: DeviceConfig, contract: RobotContract) -> None:
        self._device, self._config, self._contract = device, config, contract
        self._goal: tuple[np.ndarray, float] | None = None
        self._has_torque = False
        self._polled = Polled(self._turn, lambda: let_go(device), config.read_hz)

    def target(self) -> tuple[np.ndarray, float] | None:
        """float32 (A,) in the contract's units, and when it was read, monotonic seconds. None: nothing yet."""
        return self._polled.newest

    def drive(self, goal: np.ndarray | None) -> None:
        """Go to this command, float32 (A,), with torque on; None: torque off. Does not wait.

        For leaders with `drives_itself` alone.
        """
        self._goal = None if goal is None else (np.array(goal), time.monotonic())

    def _turn(self) -> np.ndarray:
        goal = self._goal
        if self._has_torque and (goal is None or time.monotonic() - goal[1] > SILENCE):
            self._device.disable_torque()
            self._has_torque = False
        action = self._device.get_action()
        if goal is not None and time.monotonic() - goal[1] <= SILENCE:
            if not self._has_torque:
                self._device.send_feedback(action)  # Where it is: nothing jumps when the torque comes.
                self._has_torque = True
                self._device.enable_torque()
            self._device.send_feedback(leader_feedback(goal[0], self._config.names, self._contract))
        return leader_command(action, self._config.names, self._contract)

    @property
    def error(self) -> str:
        """Why it says nothing now, where it knows."""
        return self._polled.error

    def close(self) -> None:
        self._polled.close()


class AxesDevice:
    """A gamepad, keyboard or SpaceMouse that gives `Axes`; at rest, or silent, it gives none."""

    def __init__(self, read: Callable[[], Axes | None], close: Callable[[], object], hz: float) -> None:
        self._polled = Polled(read, close, hz)

    def read(self) -> Axes | None:
        newest = self._polled.newest
        return None if newest is None or time.monotonic() - newest[1] > SILENCE else newest[0]

    def close(self) -> None:
        self._polled.close()


def open_device(config: DeviceConfig, contract: RobotContract, moves: tuple[str, ...]) -> LeaderArm | AxesDevice:
    """Connect the person's device.

    Args:
        moves: the axes that move something (`Teleoperation.moves`).

    Raises:
        DeviceError: it is missing, not calibrated, or has nothing that the robot's commands take.
    """
    if config.kind == "spacemouse":
        _check_moves("spacemouse", moves)
        mouse = _open_spacemouse()
        return AxesDevice(lambda: spacemouse_axes(mouse), mouse.close, max(config.read_hz, 100.0))
    kind = config.teleoperator
    values = {**config.settings, **{k: v for k, v in (("id", config.id), ("port", config.port)) if v}}
    device = make_device("teleoperators", kind, values, config.modules)
    try:
        features: Mapping[str, Any] = device.action_features
    except AttributeError as error:  # LeRobot's plain keyboard wants a robot's arm that it does not have.
        raise DeviceError(f"{kind}: gives keys, no motion; use keyboard_ee, or the console's keys") from error
    has_deltas = set(_DELTAS) <= set(features.get("names") or ())
    is_phone = "phone.pos" in features
    if has_deltas or is_phone:
        _check_moves(kind, moves)
    else:
        _check_names(kind, features, config.names, contract)
    if is_phone:
        connect_phone(device, config)
        phone = PhoneAxes(config.phone_reach, config.phone_turn)
        return AxesDevice(lambda: phone.read(device.get_action()), lambda: let_go(device), config.read_hz)
    how = f"lerobot-calibrate --teleop.type={kind} --teleop.port={config.port} --teleop.id={config.id}"
    connect_device(device, kind, how)
    if not device.is_connected:
        raise DeviceError(f"{kind}: did not connect; LeRobot's keyboards need an X11 session, gamepads a gamepad")
    if config.align == "drive_leader":
        _check_drives_itself(device, kind)
    if has_deltas:
        return AxesDevice(_reading_deltas(device, kind), lambda: let_go(device), config.read_hz)
    return LeaderArm(device, config, contract)


def _reading_deltas(device: Any, kind: str) -> Callable[[], Axes | None]:
    """
    Raises:
        DeviceError: there is no gamepad, which LeRobot's own class only logs.
    """
    if kind != "gamepad":
        return lambda: lerobot_axes(device.get_action())
    presence = PadPresence(device)
    try:
        presence.check()
    except DeviceError:
        let_go(device)
        raise

    def read() -> Axes | None:
        axes = lerobot_axes(device.get_action())
        presence.check()
        return axes

    return read


def drives_itself(device: Any) -> bool:
    """Whether a LeRobot teleoperator has motors that can be told where to go, as its SO-101 leader's."""
    has_torque = hasattr(device, "enable_torque") and hasattr(device, "disable_torque")
    return bool(device.feedback_features) and has_torque


def leader_feedback(command: np.ndarray, names: Mapping[str, str], contract: RobotContract) -> dict[str, float]:
    """Where a leader's joints, by name, are when it says this command, float32 (A,): `leader_command` backwards."""
    own = {contract_name: leader_name for leader_name, contract_name in names.items()}
    feedback = {}
    for sink in contract.action:
        message = write_action(sink, command, 0)
        if isinstance(message, JointState):
            values = message.position
        elif isinstance(message, JointTrajectory):
            values = message.positions[0]
        else:
            assert isinstance(message, Float64MultiArray), "a sink with joints"
            values = message.data
        feedback |= {own.get(name, name): float(value) for name, value in zip(sink.joints, values, strict=True)}
    return feedback


def leader_command(action: Mapping[str, Any], names: Mapping[str, str], contract: RobotContract) -> np.ndarray:
    """A leader's joints, by name, as a command float32 (A,) in the contract's units: its conversions backwards.

    Raises:
        MessageError: a joint is missing, or not a finite number.
    """
    position = np.array([float(v) for v in action.values()])
    message = JointState(name=tuple(names.get(n, n) for n in action), position=position, velocity=_NONE, effort=_NONE)
    command = np.zeros(contract.action_dim, np.float32)
    for sink in contract.action:
        command[list(sink.indices)] = read_action(sink, message)
    return command


def lerobot_axes(action: Mapping[str, Any]) -> Axes | None:
    """What LeRobot's gamepad and keyboard_ee say; None where nothing is touched."""
    values = np.array([*(float(action[name]) for name in _DELTAS), 0, 0, 0], np.float32)
    gripper = _GRIPPER.get(int(action.get("gripper", 1)))
    return Axes(values, gripper) if values.any() or gripper else None


def spacemouse_axes(mouse: Any) -> Axes | None:
    """What a SpaceMouse says: its left button closes the gripper, its right one opens it. None at rest.

    A report carries half of the axes, and the driver keeps them in a queue: it is emptied, or motion would lag.
    """
    state = mouse.read()
    for _ in range(64):
        before = state.t
        if (state := mouse.read()).t == before:
            break
    values = np.array([state.x, state.y, state.z, state.roll, state.pitch, state.yaw], np.float32)
    values[np.abs(values) < DEAD_ZONE] = 0
    buttons = [*state.buttons, 0, 0]
    gripper: GripperCommand | None = "close" if buttons[0] else "open" if buttons[1] else None
    return Axes(values, gripper) if values.any() or gripper else None


def _open_spacemouse() -> Any:
    try:
        library = importlib.import_module("pyspacemouse")
        return library.open(axis_convention=library.AxisConvention.ROS)
    except ImportError as error:
        raise DeviceError(f"spacemouse: {error}. Run: pip install '.[spacemouse]'") from error
    except (RuntimeError, OSError) as error:
        raise DeviceError(
            f"spacemouse: {error} It needs the library hidapi (Debian: libhidapi-hidraw0) and leave to read "
            "/dev/hidraw*"
        ) from error


def _check_drives_itself(device: Any, kind: str) -> None:
    if not drives_itself(device):
        let_go(device)
        raise DeviceError(
            f"teleop.device.align: drive_leader needs a leader with motors that take goals, as LeRobot's so101_leader; "
            f"{kind} has none. Leave it at person: the console says which joint to move"
        )


def _check_moves(kind: str, moves: tuple[str, ...]) -> None:
    if not {"x", "y", "z"} & set(moves):
        raise DeviceError(
            f"{kind}: gives motion along x, y, z; the robot's commands have none. Give a leader arm, or say in "
            "teleop.translation which numbers it moves"
        )


def _check_names(kind: str, features: Mapping[str, Any], names: Mapping[str, str], contract: RobotContract) -> None:
    known = tuple(names.get(n, n) for n in number_names(features))
    message = JointState(name=known, position=np.zeros(len(known)), velocity=_NONE, effort=_NONE)
    for sink in contract.action:
        if not sink.joints:
            raise DeviceError(f"{kind}: a leader arm gives joints; {sink.topic} takes {sink.type}")
        try:
            read_action(sink, message)
        except MessageError as error:
            raise DeviceError(
                f"{kind}: {error}; it has: {', '.join(number_names(features)) or 'no joints'}. Where only the names "
                "differ, say so in teleop.device.names"
            ) from error
