"""Options of the world model: its autoencoder, dynamics and success head, and how they are fitted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from vla_rl.config import Config, ConfigError, component

if TYPE_CHECKING:
    from vla_rl.types import EnvSpec
    from world_model.interfaces import Dynamics
    from world_model.types import DynamicsInputs


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


class DynamicsConfig(Config):
    """Base of every dynamics' options: what the world model reads of them, and how the network is built.

    For a dynamics of your own extend it, implement `build`, and name it in a recipe as "package.module:Class".

    Attributes:
        learns_from_own_frames: `Dynamics.loss` takes `seen`, which `world_model.bootstrap` needs.
        can_be_distilled: it has `Dynamics.distillation_loss`, which `world_model.distillation` needs.
        can_have_members: it takes a posterior (`Dynamics.set_posterior`), which `world_model.posterior` fits.
    """

    learns_from_own_frames: ClassVar[bool] = False
    can_be_distilled: ClassVar[bool] = False
    can_have_members: ClassVar[bool] = False

    kind: str = Field(description="The dynamics: transformer, wan, or package.module:Class.")
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Strength of the noise that imagining begins with: 1 draws futures as they were learned, weaker "
        "noise stays nearer to the expected one, 0 is always the same.",
    )

    def build(self, inputs: DynamicsInputs) -> Dynamics:
        """Return a fresh network; torch has been seeded.

        Raises:
            ValueError: sizes that do not fit each other, or a folder of weights that cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__}.build: return a world_model.interfaces.Dynamics")

    def for_env(self, spec: EnvSpec) -> Self:
        """Return these options completed by what the environment knows, such as its cameras' projections."""
        return self


class TransformerConfig(DynamicsConfig):
    """The factorized causal video transformer (see world_model/model/dynamics.py)."""

    learns_from_own_frames: ClassVar[bool] = True
    can_be_distilled: ClassVar[bool] = True
    can_have_members: ClassVar[bool] = True

    kind: str = Field(default="transformer", description="The dynamics: this transformer.")
    preset: Literal["tiny", "small", "base", "large"] = Field(
        default="tiny", description="3 M, 20 M, 150 M or 600 M parameters; the sizes below override it."
    )
    width: PositiveInt | None = Field(default=None, description="Of a token.")
    depth: PositiveInt | None = Field(default=None, description="Blocks of spatial attention, temporal attention, MLP.")
    heads: PositiveInt | None = Field(default=None, description="Attention heads.")
    patch: PositiveInt = Field(default=2, description="Side of the square of latent pixels that makes a token.")
    memory: PositiveInt = Field(
        default=4, description="Last frames that a frame attends to, besides the episode's first."
    )
    reference: bool = Field(
        default=True, description="Every frame attends to the episode's first; false: only while it is remembered."
    )
    context_noise: float = Field(
        default=0.02, ge=0, lt=0.2, description="Noise level of remembered pictures, 1 is all; more while fitting."
    )
    sampling_steps: PositiveInt = Field(default=2, le=50, description="Of the flow, when imagining.")
    kinematics: Literal["none", "delta_pose"] = Field(
        default="none",
        description="delta_pose: the first three action dimensions move the end effector, whose position is state[:3]; "
        "the dynamics then also sees where each action leads (World-Env's action maps).",
    )
    meters_per_action: PositiveFloat = Field(default=0.05, description="With delta_pose: meters at action 1.")
    projections: dict[str, tuple[tuple[float, float, float, float], ...]] = Field(
        default={},
        description="Camera -> 3 x 4 matrix from meters to homogeneous image coordinates in [0, 1] (x right, y down): "
        "then the end effector's path is also drawn into that camera's tokens.",
    )

    def build(self, inputs: DynamicsInputs) -> Dynamics:
        """See `DynamicsConfig.build`."""
        from world_model.model.dynamics import VideoDynamics

        return VideoDynamics(
            self,
            inputs.latent_shape,
            inputs.cameras,
            inputs.state_dim,
            inputs.action_dim,
            inputs.frame_steps,
            inputs.state_mean,
            inputs.state_std,
        )

    def for_env(self, spec: EnvSpec) -> Self:
        """See `DynamicsConfig.for_env`: the environment's projections, where kinematics are given and none of these."""
        if self.kinematics == "none" or self.projections:
            return self
        projections = {name: matrix.tolist() for name, matrix in spec.projections.items() if name in spec.cameras}
        return type(self).model_validate(self.model_dump() | {"projections": projections})


class WanConfig(DynamicsConfig):
    """Wan's video transformer as the dynamics (see world_model/model/wan.py and docs/wan.md)."""

    kind: str = Field(default="wan", description="The dynamics: Wan's transformer.")
    path: Path | None = Field(
        default=None,
        description="Folder of a diffusers pipeline with a WanTransformer3DModel in transformer/ (Wan-2.2-TI2V-5B), "
        "or of the transformer itself.",
    )
    transformer: dict[str, Any] | None = Field(
        default=None,
        description="In place of path: arguments of WanTransformer3DModel, which starts from random weights. A fitted "
        "world model names them, so that its folder holds all it needs.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Of the transformer's weights; what is added to it starts in float32."
    )
    memory: PositiveInt = Field(default=4, description="Last frames that are remembered besides the episode's first.")
    context_noise: float = Field(default=0.05, ge=0, lt=0.5, description="Noise level of remembered frames, 1 is all.")
    sampling_steps: PositiveInt = Field(default=5, le=50, description="Of the flow, when imagining.")
    gradient_checkpointing: bool = Field(
        default=True, description="Compute each block again in the backward pass: slower, far less memory."
    )
    lora_rank: NonNegativeInt = Field(
        default=0, description="Train adapters of this rank, not the pretrained weights; 0 trains the weights."
    )

    @model_validator(mode="after")
    def _one_source(self) -> WanConfig:
        if (self.path is None) == (self.transformer is None):
            raise ConfigError(
                "world_model.model.dynamics: give either path (pretrained weights) or transformer (sizes of a random "
                "one)"
            )
        return self

    def build(self, inputs: DynamicsInputs) -> Dynamics:
        """See `DynamicsConfig.build`."""
        from world_model.model.wan import WanDynamics

        sizes = (inputs.state_dim, inputs.action_dim, inputs.frame_steps)
        return WanDynamics(self, inputs.latent_shape, len(inputs.cameras), *sizes)


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


class PosteriorConfig(Config):
    """The model posterior: members, each a low-rank adapter of the dynamics (see world_model/model/posterior.py)."""

    members: int = Field(
        default=5, ge=2, le=64, description="K, adapters, each fitted on its own resample of the initial states."
    )
    rank: PositiveInt = Field(default=8, description="Of an adapter; it has some 12,000 numbers a rank at width 224.")


class WorldModelConfig(Config):
    """What a world model is; saved beside its weights."""

    autoencoder: AutoencoderConfig = Field(default_factory=AutoencoderConfig)
    dynamics: Annotated[SerializeAsAny[DynamicsConfig], component("dynamics")] = Field(
        default_factory=TransformerConfig,
        description="What predicts the next frames, chosen by kind: transformer (where none is given), wan, or "
        "package.module:Class for one of your own.",
    )
    success: SuccessConfig = Field(default_factory=SuccessConfig)
    frame_steps: PositiveInt = Field(default=8, description="G, control steps from one frame to the next.")
    objects: ObjectsConfig | None = Field(
        default=None, description="The objects part; null: none. A fit adds it, see world_model.objects."
    )
    posterior: PosteriorConfig | None = Field(
        default=None, description="Members of the dynamics; null: none. A fit adds them, see world_model.posterior."
    )


class ImaginationConfig(Config):
    """How `WorldModelEnv` imagines."""

    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto", description="Of the networks; auto: bf16 where the hardware multiplies it natively."
    )
    compile: bool = Field(
        default=False,
        description="Compile the dynamics with torch.compile, on CUDA as graphs that are replayed: faster once warm, "
        "with minutes of compilation before; needs a C++ compiler.",
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
    require_both: bool = Field(
        default=True, description="A success counts where the success head and the clip classifier both say so."
    )
    dual_noise: NonNegativeInt = Field(
        default=1, description="Times that a predicted success is imagined again with new noise; one flip discards it."
    )
    ensemble: PositiveInt = Field(default=1, description="Futures imagined side by side, whose spread is disagreement.")
    max_disagreement: PositiveFloat | None = Field(
        default=None, description="Truncate an episode where the futures' latents spread by more; None never."
    )
    disagreement_penalty: NonNegativeFloat = Field(
        default=0.0,
        description="A chunk's reward is lowered by this times the futures' disagreement, in multiples of what trust "
        "found usual on held-out episodes, 4 at most (COPlanner). Needs ensemble 2 or more, and trust measured with "
        "such an ensemble. 0: no penalty.",
    )
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
    fresh_noise: bool = Field(
        default=True,
        description="Every episode has noise of its own. false: an initial state always has the same, which pairs "
        "policies; the episodes of a GRPO group then differ by their actions alone.",
    )
    posterior: bool = Field(
        default=False,
        description="Each episode draws a member of the world model's posterior and keeps it to its end, also where it "
        "is gone on with from a keyframe; futures of the ensemble are then other members'. The world model must have "
        "one (world_model.posterior).",
    )
    posterior_by: Literal["group", "episode"] = Field(
        default="group",
        description="With posterior, which episodes share a draw. group: the episodes of a GRPO group, so that their "
        "rewards differ by what was done and not by which member imagined it; episode: each draws its own.",
    )

    @property
    def futures(self) -> str:
        """What the futures of an ensemble differ by: "members" or "noise"; "" where there is one alone."""
        return "" if self.ensemble < 2 else "members" if self.posterior else "noise"

    @model_validator(mode="after")
    def _disagreement_needs_futures(self) -> ImaginationConfig:
        if self.posterior_by != "group" and not self.posterior:
            raise ConfigError(
                f"imagination.posterior_by: got {self.posterior_by} without a posterior to draw from; set "
                "imagination.posterior=true, or leave it out"
            )
        if self.max_disagreement is not None and self.ensemble < 2:
            raise ConfigError(
                f"imagination.max_disagreement: got {self.max_disagreement:g} with ensemble 1, which has nothing to "
                "disagree with; set imagination.ensemble to 2 or more"
            )
        if self.disagreement_penalty and self.ensemble < 2:
            raise ConfigError(
                f"imagination.disagreement_penalty: got {self.disagreement_penalty:g} with ensemble 1, which has "
                "nothing to disagree with; set imagination.ensemble to 2 or more"
            )
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

    neighbors: PositiveInt = Field(
        default=12, description="Most similar moments of other episodes, whose outcomes say how much is still open."
    )
