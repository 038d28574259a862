"""The console's server with raw sockets: who may do what, what silence does, and what rubbish does not do."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from console_robot import console_bench
from page_socket import Browser, open_socket
from processes import until
from websockets.exceptions import ConnectionClosed, InvalidStatus

import real_robot.operator.console as console_folder
from real_robot.contract.load import load_contract
from real_robot.contract.sections import TeleopConfig
from real_robot.control.robot_loop import Tick
from real_robot.control.supervisor import SentCommand
from real_robot.operator.console import page_server
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.console.messages import MAX_MESSAGE_BYTES, ConsoleError, Drive, read_message
from real_robot.operator.console.operator import ConsoleOperator, ConsoleState
from real_robot.operator.console.page_server import PICTURES_AHEAD
from real_robot.operator.console.server import ConsoleServer, shrink
from real_robot.operator.intervention import Intervention
from real_robot.operator.teleop import Axes, Teleoperation
from vla_rl.config import ConfigError

TOKEN = "a-token-of-sixteen-signs"
REST = np.zeros(7, np.float32)


@pytest.mark.live
def test_the_robot_holds_within_the_time_out_when_the_console_falls_silent_during_take_over() -> None:
    with console_bench() as bench:
        browser = Browser(bench)
        browser.take_over()
        timeout = bench.console.teleoperation.config.timeout

        def moves() -> bool:
            browser.drive(x=-0.2)
            return bench.last_twist()[0] < 0

        until(moves, "the person's motion")
        browser.socket.socket.close()  # no farewell: as when the cable is pulled
        gone = time.monotonic()
        until(lambda: bench.last_twist() == [0, 0, 0], "standstill")
        first_hold = next(t for t in reversed(bench.ticks) if t.requested and t.requested.source == "recovery")
        assert first_hold.time - gone < timeout + 0.5, "no command is followed longer than the time-out, and one tick"
        until(lambda: bench.supervisor.state.mode == "holding", "the hold")
        assert bench.intervention.state == "recovery"


def test_releasing_the_keys_holds_at_once_and_old_words_are_not_followed() -> None:
    with console_bench("teleop.timeout=2") as bench:
        browser = Browser(bench)
        browser.take_over()
        browser.drive(y=0.1)
        until(lambda: bench.last_twist()[1] > 0, "motion")
        browser.say("drive", axes={}, gripper=None, held=False, sent=time.monotonic())
        until(lambda: bench.last_twist() == [0, 0, 0], "standstill")
        before = len(bench.ticks)
        browser.say("drive", axes={"y": 1}, gripper=None, held=True, sent=time.monotonic() - 40)  # stalled on the way
        until(lambda: len(bench.ticks) > before + 5, "ticks")
        assert bench.last_twist() == [0, 0, 0]


@pytest.mark.live
def test_a_silent_console_pauses_the_policy() -> None:
    with console_bench(link_timeout=1.0) as bench:
        browser = Browser(bench)
        browser.take_control()
        browser.press("start")
        browser.until(lambda s: s["mode"] == "running")
        browser.until(lambda s: s["phase"] == "paused", keep_alive=False)
        until(lambda: bench.last_twist() == [0, 0, 0], "standstill")
        assert "policy" in bench.sources() and "silent" in bench.intervention.summary.transitions[-1].reason
        browser.say("alive", sent=time.monotonic())
        browser.press("resume")
        browser.until(lambda s: s["phase"] == "autonomous")


def test_a_button_that_waited_in_a_stalled_connection_is_not_obeyed_but_a_hold_is() -> None:
    with console_bench() as bench:
        browser = Browser(bench)
        browser.take_control()
        browser.say("press", button="start", sent=time.monotonic() - 40)
        refused = browser.until(lambda s: s["refused"])
        assert "start: came 40." in refused["refused"][0] and refused["phase"] == "idle"
        browser.press("start")
        browser.until(lambda s: s["phase"] == "autonomous")
        browser.say("press", button="hold", sent=time.monotonic() - 40)
        browser.until(lambda s: s["phase"] == "paused")
        browser.say("stop")
        browser.until(lambda s: s["mode"] == "stopped")
        browser.say("reset", name="anna", sent=time.monotonic() - 40)
        refused = browser.until(lambda s: s["refused"])
        assert "reset: came 40." in refused["refused"][0] and refused["mode"] == "stopped"
        browser.press("resume")
        refused = browser.until(lambda s: s["refused"])
        assert refused["refused"] == ["resume: the robot is stopped (console: anna); reset it first"]
        assert refused["phase"] == "paused"


def test_one_controller_at_a_time_and_a_viewer_may_only_stop() -> None:
    with console_bench() as bench:
        first, second = Browser(bench), Browser(bench)
        assert first.take_control("anna")["in_control"]
        refusal = second.take_control("ben", force=True)
        assert not refusal["in_control"] and refusal["refused"] == ["anna has control: they must release it"]
        second.press("start")
        assert "only watches" in second.until(lambda s: s["refused"])["refused"][0]
        assert bench.intervention.state == "idle"
        first.press("start")
        first.until(lambda s: s["mode"] == "running")
        second.say("stop")
        assert second.until(lambda s: s["mode"] == "stopped")["reason"] == "console: a viewer"
        second.say("reset", name="ben", sent=time.monotonic())
        assert "only watches" in second.until(lambda s: s["refused"])["refused"][0]
        first.say("reset", name="  ", sent=time.monotonic())
        assert "name" in first.until(lambda s: s["refused"])["refused"][0]
        first.say("reset", name="anna", sent=time.monotonic())
        first.until(lambda s: s["mode"] == "holding" and s["phase"] == "paused")
        first.socket.close()
        second.until(lambda s: s["controller"] is None)
        assert second.take_control("ben")["in_control"], "free again"


def test_a_token_is_needed_and_takes_control_from_another() -> None:
    with console_bench(token=TOKEN) as bench:
        first, second = Browser(bench), Browser(bench)
        assert first.hear()["token_needed"]
        assert "token is needed" in first.take_control("anna")["refused"][0]
        assert first.take_control("anna", "a guess")["refused"] == [
            "wrong token: this console's is the text in the file, which `vla-rl deploy` on the robot's computer was "
            "given with --console-token-file"
        ]
        first.say("stop")
        first.until(lambda s: s["mode"] == "stopped")  # an emergency stop needs no token
        assert first.take_control("anna", TOKEN)["in_control"]
        assert "anna has control" in second.take_control("ben", TOKEN)["refused"][0]
        assert second.take_control("ben", TOKEN, force=True)["in_control"]
        assert first.until(lambda s: not s["in_control"])["controller"] == "ben"
        third = Browser(bench)
        with pytest.raises(ConnectionClosed):
            for _ in range(20):
                third.take_control("eve", "a guess", force=True)
        assert bench.console.controller_silence < 30


@pytest.mark.parametrize(
    ("headers", "admitted"),
    [
        ({}, True),
        ({"Origin": "http://localhost:1234"}, True),
        ({"Origin": "https://evil.example"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://127.0.0.1.evil.example"}, False),
        ({"Origin": "http://bench2:8080"}, True),
    ],
)
def test_pages_of_strangers_may_not_connect(headers: dict[str, str], admitted: bool) -> None:
    with console_bench(origins=("http://bench2:8080",)) as bench:
        if admitted:
            assert Browser(bench, additional_headers=headers).hear()["type"] == "hello"
        else:
            with pytest.raises(InvalidStatus, match="403"):
                Browser(bench, additional_headers=headers)


def test_the_page_is_served_with_its_policy_and_nothing_else_is() -> None:
    with console_bench() as bench:
        with urllib.request.urlopen(bench.url, timeout=60) as page:
            assert "script-src 'self'" in page.headers["Content-Security-Policy"] and b"E-stop" in page.read()
        for path in ("/server.py", "/../server.py", "/socket/x"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(bench.url + path, timeout=60)
        rebound = urllib.request.Request(bench.url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(rebound, timeout=60)


def test_beyond_loopback_a_token_is_required() -> None:
    with console_bench() as bench, pytest.raises(ConfigError, match="token is required"):
        ConsoleServer(ConsoleConfig(host="0.0.0.0"), bench.console, bench.supervisor)


def test_rubbish_is_refused_and_the_robot_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Mutated messages over many connections: refused or closed, never obeyed, and the page still works."""
    rng = random.Random(0)
    good = [
        {"type": "drive", "axes": {"x": 1.0}, "gripper": "open", "held": True, "sent": 1.0},
        {"type": "take_control", "name": "eve", "token": "guess"},
        {"type": "press", "button": "start", "sent": 2.0},
        {"type": "alive", "sent": 3.0},
        {"type": "seen", "statuses": 1, "pictures": 2},
    ]
    odd = [None, 1e999, -1, "x" * 200, [], {}, True, "\x00", 10**400, {"x": {"y": []}}, [[[[]]]]]

    def mutated() -> str | bytes:
        message = dict(rng.choice(good))
        message[rng.choice([*message, "more"])] = rng.choice(odd)
        text = json.dumps(message)
        kind = rng.randrange(4)
        if kind == 0:
            return text[: rng.randrange(len(text))]
        if kind == 1:
            return bytes(rng.randrange(256) for _ in range(60))
        return "[" * 3000 if kind == 2 and rng.random() < 0.1 else text

    with console_bench(token=TOKEN, max_clients=64) as bench:
        for _ in range(40):
            socket = open_socket(bench)
            with suppress(ConnectionClosed):
                for _ in range(50):
                    socket.send(mutated())
            socket.close()
        large = open_socket(bench)
        large.send("x" * (MAX_MESSAGE_BYTES + 1))
        with pytest.raises(ConnectionClosed):
            while True:
                large.recv(timeout=60)
        assert bench.intervention.state == "idle" and bench.sources() == set()
        browser = Browser(bench)
        assert browser.take_control("anna", TOKEN)["in_control"]
        browser.until(lambda s: s["loop_alive"] and s["num_consoles"] == 1)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("seed", range(3))
def test_any_text_is_a_message_or_a_console_error(seed: int) -> None:
    rng = random.Random(seed)
    base = '{"type": "drive", "axes": {"x": 1e3, "turn_z": -0.5}, "gripper": "open", "held": true, "sent": 12.5}'
    drive = read_message(base)
    assert isinstance(drive, Drive) and drive.axes.values.tolist() == [1, 0, 0, 0, 0, -0.5] and drive.held
    for _ in range(3000):
        text = list(base)
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = chr(rng.choice([rng.randrange(32, 127), 0, 0x1F600, 34, 123]))
        try:
            message = read_message("".join(text))
        except ConsoleError:
            continue
        if isinstance(message, Drive):
            assert np.abs(message.axes.values).max() <= 1 and np.isfinite(message.sent)


def test_a_slow_browser_gets_fewer_pictures_and_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "UNSEEN_PAUSE", 0.5)
    with console_bench() as bench:
        begun, ticks = time.monotonic(), len(bench.ticks)
        socket = open_socket(bench)  # never says what it has seen
        until(lambda: len(bench.ticks) > ticks + 15, "ticks, each with a picture")
        received = []
        with pytest.raises(TimeoutError):
            while True:
                received.append(socket.recv(timeout=0.05))
        most = PICTURES_AHEAD + 1 + (time.monotonic() - begun) / 0.5
        assert PICTURES_AHEAD < sum(isinstance(m, bytes) for m in received) <= most


def test_a_sensor_that_ends_the_episode_as_the_console_falls_silent_does_not_end_the_loop() -> None:
    class Raced(Intervention):
        def pause(self, who: str, reason: str = "") -> None:
            self.success("/task/outcome")  # From the sensor's thread, after it was seen that the policy drives.
            super().pause(who, reason)

    now, intervention = [0.0], Raced(["velocity"])
    console_state = ConsoleState(sim())
    teleoperation = Teleoperation(TeleopConfig(), sim().safety)
    console = ConsoleOperator(intervention, teleoperation, console_state, clock=lambda: now[0])
    console.controller_seen()
    intervention.begin("anna")
    now[0] = 5.0
    assert console.poll(None).stop is None
    assert intervention.state == "ended" and intervention.summary.outcome == "success"


def test_a_device_that_is_let_go_or_falls_silent_rests_at_once() -> None:
    """As the page's keys: what it said last is not followed for another time-out."""

    class Stick:
        says: Axes | None = Axes(np.array([1, 0, 0, 0, 0, 0], np.float32))

        def read(self) -> Axes | None:
            return self.says

    now, stick = [0.0], Stick()
    intervention = Intervention([d.kind for d in sim().safety.dimensions], clock=lambda: now[0], command_timeout=0.25)
    console_state, teleoperation = ConsoleState(sim()), Teleoperation(TeleopConfig(), sim().safety)
    console = ConsoleOperator(intervention, teleoperation, console_state, device=stick, clock=lambda: now[0])
    console_state(Tick(0, 0.0, None, False, None, SentCommand(REST, None, (), "running", REST), 0.0, 0.0))
    intervention.begin("anna")
    intervention.take_over("anna")

    def tick() -> float:
        now[0] += 0.05
        console.controller_seen()
        console.poll(None)
        command = intervention.poll().command
        assert command is not None
        return float(command.values[0])

    assert tick() > 0 and tick() > 0
    stick.says = None
    assert [tick() for _ in range(8)] == [0.0] * 8


class TestTeleoperation:
    def test_velocities_are_a_share_of_the_limit_and_the_gripper_stays(self) -> None:
        teleoperation = Teleoperation(TeleopConfig(speed=0.25, directions=(1, -1, 1, 1, 1, 1)), sim().safety)
        assert teleoperation.moves == ("x", "y", "z", "turn_x", "turn_y", "turn_z", "gripper")
        last = np.array([0.3, 0.3, 0.3, 0, 0, 0, 0.7], np.float32)
        axes = Axes(np.array([1, 1, 0, 0, 0, -0.5], np.float32))
        np.testing.assert_allclose(teleoperation.command(axes, last), [0.25, -0.25, 0, 0, 0, -0.125, 0.7], atol=1e-6)
        closed = teleoperation.command(Axes(np.zeros(6, np.float32), "close"), last)
        assert closed.tolist() == [0, 0, 0, 0, 0, 0, 1]
        assert teleoperation.command(Axes(np.full(6, np.nan, np.float32), "open"), None).tolist() == [0] * 6 + [-1]

    def test_set_points_move_on_from_what_was_sent_last(self) -> None:
        joints = [
            {"name": n, "kind": "position", "low": -1, "high": 1, "max_velocity": 2.0, "start": 0.0} for n in "xyz"
        ]
        safety = sim().safety.model_validate({"control_hz": 10, "dimensions": joints})
        teleoperation = Teleoperation(TeleopConfig(speed=0.5), safety)
        assert teleoperation.moves == ("x", "y", "z")
        step = teleoperation.command(Axes(np.array([1, 0, -1, 0, 0, 0], np.float32)), np.array([0.2, 0.5, -0.95]))
        np.testing.assert_allclose(step, [0.3, 0.5, -1.0], atol=1e-6)

    @pytest.mark.parametrize(
        ("config", "message"), [({"translation": (0, 1, 9)}, "numbers 0 to 6"), ({"gripper": 0}, "twice")]
    )
    def test_a_wrong_mapping_is_an_error(self, config: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Teleoperation(TeleopConfig(**config), sim().safety)


def sim() -> Any:
    return load_contract("sim_robot")


def test_pictures_are_shrunk_to_a_bound() -> None:
    assert shrink(np.zeros((480, 960, 3), np.uint8), 240).shape == (120, 240, 3)
    assert shrink(np.zeros((1, 5000, 3), np.uint8), 240).shape == (1, 240, 3)
    assert shrink(np.zeros((64, 64, 3), np.uint8), 240).shape == (64, 64, 3)


def test_a_port_that_is_taken_is_an_error() -> None:
    with console_bench() as bench:
        server = ConsoleServer(ConsoleConfig(port=bench.port), bench.console, bench.supervisor)
        with pytest.raises(OSError, match=str(bench.port)), server.running():
            pass
        asyncio.set_event_loop(None)


GAMEPAD = """
globalThis.window = globalThis.document = { addEventListener() {}, getElementById() {} };
const pad = { connected: true, mapping: "standard", axes: [0, -1, 0, 0], buttons: [] };
Object.defineProperty(globalThis, "navigator", { value: { getGamepads: () => [pad] }, configurable: true });
const { Tile } = await import("./tile.js"), { TeleopDevices } = await import("./teleop_devices.js");
const page = {}, part = { value: 50, classList: { toggle() {} } };
const tiles = [0, 1].map(() => Object.assign(Object.create(Tile.prototype), {
  page, hands: new TeleopDevices(), part: () => part, status: { in_control: true, phase: "recovery" },
  said: [], send(message) { this.said.push(message.held); },
}));
for (const selected of tiles) {
  page.selected = selected;
  for (const tile of tiles) tile.drive();
}
console.log(JSON.stringify(tiles.map((tile) => tile.said)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's scripts")
def test_a_gamepad_drives_the_selected_robot_alone(tmp_path: Path) -> None:
    """A person has control of two robots in one page, and has taken over both."""
    shutil.copytree(Path(console_folder.__file__).parent / "page", tmp_path / "page")
    (tmp_path / "page" / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page" / "test.js").write_text(GAMEPAD)
    page = tmp_path / "page"
    said = subprocess.run(["node", "test.js"], cwd=page, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == [[True, False], [True]], "the first one is told once that nothing is held"
