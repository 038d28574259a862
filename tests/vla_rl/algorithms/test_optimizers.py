"""Which parameter goes to which optimizer, at which learning rate."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn
from toy_problem import ToyPolicy, roll_out

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.config import ConfigError
from vla_rl.training.checkpoint import flatten_optimizer, restore_optimizer
from vla_rl.training.memory import AllocationCounter
from vla_rl.training.optimizers import build_optimizers, is_critic, optimizer_bytes, optimizer_step_bytes


def names(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[set[str]]:
    by_id = {id(p): n for n, p in module.named_parameters()}
    return [{by_id[id(p)] for p in group["params"]} for group in optimizer.param_groups]


def test_critic_has_its_own_learning_rate():
    policy = ToyPolicy(critic=True)
    config = PPOConfig(optim={"lr": 1e-3, "weight_decay": 0.1}, value_lr=1e-2)
    (adamw,) = build_optimizers(config.optim, dict(policy.named_parameters()), config.critic_lr)
    assert names(adamw, policy)[1] == {"value_head.weight", "value_head.bias"}
    assert [g["lr"] for g in adamw.param_groups] == [1e-3, 1e-2]
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]


def test_adamw_is_fused_on_a_gpu_alone():
    class Elsewhere(nn.Parameter):
        is_cuda = True

    def made(parameter: nn.Parameter) -> torch.optim.Optimizer:
        return build_optimizers(GRPOConfig().optim, {"w": parameter})[0]

    assert made(Elsewhere(torch.ones(2))).param_groups[0]["fused"] is True
    on_cpu = made(nn.Parameter(torch.ones(2)))
    assert on_cpu.param_groups[0]["fused"] is None  # Torch's default there, whose figures the golden runs hold.
    # A checkpoint from a GPU does not bring its kernels along, nor takes them away there.
    w = Elsewhere(torch.ones(2))
    on_gpu = made(w)
    for optimizer in (on_cpu, on_gpu):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
    tensors, rest = flatten_optimizer(on_gpu)
    restore_optimizer(on_cpu, tensors, json.loads(json.dumps(rest)))
    assert on_cpu.param_groups[0]["fused"] is None
    tensors, rest = flatten_optimizer(on_cpu)
    restore_optimizer(on_gpu, tensors, json.loads(json.dumps(rest)))
    assert on_gpu.param_groups[0]["fused"] is True


def test_an_unused_critic_is_left_alone():
    policy = ToyPolicy(critic=True)
    (adamw,) = build_optimizers(GRPOConfig().optim, dict(policy.named_parameters()))
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
    muon, adamw = build_optimizers(
        PPOConfig(optim={"name": "muon"}).optim, dict(module.named_parameters()), critic_lr=3e-3
    )
    assert isinstance(muon, torch.optim.Muon)
    assert names(muon, module) == [{"layer.weight"}]
    policy, critic = names(adamw, module)
    assert critic == {"value_head.weight", "value_head.bias"}
    assert policy == {n for n, _ in module.named_parameters()} - critic - {"layer.weight"}


def learn(policy: ToyPolicy, optimizer: str, steps: int, state: dict | None = None) -> tuple[list[float], dict]:
    """Losses of a regression, and a checkpoint's worth of state; `state` is one to go on from."""
    config = GRPOConfig(optim={"name": optimizer, "lr": 1e-2, "weight_decay": 0.01})
    (made,) = build_optimizers(config.optim, dict(policy.named_parameters()))
    done = 0
    if state is not None:
        policy.load_state_dict(state["weights"])
        restore_optimizer(made, state["tensors"], json.loads(state["rest"]))
        done = state["done"]
    losses = []
    for step in range(done, done + steps):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(64, 2, generator=generator)
        loss = (policy.out(policy.body(inputs)) - inputs.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(float(loss))
    tensors, rest = flatten_optimizer(made)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    return losses, {"weights": weights, "tensors": tensors, "rest": json.dumps(rest), "done": done + steps}


def test_moments_in_8_bits_learn_as_adamw_does_and_resume_to_the_bit():
    pytest.importorskip("torchao", reason="adamw_8bit needs torchao")
    policies = [ToyPolicy(hidden=64) for _ in range(4)]
    plain, _ = learn(policies[0], "adamw", 40)
    whole, state = learn(policies[1], "adamw_8bit", 40)
    assert whole[-1] < 0.2 * whole[0] and whole[-1] == pytest.approx(plain[-1], rel=0.2) and whole != plain
    assert {t.dtype for n, t in state["tensors"].items() if n.endswith("codes")} == {torch.uint8}
    first, half = learn(policies[2], "adamw_8bit", 15)
    rest, again = learn(policies[3], "adamw_8bit", 25, half)
    assert first + rest == whole
    assert again["tensors"].keys() == state["tensors"].keys()
    assert all(torch.equal(again["tensors"][n], t) for n, t in state["tensors"].items())


def test_a_learner_with_8_bits_warms_up_and_resumes():
    pytest.importorskip("torchao", reason="adamw_8bit needs torchao")
    config = PPOConfig(optim={"name": "adamw_8bit", "warmup_steps": 10}, minibatch_size=20)
    policy = ToyPolicy(critic=True, hidden=64)
    learner = config.build(policy)
    learner.update(learner.prepare(roll_out(policy, 8, 4, seed=1)))
    tensors, state = learner.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    other = ToyPolicy(critic=True, hidden=64)
    other.load_state_dict(policy.state_dict())
    resumed = config.build(other)
    resumed.load_state(tensors, json.loads(json.dumps(state)))
    episodes = roll_out(policy, 8, 4, seed=2)
    for each in (learner, resumed):
        each.update(each.prepare(episodes))
    assert 0 < learner.optimizers[0].param_groups[0]["lr"] <= config.optim.lr
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), other.parameters(), strict=True))


def test_without_torchao_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "vla_rl.training.adamw_8bit", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match=r"'adamw_8bit' needs torchao.*low_memory"):
        build_optimizers(GRPOConfig(optim={"name": "adamw_8bit"}).optim, dict(ToyPolicy().named_parameters()))


def _parts(value: Any) -> list[torch.Tensor]:
    """The plain tensors of an optimizer's entry."""
    return [getattr(value, n) for n in value.tensor_attrs] if hasattr(value, "tensor_attrs") else [value]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "muon"])
def test_the_optimizer_holds_as_many_bytes_as_counted(optimizer):
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao", reason="adamw_8bit needs torchao")
    policy = ToyPolicy(hidden=64)
    parameters = dict(policy.named_parameters())
    made = build_optimizers(GRPOConfig(optim={"name": optimizer}).optim, parameters)
    policy.out(policy.body(torch.ones(1, 2))).sum().backward()
    held = 0
    for each in made:
        each.step()
        for entries in each.state.values():
            for value in entries.values():
                held += sum(part.numel() * part.element_size() for part in _parts(value) if part.ndim)
    assert optimizer_bytes(optimizer, parameters) == held


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw_8bit"])
def test_a_step_makes_and_drops_as_many_bytes_as_counted(optimizer):
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao", reason="adamw_8bit needs torchao")
    parameters = {"layer.weight": nn.Parameter(torch.ones(128, 256)), "bias": nn.Parameter(torch.ones(64))}
    made = build_optimizers(GRPOConfig(optim={"name": optimizer}).optim, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    peaks = []
    for _ in range(2):  # In the first step the moments are made.
        known = [*parameters.values(), *(p.grad for p in parameters.values() if p.grad is not None)]
        states = [value for each in made for entries in each.state.values() for value in entries.values()]
        known += [part for state in states for part in _parts(state)]
        with torch.no_grad(), AllocationCounter(known) as counter:
            for each in made:
                each.step()
        peaks.append(counter.peak)
    assert peaks[1] == pytest.approx(optimizer_step_bytes(optimizer, parameters, "cpu"), rel=0.02)


def test_a_fused_step_shows_in_the_versions_of_the_weights(monkeypatch):
    class Fused(torch.optim.AdamW):
        """As on CUDA; the CPU has such a kernel, too."""

        def __init__(self, params, fused=None, **options):
            super().__init__(params, fused=True, **options)

    monkeypatch.setattr(torch.optim, "AdamW", Fused)
    weight = nn.Parameter(torch.ones(2, 2))
    (optimizer,) = build_optimizers(GRPOConfig().optim, {"weight": weight})
    weight.grad = torch.ones_like(weight)
    before = weight._version
    optimizer.step()
    assert weight._version > before and weight.max() < 1
