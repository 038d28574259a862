"""Evaluation of detectors on held-out episodes: ranking, alarms, how early, and whether the band keeps its promise.

A failed episode runs to the horizon, a success ends early, so a score that only counts time would rank them perfectly.
Ranking is therefore measured at a common horizon: for each task, the chunks that every episode of it lived. The
clock, a score that is the time alone, stands in every table: 0.5 there, whatever it reaches by the episodes' ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Plot
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from real_robot.failure.detector import CONFIG_FILE, DETECTORS, EPISODES_FILE, FailureDetector
from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.embeddings import EmbeddedEpisodes
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import inline
from vla_rl.evaluation.signal import weighted_auc
from vla_rl.evaluation.statistics import clustered_wilson_interval

NUM_RESAMPLES = 2000
RESULT_FILE, PAGE_FILE = "failure.json", "failure.html"
CLOCK = "clock"
SUCCESS, FAILURE, LEVEL = "#0072B2", "#D55E00", "#000000"  # Okabe & Ito's: told apart by color-blind readers too,
DASHES = {SUCCESS: "-", FAILURE: "-."}  # and in print by their dashes.
_SHOWN = 40  # Curves of each outcome drawn singly in a panel.

# Column's title -> figure. "h": at the common horizon; otherwise by each episode's own end.
COLUMNS = (
    ("ROC-AUC (h)", "roc_auc"),
    ("TPR (h)", "tpr_common"),
    ("TNR (h)", "tnr_common"),
    ("balanced acc. (h)", "balanced_accuracy_common"),
    ("TPR", "tpr"),
    ("TNR = coverage", "tnr"),
    ("balanced acc.", "balanced_accuracy"),
    ("detection time", "detection_time"),
    ("ROC-AUC by the end", "roc_auc_by_end"),
)


@dataclass(frozen=True)
class Figure:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curves:
    """One detector's scores of E episodes: score and standing float64 (count,) each, the alarm level q, its rate."""

    scores: list[np.ndarray]
    standings: list[np.ndarray]
    q: float
    alpha: float


@dataclass(frozen=True)
class FailureReport:
    """What `evaluate` found.

    Attributes:
        figures: detector -> figure's name -> Figure.
        facts: n, successes, failures, policy, horizon (task -> chunks) and how it was measured.
        curves: detector -> its scores. episodes: those measured on.
    """

    figures: dict[str, dict[str, Figure]]
    facts: dict[str, Any]
    curves: dict[str, Curves]
    episodes: EmbeddedEpisodes

    def save(self, folder: Path) -> Path:
        """Write failure.json and failure.html into a folder; returns the page."""
        figures = {kind: {name: asdict(f) for name, f in own.items()} for kind, own in self.figures.items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_text_atomic(folder / RESULT_FILE, json.dumps({"facts": self.facts, "figures": figures}, indent=1))
        return write_page(self, folder / PAGE_FILE)

    def table(self) -> Table:
        """The figures for a terminal."""
        table = Table(title=self.summary(), title_justify="left")
        table.add_column("detector")
        for title, _ in COLUMNS:
            table.add_column(title, justify="right")
        for kind, own in self.figures.items():
            table.add_row(kind, *(text(own.get(name)) for _, name in COLUMNS))
        return table

    def summary(self) -> str:
        """n and the common horizon, in a sentence."""
        facts = self.facts
        horizon = ", ".join(f"{task} {count}" for task, count in facts["horizon"].items())
        return (
            f"{facts['num_episodes']} held-out episodes, {facts['num_failures']} failures; "
            f"common horizon in chunks: {horizon}"
        )


def detectors_in(folder: Path) -> list[Path]:
    """The folders of the detectors in a run's folder.

    Raises:
        ValueError: there are none.
    """
    folders = sorted(path.parent for path in (folder / DETECTORS).glob(f"*/{CONFIG_FILE}"))
    if not folders:
        raise ValueError(f"{folder}: no detectors in it; `vla-rl failure fit RECIPE --output {folder}` makes them")
    return folders


def evaluate(folder: Path, episodes: EmbeddedEpisodes, seed: int = 0) -> FailureReport:
    """Measure every detector in a run's folder.

    Args:
        folder: of `fit`. episodes: of the same policy, from initial states that it has not used.

    Raises:
        ValueError: no detectors, episodes of another policy or already used, or no failure or no success among them.
    """
    folders = detectors_in(folder)
    _check_unused(folder, episodes)
    num_failures = int((~episodes.success).sum())
    if num_failures in (0, len(episodes)):
        raise ValueError(
            f"failure.evaluate_on: {num_failures} of {len(episodes)} episodes failed; measuring needs both failures "
            "and successes. Evaluate on more episodes, or in a harder setting"
        )
    curves = {}
    for path in folders:
        detector = FailureDetector.load(path, episodes.policy_hash)
        scores = detector.scorer.curves(episodes)
        pairs = zip(scores, episodes.instructions, strict=True)
        standings = [detector.band.standing(curve, instruction) for curve, instruction in pairs]
        curves[detector.kind] = Curves(scores, standings, detector.band.q, detector.band.alpha)
    figures = {kind: measure(own, episodes, seed) for kind, own in curves.items()}
    clock = _clock(episodes)
    ranking = measure(Curves(clock, clock, np.inf, 0.0), episodes, seed)
    figures[CLOCK] = {name: ranking[name] for name in ("roc_auc", "roc_auc_by_end")}
    facts = {
        "num_episodes": len(episodes),
        "num_failures": num_failures,
        "num_initial_states": len(set(episodes.initial_states)),
        "policy_hash": episodes.policy_hash,
        "alpha": {kind: own.alpha for kind, own in curves.items()},
        "horizon": common_horizon(episodes),
        "every": episodes.every,
        "intervals": "95 %: Wilson, corrected for clusters, for rates; bootstrap by initial state for the others",
    }
    return FailureReport(figures, facts, curves, episodes)


def _clock(episodes: EmbeddedEpisodes) -> list[np.ndarray]:
    """The time alone, in units of the task's common horizon, so that all tasks share a scale."""
    horizon = common_horizon(episodes)
    return [
        np.arange(1, count + 1) / horizon[task] for count, task in zip(episodes.counts, episodes.tasks, strict=True)
    ]


def _check_unused(folder: Path, episodes: EmbeddedEpisodes) -> None:
    used = json.loads((folder / EPISODES_FILE).read_text())
    for name, states in used.items():
        if shared := sorted(set(states) & set(episodes.initial_states)):
            raise ValueError(
                f"failure.evaluate_on: {len(shared)} initial states, such as {shared[0]}, are among those of "
                f"failure.{name}; held-out figures need others. Set another dataset, start_index or split"
            )


def common_horizon(episodes: EmbeddedEpisodes) -> dict[str, int]:
    """Task -> chunks that every episode of it lived."""
    tasks = np.asarray(episodes.tasks)
    return {task: int(episodes.counts[tasks == task].min()) for task in dict.fromkeys(episodes.tasks)}


def measure(curves: Curves, episodes: EmbeddedEpisodes, seed: int = 0) -> dict[str, Figure]:
    """The figures of one detector.

    roc_auc: of the highest standing up to the common horizon; roc_auc_by_end: up to each episode's end (length leaks).
    tpr, tnr, balanced_accuracy: alarms by each episode's own end, as a robot sees them; `_common`: by the horizon.
    false_alarms: 1 - tnr. detection_time: of failures, the share of the episode gone at the first alarm; a miss is 1.
    """
    failed = ~episodes.success
    horizon = common_horizon(episodes)
    until = np.asarray([horizon[task] for task in episodes.tasks])
    highest = np.asarray([s[:n].max() for s, n in zip(curves.standings, until, strict=True)])
    highest_by_end = np.asarray([s.max() for s in curves.standings])
    early, alarm = highest > curves.q, highest_by_end > curves.q
    time = detection_times(curves.standings, curves.q, episodes)
    states, tasks = np.asarray(episodes.initial_states), np.asarray(episodes.tasks)

    def rate(outcome: np.ndarray, among: np.ndarray) -> Figure:
        low, high = clustered_wilson_interval(outcome[among], states[among], tasks[among])
        return Figure(float(outcome[among].mean()), low, high)

    def resampled(statistic: Callable[[np.ndarray], np.ndarray]) -> Figure:
        values = statistic(_weights(states, tasks, seed))
        low, high = np.nanquantile(values, [0.025, 0.975])
        return Figure(float(statistic(np.ones((1, len(failed))))[0]), float(low), float(high))

    def balanced(alarms: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return lambda w: 0.5 * (weighted_mean(alarms, w * failed) + weighted_mean(~alarms, w * ~failed))

    coverage = rate(~alarm, ~failed)
    return {
        "roc_auc": resampled(lambda w: weighted_auc(highest, failed, w)),
        "tpr_common": rate(early, failed),
        "tnr_common": rate(~early, ~failed),
        "balanced_accuracy_common": resampled(balanced(early)),
        "tpr": rate(alarm, failed),
        "tnr": coverage,
        "false_alarms": Figure(1 - coverage.value, 1 - coverage.high, 1 - coverage.low),
        "balanced_accuracy": resampled(balanced(alarm)),
        "detection_time": resampled(lambda w: weighted_mean(time, w * failed)),
        "roc_auc_by_end": resampled(lambda w: weighted_auc(highest_by_end, failed, w)),
    }


def detection_times(standings: list[np.ndarray], q: float, episodes: EmbeddedEpisodes) -> np.ndarray:
    """Share of each episode that had gone by its first alarm, float64 (E,); 1 without one."""
    times = np.ones(len(standings))
    for number, standing in enumerate(standings):
        if len(above := np.flatnonzero(standing > q)):
            times[number] = min(above[0] * episodes.every / episodes.num_steps[number], 1.0)
    return times


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means float64 (R,) of values (E,) under weights (R, E); NaN where they are all 0."""
    total = weights.sum(1)
    return weights @ values.astype(np.float64) / np.where(total > 0, total, np.nan)


def _weights(states: np.ndarray, tasks: np.ndarray, seed: int) -> np.ndarray:
    """float64 (R, E): how often each episode is drawn when initial states are resampled within each task."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((NUM_RESAMPLES, len(states)))
    for task in np.unique(tasks):
        inside = np.flatnonzero(tasks == task)
        names, place = np.unique(states[inside], return_inverse=True)
        drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=NUM_RESAMPLES)
        weights[:, inside] = drawn[:, place]
    return weights


def text(figure: Figure | None) -> str:
    """ "0.93 [0.91, 0.95]", or a dash where there is none."""
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def write_page(report: FailureReport, path: Path) -> Path:
    """Write the page; its picture is inside it, nothing is fetched."""
    content = {
        "summary": report.summary(),
        "policy": report.facts["policy_hash"][:12],
        "titles": [title for title, _ in COLUMNS],
        "rows": [(kind, [text(own.get(name)) for _, name in COLUMNS]) for kind, own in report.figures.items()],
        "alpha": ", ".join(f"{kind} {value:g}" for kind, value in report.facts["alpha"].items()),
        "intervals": report.facts["intervals"],
        "picture": inline(draw_scores(report), "Scores over time, successes and failures, by detector and task"),
        "num_tasks": len(set(report.episodes.tasks)),
    }
    write_text_atomic(path, page_template(__package__ or "", "failure_page.html").render(content))
    return path


def draw_scores(report: FailureReport) -> Plot:
    """The chart: one row a detector, one column a task."""
    tasks = list(dict.fromkeys(report.episodes.tasks))
    figure = Plot(figsize=(2.6 * len(tasks) + 0.6, 2.1 * len(report.curves) + 0.5), dpi=110, layout="constrained")
    axes = figure.subplots(len(report.curves), len(tasks), squeeze=False)
    for row, (kind, curves) in zip(axes, report.curves.items(), strict=True):
        for panel, task in zip(row, tasks, strict=True):
            _draw(panel, curves, report, task)
            panel.tick_params(labelsize=7)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        row[0].set_ylabel(kind, fontsize=9)
    for panel, task in zip(axes[0], tasks, strict=True):
        panel.set_title(task, fontsize=9)
    figure.supxlabel("chunk of the episode", fontsize=9)
    figure.supylabel("score (modulations)", fontsize=9)
    handles = [axes[0, 0].plot([], [], color=color, linestyle=DASHES[color])[0] for color in (SUCCESS, FAILURE)]
    handles.append(axes[0, 0].plot([], [], color=LEVEL, linestyle="--", linewidth=0.9)[0])
    names = ["success", "failure", "alarm above"]
    figure.legend(handles, names, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return figure


def _draw(panel: Axes, curves: Curves, report: FailureReport, task: str) -> None:
    inside = np.asarray(report.episodes.tasks) == task
    ceiling = 4 * max(abs(curves.q), 1.0)
    for color, of in ((SUCCESS, report.episodes.success), (FAILURE, ~report.episodes.success)):
        own = [curves.standings[i] for i in np.flatnonzero(inside & of)]
        if not own:
            continue
        for curve in own[:_SHOWN]:
            panel.plot(np.minimum(curve, ceiling), color=color, alpha=0.12, linewidth=0.7)
        table = np.full((len(own), max(map(len, own))), np.nan)
        for line, curve in zip(table, own, strict=True):
            line[: len(curve)] = np.minimum(curve, ceiling)
        low, middle, high = np.nanquantile(table, [0.1, 0.5, 0.9], axis=0)
        at = np.arange(len(middle))
        panel.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        panel.plot(at, middle, color=color, linestyle=DASHES[color], linewidth=1.6)
    panel.axhline(curves.q, color=LEVEL, linestyle="--", linewidth=0.9)
