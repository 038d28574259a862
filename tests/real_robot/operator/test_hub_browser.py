"""The hub's page in a real browser: a person is called, helps, goes on to the next, and stops all."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import PATIENCE, browser, missing_browser
from hub_robots import hub_bench
from processes import until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "a browser is there"),
]


def test_a_person_helps_two_robots_one_after_the_other(tmp_path: Path) -> None:
    with browser() as chromium, hub_bench(tmp_path, 30.0) as bench:
        page = chromium.new_context(viewport={"width": 1400, "height": 900}).new_page()
        page.set_default_timeout(PATIENCE)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(bench.url)
        page.wait_for_selector(".robot.ready >> nth=1")
        assert page.is_disabled("[data-button=start]"), "a viewer until control is taken"
        page.click("#hub-control")
        page.fill("#ask-name", "Anna")
        page.click("#ask-ok")
        for name in ("left", "right"):  # Starting needs no visit.
            page.click(f"[data-robot={name}]")
            page.wait_for_selector(f".tile .name:text-is('{name}')")
            page.wait_for_selector("[data-button=start]:enabled")
            page.click("[data-button=start]")
            page.wait_for_selector(f".robot.running[data-robot={name}]")
        assert page.is_disabled("[data-button=take_over]"), "the person is with no robot"

        bench.left.intervention.alarm("failure score 2 above its threshold 1")
        page.wait_for_selector(".robot.asks[data-robot=left] >> text=failure score 2")
        bench.right.intervention.alarm("another")
        page.wait_for_selector("#hub-next:text('Next (2)')")
        page.click("#hub-next")
        page.wait_for_selector(".robot.helped")
        until(lambda: bench.hub.queue.help is not None, "the visit", 30)
        first = bench.hub.queue.help.robot  # type: ignore[union-attr]
        page.wait_for_selector(f".tile .name:text-is('{first}')")
        page.wait_for_selector("[data-button=take_over]:enabled")
        page.keyboard.press("t")
        page.wait_for_selector(".drive:visible")
        robot = bench.robots[first].robot
        start = robot.position.copy()
        page.keyboard.down("a")
        until(lambda: robot.position[1] > start[1] + 0.02, "to the left", 60)
        page.keyboard.up("a")
        until(lambda: bench.robots[first].last_twist() == [0, 0, 0], "released: it holds", 60)
        until(lambda: page.evaluate("document.querySelector('.cameras img').naturalWidth") > 0, "a picture", 60)
        for key, button in (("1", "recovery_done"), ("2", "correction_done"), ("y", "success")):
            page.wait_for_selector(f"[data-button={button}]:enabled")
            page.keyboard.press(key)
        until(lambda: bench.robots[first].intervention.summary.outcome == "success", "the label", 60)
        page.click("#hub-next:text('Done, next (1)')")
        second = "right" if first == "left" else "left"
        page.wait_for_selector(f".robot.helped[data-robot={second}]")
        page.click("#stop-all")
        page.wait_for_selector(".robot.stopped >> nth=1")
        assert all(r.supervisor.state.mode == "stopped" for r in bench.robots.values())
        assert not errors
