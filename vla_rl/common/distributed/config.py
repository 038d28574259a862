"""Options of runs of several processes. Imports no torch."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from vla_rl.config import Config


class DistributedConfig(Config):
    """How long processes that train together wait for one another."""

    timeout_minutes: PositiveFloat = Field(
        default=30.0,
        description="A process that others wait for, and in which no step of the simulator or pass of the policy has "
        "ended for so long, counts as hung: the run ends and names it. Give more than saving a checkpoint takes.",
    )
