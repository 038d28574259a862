"""Options of OpenVLA policies, the description of their architecture, and presets. Imports no torch.

What they build is in `policy.py`; `config.py` is what a recipe names.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vla_rl.config import Config, ConfigError, validate
from vla_rl.policies.base import PolicyConfig, check_adapters

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)

Decoder = Literal["parallel", "autoregressive", "l1"]
Placeholder = Literal["learned", "zero"]


class TowerSpec(Config):
    """One timm vision transformer, of which all blocks but the last are used."""

    embed_dim: PositiveInt
    depth: PositiveInt
    num_heads: PositiveInt
    mlp_ratio: PositiveFloat = 4.0
    patch_size: PositiveInt
    class_token: bool = False
    reg_tokens: NonNegativeInt = 0
    layer_scale: bool = False
    attention_pool: bool = False
    mean: tuple[float, float, float] = HALF
    std: tuple[float, float, float] = HALF


class LlamaSpec(Config):
    """A Llama language model."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    vocab_size: PositiveInt = Field(description="Token ids, action tokens included, padding excluded.")
    padded_vocab_size: PositiveInt = Field(description="Rows of the embedding: vocab_size, the pad token, rounded up.")
    rms_norm_eps: PositiveFloat = 1e-6
    rope_theta: PositiveFloat = 10000.0


class Architecture(Config):
    """Everything that decides the network's weights: their names and shapes."""

    towers: tuple[TowerSpec, ...] = Field(min_length=1, max_length=2)
    llm: LlamaSpec
    image_size: PositiveInt
    action_dim: PositiveInt
    state_dim: PositiveInt | None = Field(description="None: the policy does not read the state.")
    chunk_size: PositiveInt
    action_bins: PositiveInt
    decoder: Decoder
    placeholder: Placeholder
    end_token: bool = Field(default=True, description="`</s>` after the parallel decoder's action positions.")
    film: bool = Field(default=False, description="Language modulates the vision towers' blocks (OpenVLA-OFT+).")

    @property
    def num_action_tokens(self) -> int:
        return self.chunk_size * self.action_dim


class ImageChain(Config):
    """What is done to an image before the network normalizes it; the defaults are for policies made here.

    OpenVLA's checkpoints expect OPENVLA_CHAIN, which is what they get unless a recipe says otherwise.
    """

    rotate: bool = Field(
        default=False, description="Turn by 180 degrees: for raw LIBERO renders; our simulators give upright images."
    )
    jpeg_quality: int | None = Field(
        default=None, ge=1, le=100, description="Encode and decode as JPEG, as the training data was; null: not."
    )
    resize: Literal["bilinear", "lanczos3"] = Field(default="bilinear", description="Antialiased filter.")
    crop_area: float | None = Field(
        default=None, gt=0, le=1, description="Share of the area that a center crop keeps; null: no crop."
    )


OPENVLA_CHAIN = ImageChain(jpeg_quality=95, resize="lanczos3", crop_area=0.9)


MAX_SCALE = 1.0  # Largest b.


class LaplaceOptions(Config):
    """A scale head beside OFT's L1 head, which makes it a density (RIPT-VLA, arXiv:2505.17016)."""

    initial_scale: PositiveFloat = Field(default=0.05, description="Scale b that a fresh head gives, in [-1, 1] units.")
    min_scale: PositiveFloat = Field(default=0.01, description="Smallest b; bounds the ratio's growth.")

    @model_validator(mode="after")
    def _ordered(self) -> LaplaceOptions:
        if not self.min_scale <= self.initial_scale <= MAX_SCALE:
            raise ConfigError(
                f"policy.laplace: needs min_scale <= initial_scale <= {MAX_SCALE:g}, got {self.min_scale}, "
                f"{self.initial_scale}"
            )
        return self


class LoraOptions(Config):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft."""

    rank: PositiveInt = 32
    alpha: PositiveInt = 16
    dropout: NonNegativeFloat = 0.0
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        description="Linear layers of the language model that get an adapter; 'all-linear': also those of the vision "
        "towers and the projector, as upstream.",
    )
    vision: bool = Field(default=False, description="Adapters on the vision towers' linear layers too.")


class Preset(Config):
    """Sizes of a named preset."""

    towers: tuple[TowerSpec, ...]
    llm: LlamaSpec
    image_size: int
    placeholder: Placeholder


def _preset(
    towers: tuple[TowerSpec, ...],
    image_size: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    vocab: int,
    placeholder: Placeholder = "learned",
) -> Preset:
    padded = (vocab // 64 + 1) * 64
    llm = LlamaSpec(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=vocab,
        padded_vocab_size=padded,
    )
    return Preset(towers=towers, llm=llm, image_size=image_size, placeholder=placeholder)


DINOV2_LARGE = TowerSpec(
    embed_dim=1024, depth=24, num_heads=16, patch_size=14, class_token=True, reg_tokens=4, layer_scale=True,
    mean=IMAGENET_MEAN, std=IMAGENET_STD,
)  # fmt: skip
SIGLIP_SO400M = TowerSpec(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362, patch_size=14, attention_pool=True)

PRESETS: dict[str, Preset] = {
    # For CPUs: trained from scratch in minutes. Heads of 64, the fastest there.
    "tiny": _preset((TowerSpec(embed_dim=128, depth=7, num_heads=2, patch_size=8),), 64, 128, 384, 4, 2, 768),
    # One GPU, from scratch.
    "small": _preset((TowerSpec(embed_dim=384, depth=9, num_heads=6, patch_size=8),), 128, 512, 1376, 8, 8, 1024),
    "base": _preset(
        (
            TowerSpec(
                embed_dim=384,
                depth=12,
                num_heads=6,
                patch_size=14,
                class_token=True,
                reg_tokens=4,
                layer_scale=True,
                mean=IMAGENET_MEAN,
                std=IMAGENET_STD,
            ),
            TowerSpec(embed_dim=384, depth=12, num_heads=6, patch_size=14),
        ),
        224,
        1024,
        2752,
        16,
        16,
        1024,
    ),
    # OpenVLA's own sizes.
    "7b": _preset((DINOV2_LARGE, SIGLIP_SO400M), 224, 4096, 11008, 32, 32, 32000, "zero"),
}

# What a config may set again when it starts from a checkpoint; the rest is the checkpoint's.
RUN_FIELDS = (
    "precision", "compile", "cuda_graphs", "weights", "attention", "gradient_checkpointing", "value_head",
    "value_detach", "keyframe_loss_weight", "lora", "merge_lora", "trainable", "laplace", "images",
    "gripper", "num_actions",
)  # fmt: skip
# What a checkpoint in the published layout does not say about itself, and a recipe may.
PUBLISHED_FIELDS = (
    "decoder", "chunk_size", "cameras", "norm_key", "norm_range", "end_token", "use_state",
)  # fmt: skip

L1_AS_TOKENS = (
    "this checkpoint was trained with OFT's L1 head, and its lm_head never was: it gives no action tokens that RL could"
    " learn from. Two ways on: keep decoder=l1 and set policy.laplace={} for a scale head, which makes the L1 head a "
    "density (clone demonstrations for a while first); or clone demonstrations with policy.decoder=parallel "
    "(`vla-rl sft`), and start RL from the result"
)
L1_WITHOUT_SCALE = (
    "the l1 decoder alone gives one action and no likelihood, so RL cannot train it. Set policy.laplace={} for a scale "
    "head (RIPT-VLA), which makes it a density; clone demonstrations for a while first, so that the scale is right"
)
NO_LOGITS = "the l1 decoder regresses actions: it has no token logits that could be guided"


class OpenVLAOptions(PolicyConfig):
    """Options of a policy of the OpenVLA architecture (arXiv:2406.09246) or OpenVLA-OFT's (arXiv:2502.19645)."""

    merged: ClassVar[tuple[str, ...]] = ("images",)

    kind: Literal["openvla"] = "openvla"
    preset: Literal["tiny", "small", "base", "7b"] = Field(default="tiny", description="Sizes of the network.")
    decoder: Decoder = Field(
        default="parallel",
        description="'parallel': the whole chunk in one forward pass, bidirectional attention (OpenVLA-OFT). "
        "'autoregressive': token by token, causal (OpenVLA). 'l1': as parallel, with OFT's continuous head. "
        "A published checkpoint's own where it can be told.",
    )
    placeholder: Placeholder | None = Field(
        default=None,
        description="Input at the action positions of the parallel decoder: learned, or zero as OFT; None: preset's.",
    )
    chunk_size: PositiveInt = Field(default=8, description="Actions that cloning learns at once.")
    num_actions: PositiveInt | None = Field(
        default=None,
        description="Of a chunk, those executed before the policy looks again; null: all. Fewer react sooner, and cost "
        "more inference.",
    )
    image_size: PositiveInt | None = Field(
        default=None, description="Side of the square input image, pixels; None: preset's."
    )
    cameras: tuple[str, ...] = Field(
        default=("agentview",), min_length=1, description="Cameras the policy reads, in order."
    )
    use_state: bool = Field(default=True, description="Give the policy the proprioceptive state as one token.")
    action_bins: int = Field(default=256, ge=3, description="Bins of each action dimension.")
    end_token: bool = Field(
        default=True,
        description="`</s>` after the action positions, as OpenVLA-OFT and SimpleVLA-RL train; false: RLinf's variant.",
    )
    norm_key: str | None = Field(
        default=None,
        description="Which of a published checkpoint's dataset statistics; null: the only one there is; "
        "'from_data': none, `vla-rl sft` sets them from its demonstrations.",
    )
    norm_range: Literal["q01_q99", "min_max"] = Field(
        default="q01_q99", description="What -1 and +1 stand for; min_max: OFT's ALOHA and RoboTwin checkpoints."
    )
    images: ImageChain = Field(
        default_factory=ImageChain,
        description="What is done to the images first; with `path`, only what differs from what the checkpoint "
        "expects. {}: nothing.",
    )
    gripper: Literal["environment", "open_is_one"] = Field(
        default="environment",
        description="'open_is_one': the network's gripper is 1 open, 0 closed (OpenVLA's LIBERO checkpoints), turned "
        "into -1 open, +1 closed. 'environment': used as it is.",
    )
    laplace: LaplaceOptions | None = Field(
        default=None, description="Give the l1 decoder a scale head, so that RL can train it (RIPT-VLA)."
    )
    value_head: bool = Field(default=False, description="Add a critic on the first action token's hidden state (PPO).")
    value_detach: bool = Field(default=False, description="Stop the critic's gradient at its head.")
    keyframe_loss_weight: NonNegativeFloat = Field(
        default=0.0, description="Weight of the auxiliary loss that predicts where the gripper next opens or closes."
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        default="auto",
        description="bf16: matrix products in bfloat16. fp32: all in full float32; tf32: the same, but products in "
        "TF32 on NVIDIA GPUs, as with bf16 those that stay in float32. auto: bf16 where the hardware multiplies it "
        "natively.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the layers of the vision towers and the language model with torch.compile, which takes "
        "minutes at first and needs a C++ compiler.",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="On an NVIDIA GPU, act by CUDA graphs, one recorded for each batch size: small batches then do not "
        "wait for the host. Holds the working memory of acting.",
    )
    merge_lora: bool = Field(
        default=False,
        description="Act with the adapters added to the weights they adapt, which spares their passes and costs a copy "
        "of those weights while acting. Training computes with the adapters, and takes likelihoods from them.",
    )
    weights: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="How a published checkpoint's weights are held. auto: what is trained in fp32, and the rest in "
        "bf16 where the precision is bf16.",
    )
    attention: Literal["auto", "eager", "sdpa"] = Field(
        default="auto", description="auto: eager on CPU, sdpa elsewhere."
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute the language model's layers in backward."
    )
    lora: LoraOptions | None = Field(default=None, description="Low-rank adapters on the language model.")
    trainable: Literal["full", "lora", "frozen_vision"] = Field(
        default="full", description="Which weights are trained."
    )

    @model_validator(mode="after")
    def _check(self) -> OpenVLAOptions:
        check_adapters(self.trainable, self.lora is not None, self.path)
        if len(set(self.cameras)) != len(self.cameras):
            raise ConfigError(f"policy.cameras: got {list(self.cameras)}, a camera is named twice")
        return self

    def architecture(self, action_dim: int, state_dim: int) -> Architecture:
        """The network this config describes, for actions and states of these sizes.

        Raises:
            ConfigError: image_size is not a multiple of the patch size, or too many action bins.
        """
        preset = PRESETS[self.preset]
        image_size = self.image_size or preset.image_size
        for tower in preset.towers:
            if image_size % tower.patch_size:
                raise ConfigError(
                    f"policy.image_size: got {image_size}, must be a multiple of {tower.patch_size} "
                    f"(the patch size of preset {self.preset!r})"
                )
        most = preset.llm.vocab_size // 2
        if self.action_bins > most:
            raise ConfigError(f"policy.action_bins: got {self.action_bins}, at most {most} in preset {self.preset!r}")
        return Architecture(
            towers=preset.towers,
            llm=preset.llm,
            image_size=image_size,
            action_dim=action_dim,
            state_dim=state_dim if self.use_state else None,
            chunk_size=self.chunk_size,
            action_bins=self.action_bins,
            decoder=self.decoder,
            placeholder=self.placeholder or preset.placeholder,
        )

    def executed_actions(self, chunk_size: int) -> int:
        """Return H, how many of a policy's `chunk_size` actions are executed; raise ConfigError where it has fewer."""
        asked = self.num_actions
        if asked is not None and asked > chunk_size:
            raise ConfigError(f"policy.num_actions: got {asked}, at most {chunk_size}, the policy's chunk_size")
        return asked or chunk_size

    def with_chosen(self, chosen: dict[str, Any], published: bool = False) -> OpenVLAOptions:
        """This checkpoint's config with what a recipe chose anew.

        `published`: it is a download, which leaves more open than a policy saved here.

        Raises:
            ConfigError: a chosen value contradicts the checkpoint's architecture.
        """
        free = (*RUN_FIELDS, *PUBLISHED_FIELDS) if published else RUN_FIELDS
        for name, value in chosen.items():
            if name in free or name in ("kind", "path"):
                continue
            if value is not None and value != getattr(self, name):
                raise ConfigError(
                    f"policy.{name}: got {value!r}, but the checkpoint at policy.path has {getattr(self, name)!r}; "
                    f"remove it from the recipe. With a checkpoint only these can be set: {', '.join(free)}."
                )
        values = self.with_values(chosen, free)
        if self.lora is not None and chosen.get("lora", self.lora) != self.lora:
            raise ConfigError(
                f"policy.lora: got {chosen['lora']!r}, but the checkpoint already holds adapters {self.lora!r}; "
                "remove it from the recipe, or merge the checkpoint's adapters first (merge_lora)."
            )
        return validate(type(self), values, prefix="policy")
