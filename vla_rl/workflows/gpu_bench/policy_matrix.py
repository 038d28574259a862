"""Tiny policies of every kind, and what each is asked on a device: the answers must be those of the CPU.

for question, ask in QUESTIONS.items():
    print(question, difference(ask(build("openvla-l1", "cuda")), ask(build("openvla-l1", "cpu"))))
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.config import build_component
from vla_rl.interfaces import Policy
from vla_rl.policies.base import PolicyConfig
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionChunk

SPEC = fake_env_spec()
BATCH = 3
# Small variants of every kind; a new kind must be added here.
VARIANTS: dict[str, dict[str, Any]] = {
    "openvla-parallel": {"kind": "openvla", "precision": "fp32", "value_head": True},
    "openvla-parallel-bf16": {"kind": "openvla", "precision": "bf16", "placeholder": "zero", "use_state": False},
    "openvla-autoregressive": {
        "kind": "openvla", "precision": "fp32", "decoder": "autoregressive", "chunk_size": 2,
    },
    "openvla-l1": {
        "kind": "openvla", "precision": "fp32", "decoder": "l1", "chunk_size": 2, "laplace": {"initial_scale": 0.5},
        "value_head": True,
    },
    "smolvla-sde": {"kind": "lerobot", "type": "smolvla", "preset": "tiny", "value_head": True},
    "smolvla-noise-joint": {
        "kind": "lerobot", "type": "smolvla", "preset": "tiny", "sampling": {"method": "flow_noise", "joint": True},
    },
    "pi0-sde-joint": {"kind": "lerobot", "type": "pi0", "preset": "tiny", "sampling": {"joint": True}},
    "pi0-lora": {"kind": "lerobot", "type": "pi0", "preset": "tiny", "lora": {"rank": 2}, "trainable": "lora"},
    "pi05-noise": {
        "kind": "lerobot", "type": "pi05", "preset": "tiny", "value_head": True, "sampling": {"method": "flow_noise"},
    },
    "xvla-sde": {"kind": "lerobot", "type": "xvla", "preset": "tiny", "value_head": True},
    "diffusion-ddim": {"kind": "lerobot", "type": "diffusion", "preset": "tiny", "value_head": True},
    "diffusion-ddpm-joint": {
        "kind": "lerobot", "type": "diffusion", "preset": "tiny", "sampling": {"joint": True},
        "options": {"noise_scheduler_type": "DDPM"},
    },
    "act": {"kind": "lerobot", "type": "act", "preset": "tiny", "value_head": True},
    "act-learned": {"kind": "lerobot", "type": "act", "preset": "tiny", "sampling": {"method": "flow_noise"}},
    "pi0-fast": {"kind": "lerobot", "type": "pi0_fast", "preset": "tiny", "chunk_size": 2, "value_head": True},
    "openvla-lora": {"kind": "openvla", "precision": "fp32", "lora": {"rank": 2}, "trainable": "lora"},
}  # fmt: skip
# More, for devices: what costs or breaks there and not on a CPU.
ON_DEVICES: dict[str, dict[str, Any]] = VARIANTS | {
    "openvla-lora-bf16-checkpointing": {
        "kind": "openvla", "precision": "bf16", "lora": {"rank": 2}, "trainable": "lora",
        "gradient_checkpointing": True, "attention": "sdpa",
    },
    "openvla-graphs": {"kind": "openvla", "precision": "fp32", "value_head": True, "cuda_graphs": True},
    "openvla-graphs-merged": {
        "kind": "openvla", "precision": "fp32", "lora": {"rank": 2}, "trainable": "lora", "merge_lora": True,
        "cuda_graphs": True,
    },
    "openvla-graphs-autoregressive": {
        "kind": "openvla", "precision": "fp32", "decoder": "autoregressive", "chunk_size": 2, "value_head": True,
        "cuda_graphs": True,
    },
    "smolvla-graphs": {
        "kind": "lerobot", "type": "smolvla", "preset": "tiny", "cuda_graphs": True,
        "sampling": {"method": "flow_noise", "joint": True},
    },
    "pi0-graphs": {
        "kind": "lerobot", "type": "pi0", "preset": "tiny", "cuda_graphs": True, "lora": {"rank": 2},
        "trainable": "lora",
    },
    "pi05-graphs": {
        "kind": "lerobot", "type": "pi05", "preset": "tiny", "cuda_graphs": True, "value_head": True,
        "sampling": {"method": "flow_noise"},
    },
    "xvla-graphs": {
        "kind": "lerobot", "type": "xvla", "preset": "tiny", "cuda_graphs": True, "sampling": {"joint": True},
    },
    "openvla-image-chain": {
        "kind": "openvla", "precision": "fp32", "attention": "sdpa", "keyframe_loss_weight": 0.1,
        "images": {"jpeg_quality": 95, "resize": "lanczos3", "crop_area": 0.9},
    },
}  # fmt: skip

# Arrays by name; those in DRAWN hang on single tokens, of which a rounding may change one.
Answer = dict[str, np.ndarray]
DRAWN = ("tokens", "actions")


def build(name: str, device: str | torch.device, seed: int = 0) -> Policy:
    """The variant with fresh weights, the same on every device, and statistics."""
    # LeRobot's compute in bfloat16 on a GPU unless they are told not to, and OpenVLA's say what they compute in.
    config = build_component("policy", {"precision": "fp32"} | ON_DEVICES[name])
    assert isinstance(config, PolicyConfig), "the section makes policies"
    policy = config.build(SPEC, device, seed)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


def computes_in_bf16(name: str) -> bool:
    """Whether a variant's numbers are rounded to bfloat16, so that two devices agree less closely."""
    return ON_DEVICES[name].get("precision") == "bf16"


def _chunk(policy: Policy, temperature: float, generator: torch.Generator | None) -> Answer:
    chunk = policy.act(fake_observation(SPEC, BATCH), generator, temperature)
    values = {"tokens": chunk.tokens, "path": chunk.path, "log_prob": chunk.log_prob, "value": chunk.value}
    continuous = {} if chunk.tokens is not None else {"path": chunk.actions}
    return {name: array for name, array in values.items() if array is not None} | continuous


def act(policy: Policy) -> Answer:
    """A drawn chunk, by a generator of the host."""
    return _chunk(policy, 1.0, torch.Generator().manual_seed(0))


def act_greedy(policy: Policy) -> Answer:
    """The likeliest chunk."""
    return _chunk(policy, 0.0, torch.Generator().manual_seed(0))


def act_without_generator(policy: Policy) -> Answer:
    """The likeliest chunk, with no generator given."""
    return _chunk(policy, 0.0, None)


def given_chunk(policy: Policy) -> ActionChunk:
    """Some chunk, the same on every device but for the rounding of a denoising path."""
    rng = np.random.default_rng(0)
    shape = (BATCH, policy.chunk_size, policy.action_dim)
    actions = rng.uniform(-0.9, 0.9, shape).astype(np.float32)
    drawn = policy.act(fake_observation(SPEC, BATCH), torch.Generator().manual_seed(0), 1.0)
    tokens = None if drawn.tokens is None else rng.integers(0, 150, drawn.tokens.shape)
    return ActionChunk(actions, tokens=tokens, path=drawn.path)


def evaluate(policy: Policy) -> Answer:
    """Likelihood of a given chunk, and the norm of the gradient of all parameters together and of each's place."""
    out = policy.evaluate(fake_observation(SPEC, BATCH), given_chunk(policy), 1.0)
    _zero_gradients(policy)
    loss = out.log_prob.mean() + out.entropy.mean() + (0.0 if out.value is None else out.value.mean())
    loss.backward()
    answer = {"log_prob": out.log_prob.detach().float().cpu().numpy(), "gradient": gradient_norms(policy)}
    _zero_gradients(policy)
    return answer


def bc_loss(policy: Policy) -> Answer:
    """The loss of cloning, and its gradients."""
    size = getattr(policy, "demonstration_size", None) or policy.chunk_size
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, (BATCH, size, policy.action_dim)).astype(np.float32)
    valid = np.ones((BATCH, size), bool)
    valid[0, -1:] = size == 1
    keyframe = np.random.default_rng(1).normal(size=(BATCH, 3)).astype(np.float32)
    torch.manual_seed(0)  # Flow policies draw their noise from the host's global generator.
    _zero_gradients(policy)
    loss, _ = policy.bc_loss(fake_observation(SPEC, BATCH), actions, valid, keyframe=keyframe)
    loss.backward()
    answer = {"loss": np.array([float(loss.detach())]), "gradient": gradient_norms(policy)}
    _zero_gradients(policy)
    return answer


def embed(policy: Policy) -> Answer:
    """Features for failure detection."""
    return {"features": policy.embed(fake_observation(SPEC, BATCH)).float().cpu().numpy()}


def save_and_load(policy: Policy) -> Answer:
    """The likeliest chunk of the policy that was saved and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        policy.save(Path(folder) / "policy")
        return act_greedy(load_policy(Path(folder) / "policy", policy.device))


@torch.no_grad()
def act_after_a_change(policy: Policy) -> Answer:
    """The likeliest chunk when every trained weight has changed in place, as in a step; then they are as before."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    before = [parameter.clone() for parameter in trained]
    for number, parameter in enumerate(trained):
        parameter.add_(
            0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).to(parameter)
        )
    answer = act_greedy(policy)
    for parameter, value in zip(trained, before, strict=True):
        parameter.copy_(value)
    return answer


def merge(policy: Policy) -> Answer:
    """The likeliest chunk with adapters added to the weights; changes the policy, so it comes last."""
    merge_lora = getattr(policy, "merge_lora", None)
    if merge_lora is None or getattr(getattr(policy, "config", None), "lora", None) is None:
        return {}
    merge_lora()
    return act_greedy(policy)


QUESTIONS: dict[str, Callable[[Policy], Answer]] = {
    "act": act,
    "act greedy": act_greedy,
    "act without generator": act_without_generator,
    "evaluate and backward": evaluate,
    "cloning loss and backward": bc_loss,
    "embed": embed,
    "act after a change": act_after_a_change,
    "save and load": save_and_load,
    "merge": merge,
}


def gradient_norms(policy: Policy) -> np.ndarray:
    """float64 (n,): the norm of each trained parameter's gradient, 0 where there is none, over that of all together."""
    norms = [
        0.0 if p.grad is None else float(p.grad.detach().float().norm()) for p in policy.parameters() if p.requires_grad
    ]
    return np.array(norms) / max(float(np.linalg.norm(norms)), 1e-12)


def _zero_gradients(policy: Policy) -> None:
    for parameter in policy.parameters():
        parameter.grad = None


def difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], drawn_alike: bool = True) -> float:
    """The largest absolute difference of two answers; infinite where their shapes differ, NaN where one has it.

    Of drawn arrays it is the share that differs, less the 2 % that rounding may change.

    Args:
        drawn_alike: False leaves out drawn tokens and their likelihood: rounded to bfloat16, other ones are drawn.
    """
    if not drawn_alike and "tokens" in found:
        left_out = (*DRAWN, "log_prob")
        found, expected = ({n: a for n, a in x.items() if n not in left_out} for x in (found, expected))
    if found.keys() != expected.keys():
        return float("inf")
    worst = 0.0
    for name, array in found.items():
        other = expected[name]
        if array.shape != other.shape:
            return float("inf")
        if array.size == 0:
            continue
        if name in DRAWN:
            gap = max(0.0, float((array != other).mean()) - 0.02)
        else:
            gap = float(np.abs(np.asarray(array, np.float64) - np.asarray(other, np.float64)).max())
        if np.isnan(gap):
            return gap
        worst = max(worst, gap)
    return worst
