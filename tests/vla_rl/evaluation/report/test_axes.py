"""Numbers on the axes of what is counted: iterations, steps, episodes are whole, however few they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from own_recordings import so101

from vla_rl.data.recorded import read
from vla_rl.evaluation.dataset_page import _draw_lengths
from vla_rl.evaluation.recorded import Track, action_errors, draw_steps, draw_track
from vla_rl.evaluation.report.charts import BLUE, Line, line_chart
from world_model.trust.measures.metrics import Curve
from world_model.trust.page import Line as TrustLine
from world_model.trust.page import curves_chart


@pytest.mark.parametrize("iterations", [1, 2, 3, 5, 20, 137])
def test_iterations(iterations: int) -> None:
    points = [(step, 0.1 * step) for step in range(1, iterations + 1)]
    chart = line_chart("loss", [Line("", points, BLUE)])
    numbers = re.findall('class="tick" text-anchor="middle">([^<]*)<', chart)
    assert numbers and all(number.isdigit() for number in numbers) and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("frames", [2, 3, 4])
def test_control_steps_imagined(frames: int) -> None:
    steps = tuple(range(frames))
    flat = tuple(0.5 for _ in steps)
    curve = Curve(steps=steps, mean=flat, low=flat, high=flat, n=tuple(3 for _ in steps))
    chart = curves_chart("PSNR", [TrustLine("imagined", curve, BLUE)], None)
    numbers = re.findall("<text[^>]*>([^<]*)</text>", chart.partition("control steps imagined")[0])
    assert numbers and all(number.isdigit() for number in numbers)


def counted(figure: Figure, side: Callable[[Axes], list[float]]) -> list[float]:
    """The numbers along an axis of each of a figure's plots."""
    return [number for axes in figure.axes if axes.axison for number in side(axes)]


def along_x(axes: Axes) -> list[float]:
    return [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]


def along_y(axes: Axes) -> list[float]:
    return [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]


def test_steps_of_a_chunk_and_of_an_episode() -> None:
    actions, moments = np.arange(6.0).reshape(3, 2), np.array([1])
    track = Track("t", "go", actions, moments, np.zeros((1, 2, 2)), math.nan)
    about = {"name": "p", "policy": "p", "policy_hash": "", "datasets": ("d",), "unseen": "", "control_hz": 10.0}
    result, _ = action_errors([track], ("x", "y"), **about)
    for figure in (draw_steps(result), draw_track(track, ("x", "y"))):
        numbers = counted(figure, along_x)
        assert numbers and all(number == round(number) for number in numbers)


def test_episodes_of_a_length(tmp_path: Path) -> None:
    numbers = counted(_draw_lengths(read(so101(tmp_path / "data", episodes=3, videos=False))), along_y)
    assert len(numbers) > 1 and all(number == round(number) for number in numbers)
