"""How far a policy's actions are from those recorded in episodes that it has not learned: no success, no environment.

For each dimension of the action and each step of a chunk, |predicted - recorded|, greedily, at moments of the held-out
episodes; beside it the error of the simplest policy there is, which repeats the last recorded action. Episodes count
alike, whatever their length; intervals are by bootstrap over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.tables import console_table
from vla_rl.config import Config, Number
from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import BLUE, GRAY, ORANGE, inline
from vla_rl.evaluation.statistics import mean_bands, ratio_bands
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import evaluation_mode

MAX_MOMENTS = 50  # of an episode, spread evenly
FEW = 10  # episodes, below which the bootstrap's intervals are too narrow
BATCH = 32  # observations that the policy acts on at once
COLUMNS = 3  # of plots, a dimension each
NOT_SUCCESS = (
    "An action error is not success: a policy can be near the recorded actions and fail, or far from them and succeed. "
    "Whether it solves the task is seen on the robot, or in a simulator."
)


class Band(Config):
    """A figure with its 95 % interval over episodes."""

    value: Number
    low: Number
    high: Number

    def text(self) -> str:
        """ "0.031 [0.028, 0.035]"."""
        if math.isnan(self.value):
            return "–"
        interval = "" if math.isnan(self.low) else f" [{_short(self.low)}, {_short(self.high)}]"
        return f"{_short(self.value)}{interval}"


def _short(value: float) -> str:
    """Of a ratio to nearly nothing only that it is large."""
    return f"{value:.3g}" if value < 1e6 else "large"


class DimensionError(Config):
    """Of one number of the action, in its own unit.

    Attributes:
        spread: from its 1 % to its 99 % quantile in the held-out episodes; 0: it never changes.
        error: of the policy. repeated: of repeating the last action. ratio: the one over the other.
    """

    name: str
    spread: float
    error: Band
    repeated: Band
    ratio: Band


class StepError(Config):
    """At one step of a chunk, as a share of each dimension's spread, on average over those that change."""

    error: Band
    repeated: Band


class ActionErrors(Config):
    """What was found of one policy.

    Attributes:
        unseen: why its cloning is known not to have seen these episodes; "": not known.
        control_hz: control steps a second. ratio: of all dimensions' errors together, each over its spread.
    """

    name: str
    policy: str
    policy_hash: str
    datasets: tuple[str, ...]
    unseen: str
    control_hz: float
    num_episodes: int
    num_moments: int
    ratio: Band
    dimensions: tuple[DimensionError, ...]
    steps: tuple[StepError, ...]

    def headline(self) -> str:
        """What it comes to, in a sentence."""
        few = ", too few for a sound interval" if self.num_episodes < FEW else ""
        where = f"on {self.num_episodes} held-out episodes{few} ({self.num_moments} moments)"
        than = f"{self.ratio.text()} times that of repeating the last action, {where}"
        if self.ratio.high < 1:
            return f"The action error is {than}: the policy has learned something of what comes next."
        if self.ratio.low > 1:
            return f"The action error is {than}: worse than doing nothing new."
        return f"The action error is {than}: no better is shown than repeating the last action."

    def table(self) -> Table:
        """A table for the console: a row for each dimension."""
        head = ("dimension", "error", "repeating the last", "ratio")
        table = console_table(self.headline(), head, ("dimension",), NOT_SUCCESS)
        for one in self.dimensions:
            table.add_row(one.name, one.error.text(), one.repeated.text(), one.ratio.text())
        return table

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, self.model_dump_json(indent=1))


@dataclass(frozen=True)
class Track:
    """One held-out episode as it was recorded, and what the policy would have done.

    Attributes:
        name: of the episode. actions: float32 (T, A). moments: int64 (M,), steps at which the policy was asked.
        predicted: float32 (M, H, A). error: its mean error over the spread.
    """

    name: str
    instruction: str
    actions: np.ndarray
    moments: np.ndarray
    predicted: np.ndarray
    error: float


def predict(
    policy: Policy,
    parts: Sequence[EpisodeDataset],
    per_instruction: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Track]:
    """Ask the policy, greedily, at moments of the selected episodes of each dataset.

    Args:
        per_instruction: episodes of each instruction at most, of each dataset. seed: of a policy that draws noise.
        progress: told after each episode how many are done.

    Raises:
        DatasetError: no episode is long enough.
    """
    chosen = [(part, int(number)) for part in parts for number in _first(part, per_instruction)]
    generator = torch.Generator(policy.device).manual_seed(seed)
    tracks = []
    with evaluation_mode(policy):
        for done, (part, number) in enumerate(chosen):
            progress(done, len(chosen))
            tracks.append(_track(policy, part, number, generator))
    found = [track for track in tracks if track is not None]
    if not found:
        raise DatasetError(f"{parts[0].path}: no held-out episode has two steps; there is nothing to compare with")
    return found


def _first(part: EpisodeDataset, count: int) -> np.ndarray:
    """The selected episodes, of each instruction so many at most."""
    episodes = part.episodes
    tasks = part.task[part.starts[episodes]]
    return np.sort(np.concatenate([episodes[tasks == task][:count] for task in np.unique(tasks)]))


def _track(policy: Policy, part: EpisodeDataset, number: int, generator: torch.Generator) -> Track | None:
    start, length = int(part.starts[number]), int(part.lengths[number])
    own = part.rows[(part.rows > start) & (part.rows < start + length)]  # The first step has no action before it.
    if not len(own):
        return None
    rows = own[np.unique(np.linspace(0, len(own) - 1, min(MAX_MOMENTS, len(own))).round().astype(int))]
    chunks = []
    for first in range(0, len(rows), BATCH):
        obs = part.batch(rows[first : first + BATCH], 1).obs
        chunks.append(policy.act(obs, generator, temperature=0.0).actions)
    return Track(
        name=f"{part.name}, episode {number}",
        instruction=part.instructions[int(part.task[start])],
        actions=part.actions[start : start + length],
        moments=rows - start,
        predicted=np.concatenate(chunks),
        error=math.nan,
    )


def spread_of(tracks: Sequence[Track]) -> np.ndarray:
    """float64 (A,): from the 1 % to the 99 % quantile of what was recorded; NaN where nothing changes."""
    low, high = np.quantile(np.concatenate([track.actions for track in tracks]), (0.01, 0.99), axis=0)
    return np.where(high - low > 1e-6, high - low, np.nan)


def errors_of(track: Track) -> tuple[np.ndarray, np.ndarray]:
    """The policy's errors, and those of repeating the last action: float64 (H, A), means; NaN past the end."""
    steps = track.moments[:, None] + np.arange(track.predicted.shape[1])
    inside = (steps < len(track.actions))[..., None]
    recorded = track.actions[np.minimum(steps, len(track.actions) - 1)]
    last = track.actions[track.moments - 1][:, None]
    count = inside.sum(0)
    sums = [(np.abs(asked - recorded) * inside).sum(0, dtype=np.float64) for asked in (track.predicted, last)]
    policy, repeated = (np.where(count > 0, total / np.maximum(count, 1), np.nan) for total in sums)
    return policy, repeated


def action_errors(tracks: Sequence[Track], names: Sequence[str], **about: object) -> tuple[ActionErrors, list[Track]]:
    """What was found of the episodes, and the episodes with their errors.

    Args:
        names: of the A numbers of the action. about: the other fields of `ActionErrors`.
    """
    spread = spread_of(tracks)
    pairs = [errors_of(track) for track in tracks]
    policy, repeated = (np.stack([pair[i] for pair in pairs]) for i in range(2))  # (E, H, A)
    groups = np.arange(len(tracks))
    each = [np.nanmean(errors, axis=1) for errors in (policy, repeated)]
    scaled = [errors / spread for errors in (policy, repeated)]
    by_step = [_mean(errors, 2) for errors in scaled]
    whole = [_mean(errors, 1)[:, None] for errors in by_step]
    errors, others, ratios = (
        _bands(mean_bands(each[0], groups)),
        _bands(mean_bands(each[1], groups)),
        _ratios(each, groups),
    )
    result = ActionErrors.model_validate(
        {
            **about,
            "num_episodes": len(tracks),
            "num_moments": sum(len(track.moments) for track in tracks),
            "ratio": _ratios(whole, groups)[0],
            "dimensions": [
                DimensionError(name=name, spread=float(np.nan_to_num(wide)), error=own, repeated=other, ratio=ratio)
                for name, wide, own, other, ratio in zip(names, spread, errors, others, ratios, strict=True)
            ],
            "steps": [
                StepError(error=own, repeated=other)
                for own, other in zip(*(_bands(mean_bands(one, groups)) for one in by_step), strict=True)
            ],
        }
    )
    told = [
        Track(t.name, t.instruction, t.actions, t.moments, t.predicted, float(error))
        for t, error in zip(tracks, whole[0][:, 0], strict=True)
    ]
    return result, told


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean without NaN; NaN where there is nothing else."""
    count = np.isfinite(values).sum(axis)
    return np.where(count > 0, np.nansum(values, axis) / np.maximum(count, 1), np.nan)


def _ratios(pair: Sequence[np.ndarray], groups: np.ndarray) -> list[Band]:
    """The first over the second, both float (E, K); NaN where the second is always 0."""
    bands = _bands(ratio_bands(pair[0], pair[1], groups))
    none = Band(value=math.nan, low=math.nan, high=math.nan)
    return [band if total > 0 else none for band, total in zip(bands, np.nansum(pair[1], 0), strict=True)]


def _bands(found: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[Band]:
    return [Band(value=float(v), low=float(low), high=float(high)) for v, low, high in zip(*found, strict=True)]


def write_page(result: ActionErrors, tracks: Sequence[Track], path: Path, command: str = "") -> Path:
    """Write the page; its pictures are inside it, nothing is fetched."""
    ordered = sorted(tracks, key=lambda track: track.error)
    shown = {"the episode with the largest error": ordered[-1]}
    if len(ordered) > 1:
        shown = {"the usual episode": ordered[(len(ordered) - 1) // 2], **shown}
    names = [one.name for one in result.dimensions]
    content = {
        "result": result,
        "not_success": NOT_SUCCESS,
        "unseen": result.unseen or "Whether the policy has learned from these episodes is not known here.",
        "most": MAX_MOMENTS,
        "by_step": inline(draw_steps(result), "Action error by step of the chunk, and of repeating the last action"),
        "tracks": [
            (f"{what.capitalize()}: {t.name}, “{t.instruction}”, error {100 * t.error:.1f} % of the range",
             inline(draw_track(t, names), what))
            for what, t in shown.items()
        ],
        "command": command,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, page_template(__package__ or "", "recorded_page.html").render(content))
    return path


def draw_steps(result: ActionErrors) -> Figure:
    """Error over the steps of the chunk, policy and baseline, with intervals."""
    figure = Figure(figsize=(4.4, 3.0), dpi=110, layout="constrained")
    axes, steps = figure.subplots(), np.arange(1, len(result.steps) + 1)
    for bands, color, marker, name in (
        ([one.error for one in result.steps], BLUE, "o", result.name),
        ([one.repeated for one in result.steps], ORANGE, "s", "repeating the last action"),
    ):
        value, low, high = (100 * np.array([getattr(band, end) for band in bands]) for end in ("value", "low", "high"))
        axes.plot(steps, value, color=color, marker=marker, markersize=4, label=name)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(f"step of the chunk ({1000 / result.control_hz:.0f} ms each)")
    axes.set_ylabel("action error, % of the range")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_track(track: Track, names: Sequence[str]) -> Figure:
    """Each dimension over an episode: as recorded, and as chunks one after the other."""
    rows = math.ceil(len(names) / COLUMNS)
    figure = Figure(figsize=(9.6, 1.75 * rows), dpi=110, layout="constrained")
    grid = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True).reshape(-1)
    for number, axes in enumerate(grid):
        if number >= len(names):
            axes.set_axis_off()
            continue
        axes.plot(track.actions[:, number], color=GRAY, linewidth=2.5, label="recorded")
        end = 0
        for moment, chunk in zip(track.moments, track.predicted[:, :, number], strict=True):
            if moment >= end:
                end = moment + len(chunk)
                steps = np.arange(moment, min(end, len(track.actions)))
                axes.plot(steps, chunk[: len(steps)], color=BLUE, linewidth=1.3)
                axes.plot(moment, chunk[0], color=BLUE, marker="o", markersize=3)
        axes.set_title(names[number], fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("control step", fontsize=8)
    return figure
