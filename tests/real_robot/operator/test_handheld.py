"""Gamepad and phone through LeRobot's own classes, without the hardware: its input fed, its server spoken to."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import until
from websockets.sync.client import ClientConnection

from real_robot.client_package.vla_rl_client import open_connection
from real_robot.contract.load import load_contract
from real_robot.contract.sections import DeviceConfig
from real_robot.operator import devices
from real_robot.operator.devices import (
    PHONE_SILENCE,
    AxesDevice,
    PadPresence,
    PhoneAxes,
    device_overrides,
    lerobot_axes,
    open_device,
    phone_gripper,
)
from real_robot.operator.teleop import Axes, Teleoperation
from real_robot.transports.lerobot_devices import DeviceError, make_device

REACH, TURN = 0.1, 0.5


def test_gamepad_and_phone_are_named_alone() -> None:
    assert device_overrides("gamepad") == ("teleop.device.kind=lerobot", "teleop.device.teleoperator=gamepad")
    device = load_contract("sim_robot", device_overrides("phone")).teleop.device
    assert device is not None and device.teleoperator == "phone" and device.phone_reach == 0.12


# --- a phone ------------------------------------------------------------------------------------------


class Hand:
    """What LeRobot's phone would say, and a clock of ours."""

    def __init__(self) -> None:
        from lerobot.utils.rotation import Rotation

        self.rotation_of = Rotation.from_rotvec
        self.now = 5.0
        self.axes = PhoneAxes(REACH, TURN, lambda: self.now)

    def say(
        self, position: Any = (0, 0, 0), rotvec: Any = (0, 0, 0), pressed: bool = True, seconds: float = 0.02
    ) -> Any:
        self.now += seconds
        return self.axes.read(
            {
                "phone.pos": np.array(position, float),
                "phone.rot": self.rotation_of(np.array(rotvec, float)),
                "phone.raw_inputs": {},
                "phone.enabled": pressed,
            }
        )


def test_the_further_from_where_it_was_pressed_the_faster() -> None:
    hand = Hand()
    assert hand.say(pressed=False) is None and hand.axes.read({}) is None
    assert hand.say((0, 0, 0)).values == pytest.approx(np.zeros(6))
    assert hand.say((0.05, 0.02, -0.3)).values == pytest.approx([-0.2, 0.5, -1, 0, 0, 0], abs=1e-6)
    assert hand.say((0.005, 0.02, 0)).values == pytest.approx([-0.2, 0, 0, 0, 0, 0], abs=1e-6), "within the dead zone"


def test_rotations_count_from_how_it_was_held_when_pressed() -> None:
    hand = Hand()
    hand.say(rotvec=(0, 0, 1.0))
    assert hand.say(rotvec=(0, 0, 1.25)).values == pytest.approx([0, 0, 0, 0, 0, -0.5], abs=1e-6)
    hand.say(rotvec=(0, 0, 1.25), pressed=False)
    assert hand.say(rotvec=(0, 0, 1.25)).values == pytest.approx(np.zeros(6), abs=1e-6)


def test_its_axes_are_those_of_lerobots_own_mapping() -> None:
    processor = pytest.importorskip("lerobot.teleoperators.phone.phone_processor")
    from lerobot.teleoperators.phone.config_phone import PhoneOS

    hand = Hand()
    hand.say()
    for position, rotvec in [((0.03, 0.05, -0.07), (0, 0, 0)), ((0, 0, 0.09), (0.1, 0.2, -0.4))]:
        found = hand.say(position, rotvec)
        told = {
            "phone.pos": np.array(position),
            "phone.rot": hand.rotation_of(np.array(rotvec, float)),
            "phone.raw_inputs": {},
            "phone.enabled": True,
        }
        theirs = processor.MapPhoneActionToRobotAction(platform=PhoneOS.ANDROID).action(told)
        targets = [theirs[f"target_{axis}"] for axis in ("x", "y", "z", "wx", "wy", "wz")]
        expected = np.array(targets) / ([REACH] * 3 + [TURN] * 3)
        assert found.values == pytest.approx(np.where(np.abs(expected) < 0.1, 0, expected), abs=1e-6)


def test_a_phone_that_falls_silent_while_pressed_counts_only_after_it_was_let_go() -> None:
    hand = Hand()
    hand.say((0, 0, 0))
    assert hand.say((0.05, 0, 0)) is not None
    assert hand.say((0.05, 0, 0), seconds=PHONE_SILENCE / 2) is not None
    assert hand.say((0.05, 0, 0), seconds=PHONE_SILENCE) is None, "the very same pose: its last word is repeated"
    assert hand.say((0.06, 0, 0)) is None, "back in the network, still pressed"
    assert hand.say((0, 0, 0), pressed=False) is None
    assert hand.say((0, 0, 0)) is not None


@pytest.mark.parametrize(
    ("inputs", "wanted"),
    [
        ({}, None),
        ({"reservedButtonA": True}, "open"),
        ({"reservedButtonB": True}, "close"),
        ({"reservedButtonA": True, "reservedButtonB": True}, None),
        ({"a3": -0.9}, "close"),
        ({"a3": 0.2}, None),
    ],
)
def test_what_its_buttons_do_to_the_gripper(inputs: dict[str, Any], wanted: str | None) -> None:
    assert phone_gripper(inputs) == wanted


class Phone:
    """A phone's page, as far as LeRobot's server hears of it."""

    def __init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # The library ships its certificate.

        def reached() -> ClientConnection | None:
            try:
                return open_connection("wss://127.0.0.1:4443/ws", context, 10.0, proxy=None)
            except OSError:
                return None

        self.socket = until(reached, "the phone's server", 60)
        self.trembling = 0.0

    def say(self, x: float, move: bool) -> None:
        """A pose; no hand is still."""
        self.trembling += 1e-6
        data = {
            "move": move,
            "position": {"x": self.trembling, "y": 0.0, "z": -x},
            "orientation": {"x": 0, "y": 0, "z": 0, "w": 1},
            "scale": 1.0,
        }
        self.socket.send(json.dumps({"type": "pose", "data": data}))
        time.sleep(0.01)


def test_lerobots_android_phone_drives_over_its_own_server_and_holds_when_it_is_gone() -> None:
    """LeRobot's class, the teleop package's server, its messages over TLS; no phone."""
    pytest.importorskip("teleop", reason="pip install '.[phone]'")
    pytest.importorskip("hebi", reason="pip install '.[phone]'")
    import threading

    contract = load_contract("sim_robot")
    config = DeviceConfig(kind="lerobot", teleoperator="phone", settings={"phone_os": "ANDROID"})
    moves = Teleoperation(contract.teleop, contract.safety).moves
    opened: list[AxesDevice] = []

    def open_phone() -> None:
        device = open_device(config, contract, moves)
        assert isinstance(device, AxesDevice)
        opened.append(device)

    thread = threading.Thread(target=open_phone, daemon=True)
    thread.start()
    phone = Phone()

    def pressed_once() -> bool:
        phone.say(0.0, True)
        return bool(opened)

    until(pressed_once, "the first press, which LeRobot waits for", 60)
    with closing(opened[0]) as device:
        until(lambda: phone.say(0.0, False) or device.read() is None, "let go: it holds", 20)
        for step in range(6):
            phone.say(0.01 * step, True)

        def moving() -> Axes | None:
            phone.say(0.06, True)
            axes = device.read()
            return axes if axes is not None and np.abs(axes.values[:3]).max() > 0.3 else None

        values = until(moving, "motion", 20).values
        assert np.abs(values).max() <= 1 and np.abs(values[3:]).max() == 0
        phone.socket.close()
        until(lambda: device.read() is None, "the hold after the phone has gone", 20)
        deadline = time.monotonic() + 3 * PHONE_SILENCE
        while time.monotonic() < deadline:
            assert device.read() is None
            time.sleep(0.02)


def test_a_phone_that_nobody_presses_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "PHONE_PATIENCE", 0.1)

    class Waits:
        is_connected = False

        def connect(self) -> None:
            time.sleep(30)

    with pytest.raises(DeviceError, match=r"not pressed within 0\.1 s\. Android: open https://"):
        devices.connect_phone(Waits(), DeviceConfig(kind="lerobot", teleoperator="phone"))


# --- a gamepad ----------------------------------------------------------------------------------------


@pytest.fixture
def pygame() -> Iterator[Any]:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    library = pytest.importorskip("pygame", reason="pip install '.[gamepad]'")
    library.init()
    yield library
    library.quit()


def test_without_a_gamepad_the_error_says_so(pygame: Any) -> None:
    contract = load_contract("sim_robot")
    with pytest.raises(DeviceError, match="gamepad: none is plugged in"):
        open_device(DeviceConfig(kind="lerobot", teleoperator="gamepad"), contract, ("x", "y", "z"))


class Stick:
    """What pygame gives for a joystick."""

    def __init__(self) -> None:
        self.axes, self.buttons = [0.0] * 6, [0] * 12

    def get_axis(self, number: int) -> float:
        return self.axes[number]

    def get_button(self, number: int) -> int:
        return self.buttons[number]

    def quit(self) -> None: ...


def test_lerobots_gamepad_gives_axes_and_gripper(pygame: Any) -> None:
    """LeRobot's class and pygame's own events; the stick is fed, no pad was at hand."""
    device = make_device("teleoperators", "gamepad", {})
    device.connect()
    device.gamepad.joystick = stick = Stick()
    assert lerobot_axes(device.get_action()) is None, "at rest"
    stick.axes[1], stick.axes[3] = -0.5, 1.0
    axes = lerobot_axes(device.get_action())
    assert axes is not None and axes.values == pytest.approx([0.5, 0, -1, 0, 0, 0])
    stick.axes[1] = stick.axes[3] = 0.05
    pygame.event.post(pygame.event.Event(pygame.JOYBUTTONDOWN, button=7, joy=0))
    axes = lerobot_axes(device.get_action())
    assert axes is not None and axes.gripper == "open" and not axes.values.any()
    pygame.event.post(pygame.event.Event(pygame.JOYBUTTONUP, button=7, joy=0))
    assert lerobot_axes(device.get_action()) is None
    device.disconnect()


def test_a_pad_that_is_pulled_out_is_an_error_and_no_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    now, plugged = [0.0], [{"path": b"/dev/hidraw0"}]
    hid = SimpleNamespace(enumerate=lambda vendor, product: plugged)
    monkeypatch.setitem(sys.modules, "hid", hid)
    info = {"path": b"/dev/hidraw0", "vendor_id": 1, "product_id": 2}
    device = SimpleNamespace(gamepad=SimpleNamespace(running=True, device_info=info))
    presence = PadPresence(device, lambda: now[0])
    presence.check()
    plugged.clear()
    now[0] = devices.LOOK_EVERY
    for _ in range(2):
        with pytest.raises(DeviceError, match="none is plugged in"):
            presence.check()
