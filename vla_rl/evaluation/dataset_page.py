"""The page of a dataset: what `doctor --dataset` finds, frames and videos, lengths, the actions of each dimension."""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from matplotlib import figure as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.health import check_recorded
from vla_rl.data.lerobot_io import encode_png
from vla_rl.data.recorded import Recorded, read
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.recorded import COLUMNS
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import BLUE, inline
from vla_rl.evaluation.video import tile, write_mp4

SHOWN, FILMED = 3, 2  # episodes: first, middle, last; of these the first ones as videos
MOST_DECODED = 10_000  # pictures of a camera, about; minutes for each hour of recordings beyond
SIDE = 180  # pixels, the height of a picture
MAX_SECONDS, FILM_HZ = 20, 10  # of a video
MAX_INSTRUCTIONS = 30
REPORT = "report.html"


def write_dataset_page(path: Path) -> Path:
    """Write the page of a dataset into its folder; of one on the Hub, here, under its name. Returns its path.

    Raises:
        DatasetError: missing, of another format, or damaged.
    """
    source = LeRobotSource(path)
    wanted = _wanted(source)
    kept: dict[tuple[str, int], np.ndarray] = {}

    def keep(camera: str, rows: np.ndarray, images: np.ndarray) -> None:
        for place in np.flatnonzero(np.isin(rows, wanted)):
            kept[camera, int(rows[place])] = _scaled(images[place])

    data = read(path, keep, _looked_at)
    content = {
        "name": data.name,
        "summary": _summary(source, data),
        "checks": check_recorded(data),
        "episodes": _frames(data, kept),
        "videos": _videos(data, kept),
        "instructions": _instructions(source, data),
        "more": max(0, len(set(data.instruction)) - MAX_INSTRUCTIONS),
        "lengths": inline(_draw_lengths(data), "Lengths of the episodes"),
        "actions": _actions(data),
        "histograms": inline(_draw_actions(data), "How often each action was given, by dimension"),
    }
    page = path / REPORT if path.is_dir() else Path(f"{data.name}_{REPORT}")
    write_text_atomic(page, page_template(__package__ or "", "dataset_page.html").render(content))
    return page


def _shown(lengths: np.ndarray) -> list[int]:
    """Numbers of the episodes whose frames are shown."""
    return sorted({0, len(lengths) // 2, len(lengths) - 1})[:SHOWN]


def _looked_at(lengths: np.ndarray) -> np.ndarray:
    """Numbers of the episodes whose pictures are decoded: all, or of a large dataset so many, evenly drawn."""
    count = min(len(lengths), max(SHOWN, int(MOST_DECODED / lengths.mean())))
    even = np.linspace(0, len(lengths) - 1, count).round().astype(np.int64)
    return np.union1d(even, _shown(lengths)).astype(np.int64)


def _wanted(source: LeRobotSource) -> np.ndarray:
    """The rows whose pictures are kept, int64, ascending."""
    starts = np.cumsum(source.lengths) - source.lengths
    rows: set[int] = set()
    for place, number in enumerate(_shown(source.lengths)):
        start, length = int(starts[number]), int(source.lengths[number])
        rows |= {start + step for step in _steps(length)}
        if place < FILMED:
            rows |= {start + step for step in _filmed(length, source.fps)}
    return np.array(sorted(rows), np.int64)


def _steps(length: int) -> list[int]:
    return sorted({0, length // 2, length - 1})


def _filmed(length: int, fps: float) -> range:
    """Steps of an episode that its video shows."""
    return range(0, min(length, math.ceil(MAX_SECONDS * fps)), max(1, round(fps / FILM_HZ)))


def _scaled(image: np.ndarray) -> np.ndarray:
    """A picture of `SIDE` pixels' height, which a video's pixels can be cut into."""
    width = 2 * round(image.shape[1] * SIDE / image.shape[0] / 2)
    return cv2.resize(image, (max(width, 2), SIDE), interpolation=cv2.INTER_AREA)


def _summary(source: LeRobotSource, data: Recorded) -> str:
    sizes = {name: source.info["features"][key]["shape"] for name, key in source.cameras.items()}
    cameras = ", ".join(f"{name} ({' × '.join(map(str, size))})" for name, size in sizes.items()) or "none"
    success = "no outcomes recorded" if source.success is None else f"{int(source.success.sum())} succeeded"
    return (
        f"{len(data.lengths)} episodes, {success}; {len(data.actions)} frames, "
        f"{len(data.actions) / data.fps / 60:.1f} minutes at {data.fps:g} Hz. Robot "
        f"{source.info.get('robot_type') or 'not named'}: {source.action_dim} numbers of the action, "
        f"{source.state_dim} of the state. Cameras: {cameras}."
    )


def _title(data: Recorded, number: int) -> str:
    return f"Episode {number}: “{data.instruction[number]}”, {data.lengths[number] / data.fps:.1f} s"


def _frames(data: Recorded, kept: Mapping[tuple[str, int], np.ndarray]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Of each episode shown: its title; for each camera a caption, and its first, middle and last frame as PNG."""
    found = []
    for number in _shown(data.lengths):
        start, steps = int(data.starts[number]), _steps(int(data.lengths[number]))
        strips = [tile([kept[camera, start + step][None] for step in steps])[0] for camera in data.cameras]
        pictures = [base64.b64encode(encode_png(strip)).decode() for strip in strips]
        captions = [f"{camera}, steps {', '.join(map(str, steps))}" for camera in data.cameras]
        found.append((_title(data, number), list(zip(captions, pictures, strict=True))))
    return found


def _videos(data: Recorded, kept: Mapping[tuple[str, int], np.ndarray]) -> list[tuple[str, str]]:
    """Titles and MP4s (base64), the cameras side by side."""
    found = []
    for number in _shown(data.lengths)[:FILMED] if data.cameras else ():
        start, steps = int(data.starts[number]), _filmed(int(data.lengths[number]), data.fps)
        views = [np.stack([kept[camera, start + step] for step in steps]) for camera in data.cameras]
        with tempfile.TemporaryDirectory() as folder:
            file = write_mp4(Path(folder) / "episode.mp4", tile(_as_wide(views)), data.fps / steps.step)
            film = base64.b64encode(file.read_bytes()).decode()
        cut = f", the first {MAX_SECONDS} s" if data.lengths[number] > MAX_SECONDS * data.fps else ""
        found.append((f"{_title(data, number)}{cut}: {', '.join(data.cameras)}", film))
    return found


def _as_wide(views: list[np.ndarray]) -> list[np.ndarray]:
    """Videos of one width: narrower ones have black beside them."""
    widest = max(view.shape[2] for view in views)
    return [np.pad(view, ((0, 0), (0, 0), (0, widest - view.shape[2]), (0, 0))) for view in views]


def _instructions(source: LeRobotSource, data: Recorded) -> list[tuple[Any, ...]]:
    """Of each instruction: it, how many episodes, how long, how many succeeded."""
    texts, rows = np.array(data.instruction), []
    for text in sorted(set(data.instruction))[:MAX_INSTRUCTIONS]:
        own = texts == text
        seconds = data.lengths[own] / data.fps
        times = f"{seconds.min():.1f} to {seconds.max():.1f} ({np.median(seconds):.1f})"
        rows.append((text, int(own.sum()), times, "–" if source.success is None else int(source.success[own].sum())))
    return rows


def _actions(data: Recorded) -> list[tuple[str, ...]]:
    """Of each dimension: its name, and its smallest, 1 %, median, 99 % and largest value."""
    rows = []
    for number, name in enumerate(data.action_names):
        values = np.quantile(_finite(data, number), (0, 0.01, 0.5, 0.99, 1))
        mark = " (gripper)" if number in data.grippers and "gripper" not in name else ""
        rows.append((name + mark, *(f"{value:.4g}" for value in values)))
    return rows


def _finite(data: Recorded, number: int) -> np.ndarray:
    """The numbers of a dimension that are numbers; 0 where none is."""
    values = data.actions[:, number]
    values = values[np.isfinite(values)]
    return values if len(values) else np.zeros(1)


def _draw_lengths(data: Recorded) -> Figure:
    figure = mpl.Figure(figsize=(4.2, 2.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.hist(data.lengths / data.fps, bins=min(40, max(5, len(data.lengths) // 3)), color=BLUE)
    axes.set_xlabel("seconds of an episode")
    axes.set_ylabel("episodes")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_actions(data: Recorded) -> Figure:
    """A histogram of each dimension."""
    count = data.actions.shape[1]
    rows = math.ceil(count / COLUMNS)
    figure = mpl.Figure(figsize=(9.6, 1.4 * rows), dpi=110, layout="constrained")
    for number, axes in enumerate(figure.subplots(rows, COLUMNS, squeeze=False).reshape(-1)):
        if number >= count:
            axes.set_axis_off()
            continue
        axes.hist(_finite(data, number), bins=60, color=BLUE, histtype="stepfilled")
        axes.set_title(data.action_names[number], fontsize=8, loc="left")
        axes.set_yticks([])
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
