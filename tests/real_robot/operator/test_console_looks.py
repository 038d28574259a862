"""How the console looks to whom: on a phone while driving, in light and dark, and to color-blind eyes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Person, browser, missing_browser
from console_robot import console_bench

from real_robot.operator import console

CSS = (Path(console.__file__).parent / "page" / "console.css").read_text()
STATES = ("go", "wait", "stop", "person", "policy")  # what a color stands for
WORDS = (
    *(("text", "back"), ("text", "panel"), ("text", "raised"), ("dim", "back"), ("dim", "panel"), ("faint", "panel")),
    *(("warn", "panel"), ("error", "back"), ("error", "panel"), ("stop", "panel"), ("person", "panel")),
    *(("policy", "panel"), ("on-running", "running"), ("on-holding", "holding"), ("on-stopped", "stopped")),
    ("on-person", "person"),
)
# Machado, Oliveira and Fernandes (2009), severity 1, of linear RGB.
BLIND = {
    "none": np.eye(3),
    "protanopia": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0519]]),
    "deuteranopia": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6727, 0.0472], [-0.0118, 0.0429, 0.9689]]),
}


def palette(scheme: str) -> dict[str, np.ndarray]:
    """Name -> linear RGB in [0, 1], of a scheme's variables."""
    dark, light = (block for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL))
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", dark))
    if scheme == "light":
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", light))
    return {name: linear(value) for name, value in found.items()}


def linear(color: str) -> np.ndarray:
    """Linear RGB of "#rrggbb" (sRGB)."""
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratios = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratios > 0.008856, np.cbrt(ratios), 7.787 * ratios + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    """WCAG's contrast ratio."""
    dark, light = sorted(float(color @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_words_can_be_read(scheme: str) -> None:
    colors = palette(scheme)
    found = {pair: contrast(colors[pair[0]], colors[pair[1]]) for pair in WORDS}
    assert min(found.values()) >= 4.5, {pair: round(ratio, 1) for pair, ratio in found.items() if ratio < 4.5}


@pytest.mark.parametrize("eyes", BLIND)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_states_have_colors_that_differ_for_all_eyes(scheme: str, eyes: str) -> None:
    colors = {name: lab(BLIND[eyes] @ palette(scheme)[name]) for name in STATES}
    apart = {
        pair: float(np.linalg.norm(colors[pair[0]] - colors[pair[1]])) for pair in itertools.combinations(STATES, 2)
    }
    assert min(apart.values()) > 15, {pair: round(d) for pair, d in apart.items() if d <= 15}


# --- in a browser ---

in_browser = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "a browser is there"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as opened:
        yield opened


IN_SIGHT = """selector => {
  const box = document.querySelector(selector).getBoundingClientRect();
  const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return box.top >= 0 && box.bottom <= innerHeight && Boolean(at && at.closest(selector));
}"""


class TestInABrowser:
    """What Chromium makes of the page."""

    pytestmark = in_browser

    def test_on_a_phone_the_camera_the_pads_and_the_stop_are_in_sight_while_driving(self, chromium: Any) -> None:
        with console_bench(link_timeout=20.0) as bench:
            person = Person(chromium, bench.url, width=390, height=844, touch=True)
            person.take_control()
            person.click("start")
            person.await_mode("running")
            page = person.page
            page.locator(".stats").scroll_into_view_if_needed()
            person.click("take_over")
            page.wait_for_selector(".drive:visible")
            for selector in (".cameras img", ".head .estop", ".pads .pad:last-of-type button:last-of-type"):
                assert page.evaluate(IN_SIGHT, selector), f"{selector} with the pads"
            for button in ("recovery_done", "failure"):
                page.locator(f"[data-button={button}]").scroll_into_view_if_needed()
                for selector in (".cameras img", ".head .estop", f"[data-button={button}]"):
                    assert page.evaluate(IN_SIGHT, selector), f"{selector} with {button}"
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            assert not person.errors

    def test_the_score_s_chart_names_its_axes_and_lines(self, chromium: Any) -> None:
        with console_bench(link_timeout=20.0) as bench:
            person = Person(chromium, bench.url)
            person.page.wait_for_timeout(500)
            assert not person.page.is_visible(".scores"), "nothing to show without a detector"
            person.take_control()
            person.click("start")
            person.page.wait_for_selector(".chart circle.score")
            texts = person.page.locator(".chart text").all_text_contents()
            assert {"seconds ago", "score", "60", "15", "now", "alarm above 0.800"} <= set(texts)
            assert any(re.fullmatch(r"(alarm: )?score ● [\d.]+", text) for text in texts)
            numbers = [float(text) for text in texts if re.fullmatch(r"[\d.]+", text)][:2]
            assert numbers[0] == 0 < numbers[1], "the scores' own ticks come first"
            dashes = person.page.evaluate(
                "['threshold', 'score'].map("
                "(line) => getComputedStyle(document.querySelector(`.chart path.${line}`)).strokeDasharray)"
            )
            assert dashes[0] != dashes[1] == "none"

    def test_it_is_light_or_dark_as_the_browser_asks(self, chromium: Any) -> None:
        with console_bench(link_timeout=20.0) as bench:
            person, shown = Person(chromium, bench.url), {}
            for scheme in ("dark", "light"):
                person.page.emulate_media(color_scheme=scheme)
                shown[scheme] = person.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            assert shown == {"dark": "rgb(16, 20, 24)", "light": "rgb(244, 246, 248)"}

    def test_modes_differ_by_their_signs(self, chromium: Any) -> None:
        with console_bench(link_timeout=20.0) as bench:
            person, signs = Person(chromium, bench.url), {}
            person.take_control()
            for mode, button in (("running", "start"), ("holding", "hold"), ("stopped", None)):
                if button:
                    person.click(button)
                else:
                    person.page.keyboard.press("Space")
                person.await_mode(mode)
                signs[mode] = person.page.eval_on_selector(".mode", "e => getComputedStyle(e, '::before').content")
            assert len(set(signs.values())) == 3 and "none" not in signs.values(), signs
