"""A person's whole intervention in a real browser, by clicks and keys; the robot is a point in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from browser import Person, browser, missing_browser
from console_robot import console_bench
from processes import PATIENCE, until
from websockets.sync.client import connect

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "a browser is there"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as chromium:
        yield chromium


def test_an_intervention_by_clicks_and_keys(chromium: Any) -> None:
    with console_bench(link_timeout=10.0) as bench:
        person = Person(chromium, bench.url)
        assert person.page.is_disabled("[data-button=start]"), "a viewer until control is taken"
        person.take_control()
        person.key("Enter", "start")
        person.await_mode("running")
        until(lambda: bench.sources() == {"policy"}, "the policy drives")
        person.click("take_over")
        person.await_phase("recovery")
        until(lambda: bench.last_twist() == [0, 0, 0], "the robot holds until a key is held")

        person.page.wait_for_selector(".drive:visible")
        start = bench.robot.position.copy()
        person.page.keyboard.down("a")
        until(lambda: bench.robot.position[1] > start[1] + 0.03, "to the left")
        person.page.keyboard.up("a")
        until(lambda: bench.last_twist() == [0, 0, 0], "released: it holds")
        person.key("1", "recovery_done")
        person.await_phase("correction")
        person.page.hover("[data-code=KeyW]")  # the pad on the screen
        person.page.mouse.down()
        until(lambda: bench.last_twist()[0] > 0, "forward")
        person.page.mouse.up()
        until(lambda: bench.last_twist() == [0, 0, 0], "released: it holds")
        person.page.keyboard.press("f")
        until(lambda: bench.robot.grip == 1.0, "the gripper closes")
        person.click("correction_done")
        person.await_phase("ended")
        person.key("y", "success")
        until(lambda: bench.intervention.summary.outcome == "success", "the label")
        assert bench.sources() == {"policy", "recovery", "correction"}
        person.page.wait_for_selector(".guide:text('episode has ended as a success')")
        assert person.page.locator(".cameras img").count() == 1
        assert person.page.evaluate("document.querySelector('.cameras img').naturalWidth") == 480
        assert not person.errors


def test_two_episodes_are_compared_by_keys_where_they_can_be(chromium: Any) -> None:
    class Kept:
        can_compare = False
        said: list[tuple[bool, str]]

        def compare(self, better: bool, who: str) -> None:
            self.said.append((better, who))

    kept = Kept()
    kept.said = []
    with console_bench() as bench:
        bench.console.comparisons = kept
        person = Person(chromium, bench.url)
        person.take_control()
        person.key("Enter", "start")
        person.key("y", "success")
        person.await_phase("ended")
        assert not person.page.is_visible("[data-button=better]")
        kept.can_compare = True
        person.key("3", "better")
        person.click("worse")
        person.page.wait_for_selector(".log li:text-matches('worse than the episode before')")
        assert kept.said == [(True, "Anna"), (False, "Anna")]
        assert "Better or Worse compares it with the one before it." in person.text(".guide")
        assert not person.errors


def test_space_stops_from_a_viewer_and_the_controller_resets_by_name(chromium: Any) -> None:
    with console_bench(link_timeout=30.0) as bench:
        person, viewer = Person(chromium, bench.url), Person(chromium, bench.url)
        person.take_control()
        person.click("start")
        person.await_mode("running")
        viewer.page.keyboard.press("Space")
        person.await_mode("stopped")
        assert viewer.page.locator("[data-button=reset]:enabled").count() == 0
        person.page.bring_to_front()
        person.click("reset")
        person.page.fill("#ask-name", "Anna Berg")
        person.page.click("#ask-ok")
        person.await_mode("holding")
        until(lambda: "Anna Berg resets" in person.text(".log"), "the log")
        person.click("resume")
        person.await_mode("running")
        person.page.click(".tile .estop")
        person.await_mode("stopped")
        person.page.wait_for_selector("[data-button=resume]:disabled")
        assert person.page.get_attribute("[data-button=resume]", "title") == ("Stopped: console: Anna. Reset it first.")
        assert not person.errors and not viewer.errors


def test_closing_the_page_while_a_key_is_held_holds_the_robot(chromium: Any) -> None:
    with console_bench(link_timeout=10.0) as bench:
        person = Person(chromium, bench.url)
        person.take_control()
        person.click("start")
        person.click("take_over")
        person.await_phase("recovery")
        person.page.keyboard.down("s")
        until(lambda: bench.last_twist()[0] < 0, "motion")
        person.context.close()
        until(lambda: bench.last_twist() == [0, 0, 0], "it holds", 5)
        assert bench.intervention.state == "recovery"


def test_a_wrong_token_is_told_and_several_robots_stand_in_one_page(chromium: Any) -> None:
    token = "a-token-of-sixteen-signs"
    with console_bench(token=token, token_file="console-token") as bench, console_bench("name=left_arm") as other:
        person = Person(chromium, bench.url)
        person.page.click(".control")
        person.page.fill("#ask-name", "Eve")
        person.page.fill("#ask-token", "a guess")
        person.page.click("#ask-ok")
        person.page.wait_for_selector(".log li.refused:text('wrong token')")
        person.page.wait_for_selector("#ask[open] .error:text('the text in console-token, which')")
        person.page.fill("#ask-name", "Anna")
        person.page.fill("#ask-token", token)
        person.page.click("#ask-ok")
        person.page.wait_for_selector(".holder:text-matches('You have control')")
        person.page.click("#add")
        person.page.fill("#ask-url", other.url)
        person.page.click("#ask-ok")
        person.page.wait_for_selector(".name:text('left_arm')")
        person.page.click("#stop-all")
        for robot in (bench, other):
            until(lambda r=robot: r.supervisor.state.mode == "stopped", "both stop")
        person.page.reload()
        person.page.wait_for_selector(".name:text('left_arm')")
        assert not person.errors


def test_the_pages_stop_works_without_a_place_for_its_socket(chromium: Any) -> None:
    """All places of the second robot are taken by others: its tile has no socket, and its stop is another origin's."""
    with console_bench() as bench, console_bench(max_clients=1) as other, ExitStack() as stack:
        viewer = stack.enter_context(connect(f"ws://127.0.0.1:{other.port}/socket", open_timeout=PATIENCE))
        viewer.send('{"type": "seen", "statuses": 0, "pictures": 0}')
        person = Person(chromium, bench.url)
        person.page.click("#add")
        person.page.fill("#ask-url", other.url)
        person.page.click("#ask-ok")
        person.page.wait_for_selector(".guide:text('too many watch')")
        person.page.click("#stop-all")
        for robot in (bench, other):
            until(lambda r=robot: r.supervisor.state.mode == "stopped", "both stop")
        assert other.supervisor.state.reason == "console: POST from 127.0.0.1"
        person.page.wait_for_selector(".log li:text('E-stop: the robot stops at its next control tick')")
        assert not person.errors


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (820, 1180), (390, 844)])
def test_everything_fits_and_can_be_touched(chromium: Any, width: int, height: int) -> None:
    with console_bench(link_timeout=10.0) as bench:
        person = Person(chromium, bench.url, width, height, touch=True)
        person.take_control()
        person.click("start")
        person.click("take_over")
        person.page.wait_for_selector(".drive:visible")
        assert person.page.evaluate("document.documentElement.scrollWidth") <= width
        small = person.page.evaluate(
            """[...document.querySelectorAll('button')].filter(b => b.offsetParent).map(b => [b.textContent,
            b.getBoundingClientRect()]).filter(([, r]) => r.width < 44 || r.height < 44).map(([t]) => t)"""
        )
        assert small == []
        person.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
        box = person.page.locator(".tile .estop").bounding_box()
        assert 0 <= box["y"] < height, "the emergency stop stays in sight"
        assert not person.errors
