"""Where a run's wall time went, for its page."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from vla_rl.report.charts import stacked_bar

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
