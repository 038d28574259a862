"""Options of `vla-rl world-model fit` and `eval`: a recipe's `world_model` section."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, SerializeAsAny, model_validator

from vla_rl.config import ConfigError, component
from vla_rl.data.config import DatasetConfig, MaybeDatasets
from vla_rl.interfaces import WorldModelFitConfig
from vla_rl.training.config import OptimConfig
from world_model.config import (
    FitStage,
    KeyframeConfig,
    ObjectsStageConfig,
    StageConfig,
    StyleConfig,
    WorldModelConfig,
)
from world_model.data.clips import ClipSourceConfig
from world_model.model.dynamics import TransformerConfig
from world_model.model.wan import WanConfig
from world_model.trust.config import MeasureConfig


class FitConfig(WorldModelFitConfig):
    """Data, start, and the stages, one after another."""

    kind: Literal["latent_video"] = "latent_video"
    model: WorldModelConfig | None = Field(
        default=None, description="What it is made of; null takes it from start_from, or the defaults."
    )
    datasets: MaybeDatasets = Field(default=(), description="LeRobotDatasets to learn from.")
    success_datasets: MaybeDatasets = Field(
        default=(),
        description="What the success networks learn from; empty: `datasets`. Give them episodes that the dynamics has "
        "not learned from, since it imagines those that it has too well.",
    )
    start_from: str | None = Field(
        default=None, description="A world model to fine-tune: a folder, or pretrained:NAME; null starts from scratch."
    )
    fresh_success: bool = Field(
        default=False, description="Start the success networks from random weights, whatever start_from has."
    )
    calibrate_on: MaybeDatasets = Field(
        default=(), description="The policy's own episodes, for the threshold; empty holds some of `datasets` out."
    )
    holdout: float = Field(
        default=0.15,
        gt=0,
        lt=1,
        description="Share of the episodes held out for the threshold, with all others of their initial states.",
    )
    holdout_from: Literal["all", "last"] = Field(
        default="all",
        description="Of which of `datasets`; last: of the last alone, as in a loop, whatever is said here.",
    )
    cross_fit: int = Field(
        default=0,
        ge=0,
        le=10,
        description="Hold nothing out: parts are fitted once without each of so many folds of those episodes, which "
        "they then score, threshold and probability are chosen on these scores, and the parts are fitted on all. "
        "For few episodes (2 at some 150); a fit takes 1 + cross_fit times as long. 0: `holdout` instead.",
    )
    temperature: float | None = Field(
        default=None, ge=0, le=1, description="Of imagining, see model.dynamics; null takes the model's."
    )
    sampling_steps: PositiveInt | None = Field(
        default=None, le=50, description="Of the flow when imagining, see model.dynamics; null takes the model's."
    )
    clip_frames: PositiveInt = Field(
        default=8,
        ge=2,
        description="T, frames of a clip, the reference included. `model.dynamics.memory` may be T - 2 at most.",
    )
    cuts: PositiveInt = Field(
        default=1,
        description="Ways of cutting an episode into frames that the dynamics learns from.",
    )
    autoencoder: StageConfig = Field(default_factory=StageConfig)
    dynamics: StageConfig = Field(default_factory=StageConfig)
    success: StageConfig = Field(default_factory=StageConfig)
    value: StageConfig = Field(
        default_factory=lambda: StageConfig(steps=0, batch_size=64, optim=OptimConfig(lr=3e-4), ema_decay=0.98),
        description="The value, which says whether an episode will succeed: its network, learned from the outcomes of "
        "success_datasets or `datasets`; 0 steps: the world model has none, or keeps that of start_from.",
    )
    objects: ObjectsStageConfig = Field(
        default_factory=ObjectsStageConfig,
        description="The objects part, which rolls poses with the actions and says whether an episode succeeds; it "
        "learns from those of `datasets` that were collected with collect.objects. 0 steps: as in start_from.",
    )
    inverse: StageConfig = Field(
        default_factory=lambda: StageConfig(steps=0, batch_size=32),
        description="The inverse dynamics, which reads actions off pairs of frames for env.imagination.action_penalty; "
        "it learns from the real frames of `datasets`. 0 steps: the world model has none, or keeps that of start_from.",
    )
    clip_source: Annotated[SerializeAsAny[ClipSourceConfig] | None, component("clip_source")] = Field(
        default=None, description="What the dynamics learns from, chosen by kind; null: clips of real frames."
    )
    style: StyleConfig = Field(
        default_factory=StyleConfig,
        description="Images and clips in other styles, for every stage but objects and inverse; those of "
        "success_datasets stay as recorded.",
    )
    imagined_share: float = Field(
        default=0.5, ge=0, le=1, description="Of the success heads' examples, those on frames that the model imagined."
    )
    imagined_episodes: PositiveInt = Field(
        default=2000, description="Imagined for the success heads, drawn in proportion to the datasets' weights."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Of computing while fitting; auto: bf16 where the hardware multiplies it natively."
    )
    max_false_success: float = Field(
        default=0.1, gt=0, lt=1, description="The threshold keeps the false-success rate's upper 95 % limit below this."
    )
    min_failures: PositiveInt = Field(
        default=40, description="Held-out failed episodes needed to calibrate the threshold."
    )
    weights: Literal["float32", "float16"] = Field(
        default="float32", description="How the fitted world model is stored; float16 takes half the room."
    )
    save_every: PositiveInt = Field(default=200, description="Updates between checkpoints of a stage.")
    measure: MeasureConfig = Field(default_factory=MeasureConfig)
    keyframes: KeyframeConfig = Field(
        default_factory=KeyframeConfig, description="Moments that `keyframes` mines for RL to start from."
    )
    compare_episodes: PositiveInt = Field(
        default=20, description="Real and imagined episodes per task for each policy that `eval` compares."
    )

    @model_validator(mode="after")
    def _resumes_exactly(self) -> FitConfig:
        if self.clip_source is not None:
            self.clip_source.check(self.save_every)
        return self

    @model_validator(mode="after")
    def _autoencoder_has_weights(self) -> FitConfig:
        if self.model and self.model.autoencoder.pretrained is not None and not self.start_from:
            raise ConfigError(
                "world_model.model.autoencoder.pretrained: is what a fitted world model says of its own, and names no "
                "weights; give path, the folder of the autoencoder, or start_from"
            )
        return self

    @model_validator(mode="after")
    def _clips_fill_the_memory(self) -> FitConfig:
        dynamics = self.model.dynamics if self.model else None
        if not isinstance(dynamics, TransformerConfig | WanConfig) or self.start_from or not self.dynamics.steps:
            return self
        if dynamics.memory > self.clip_frames - 2:
            raise ConfigError(
                f"world_model.model.dynamics.memory: got {dynamics.memory} with clip_frames {self.clip_frames}. Before "
                f"a clip's last frame are its reference and at most {self.clip_frames - 2} more, so imagining would "
                f"remember more than the fit ever shows; set memory to at most clip_frames - 2, or "
                f"world_model.clip_frames to at least {dynamics.memory + 2}"
            )
        return self

    @model_validator(mode="after")
    def _can_cross_fit(self) -> FitConfig:
        if self.cross_fit == 1:
            raise ConfigError(
                "world_model.cross_fit: got 1; a fold needs others to fit on, set it to 2 or more, or to 0"
            )
        others = {
            "calibrate_on": bool(self.calibrate_on),
            "autoencoder.steps": self.autoencoder.steps > 0,
            "value.steps": self.value.steps > 0,
            "objects.steps": self.objects.steps > 0,
            "inverse.steps": self.inverse.steps > 0,
        }
        if self.cross_fit and any(others.values()):
            found = " and ".join(name for name, used in others.items() if used)
            raise ConfigError(
                f"world_model.cross_fit: got {self.cross_fit} with {found}, which would be fitted or chosen on "
                f"episodes that judge it; leave {found} out, or set cross_fit=0"
            )
        return self

    def without_learning(self) -> FitConfig:
        """The same, of which no stage learns: such a fit chooses thresholds and probabilities anew."""
        stages = {name: value for name, value in self if isinstance(value, FitStage)}
        unlearned = {name: stage.model_copy(update={"steps": 0}) for name, stage in stages.items()}
        kept = {"fresh_success": False, "cross_fit": 0, "sampling_steps": None, "temperature": None}
        return self.model_copy(update=unlearned | kept)

    @property
    def needs_structure(self) -> bool:
        """Whether episodes to fit on must be recorded with `collect.structure`."""
        return self.style.share > 0

    @property
    def needs_objects(self) -> bool:
        """Whether episodes to fit on must be recorded with `collect.objects`."""
        return self.objects.steps > 0

    def dataset(self, path: Path) -> DatasetConfig:
        """Return the options of the dataset at `path`: those given in `datasets`, or the defaults."""
        known = [one for one in self.datasets if Path(one.path) == path]
        return known[0] if known else DatasetConfig(path=str(path))
