"""Facts about LIBERO's suites that need no simulator: horizons, cameras, where the scripted expert is offered."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sim.base import FixedCamera
from vla_rl.common.tables import short_names

# suite -> control steps before truncation, the wait not counted (OpenVLA, experiments/robot/libero).
HORIZONS: dict[str, int] = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
# suite -> what papers call it, in their order. libero_90 mostly trains; where it is tested, it stands apart.
TITLES: dict[str, str] = {
    "libero_spatial": "Spatial",
    "libero_object": "Object",
    "libero_goal": "Goal",
    "libero_10": "Long",
    "libero_90": "90",
}
# our camera name -> LIBERO's
CAMERAS: dict[str, str] = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
# suite -> its agentview, where all its tasks have the same; OpenVLA's images are mirrored.
VIEWS: dict[str, FixedCamera] = {
    suite: FixedCamera(position, right=(0, 1, 0), up=up, fovy=45, mirrored=True)
    for suite, position, up in (
        ("libero_spatial", (0.65861, 0, 1.61035), (-0.62827, 0, 0.77800)),
        ("libero_object", (0.89658, 0, 0.65), (-0.52877, 0, 0.84877)),
        ("libero_goal", (0.65861, 0, 1.61035), (-0.62827, 0, 0.77800)),
    )
}
NUM_OFFICIAL_STATES = 50
CONTROL_HZ = 20.0
EXPERT_TABLE = Path(__file__).with_name("measured_experts.json")  # `scripts/libero_experts.py --update` writes it.
OFFERED_FROM = 0.6  # share of the measured episodes that the expert must solve to be offered
_SCENE = re.compile(r"([A-Z_]+)_SCENE(\d+)_")


def task_labels(tasks: Sequence[str]) -> dict[str, str]:
    """Task -> its number in the suite and a short name ("3 on cookie box"), given all of a suite's tasks in order.

    A scene ("KITCHEN_SCENE10") is said ("K10") in a suite where one sentence is the task of several.
    """
    named = [_SCENE.sub("", task) for task in tasks]
    if len(set(named)) < len(named):
        named = [_SCENE.sub(_short_scene, task) for task in tasks]
    return {task: f"{number} {name}" for number, (task, name) in enumerate(zip(tasks, short_names(named), strict=True))}


def _short_scene(found: re.Match[str]) -> str:
    return "".join(word[0] for word in found[1].split("_")) + found[2] + "_"


# What `paraphrases` says otherwise, longer phrases first.
_OTHER_WORDS = (
    ("pick up", "grab"), ("turn on", "switch on"), ("turn off", "switch off"), ("frying pan", "skillet"),
    ("moka pots", "coffee pots"), ("moka pot", "coffee pot"), ("place", "set"), ("put", "set"), ("open", "pull open"),
    ("close", "shut"), ("push", "slide"), ("stack", "pile"), ("cabinet", "cupboard"), ("mug", "cup"),
    ("caddy", "desk organizer"), ("stove", "cooker"), ("cookie box", "box of cookies"),
)  # fmt: skip


def paraphrases(instruction: str) -> tuple[str, str, str]:
    """The same in other words: a polite frame; other words; both in a longer sentence."""
    said = instruction
    for word, other in _OTHER_WORDS:
        said = re.sub(rf"\b{word}\b", other, said)
    return f"please {instruction}", said, f"your next job, whenever you are ready, is to {said}, thank you"


def nearest_tasks(task: str, known: Iterable[str]) -> list[str]:
    """The three names that share most words with `task`, then most letters."""
    words = set(task.lower().replace("_", " ").split())

    def likeness(name: str) -> tuple[int, float]:
        return len(words & set(name.lower().split("_"))), difflib.SequenceMatcher(None, task, name).ratio()

    return sorted(known, key=likeness, reverse=True)[:3]


@functools.cache
def measured_experts() -> dict[str, dict[str, tuple[int, int]]]:
    """suite -> task -> (solved, of) for every task whose goal the expert knows."""
    values = json.loads(EXPERT_TABLE.read_text())
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
