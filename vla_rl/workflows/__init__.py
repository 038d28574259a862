"""What the commands do: each puts core, simulators, world model and robot side together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.recipe.recipe import Run

# Where the work is of each kind of run that trains a policy otherwise than by RL.
TRAINING = {
    "sft": "vla_rl.workflows.collect",
    "offline": "vla_rl.workflows.offline",
    "online": "vla_rl.workflows.online",
    "hil": "vla_rl.workflows.hil",
    "rac": "vla_rl.workflows.rac",
}


def training_by(kind: str) -> Run[Any]:
    """Return what makes runs of a kind; its file alone is imported."""
    return import_module(TRAINING[kind]).RUN
