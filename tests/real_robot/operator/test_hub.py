"""The hub between real consoles, over sockets: queue, hand-over, who may drive what, and what a lost line does."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from console_robot import console_bench
from hub_robots import HubBench, Page, hub_bench
from processes import ROOT, Child, until
from websockets.exceptions import ConnectionClosed

import real_robot.operator.console as console_folder
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.console.page_server import Session
from real_robot.operator.hub.hub import Hub, needs_help
from real_robot.operator.hub.hub_log import read_log, shares
from real_robot.operator.hub.hub_server import HubServer, console_url, load_hub
from vla_rl.config import ConfigError


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubBench]:
    with hub_bench(tmp_path_factory.mktemp("hub")) as made:
        yield made


@pytest.fixture
def impatient_bench(tmp_path: Path) -> Iterator[HubBench]:
    """One that takes a person who says nothing for gone."""
    with hub_bench(tmp_path, link_timeout=1.0) as made:
        yield made


@pytest.fixture
def page(bench: HubBench) -> Iterator[Page]:
    """A page in control; afterwards both robots' episodes are over, and nobody is at the hub."""
    made = Page(bench.port)
    made.enter()
    yield made
    with suppress(ConnectionClosed, OSError):
        made.socket.close()
    until(lambda: not bench.hub.person, "the person to be gone", 30)
    # The robots' own word that they were let go, else the next page takes the last one's control for its own.
    until(lambda: not any(link.is_ours for link in bench.hub.links.values()), "the robots to be let go", 30)
    for robot in bench.robots.values():
        if robot.supervisor.state.mode == "stopped":
            robot.console.reset("test")
            until(lambda robot=robot: robot.supervisor.state.mode != "stopped", "the reset", 30)
        if robot.intervention.state not in ("idle", "ended"):
            robot.intervention.failure("test")


def start_both(page: Page) -> None:
    for robot in ("left", "right"):
        page.press(robot, "start")
    page.states(left="running", right="running")


def test_robots_that_ask_wait_in_the_queue_and_are_helped_one_at_a_time(bench: HubBench, page: Page) -> None:
    start_both(page)
    bench.right.intervention.alarm("failure score 3 above its threshold 1")
    page.states(right="asks")
    bench.left.intervention.alarm("failure score 1.1 above its threshold 1")
    overview = page.states(left="asks", right="asks")
    assert sorted(overview["queue"]) == ["left", "right"]
    why = {r["name"]: r["why"] for r in overview["robots"]}
    assert why["right"] == "alarm (detector): failure score 3 above its threshold 1"
    until(lambda: bench.left.last_twist() == bench.right.last_twist() == [0, 0, 0], "both hold", 20)

    page.say("help", robot="right")
    overview = page.states(right="helped", left="asks")
    assert overview["helping"] == "right" and overview["queue"] == ["left"]
    page.until(lambda o: page.robot.get("in_control"))
    page.say("help", robot="left")
    page.until(lambda o: any("anna is with right: hand it back first" in text for text in page.refused))

    page.press("right", "take_over")
    page.until(lambda o: page.robot.get("phase") == "recovery")
    assert bench.right.intervention.summary.transitions[-1].who == "anna"
    for _ in range(20):
        page.say("drive", robot="right", axes={"x": 1}, gripper=None, held=True, sent=time.monotonic())
        page.hear()
    assert "recovery" in bench.right.sources() and "recovery" not in bench.left.sources()
    for button in ("recovery_done", "correction_done", "success"):
        page.press("right", button)
    page.until(lambda o: page.robot.get("outcome") == "success")

    page.say("hand_back")
    page.say("help")  # The next one, whichever it is.
    page.until(lambda o: o["helping"] == "left")
    page.press("left", "resume")
    page.until(lambda o: page.robot.get("phase") == "autonomous")
    page.say("hand_back")
    overview = page.states(left="running", right="ready")
    assert overview["queue"] == [] and overview["helping"] is None
    asked, helped, back = (bench.events(kind) for kind in ("asked", "helping", "handed_back"))
    assert [e["robot"] for e in asked][-2:] == ["right", "left"]
    assert [(e["robot"], e["who"]) for e in helped][-2:] == [("right", "anna"), ("left", "anna")]
    assert helped[-1]["waited"] > 0 and back[-1]["helped"] > 0
    found = shares(read_log(bench.log))
    assert 0 < found.person < 1 and found.served == 2


def test_only_the_robot_that_the_person_is_with_can_be_driven(bench: HubBench, page: Page) -> None:
    start_both(page)
    page.say("help", robot="right")
    page.states(right="helped")
    page.press("left", "take_over")
    page.until(lambda o: any("take_over: go to left first" in text for text in page.refused))
    page.say("drive", robot="left", axes={"x": 1}, gripper=None, held=True, sent=time.monotonic())
    page.until(lambda o: any("drive: go to left first" in text for text in page.refused))
    page.say("reset", robot="left", name="anna", sent=time.monotonic())
    page.until(lambda o: any("reset: go to left first" in text for text in page.refused))
    page.say("press", robot="middle", button="hold", sent=time.monotonic())
    page.until(lambda o: any("robot: got 'middle', allowed: left, right" in text for text in page.refused))
    assert bench.left.intervention.state == "autonomous"
    page.press("left", "hold")  # From afar.
    page.states(left="asks")
    assert bench.left.intervention.summary.transitions[-1].who == "anna"


@pytest.mark.live
def test_a_person_who_is_gone_makes_every_robot_hold_and_the_one_helped_wait_again(impatient_bench: HubBench) -> None:
    bench, page = impatient_bench, Page(impatient_bench.port)
    page.enter()
    start_both(page)
    page.say("help", robot="left")
    page.states(left="helped", right="running")
    page.press("left", "take_over")
    page.until(lambda o: page.robot.get("phase") == "recovery")
    page.alive = False
    silent = time.monotonic()
    resumes_late = lambda: page.press("right", "resume", late=30)  # noqa: E731  # no sign of life, and not obeyed
    until(lambda: resumes_late() or bench.right.intervention.state == "paused", "the hold", 30)
    why = bench.right.intervention.summary.transitions[-1].reason
    assert why in ("control was given up", "the console is silent"), "whichever comes first on a busy machine"
    held = [t.time for t in bench.left.ticks if t.time > silent + 5 and t.sent and t.sent.mode == "running"]
    assert held == []
    watcher = Page(bench.port)
    watcher.states(left="asks", right="asks")
    overview = watcher.until(lambda o: not any(r["ours"] for r in o["robots"]))  # once the consoles have said so
    assert overview["person"] is None and overview["helping"] is None
    assert bench.events("handed_back")[-1]["why"] == "the person's page is silent"
    watcher.socket.close()


@pytest.mark.live
def test_a_page_that_was_silent_for_a_while_stands_by_again_and_its_robots_wait(impatient_bench: HubBench) -> None:
    """As at a console: it need not give up control and take it again. Nothing moves before the person says so."""
    bench, page = impatient_bench, Page(impatient_bench.port)
    page.enter()
    start_both(page)
    page.alive = False
    page.until(lambda o: o["person"] is None and o["in_control"])
    until(lambda: bench.left.intervention.state == bench.right.intervention.state == "paused", "the hold", 30)
    page.say("help", robot="left")  # It may have waited in the stalled connection.
    page.until(lambda o: any("nobody is at the hub" in text for text in page.refused))
    page.alive = True
    overview = page.until(lambda o: o["person"] == "anna" and all(r["ours"] for r in o["robots"]))
    assert overview["helping"] is None and overview["in_control"]
    assert bench.left.intervention.state == bench.right.intervention.state == "paused"
    page.say("help", robot="left")
    page.until(lambda o: o["helping"] == "left")


def test_a_viewer_stops_one_or_all_and_only_a_visitor_resets(bench: HubBench, page: Page) -> None:
    start_both(page)
    viewer = Page(bench.port)
    viewer.say("stop", robot="left")
    viewer.states(left="stopped", right="running")
    viewer.say("stop")
    overview = viewer.states(left="stopped", right="stopped")
    assert sorted(overview["queue"]) == ["left", "right"]
    assert [e["who"] for e in bench.events("stop_all")][-1] == "a viewer"
    viewer.say("help", robot="left")
    viewer.until(lambda o: any("only watches" in text for text in viewer.refused))
    viewer.socket.close()
    page.say("help", robot="left")
    page.until(lambda o: o["helping"] == "left")
    page.say("reset", robot="left", name="anna", sent=time.monotonic())
    page.until(lambda o: page.robot.get("mode") not in (None, "stopped"))
    page.states(right="stopped", left="helped")


def test_who_watches_sees_the_robots_pictures_score_and_log(bench: HubBench, page: Page) -> None:
    page.press("left", "start")
    page.states(left="running")
    viewer = Page(bench.port)
    viewer.say("watch", robot="left")
    viewer.until(lambda o: viewer.pictures > 0 and viewer.robot.get("scores"))
    assert viewer.robot["in_control"] is False
    again = Page(bench.port)  # One that comes later gets the log from its beginning too.
    again.say("watch", robot="left")
    notices: list[str] = []
    again.until(lambda o: notices.extend(text for _, text in again.robot.get("notices", ())) or notices)
    assert any("begin (anna)" in text for text in notices)
    viewer.socket.close()
    again.socket.close()


def test_a_robot_that_dies_leaves_the_queue(tmp_path: Path) -> None:
    with hub_bench(tmp_path) as bench:
        page = Page(bench.port)
        page.enter()
        start_both(page)
        bench.right.intervention.alarm("score")
        page.states(right="asks")
        link = bench.hub.links["right"]
        link.url = "ws://127.0.0.1:1/socket"  # Its process is gone: the line breaks and is not answered again.
        assert link._connection is not None
        link._connection.transport.abort()
        overview = page.states(right="lost", left="running")
        assert overview["queue"] == []
        assert bench.events("withdrawn")[-1]["why"] == "no connection to the robot"
        page.say("help", robot="right")
        page.until(lambda o: any("right: no connection" in text for text in page.refused))
        assert bench.left.intervention.state == "autonomous"


@pytest.mark.live
@pytest.mark.parametrize("phase", ["autonomous", "recovery"])
def test_a_hub_that_is_killed_leaves_its_robot_holding(tmp_path: Path, phase: str) -> None:
    """The program itself, killed at once: while the policy drives, and while the person does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with console_bench(link_timeout=1.0) as robot:
        command = [sys.executable, "-m", "vla_rl", "hub", "serve", "--robot", f"one={robot.url}", "--port", "0"]
        child = Child([*command, "--log", str(tmp_path / "hub.jsonl")], tmp_path / "hub.log", env)
        try:
            until(lambda: child.says("hub: http://127.0.0.1:"), "the hub", 60)
            page = Page(int(child.output().partition("hub: http://127.0.0.1:")[2].split()[0]))
            page.enter()
            page.press("one", "start")
            page.states(one="running")
            if phase == "recovery":
                page.say("help", robot="one")
                page.press("one", "take_over")
                page.until(lambda o: page.robot.get("phase") == "recovery")
                for _ in range(10):
                    page.say("drive", robot="one", axes={"x": 1}, gripper=None, held=True, sent=time.monotonic())
                    page.hear()
                assert "recovery" in robot.sources()
            until(lambda: ("policy" if phase == "autonomous" else phase) in robot.sources(), "motion", 20)
            killed = time.monotonic()
            child.kill()
            expected = ("paused",) if phase == "autonomous" else ("recovery",)
            until(lambda: robot.console.controller_silence == float("inf"), "the loss to be seen", 20)
            until(lambda: robot.ticks[-1].sent and robot.ticks[-1].sent.mode == "holding", "the hold", 20)
            assert robot.intervention.state in expected
            moved = [t.time for t in robot.ticks if t.sent and t.sent.mode == "running"]
            print(f"last motion {1000 * max(0.0, moved[-1] - killed):.0f} ms after the hub was killed")
            assert moved[-1] - killed < 0.4
            events = [e["event"] for e in read_log(tmp_path / "hub.jsonl")]
            assert events[0] == "begin" and {"control", "state"} <= set(events)
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"mode": "running", "phase": "autonomous"}, ""),
        ({"mode": "holding", "phase": "idle"}, ""),
        ({"mode": "holding", "phase": "ended", "outcome": None}, ""),
        ({"mode": "holding", "phase": "paused", "why": "alarm (detector)"}, "alarm (detector)"),
        ({"mode": "holding", "phase": "paused"}, "it holds"),
        ({"mode": "holding", "phase": "recovery"}, "left in the recovery"),
        ({"mode": "stopped", "phase": "idle", "reason": "console: ann"}, "stopped: console: ann"),
    ],
)
def test_when_a_robot_needs_help(status: dict[str, Any], why: str) -> None:
    assert needs_help(status) == why


def test_robots_are_read_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "hub.yaml"
    file.write_text("robots:\n  left: {url: 'http://bench1:8080'}\nhead_start: 10\n")
    found = load_hub(file, ["right=wss://bench2:8443/"])
    assert {name: robot.url for name, robot in found.robots.items()} == {
        "left": "ws://bench1:8080/socket",
        "right": "wss://bench2:8443/socket",
    }
    assert found.head_start == 10 and console_url("[::1]:8080") == "ws://[::1]:8080/socket"
    for robots, message in [
        ([], "hub: no robots"),
        (["left"], "--robot: got 'left', expected NAME=ADDRESS"),
        (["left=bench1:1", "left=bench2:1"], "--robot: 'left' is given twice"),
        (["left=bench1"], "the port is missing"),
        (["left=ftp://bench1:80"], "ftp:// is not spoken here"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_hub(None, robots)


def test_a_stop_over_a_line_that_is_silent_is_not_taken_for_heard() -> None:
    said = list[str]()
    links: Any = {
        name: SimpleNamespace(
            name=name, say=lambda kind, name=name: said.append(name) or name != "gone", is_fresh=fresh
        )
        for name, fresh in (("well", True), ("silent", False), ("gone", False))
    }
    hub = Hub(links, lambda event, **fields: None, head_start=30.0)
    assert hub.stop(None, "anna") == ["silent", "gone"]
    assert said == ["well", "silent", "gone"], "it is sent all the same"


def test_the_hub_closes_its_lines_when_it_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hub_bench(tmp_path) as bench:
        until(lambda: all(link.is_fresh for link in bench.hub.links.values()), "both lines", 60)
        lines = list(bench.hub.links.values())
    gc.collect()
    assert not any(line.is_fresh for line in lines)
    assert "was destroyed but it is pending" not in caplog.text


PAGE = """
const stub = () => new Proxy(function () {}, {
  get: (target, name) => {
    if (name === Symbol.toPrimitive) return () => "0";
    if (name === Symbol.iterator) return function* () {};
    if (name in target && name !== "name" && name !== "length") return target[name];
    return (target[name] = name === "children" ? [] : stub());
  },
  set: (target, name, value) => { target[name] = value; return true; },
  apply: () => stub(), construct: () => stub(),
});
const sockets = [];
class Socket { static OPEN = 1; readyState = 1; constructor() { sockets.push(this); } send() {} close() {} }
const put = (name, value) => Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
for (const name of ["document", "window", "localStorage", "ResizeObserver"]) put(name, stub());
const page = { WebSocket: Socket, location: { origin: "http://hub:1" }, setInterval() {} };
for (const [name, value] of Object.entries(page)) put(name, value);
const { Tile } = await import("./tile.js");
const shown = [];
Tile.prototype.showPicture = function () { shown.push(this.address.name); };
Tile.prototype.show = function (status) { shown.push(`${this.address.name}: ${status.phase}`); };
Tile.prototype.begin = function (hello) { this.hello = hello; };
Tile.prototype.paint = function () {};
await import("./hub.js");
const [socket] = sockets;
const hear = (message) => socket.onmessage({ data: message ? JSON.stringify(message) : new Uint8Array([0]).buffer });
const robots = [{ name: "left" }, { name: "right" }];
const overview = (helping) => hear({ type: "hub", in_control: true, helping, robots, queue: [], refused: [] });
const seen = (phase) => { hear(); hear({ type: "status", phase }); }; // a picture, and a status
overview(null);
hear({ type: "hello", robot: "left" });
seen("left's");
overview("right"); // the page looks at the other one; what comes now was sent before the hub knew
seen("left's");
hear({ type: "hello", robot: "right" });
seen("right's");
console.log(JSON.stringify(shown));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which runs the page's scripts")
def test_the_page_shows_no_picture_of_the_robot_that_was_looked_at_before(tmp_path: Path) -> None:
    page = tmp_path / "page"
    shutil.copytree(Path(console_folder.__file__).parent / "page", page)
    (page / "package.json").write_text('{"type": "module"}')
    (page / "test.js").write_text(PAGE)
    said = subprocess.run(["node", "test.js"], cwd=page, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == ["left", "left: left's", "right", "right: right's"]


def test_the_hub_sends_no_picture_of_a_robot_after_another_ones_hello() -> None:
    """Pictures that do not change, as of a simulator that waits; the page looks at one robot, the other, the one."""
    links: dict[str, Any] = {
        name: SimpleNamespace(
            name=name,
            hello={"type": "hello"},
            is_fresh=True,
            is_ours=True,
            status={"type": "status"},
            scores=(),
            notices=(),
            pictures={camera.encode(): f"{name} {camera}".encode() for camera in cameras},
        )
        for name, cameras in {"left": ("front", "side"), "right": ("wrist",)}.items()
    }
    hub: Any = SimpleNamespace(links=links, overview=lambda: {"type": "hub"}, queue=SimpleNamespace(help=None))
    sent, order = list[str](), ["left", "right", "left"]

    async def run() -> None:
        show = HubServer(ConsoleConfig(status_rate=60, camera_rate=60), hub)

        async def send(data: str | bytes) -> None:
            if isinstance(data, bytes):
                sent.append(data.decode())
                if order and sent[-1] != "left side":  # At the first picture of each.
                    show.watch(session, order.pop(0))
            elif (message := json.loads(data))["type"] == "hello":
                sent.append(f"hello {message['robot']}")
            await asyncio.sleep(0)

        session = Session(cast(Any, SimpleNamespace(send=send)))
        session.may_send = lambda what, ahead: True  # type: ignore[method-assign]
        show.watch(session, order.pop(0))
        tasks = [asyncio.ensure_future(part) for part in (show._send_statuses(session), show._send_pictures(session))]
        end = time.monotonic() + 20
        while len(sent) < 7 and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()

    asyncio.run(run())
    first = ["hello left", "left front", "hello right", "right wrist"]
    assert sent == [*first, "hello left", "left front", "left side"]
