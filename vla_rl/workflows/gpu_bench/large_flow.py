"""SmolVLA and pi0 at their published sizes with random weights, made on the device: no file of a hub is read."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor, SmolVLMVideoProcessor

from vla_rl.config import build_component
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.policy import LeRobotPolicy
from vla_rl.policies.lerobot.tiny import tiny_tokenizer
from vla_rl.types import EnvSpec, Observation

CHUNK = 50  # Actions that both denoise at once, as published.
# name -> its options at full size. pi0's weights lie in bfloat16; SmolVLA's in float32, as LeRobot makes them.
OPTIONS: dict[str, dict[str, Any]] = {
    "smolvla": {"type": "smolvla"},
    "pi0": {"type": "pi0", "options": {"dtype": "bfloat16"}},
}
LORA = {"lora": {"rank": 32}, "trainable": "lora"}  # On the action expert.


def spec_of(is_full: bool) -> EnvSpec:
    """An environment with images of pi0's own size."""
    return fake_env_spec(image_size=224 if is_full else 64)


def on_device(
    name: str, is_full: bool, device: torch.device, spec: EnvSpec | None = None, **chosen: Any
) -> LeRobotPolicy:
    """The policy with these options, fresh weights and adapters, drawn on the device itself where it is a GPU.

    Args:
        spec: of the environment; None: `spec_of`.
        chosen: options over those of the benchmark, which has adapters.
    """
    spec, own = spec or spec_of(is_full), device if device.type in ("cuda", "meta") else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        if is_full:
            write_smolvlm2_500m(Path(folder))
            size = {"chunk_size": CHUNK, "vlm": folder} if name == "smolvla" else {"chunk_size": CHUNK}
            size |= {} if name == "smolvla" else {"tokenizer": folder}
        else:
            size = {"preset": "tiny", "chunk_size": 10}
        config = build_component("policy", {"kind": "lerobot", **OPTIONS[name], **size, **LORA, **chosen})
        with own:
            policy = config.build(spec, device, 0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy.eval()


def observations(is_full: bool, batch_size: int) -> Observation:
    """Made-up inputs."""
    return fake_observation(spec_of(is_full), batch_size)


def write_smolvlm2_500m(folder: Path) -> None:
    """Write the sizes of SmolVLM2-500M-Video-Instruct's config, which SmolVLA is built from, and a small tokenizer."""
    text = {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15}
    text |= {"num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49280, "pad_token_id": 2}
    vision = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    values = {
        "text_config": {"model_type": "llama", **text},
        "vision_config": {**vision, "image_size": 512, "patch_size": 16},
        "scale_factor": 4,
        "pad_token_id": 2,
        "image_token_id": 49190,
    }
    SmolVLMConfig.from_dict(values).save_pretrained(folder)
    processor = SmolVLMProcessor(SmolVLMImageProcessor(), tiny_tokenizer(["a word"]), SmolVLMVideoProcessor())
    processor.save_pretrained(folder)
