"""Flow policies at their published sizes: acting with a likelihood for 1 to 64 environments, and a micro-batch.

SmolVLA and pi0 have random weights, made on the device: no file of a hub is read.
"""

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
from vla_rl.workflows.gpu_bench.sheet import Attempt, Sheet
from vla_rl.workflows.gpu_bench.timing import count_flops, median_seconds

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


FORMS = {"eager": False, "CUDA graphs": True}  # cuda_graphs
SIZES = {"full": (1, 16, 64), "tiny": (2,)}  # In the order of what matters, as time may run out.
MICRO_BATCHES = {"full": (8,), "tiny": (2,)}


class Flowing:
    """The policy at hand, made when it is first asked for; there is room for one."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._form: tuple[str, str] | None = None
        self._policy: LeRobotPolicy | None = None
        self._flops: dict[tuple[str, int], float] = {}

    def policy(self, name: str, form: str) -> LeRobotPolicy:
        """The policy of this name, which acts so."""
        if self._policy is None or self._form != (name, form):
            self._policy = None
            self._policy = on_device(name, self.sheet.is_full, self.sheet.device, cuda_graphs=FORMS[form])
            self._form = name, form
        return self._policy

    def act(self, name: str, form: str, batch_size: int) -> None:
        """One chunk for each environment, images on the host to actions."""
        policy, obs = self.policy(name, form), observations(self.sheet.is_full, batch_size)
        generator = torch.Generator().manual_seed(0)

        def act() -> None:
            assert policy.act(obs, generator, 1.0).log_prob is not None, "a flow policy draws with a likelihood"

        if form == "eager":
            self._flops[name, batch_size] = count_flops(act)
        seconds = median_seconds(act, self.sheet.device, 5 if self.sheet.is_full else 1, 1)
        self._add(f"{_text(name, policy)}, act, {form}, B={batch_size}", seconds, (name, batch_size), batch_size)

    def micro_batch(self, name: str, size: int) -> None:
        """Forward and backward of GRPO's loss of one micro-batch, through every denoising step."""
        policy, obs = self.policy(name, "eager"), observations(self.sheet.is_full, size)
        chunk = policy.act(obs, torch.Generator().manual_seed(0), 1.0)

        def step() -> None:
            out = policy.evaluate(obs, chunk)
            (out.log_prob.mean() + out.entropy.mean()).backward()

        policy.zero_grad()
        self._flops[name, -size] = count_flops(step)
        seconds = median_seconds(step, self.sheet.device, 5 if self.sheet.is_full else 1, 1)
        self._add(f"{_text(name, policy)}, forward and backward, micro-batch of {size}", seconds, (name, -size), size)
        policy.zero_grad()

    def _add(self, what: str, seconds: float, counted: tuple[str, int], decisions: int) -> None:
        note = self.sheet.speed_note(self._flops.get(counted), seconds, decisions)
        self.sheet.add(what, 1000 * seconds, "ms", note=note)


def _text(name: str, policy: LeRobotPolicy) -> str:
    sizes = [p.numel() for n, p in policy.named_parameters() if not n.endswith("paligemma.lm_head.weight")]
    return f"{name} ({sum(sizes) / 1e9:.2f} billion parameters)"  # Its head is its embedding.


def measure(sheet: Sheet) -> None:
    """Chunks of 50 actions in 10 denoising steps, one camera; adapters of rank 32 on the action expert are trained."""
    flowing, size = Flowing(sheet), "full" if sheet.is_full else "tiny"
    attempts: list[Attempt] = []
    for name in OPTIONS:
        attempts += [
            (f"{name}, micro-batch of {n}", lambda name=name, n=n: flowing.micro_batch(name, n))
            for n in MICRO_BATCHES[size]
        ]
        attempts += [
            (f"{name}, act, {form}, B={n}", lambda name=name, form=form, n=n: flowing.act(name, form, n))
            for form in FORMS
            for n in SIZES[size]
        ]
    sheet.run(attempts)
