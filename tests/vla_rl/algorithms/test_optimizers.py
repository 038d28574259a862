"""Which parameter goes to which optimizer, at which learning rate."""

from __future__ import annotations

import torch
from torch import nn
from toy_problem import ToyPolicy

from vla_rl.algorithms.configs import GRPOConfig, PPOConfig
from vla_rl.algorithms.optimizers import build_optimizers, is_critic


def names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[set[str]]:
    by_id = {id(p): n for n, p in module.named_parameters()}
    return [{by_id[id(p)] for p in group["params"]} for group in optimizer.param_groups]


def test_critic_has_its_own_learning_rate():
    policy = ToyPolicy(critic=True)
    (adamw,) = build_optimizers(PPOConfig(lr=1e-3, value_lr=1e-2, weight_decay=0.1), dict(policy.named_parameters()))
    assert names(adamw, policy)[1] == {"value_head.weight", "value_head.bias"}
    assert [g["lr"] for g in adamw.param_groups] == [1e-3, 1e-2]
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]


def test_an_unused_critic_is_left_alone():
    policy = ToyPolicy(critic=True)
    (adamw,) = build_optimizers(GRPOConfig(), dict(policy.named_parameters()))
    assert not any(is_critic(n) for group in names(adamw, policy) for n in group)


def test_muon_takes_hidden_matrices_only():
    module = nn.ModuleDict(
        {
            "patch_embed": nn.Conv2d(3, 8, 4),
            "embed_tokens": nn.Embedding(10, 8),
            "layer": nn.Linear(8, 8),
            "lm_head": nn.Linear(8, 10),
            "value_head": nn.Linear(8, 1),
        }
    )
    muon, adamw = build_optimizers(PPOConfig(optimizer="muon"), dict(module.named_parameters()))
    assert isinstance(muon, torch.optim.Muon)
    assert names(muon, module) == [{"layer.weight"}]
    policy, critic = names(adamw, module)
    assert critic == {"value_head.weight", "value_head.bias"}
    assert policy == {n for n, _ in module.named_parameters()} - critic - {"layer.weight"}
