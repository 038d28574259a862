"""The last line of a command: what to type next, with the paths that it wrote."""

from __future__ import annotations

import shlex

# Kind of run -> how a recipe of it is started; of those that are not here, by `train`.
STARTED_BY = {
    "eval": "eval",
    "sft": "sft",
    "loop": "loop",
    "fit": "world-model fit",
    "reward": "reward fit",
    "failure": "failure fit",
    "hub": "hub measure",
}


def next_command(*words: object, what: str = "") -> str:
    """Return the line. `what`: what the command is for, where it alone does not tell."""
    return f"next{what and ', '}{what}: vla-rl {shlex.join(map(str, words))}"
