"""Options of trust: how it is measured, and what must be reached before RL in imagination may start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, model_validator

from vla_rl.config import Config, ConfigError
from vla_rl.evaluation.statistics import Figure
from world_model.trust.figures import MAX_AUC_FRAMES, figure_info


class MeasureConfig(Config):
    """How trust is measured."""

    inverse_updates: NonNegativeInt = Field(
        default=300, description="Its updates, of 64 pairs; 0 leaves it out (its figures are then not measured)."
    )
    auc_frames: int = Field(
        default=3,
        ge=0,
        le=MAX_AUC_FRAMES,
        description="AUC is measured this many frames after a real one, and at each number below: how far a branch "
        "from a real frame may imagine. 0 leaves it out; each frame costs as much as imagining the episodes once.",
    )
    perceptual_weights: Path | None = Field(
        default=None,
        description="Folder with weights of perceptual distances, which are never downloaded: for LPIPS torchvision's "
        "alexnet-owt-7be5be79.pth and alex.pth (weights/v0.1 of the lpips package), for the Fréchet video distance "
        "torchvision's r3d_18-b3b3357e.pth.",
    )


class Requirement(Config):
    """What one trust figure must reach. Its interval must reach it: the upper end `at_most`, the lower end `above`."""

    at_most: float | None = Field(default=None, description="The figure's upper 95 % limit may be this at most.")
    above: float | None = Field(default=None, description="The figure's lower 95 % limit must lie above this.")
    limit: Literal["interval", "value"] = Field(
        default="interval", description="value: judge the figure itself. Figures without an interval always are."
    )
    otherwise: Literal["refuse", "refuse_if_measured", "warn"] = Field(
        default="refuse",
        description="What RL does where it is not reached, or not measured; refuse_if_measured: then it warns.",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> Requirement:
        if (self.at_most is None) == (self.above is None):
            raise ConfigError("env.trust.require: a requirement needs either at_most or above, and not both")
        return self

    def judged(self, name: str, measured: Figure | None) -> float:
        """The number that is held against the bound; NaN where the figure or its interval was not measured."""
        if measured is None:
            return math.nan
        if self.limit == "value" or not figure_info(name).interval:
            return measured.value
        return measured.low if self.at_most is None else measured.high

    def reached(self, number: float) -> bool:
        """Whether a judged number is good enough; NaN never is."""
        return number > self.above if self.above is not None else number <= (self.at_most or 0.0)

    def bound_text(self) -> str:
        """For people: "at most 0.1" or "above 0"."""
        return f"above {self.above:g}" if self.above is not None else f"at most {self.at_most:g}"


# What refuses tells a world model in which nothing can be learned: no order of successes and failures, deaf to actions,
# worse than a still image. Which figure predicts how much is gained in a live one is not known: over twelve world
# models the correlations rest on the two dead ones (docs/results_world_model.md, "Which trust figure predicts the
# gain").
DEFAULT_REQUIRE: dict[str, dict[str, Any]] = {
    "auc": {"above": 0.5},
    "informedness": {"above": 0.1},
    "action_gain": {"above": 1.2},
    "skill": {"above": 0.0},
    "trust_horizon": {"above": 0.0},
    "acting_gap": {"at_most": 0.20, "limit": "value", "otherwise": "refuse_if_measured"},
    "false_success": {"at_most": 0.10, "otherwise": "warn"},
    "calibration_error": {"at_most": 0.05, "limit": "value", "otherwise": "warn"},
    "outcome_flips": {"at_most": 0.30, "otherwise": "warn"},
    "pearson": {"above": 0.9, "limit": "value", "otherwise": "warn"},
    "policy_gap": {"at_most": 0.10, "limit": "value", "otherwise": "warn"},
}


def _over_defaults(value: Any) -> Any:
    """A recipe's requirements on top of the default ones: a bound replaces a bound, null removes the requirement."""
    if not isinstance(value, dict):
        return value
    merged: dict[str, Any] = {name: dict(default) for name, default in DEFAULT_REQUIRE.items()}
    for name, given in value.items():
        if given is None:
            merged.pop(name, None)
        elif isinstance(given, dict):
            kept = merged.get(name, {})
            if {"at_most", "above"} & set(given):
                kept = {key: bound for key, bound in kept.items() if key not in ("at_most", "above")}
            merged[name] = {**kept, **given}
        else:
            merged[name] = given
    return merged


class TrustConfig(Config):
    """What a world model must have shown before a policy is trained in it."""

    report: Path | None = Field(
        default=None, description="The trust.json to go by; None: the one in the world model's folder."
    )
    require: Annotated[dict[str, Requirement], BeforeValidator(_over_defaults)] = Field(
        default={},
        description="Figure -> bound. What is given is laid over the defaults: auc above 0.5, informedness above 0.1, "
        "action_gain above 1.2, skill above 0, trust_horizon above 0, acting_gap at_most .20 (the value, if measured) "
        "refuse; false_success at_most .10, calibration_error at_most .05, outcome_flips at_most .30, pearson above "
        ".9, policy_gap at_most .10 warn; informedness warns where env.imagination.reward needs no threshold. null "
        "removes one.",
    )
    ignore: bool = Field(
        default=False, description="Train all the same where trust is missing or fails; the run's report then says so."
    )

    @model_validator(mode="after")
    def _known_figures(self) -> TrustConfig:
        for name in self.require:
            try:
                figure_info(name)
            except ValueError as error:
                raise ConfigError(f"env.trust.require: {error}") from None
        return self
