"""Options of the outer loop (see vla_rl/loop.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.config import Config


class LoopConfig(Config):
    """How many real episodes a round may take, and which controls run beside it."""

    rounds: PositiveInt = Field(default=1, description="Times: real episodes, fit, trust, RL in imagination.")
    episodes: PositiveInt = Field(default=60, description="Real episodes per task and round to fit the world model on.")
    held_out: PositiveInt = Field(default=40, description="Real episodes per task and round that only trust sees.")
    first_state: NonNegativeInt = Field(default=100_000, description="First `train` state of those episodes.")
    steps_after_success: NonNegativeInt = Field(
        default=8,
        description="Control steps for which these episodes go on after success, a chunk: else the world model "
        "never sees what the rest of a chunk does.",
    )
    controls: tuple[Literal["shuffled_rewards", "continue_bc"], ...] = Field(
        default=(), description="Negative controls of the RL run, each in a process of its own beside it."
    )
