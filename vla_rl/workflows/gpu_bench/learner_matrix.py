"""Learners of every kind on tiny policies: two updates on given episodes, whose losses must be those of the CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.learner import Learner
from vla_rl.config import build_component
from vla_rl.interfaces import Policy
from vla_rl.policies.fake_input import fake_observation, fake_statistics
from vla_rl.types import EnvSpec, Episode, EpisodeSpec
from vla_rl.workflows.gpu_bench import policy_matrix
from vla_rl.workflows.gpu_bench.policy_matrix import SPEC

_BATCHES = {"epochs": 1, "minibatch_size": 6, "micro_batch_size": 4}
_FLOW = _BATCHES | {"ratio_level": "action"}
# name -> policy, algorithm
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"kind": "openvla", "precision": "fp32"}, {"kind": "grpo", **_BATCHES}),
    "grpo-kl-muon": (
        {"kind": "openvla", "precision": "fp32"},
        {"kind": "grpo", "kl_coef": 0.01, "optim": {"name": "muon"}, **_BATCHES},
    ),
    "ppo": ({"kind": "openvla", "precision": "fp32", "value_head": True}, {"kind": "ppo", **_BATCHES}),
    "grpo-autoregressive": (
        {"kind": "openvla", "precision": "fp32", "decoder": "autoregressive", "chunk_size": 2},
        {"kind": "grpo", **_BATCHES},
    ),
    "grpo-l1": (
        {"kind": "openvla", "precision": "fp32", "decoder": "l1", "chunk_size": 2, "laplace": {}},
        {"kind": "grpo", **_BATCHES},
    ),
    "grpo-lora-bf16-checkpointing": (
        {
            "kind": "openvla",
            "precision": "bf16",
            "lora": {"rank": 4},
            "trainable": "lora",
            "gradient_checkpointing": True,
            "attention": "sdpa",
        },
        {"kind": "grpo", **_BATCHES},
    ),
    "ppo-smolvla": (
        {"kind": "lerobot", "type": "smolvla", "preset": "tiny", "value_head": True},
        {"kind": "ppo", **_FLOW},
    ),
    "grpo-pi05-noise": (
        {"kind": "lerobot", "type": "pi05", "preset": "tiny", "sampling": {"method": "flow_noise"}},
        {"kind": "grpo", **_FLOW},
    ),
}
COMPARED = ("loss/policy", "grad_norm/policy", "loss/value", "update/kl_reference")


def build(name: str, device: str | torch.device) -> tuple[Policy, Learner]:
    """The case's policy and its learner, the same on every device."""
    policy_config = build_component("policy", {"precision": "fp32"} | CASES[name][0])
    policy = policy_config.build(SPEC, device, 0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.eval()
    return policy, learner(name, policy)


def learner(name: str, policy: Policy) -> Learner:
    """The case's learner for a policy."""
    config = build_component("algo", CASES[name][1])
    return config.build(policy, 0, temperature=1.0)


def computes_in_bf16(name: str) -> bool:
    """Whether a case's numbers are rounded to bfloat16, so that two devices agree less closely."""
    return CASES[name][0].get("precision") == "bf16"


def episodes(policy: Policy, groups: int = 2, size: int = 3, decisions: int = 2, spec: EnvSpec = SPEC) -> list[Episode]:
    """Made-up episodes with chunks of the policy: half of each group's succeed."""
    made = []
    for number in range(groups * size):
        obs = fake_observation(spec, decisions + 1, seed=number)
        here = list(range(decisions))
        chunks = policy.act(obs.select(here), torch.Generator().manual_seed(number), 1.0)
        success = number % 2 == 0
        reward = np.zeros((decisions, policy.chunk_size), np.float32)
        terminated, truncated = np.zeros((2, *reward.shape), bool)
        reward[-1, -1] = terminated[-1, -1] = success
        truncated[-1, -1] = not success
        made.append(
            Episode(
                spec=EpisodeSpec(next(iter(spec.tasks)), "train", number // size),
                obs=obs.select(here),
                chunks=chunks,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                num_steps=np.full(decisions, policy.chunk_size),
                success=success,
                final_obs=obs.select([decisions]),
                group=number // size,
                lost=False,
                frames=None,
                states=None,
                info={},
            )
        )
    return made


def two_updates(policy: Policy, learner: Learner, given: list[Episode]) -> dict[str, np.ndarray]:
    """The metrics of two updates, the state saved and loaded between them.

    Returns:
        COMPARED, where the algorithm has them: float64 (2,).
    """
    first = learner.update(learner.prepare(given))
    tensors, state = learner.state()
    learner.load_state({name: x.detach().to("cpu") for name, x in tensors.items()}, json.loads(json.dumps(state)))
    second = learner.update(learner.prepare(given))
    return {name: np.array([first[name], second[name]], np.float64) for name in COMPARED if name in first}


def difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference of two answers of `two_updates`, of numbers above 1 relative: gradients can be large."""
    scales = {name: np.maximum(1.0, np.abs(array)) for name, array in expected.items()}
    if found.keys() != expected.keys():
        return float("inf")
    return policy_matrix.difference(
        {name: found[name] / scale for name, scale in scales.items()},
        {name: expected[name] / scale for name, scale in scales.items()},
    )
