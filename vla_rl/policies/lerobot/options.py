"""Options of policies from LeRobot: those of `RL_TYPES` for everything, any other to evaluate. Imports no torch.

The policies around LeRobot's classes are in `policy.py` (any of them), `flow.py` and `fast.py`; a recipe names
`config.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from vla_rl.config import Config, ConfigError
from vla_rl.policies.base import PolicyConfig, check_adapters, read_policy_config

CONTINUING_TYPES = ("smolvla", "pi0", "pi05")  # Flow policies that real-time chunking can guide.
FLOW_TYPES = (*CONTINUING_TYPES, "xvla")
RL_TYPES = (*FLOW_TYPES, "pi0_fast", "diffusion", "act")
TINY_TYPES = RL_TYPES
EXTRAS_FILE = "vla_rl.json"
IMAGE_PREFIX = "observation.images."

# What a config may set again when it starts from a checkpoint; the rest is the checkpoint's.
RUN_FIELDS = (
    "num_actions", "camera_map", "norm_key", "sampling", "value_head", "precision", "cuda_graphs",
    "gradient_checkpointing", "lora", "merge_lora", "trainable", "options", "vlm", "tokenizer", "action_tokenizer",
)  # fmt: skip

# Why a LeRobot policy cannot be trained by RL here; for any other the general reason.
NO_LIKELIHOOD = {
    "multi_task_dit": "its sampler's likelihood is not adapted here (diffusion or flow matching, by its objective)",
    "vqbet": "VQ-BeT adds a regressed offset to its sampled code, so the action itself has no likelihood",
    "tdmpc": "TD-MPC plans with a learned model; its planner gives no likelihood",
    "groot": "this LeRobot has GR00T N1.7 alone (N1.5 was removed after LeRobot 0.5.1); its flow head is not adapted: "
    "its processors need those of Qwen3-VL from the hub, out of the tests' reach",
    "gaussian_actor": "it is the actor of LeRobot's own online RL, which trains it",
    **dict.fromkeys(
        ("eo1", "evo1", "wall_x", "molmoact2", "vla_jepa"),
        "its action head is not adapted: LeRobot builds it from a model on the hub, out of the tests' reach",
    ),
    **dict.fromkeys(
        ("fastwam", "lingbot_va"),
        "it denoises video and actions together, from a video model on the hub; no likelihood is adapted here",
    ),
}


def no_rl_reason(policy_type: str) -> str | None:
    """Why RL cannot train LeRobot policies of this type, or None where it can."""
    if policy_type in RL_TYPES:
        return None
    reason = NO_LIKELIHOOD.get(policy_type, f"LeRobot's {policy_type!r} has no likelihood that is implemented here")
    return f"{reason}. Of LeRobot's policies RL trains {', '.join(RL_TYPES)}"


class FlowSampling(Config):
    """How a flow policy draws actions with a likelihood (pi_RL, arXiv 2510.25889), and its safeguards."""

    method: Literal["flow_sde", "flow_noise"] = Field(
        default="flow_sde",
        description="flow_sde: the ODE made stochastic, same marginals, nothing to learn. flow_noise: the ODE's mean "
        "and a learned standard deviation (also ReinFlow, arXiv 2505.22094).",
    )
    num_steps: PositiveInt | None = Field(default=None, description="Denoising steps; empty: the checkpoint's.")
    joint: bool = Field(
        default=False,
        description="false: noise and likelihood in one denoising step a decision, drawn at random, the others follow "
        "the ODE (cheap: one pass of the action expert to learn from). true: in all steps, likelihood of the path.",
    )
    noise_level: PositiveFloat = Field(default=0.5, description="a in Flow-SDE's sigma = a sqrt(t / (1 - t)).")
    noise_bounds: tuple[PositiveFloat, PositiveFloat] = Field(
        default=(0.08, 0.16), description="Flow-Noise's learned standard deviation stays between these."
    )
    std_floor: NonNegativeFloat = Field(
        default=0.08,
        description="Smallest standard deviation of a noisy step, in normalized action units (DPPO, ReinFlow); of ACT "
        "the standard deviation itself: "
        "without one, Flow-SDE's last steps have hardly any noise and their ratios explode.",
    )
    log_prob_clamp: tuple[float, float] | None = Field(
        default=(-5.0, 2.0), description="Bounds on each component's log-density in each step (DPPO); empty: none."
    )

    @model_validator(mode="after")
    def _check(self) -> FlowSampling:
        low, high = self.noise_bounds
        if low >= high:
            raise ConfigError(f"policy.sampling.noise_bounds: got {[low, high]}, the first must be smaller")
        if self.log_prob_clamp is not None and self.log_prob_clamp[0] >= self.log_prob_clamp[1]:
            raise ConfigError(
                f"policy.sampling.log_prob_clamp: got {list(self.log_prob_clamp)}, the first must be smaller"
            )
        return self


class FlowLora(Config):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft, on LeRobot's modules."""

    rank: PositiveInt = 32
    alpha: PositiveInt = 16
    dropout: NonNegativeFloat = 0.0
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="Linear layers that get an adapter, by the last part of their name.",
    )
    part: Literal["expert", "language", "all"] = Field(
        default="expert", description="Of the action expert, of the language model, or of both."
    )


class LeRobotOptions(PolicyConfig):
    """Options of a policy of LeRobot's, through its own classes and processors.

    SmolVLA (arXiv 2506.01844), pi0 (arXiv 2410.24164), pi0.5 (arXiv 2504.16054), X-VLA (arXiv 2510.10274), pi0-FAST
    (arXiv 2501.09747), Diffusion Policy (arXiv 2303.04137) and ACT (arXiv 2304.13705) can act, clone and learn by RL;
    any other type of LeRobot can be evaluated and deployed.
    """

    merged: ClassVar[tuple[str, ...]] = ("sampling",)

    kind: Literal["lerobot"] = "lerobot"
    type: str | None = Field(
        default=None, description="LeRobot's name of the policy for fresh weights: smolvla, pi0, pi05, act, ..."
    )
    preset: Literal["tiny"] | None = Field(
        default=None,
        description=f"tiny: sizes for a CPU, made offline ({', '.join(TINY_TYPES)}). Empty: LeRobot's own.",
    )
    image_size: PositiveInt = Field(default=64, description="Side of the tiny preset's input image, pixels.")
    chunk_size: PositiveInt = Field(default=8, description="Actions that fresh weights denoise at once.")
    num_actions: PositiveInt | None = Field(
        default=None, description="How many of them are executed before the next decision; empty: n_action_steps."
    )
    cameras: tuple[str, ...] = Field(
        default=("agentview",), min_length=1, description="Cameras that fresh weights read, in order."
    )
    camera_map: dict[str, str | None] = Field(
        default={},
        description="The checkpoint's image name -> the environment's camera, where they differ; null: no such camera "
        "(SmolVLA, pi0 and pi0.5 take a blank image).",
    )
    norm_key: Literal["from_data"] | None = Field(
        default=None,
        description="from_data: forget the checkpoint's statistics of actions and states, which are another robot's; "
        "`vla-rl sft` sets them from its demonstrations. Empty: the checkpoint's.",
    )
    sampling: FlowSampling = Field(default_factory=FlowSampling, description="How actions are drawn at temperature>0.")
    value_head: bool = Field(
        default=False, description="Add a critic (PPO) on the mean of the vision-language features and the state."
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        default="auto",
        description="bf16: matrix products in bfloat16 (autocast); likelihoods stay float32. fp32: all in full "
        "float32; tf32: the same, but products in TF32 on NVIDIA GPUs, as with bf16 those that stay in "
        "float32. auto: bf16 on a GPU, fp32 on a CPU.",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="On an NVIDIA GPU, compute a chunk as one CUDA graph, recorded for each batch size and length of "
        "prompts, so that the host does not launch its kernels. For SmolVLA, pi0, pi0.5 and X-VLA.",
    )
    merge_lora: bool = Field(
        default=False,
        description="Act with the adapters added to the weights they adapt, which spares their passes and costs a copy "
        "of those weights while acting. Training computes with the adapters, and takes likelihoods from them.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute each denoising step in backward, and LeRobot's own layers in cloning."
    )
    lora: FlowLora | None = Field(default=None, description="Low-rank adapters.")
    trainable: Literal["lerobot", "lora"] = Field(
        default="lerobot",
        description="lerobot: what LeRobot's options leave trainable (train_expert_only, freeze_vision_encoder). "
        "lora: the adapters and the new heads alone.",
    )
    options: dict[str, Any] = Field(
        default={}, description="LeRobot's own config fields, by its names, e.g. {train_expert_only: false}."
    )
    vlm: str | None = Field(
        default=None, description="SmolVLA: folder or hub id of the vision-language model's config and tokenizer."
    )
    tokenizer: str | None = Field(
        default=None, description="pi0, pi0.5, pi0-FAST, X-VLA: folder or hub id of the text's tokenizer."
    )
    action_tokenizer: str | None = Field(
        default=None, description="pi0-FAST: folder or hub id of FAST's tokenizer of actions; its code is not run."
    )

    @field_validator("cameras")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ConfigError(f"policy.cameras: got {list(value)}, a camera is named twice")
        return value

    @model_validator(mode="after")
    def _check(self) -> LeRobotOptions:
        if self.path is None and self.type is None:
            raise ConfigError(
                "policy: kind 'lerobot' needs policy.path (a LeRobot checkpoint) or policy.type (fresh weights), "
                f"e.g. policy.type=smolvla policy.preset=tiny; presets: {', '.join(TINY_TYPES)}"
            )
        if self.preset is not None and self.type not in (None, *TINY_TYPES):
            raise ConfigError(f"policy.preset: 'tiny' is for {', '.join(TINY_TYPES)}; got policy.type={self.type!r}")
        check_adapters(self.trainable, self.lora is not None, self.path)
        return self

    def with_chosen(self, chosen: dict[str, Any]) -> LeRobotOptions:
        """This checkpoint's config with what a recipe chose anew.

        Raises:
            ConfigError: a chosen value contradicts the checkpoint.
        """
        for name, value in chosen.items():
            if name in RUN_FIELDS or name in ("kind", "path") or value is None or value == getattr(self, name):
                continue
            raise ConfigError(
                f"policy.{name}: got {value!r}, but the checkpoint at policy.path has {getattr(self, name)!r}; "
                f"remove it from the recipe. With a checkpoint only these can be set: {', '.join(RUN_FIELDS)}."
            )
        if self.lora is not None and chosen.get("lora", self.lora) != self.lora:
            raise ConfigError(
                f"policy.lora: got {chosen['lora']!r}, but the checkpoint already holds adapters {self.lora!r}; "
                "remove it from the recipe"
            )
        return type(self).model_validate(self.with_values(chosen, RUN_FIELDS))


def saved_config(folder: Path) -> LeRobotOptions:
    """The options that a checkpoint was saved with; for one from LeRobot itself, the defaults that fit it.

    Raises:
        ValueError: a file is damaged.
    """
    values = read_policy_config(folder, "type")
    file = Path(folder) / EXTRAS_FILE
    if not file.is_file():
        cameras = tuple(image_names(values)) or ("none",)
        size = int(values.get("chunk_size") or values.get("horizon") or values.get("action_chunk_size") or 1)
        return LeRobotOptions(type=values["type"], chunk_size=size, cameras=cameras)
    try:
        return LeRobotOptions.model_validate(json.loads(file.read_text())["config"])
    except (json.JSONDecodeError, KeyError, ValidationError, ConfigError) as error:
        raise ValueError(f"{file}: not options of this package's LeRobot policy: {error}") from error


def check_not_adapters(folder: Path) -> None:
    """Raise ValueError for a folder of adapters alone, as LeRobot writes with peft."""
    found, whole = folder / "adapter_model.safetensors", folder / "model.safetensors"
    if found.is_file() and not whole.is_file():
        raise ValueError(
            f"{found}: adapters without the policy that they adapt (lerobot-train with peft), which are not read here. "
            "Load them with LeRobot, add them to the weights with peft's merge_and_unload(), and save the whole policy "
            "(save_pretrained), with the two processors of this folder beside it."
        )


def image_names(values: dict[str, Any]) -> list[str]:
    """Short names of a LeRobot config's image inputs, in order."""
    features = values.get("input_features") or {}
    return [image_name(key) for key, feature in features.items() if feature.get("type") == "VISUAL"]


def image_name(key: str) -> str:
    """`observation.images.wrist` -> `wrist`; `observation.image` -> `image`."""
    return key.removeprefix(IMAGE_PREFIX).removeprefix("observation.")
