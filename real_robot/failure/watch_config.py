"""Options of the failure detector beside a robot: the `failure` section of its contract."""

from __future__ import annotations

from pydantic import Field

from real_robot.finite_config import FiniteConfig


class WatchConfig(FiniteConfig):
    """How a robot heeds its failure detector."""

    quiet: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="A rewind ends where the score has fallen to this share of the way from where successes are on "
        "average (the band's center; 0 for a constant band) to the threshold.",
    )
    patience: float = Field(
        default=2.0, gt=0, description="Seconds after which a detector that has not answered is an alarm."
    )
