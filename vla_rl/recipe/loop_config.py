"""Options of the closed loop (see vla_rl/workflows/loop/closed_loop.py)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.config import Config


class LoopConfig(Config):
    """How many real episodes a round may take, and which controls run beside it."""

    rounds: PositiveInt = Field(default=1, description="Times: real episodes, fit, trust, RL in imagination.")
    real_episodes: PositiveInt | None = Field(
        default=None,
        description="Real episodes that all rounds together may take, the gate's and validation's included (not those "
        "of the final evaluation); null: as many as the rounds ask for.",
    )
    episodes: PositiveInt = Field(default=60, description="Real episodes per task and round to fit the world model on.")
    held_out: PositiveInt = Field(
        default=40, description="Real episodes per task and round for trust; later rounds learn from them."
    )
    held_out_group: PositiveInt = Field(
        default=1,
        description="Held-out episodes from each initial state, see collect.group_size; fewer states make wider "
        "intervals of the other figures.",
    )
    first_state: NonNegativeInt = Field(default=100_000, description="First `train` state of those episodes.")
    steps_after_success: NonNegativeInt = Field(
        default=8,
        description="Control steps for which these episodes go on after success, a chunk: else the world model "
        "never sees what the rest of a chunk does.",
    )
    every_frame: bool = Field(
        default=True,
        description="Record what is seen after each control step of these episodes, see collect.every_frame; false "
        "where rendering is slow.",
    )
    save_states: bool = Field(
        default=True,
        description="With sampling.keyframe_share: keep the simulator's states with the episodes, for keyframes at "
        "contacts and exact restarts. false for a robot, which has none.",
    )
    refit: bool = Field(
        default=True,
        description="Co-evolution: each round fits the world model again, on the new policy's episodes too. false: the "
        "later rounds stay in the first round's (an ablation).",
    )
    old_weight: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="A round's episodes, rollouts and held-out ones together, count this much in the next refit, "
        "relative to the newest rollouts' 1; its square in the one after, and so on.",
    )
    controls: tuple[Literal["shuffled_rewards", "continue_bc", "online_grpo"], ...] = Field(
        default=(),
        description="shuffled_rewards, continue_bc: negative controls of RL, each in a process of its own beside it. "
        "online_grpo: at the end, the recipe's RL in the real simulator with as many real episodes as the loop took.",
    )

    @property
    def negative_controls(self) -> tuple[str, ...]:
        """Those that run beside RL, in the same imagination."""
        return tuple(name for name in self.controls if name != "online_grpo")
