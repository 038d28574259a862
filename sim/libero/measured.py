"""How often the scripted expert solves each task, as measured, and so where it is offered.

`python -m sim.libero.measure --update` writes the table.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

TABLE = Path(__file__).with_name("measured_experts.json")
OFFERED_FROM = 0.6  # share of the measured episodes that the expert must solve to be offered


@functools.cache
def measured_experts() -> dict[str, dict[str, tuple[int, int]]]:
    """suite -> task -> (solved, of) for every task whose goal the expert knows."""
    values = json.loads(TABLE.read_text())
    return {suite: {task: (solved, of) for task, (solved, of) in tasks.items()} for suite, tasks in values.items()}


def is_offered(suite: str, task: str) -> bool:
    """Whether the expert was measured on the task and solves enough of it."""
    solved, of = measured_experts().get(suite, {}).get(task, (0, 1))
    return solved >= OFFERED_FROM * of


def why_not_offered(suite: str, task: str) -> str:
    """Why the expert is not offered for a task; empty if it is."""
    if is_offered(suite, task):
        return ""
    if task not in measured_experts().get(suite, {}):
        return (
            f"there is no scripted expert for {suite}'s {task}: it puts one object on or in something, and is offered "
            "where it was measured"
        )
    solved, of = measured_experts()[suite][task]
    return (
        f"the scripted expert solves {solved} of {of} episodes of {suite}'s {task}; it is offered from "
        f"{OFFERED_FROM:.0%} on (docs/libero.md lists the tasks)"
    )
