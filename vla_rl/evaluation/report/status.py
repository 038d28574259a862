"""Status text of a run, from its folder."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from vla_rl.common.progress import read_status
from vla_rl.common.run_folder import RunFolder, read_metrics
from vla_rl.evaluation.report.charts import stacked_bar
from vla_rl.evaluation.results import unfinished

STAGES = ("simulation", "inference", "forward_backward", "optimizer", "other")


def status_lines(run: RunFolder) -> list[str]:
    """Say the step that a run is at, how its last iteration went, and what its rollouts lost and redid in all.

    Of a run without iterations, such as a fit, what it logged last.
    """
    status, lines = read_status(run.status), [f"run: {run.path}"]
    if status is not None:
        lines.append(status.text() or f"This run is finished. As of {status.updated.replace('T', ' ')}.")
        if status.is_running and status.dashboard:
            lines.append(f"machines: {status.dashboard} (Ray's dashboard)")
    metrics = read_metrics(run.metrics) if run.metrics.is_file() else []
    evaluations = _evaluation_lines(run)
    logged = progress_lines(metrics) or _last_logged(run, metrics)
    return lines + (logged + evaluations or ["No iteration has ended yet."])


def _evaluation_lines(run: RunFolder) -> list[str]:
    """Say what the run has evaluated, and how far it is with what it has not."""
    ended = [f"evaluation {file.stem}: finished" for file in sorted(run.evaluations.glob("*.json"))]
    begun = unfinished(run.evaluations) | unfinished(run.perturbed)
    return ended + [
        f"evaluation {name}: {done:,} of {total:,} episodes have ended" for name, (done, total) in begun.items()
    ]


def _last_logged(run: RunFolder, metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """What a run without iterations of RL, such as a fit or cloning, logged last; nothing where it has not yet."""
    if not metrics:
        return []
    at = datetime.fromtimestamp(run.metrics.stat().st_mtime).isoformat(" ", timespec="seconds")
    values = [f"{name} {value:.3g}" for name, value in metrics[-1].items() if name != "step"]
    return [f"logged last, at {at}: step {metrics[-1]['step']:.0f}, {', '.join(values)}"]


def progress_lines(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """Say how the last iteration went, and what its rollouts lost and redid in all; nothing where none has ended."""
    rows = [row for row in metrics if {"train/episodes", "train/success", "time/total"} <= row.keys()]
    if not rows:
        return []
    last = rows[-1]
    lines = [
        f"iteration {len(rows)}: {last['train/episodes']:.0f} episodes, {100 * last['train/success']:.0f} % solved, "
        f"{last['train/episodes'] / last['time/total']:.2f} episodes/s with the update"
    ]
    # A source that works ahead acts meanwhile: no stage of the training process's own.
    stages = [stage for stage in STAGES if last.get(f"time/{stage}", 0.0) > 0]
    lines.append("time: " + ", ".join(_share(last, stage) for stage in stages))
    return lines + _rollout_lines(rows)


def _share(row: Mapping[str, float], stage: str) -> str:
    return f"{stage.replace('_', ' ')} {100 * row[f'time/{stage}'] / row['time/total']:.0f} %"


def _rollout_lines(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """What a source of many processes logged; nothing of a run whose episodes run in its own process."""
    last = {name.removeprefix("rollout/"): value for name, value in rows[-1].items() if name.startswith("rollout/")}
    if "stood_s" not in last:
        return []
    lines = []
    if "envs_busy" in last:
        envs, policy = 100 * last["envs_busy"], 100 * last["policy_busy"]
        lines.append(f"busy: environments {envs:.0f} % of the time, the policy in the rollouts {policy:.0f} %")
    if "lag" in last:
        busy = f"{last['running']:.0f} episodes running, {last['waiting']:.0f} waiting for an environment"
        ahead = f"{last['groups_under_way']:.0f} groups under way, {last['lag']:.2f} updates old on average"
        lines.append(
            f"rollouts: {last['hosts']:.0f} hosts, {busy}, {last['asking']:.0f} for the policy; {ahead}, at most "
            f"{last['lag_max']:.0f}"
        )
    names = ("hosts_lost", "workers_lost", "moved", "redone", "groups_dropped", "stood_s")
    hosts, workers, moved, redone, dropped, stood = (sum(r.get(f"rollout/{n}", 0.0) for r in rows) for n in names)
    lines.append(
        f"lost in all: {hosts:.0f} hosts, {workers:.0f} workers; {moved:.0f} episodes went on elsewhere, {redone:.0f} "
        f"were begun again, {dropped:.0f} groups were too old; stood for {stood:.0f} s"
    )
    return lines


STAGE_NAMES = {"simulation": "simulation and rendering", "inference": "policy forward, rollout"}


def timing(metrics: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """Seconds by stage, summed over the iterations, as a lead and a chart; None where none were logged."""
    seconds: dict[str, float] = defaultdict(float)
    totals = []
    for row in metrics:
        for key, value in row.items():
            stage = key.removeprefix("time/")
            if stage == key or stage.endswith(("fraction", "per_second")) or not math.isfinite(value):
                continue
            if stage == "total":
                totals.append(value)
            else:
                seconds[stage] += value
    seconds = defaultdict(float, {stage: value for stage, value in seconds.items() if value > 0})
    if not seconds:
        return None
    stages = sorted(seconds, key=lambda stage: (stage == "other", -seconds[stage]))
    named = {STAGE_NAMES.get(stage, stage.replace("_", " ")): seconds[stage] for stage in stages}
    total = sum(totals) or sum(seconds.values())
    lead = f"{_duration(total)} in {len(totals)} iterations, {total / len(totals):.1f} s each." if totals else ""
    return {"lead": lead, "chart": Markup(stacked_bar("Share of wall time", named))}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
