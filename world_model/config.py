"""Options of a world model and of its parts, of the stages of its fit, of imagining with it, and of keyframes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from vla_rl.config import Config, ConfigError, build_component, component
from vla_rl.training.config import AveragedConfig, OptimConfig, TrainerConfig
from world_model.interfaces import DynamicsConfig


class AutoencoderConfig(Config):
    """Images to latents: a folder with one of diffusers' autoencoders, or a small one trained here."""

    path: Path | None = Field(
        default=None,
        description="Folder of a diffusers AutoencoderTiny, AutoencoderKL, AutoencoderDC or AutoencoderKLWan. "
        "None trains one from scratch, of AutoencoderTiny's blocks in the shape below.",
    )
    pretrained: dict[str, Any] | None = Field(
        default=None,
        description="In place of path: that folder's config.json. A fitted world model has it, so that its own folder "
        "holds all it needs.",
    )
    channels: tuple[PositiveInt, ...] = Field(
        default=(16, 32, 64), description="Of each level, finest first; each level but the first halves the image."
    )
    blocks: tuple[PositiveInt, ...] = Field(default=(1, 1, 2), description="Residual blocks of each level.")
    latent_channels: PositiveInt = Field(default=8, description="C.")

    @model_validator(mode="after")
    def _one_source(self) -> AutoencoderConfig:
        if self.path is not None and self.pretrained is not None:
            raise ConfigError("autoencoder: got both path and pretrained; give path alone")
        return self


class SuccessConfig(Config):
    """The success head on latents and the separate clip classifier."""

    width: PositiveInt = Field(default=96, description="Of a token.")
    depth: PositiveInt = Field(default=2, description="Attention blocks.")
    num_frames: PositiveInt = Field(default=2, description="Last frames that it sees.")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="While training.")


class ObjectsConfig(Config):
    """The objects part: poses read off the first real frame, then rolled by the actions (see model/objects.py)."""

    slots: tuple[tuple[str, ...], ...] = Field(
        min_length=1,
        description="M slots, the first for what is to be handled. In each episode a slot holds the first of its names "
        "that the scene has, of those recorded with collect.objects.",
    )
    width: PositiveInt = Field(default=160, description="Of the recurrent network.")
    probe_width: PositiveInt = Field(default=64, multiple_of=8, description="Of the probe's convolutions.")
    meters_per_action: PositiveFloat = Field(default=0.05, description="Of the end effector at action 1.")
    end_effector: Literal["commanded", "learned"] = Field(
        default="commanded",
        description="Where it goes. commanded: where actions say, for deltas from the last set-point, "
        "as the tabletop's. learned: from the recorded state[:3], for an arm that lags behind deltas from where it is, "
        "as LIBERO's and robosuite's.",
    )


class WorldModelConfig(Config):
    """What a world model is; saved beside its weights."""

    autoencoder: AutoencoderConfig = Field(default_factory=AutoencoderConfig)
    dynamics: Annotated[SerializeAsAny[DynamicsConfig], component("dynamics")] = Field(
        default_factory=lambda: cast(DynamicsConfig, build_component("dynamics", {})),
        description="What predicts the next frames, chosen by kind: transformer (where none is given), wan, or "
        "package.module:Class for one of your own.",
    )
    success: SuccessConfig = Field(default_factory=SuccessConfig)
    frame_steps: PositiveInt = Field(default=8, description="G, control steps from one frame to the next.")
    objects: ObjectsConfig | None = Field(
        default=None, description="The objects part; null: none. A fit adds it, see world_model.objects."
    )


class ImaginationConfig(Config):
    """How `WorldModelEnv` imagines."""

    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Of the networks; auto: bf16 where the hardware multiplies it natively."
    )
    compile: bool = Field(
        default=False,
        description="Compile the dynamics with torch.compile, and on CUDA record a chunk of all environments, from its "
        "noise to pictures and verdicts, as graphs that are replayed: faster once warm, with minutes of compilation "
        "before; needs a C++ compiler.",
    )
    reward: Literal["success", "probability", "objects"] = Field(
        default="success",
        description="success: 1 where the verdicts pass their thresholds; probability: the calibrated probability that "
        "the episode succeeds, paid as it grows, without a threshold; objects: the same, by the objects part, which "
        "looks at no imagined picture.",
    )
    stop_probability: float = Field(
        default=0.8, gt=0, lt=1, description="With reward probability or objects: an episode ends where it passes this."
    )
    action_penalty: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Taken off a chunk's reward where its imagined frames do not show its actions: this, times an "
        "error from 0 (as real frames show theirs) to 1 (as if other actions had been executed), by the inverse "
        "dynamics, which the world model must have. No verdict changes. 0: nothing is taken off.",
    )
    dual_noise: NonNegativeInt = Field(
        default=1, description="Times that a predicted success is imagined again with new noise; one flip discards it."
    )
    ensemble: PositiveInt = Field(default=1, description="Futures imagined side by side, whose spread is disagreement.")
    horizon: PositiveInt | None = Field(
        default=None,
        description="Truncate after this many imagined control steps, if the task does not before; null: after the "
        "trust horizon that was measured, which is refused where it is 0.",
    )
    branch_frames: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description="End an episode after this many frames since a real one, worth the value there: a short branch. "
        "auto: as many as the value's AUC stays at .85 for; null: episodes go on to their end.",
    )

    @model_validator(mode="after")
    def _verification_needs_a_verdict(self) -> ImaginationConfig:
        if self.reward != "success" and self.dual_noise:
            raise ConfigError(
                f"imagination.dual_noise: got {self.dual_noise} with reward {self.reward!r}, which knows no single "
                "success to imagine again; set imagination.dual_noise=0"
            )
        return self


KeyframeKind = Literal["divergence", "failure", "gripper", "contact", "uniform", "uncertain"]


class KeyframeConfig(Config):
    """Which moments of real episodes are mined, for imagined episodes to start from."""

    kinds: tuple[KeyframeKind, ...] = Field(
        default=("divergence", "failure", "gripper", "contact"),
        min_length=1,
        description="divergence: similar moments ended differently; failure: before an episode was lost; gripper: "
        "before it opens or closes; contact: before it touches something (where collect.keyframes kept states); "
        "uniform: any; uncertain: where the world model's value is nearest to a half.",
    )
    per_kind: PositiveInt = Field(default=32, description="Keyframes of each kind and task, at most.")


class FitStage(TrainerConfig):
    """A stage of a known length, whose learning rate falls to a twentieth."""

    max_bad_steps: ClassVar[int] = 20

    steps: NonNegativeInt = Field(default=1000, description="Updates; 0 leaves the part as it is.")
    batch_size: PositiveInt = Field(default=32, description="Images (autoencoder) or clips per update.")
    optim: OptimConfig = OptimConfig(lr=1e-3, warmup_steps=50)

    @property
    def last_lr_share(self) -> float:
        return 0.05


class StageConfig(FitStage, AveragedConfig):
    """How one part is fitted."""


class ObjectsStageConfig(FitStage):
    """How the objects part is fitted, on episodes recorded with collect.objects."""

    steps: NonNegativeInt = Field(default=0, description="Updates; 0 leaves the part as it is, or out.")
    batch_size: PositiveInt = Field(
        default=96, description="Episodes per update; the probe sees half as many single frames."
    )
    optim: OptimConfig = OptimConfig(lr=2e-3, warmup_steps=100)
    network: ObjectsConfig | None = Field(default=None, description="What it is made of; null: as it is in start_from.")
    mirror: bool = Field(
        default=False,
        description="Half of the episodes are seen in a mirror at the plane y = 0; only where the robot is symmetrical "
        "about it, and no instruction says left or right.",
    )


class StyleConfig(Config):
    """Training clips in other styles, guided by segmentation (see docs/style_robust.md)."""

    share: float = Field(
        default=0.0, ge=0, lt=1, description="Of the images and clips that are in another style; 0: none."
    )
    copies: PositiveInt = Field(
        default=2, le=64, description="Styles of each episode that clips are drawn from; latents of each are kept."
    )

    depth: bool = Field(
        default=False, description="Also light from another side, for which the datasets must have recorded depth."
    )
    still_cameras: tuple[str, ...] | None = Field(
        default=None,
        description="Cameras that do not move; only these get patterns and uneven light. null: those whose projection "
        "the environment knows.",
    )
