"""The execution section of a robot's contract: how chunks of actions become a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from real_robot.finite_config import FiniteConfig
from vla_rl.config import Config, ConfigError
from vla_rl.types import PrefixSchedule


class RealTimeChunking(Config):
    """Real-time chunking (Black et al. 2025, arXiv 2506.07339): the policy goes on from the actions under way.

    Options that are null are the checkpoint's own, else LeRobot's defaults.
    """

    execution_horizon: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Actions under way that the new chunk minds; LeRobot's default is 10.",
    )
    max_guidance_weight: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Bound on the pull towards the actions under way; LeRobot's default is 10.",
    )
    prefix_attention_schedule: PrefixSchedule | None = Field(
        default=None,
        description="How the actions under way lose weight after those that will be over: LINEAR (LeRobot's default), "
        "EXP, ONES, ZEROS.",
    )
    num_delays: int = Field(
        default=10, ge=1, le=1000, description="The next chunk is expected as late as the latest of so many last ones."
    )

    @property
    def guidance(self) -> dict[str, Any]:
        """The options that were given."""
        return self.model_dump(exclude={"num_delays"}, exclude_none=True)


class ExecutionConfig(FiniteConfig):
    """How chunks become a stream of actions."""

    control_hz: float = Field(gt=0, le=1000, description="Control steps per second.")
    kind: Literal["position", "velocity"] = Field(
        default="position",
        description="What a pause leaves behind: position, the last action; velocity (and deltas), standstill.",
    )
    refill_at: int | None = Field(
        default=None,
        ge=0,
        description="Ask for a chunk when so few actions are left; null: whenever the last is there.",
    )
    ensemble: float | None = Field(
        default=None,
        ge=0,
        description="Average all chunks that cover a step, weight exp(-ensemble i), i = 0 the oldest.",
    )
    blend_steps: int = Field(default=4, ge=0, description="Steps over which a change of source fades; 0: at once.")
    unblended: tuple[int, ...] = Field(default=(), description="Numbers of the action that never blend (grippers).")
    max_age: float = Field(
        default=2.0, gt=0, description="Seconds: a chunk whose observation is older when it arrives is thrown away."
    )
    infer_timeout: float = Field(
        default=2.0,
        gt=0,
        le=600,
        description="Seconds that the policy server may take to answer; then it is asked anew.",
    )
    retry_after: float = Field(default=0.2, ge=0, description="Seconds to wait after a failed inference.")
    max_blind: float = Field(
        default=0.3,
        gt=0,
        le=600,
        description="Seconds that a chunk is played on after the policy server's last sign of life. A server that "
        "answers no ping while it computes needs more than its inference takes.",
    )
    real_time_chunking: RealTimeChunking | None = Field(
        default=None,
        description="Give the policy the actions under way; true: with its own options. For flow policies (SmolVLA, "
        "pi0, pi0.5).",
    )

    @field_validator("real_time_chunking", mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_real_time_chunking(self) -> ExecutionConfig:
        if self.real_time_chunking is not None:
            if self.ensemble is not None:
                raise ConfigError("execution.ensemble: averages chunks that real_time_chunking makes agree; give one")
            if self.refill_at == 0:
                raise ConfigError(
                    "execution.refill_at: 0 asks when nothing is under way any more, so real_time_chunking has nothing "
                    "to go on from; leave it out (null), or give as many steps as inference takes, and some more"
                )
        return self
