"""Report pages in a browser: on a phone and a screen, light and dark; and to eyes that tell no red from green."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from browser import browser, missing_browser
from own_recordings import so101
from test_report import run, video  # noqa: F401  (fixtures)

from vla_rl.evaluation.dataset_page import write_dataset_page
from vla_rl.evaluation.report.charts import BLUE, GREEN, ORANGE, PURPLE
from vla_rl.evaluation.report.report import write_report

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "vla_rl/evaluation/report/page.html"
TEMPLATES = (
    "vla_rl/evaluation/report/report_template.html",
    "world_model/trust/trust_page.html",
    "real_robot/failure/failure_page.html",
    "vla_rl/workflows/gpu_bench/page_template.html",
)
HEX = re.compile(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b")

# Of each element that holds text itself: the text, its size as drawn, its color, and the ground it stands on.
TEXTS = """() => [...document.querySelectorAll("main *")].filter(e => e.checkVisibility() && e.tagName != "VIDEO" &&
    [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())).map(e => {
  const style = getComputedStyle(e), svg = e.ownerSVGElement;
  let ground = e;
  while (ground && getComputedStyle(ground).backgroundColor == "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  return {text: e.textContent.trim().slice(0, 40), size: parseFloat(style.fontSize) * (svg ? svg.getScreenCTM().a : 1),
          ink: svg ? style.fill : style.color, ground: getComputedStyle(ground || document.body).backgroundColor};
})"""


def rgb(text: str) -> np.ndarray:
    """Linear light, 0 .. 1, of "#rrggbb", "#rgb" or "rgb(r, g, b)"."""
    if text.startswith("#"):
        digits = text[1:] if len(text) == 7 else "".join(2 * d for d in text[1:])
        values = [int(digits[i : i + 2], 16) for i in (0, 2, 4)]
    else:
        values = [float(v) for v in re.findall(r"[\d.]+", text)[:3]]
    values = np.array(values) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG 2, 1 .. 21."""
    low, high = sorted(float(rgb(color) @ (0.2126, 0.7152, 0.0722)) for color in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "a browser is here")
def test_it_is_readable_on_a_phone_and_in_the_dark(run) -> None:  # noqa: F811
    page_file = write_report(run)
    with browser() as chromium:
        for width, scheme in itertools.product((390, 1280), ("light", "dark")):
            context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == width
            texts = page.evaluate(TEXTS)
            assert len(texts) > 60
            small = [t for t in texts if t["size"] < 9.5]
            faint = [t for t in texts if contrast(t["ink"], t["ground"]) < 4.5]
            assert not small and not faint, (width, scheme, small[:3], faint[:3])
            grounds = {t["ground"] for t in texts}
            assert all((rgb(ground).mean() < 0.1) == (scheme == "dark") for ground in grounds)
            context.close()


@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "a browser is here")
def test_charts_of_a_dataset_take_the_colors_of_its_page(tmp_path: Path) -> None:
    dataset = so101(tmp_path / "data", episodes=6, videos=False)
    page_file = write_dataset_page(dataset)
    with browser() as chromium:
        for width, scheme in itertools.product((390, 1280), ("light", "dark")):
            page = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()
            page.goto(page_file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == width
            texts = page.evaluate(TEXTS)
            faint = [text for text in texts if contrast(text["ink"], text["ground"]) < 4.5]
            assert len(texts) > 60 and not faint, (width, scheme, faint[:3])
            axes = page.eval_on_selector_all("svg.figure path", "all => all.map(one => getComputedStyle(one).stroke)")
            assert page.evaluate("getComputedStyle(document.body).color") in axes


def schemes() -> list[dict[str, str]]:
    """The colors by name, light and dark."""
    blocks = re.findall(r":root \{(.*?)\}", PAGE.read_text(), flags=re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in blocks]


def test_every_page_takes_its_colors_from_one_place() -> None:
    light, dark = schemes()
    assert light.keys() == dark.keys() and len(light) > 10
    for name in TEMPLATES:
        style = (ROOT / name).read_text().partition("{% block style %}")[2].partition("{% endblock %}")[0]
        own = HEX.findall("\n".join(line for line in style.splitlines() if ".distrust" not in line))
        assert not own and ":root" not in style, f"{name}: {own}"
    for colors in (light, dark):
        for ink in ("ink", "soft", "good", "bad", "wrong", "note"):
            for ground in ("panel", "ground", f"{ink}-ground"):
                assert contrast(colors[ink], colors.get(ground, colors["panel"])) >= 4.5, (ink, ground)


# Machado, Oliveira & Fernandes 2009, severity 1: what is seen without the long- or the middle-wave cones.
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def distance(a: str, b: str, kind: str) -> float:
    """CIE76's color difference as such eyes see it; 2 can just be told side by side."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    seen = [np.clip(np.array(BLIND[kind]) @ rgb(color), 0, 1) for color in (a, b)]
    x, y, z = np.cbrt(np.maximum([to_xyz @ color / (0.9505, 1, 1.089) for color in seen], 0.008856)).T
    return float(np.hypot(np.hypot(116 * np.diff(y), 500 * np.diff(x - y)), 200 * np.diff(y - z))[0])


@pytest.mark.parametrize("kind", BLIND)
def test_colors_hold_for_the_color_blind(kind: str) -> None:
    assert distance("#007a3d", "#8a5a00", kind) < 40, "a green and a brown, which the next line would refuse"
    for colors in schemes():
        assert distance(colors["good"], colors["bad"], kind) > 40
    assert min(distance(a, b, kind) for a, b in itertools.combinations((BLUE, ORANGE, GREEN, PURPLE), 2)) > 15
