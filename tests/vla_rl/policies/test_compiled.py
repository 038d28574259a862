"""torch.compile: compiled policies give the eager ones' numbers, and every trained weight its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.config import build_component
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics

SPEC = fake_env_spec()
OPENVLA = {
    "parallel": {"value_head": True, "keyframe_loss_weight": 0.1},
    "autoregressive": {"decoder": "autoregressive"},
    "l1": {"decoder": "l1", "laplace": {}},
    "adapters": {"lora": {"rank": 2, "vision": True}, "trainable": "lora"},
    "checkpointing": {"gradient_checkpointing": True, "attention": "sdpa"},
}


def make(**options: Any) -> Any:
    policy = build_component("policy", options).build(SPEC, "cpu", 0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():  # Adapters' second half starts at 0, and hides the first's.
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.1)
    return policy.eval()


def openvla(name: str, **options: Any) -> Any:
    return make(kind="openvla", precision="fp32", image_size=32, chunk_size=2, **OPENVLA[name], **options)


def drawn(policy: Any) -> Any:
    return policy.act(fake_observation(SPEC, 3), torch.Generator().manual_seed(0), 1.0)


def gradients(policy: Any, chunk: Any) -> dict[str, torch.Tensor]:
    """Of likelihood, entropy and value of chunks, and of cloning them."""
    obs = fake_observation(SPEC, 3)
    policy.zero_grad()
    out = policy.evaluate(obs, chunk)
    loss = out.log_prob.mean() + out.entropy.mean() + (0.0 if out.value is None else out.value.mean())
    (loss + policy.bc_loss(obs, chunk.actions, keyframe=np.zeros((3, 3)))[0]).backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.requires_grad and p.grad is not None}


def assert_same(compiled: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> None:
    assert compiled.keys() == eager.keys()
    for name, gradient in eager.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(compiled[name], gradient, atol=1e-3 * scale, rtol=1e-3, msg=name)


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow  # The layers that `policy.compile` compiles are below, and a language model's in test_llama.py.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPENVLA)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_every_trained_weight_of_openvla_keeps_its_gradient(compiler, name, backend):
    """With q's and k's, which a rotation in place once made 0 in each of the three."""
    plain, policy = openvla(name), openvla(name)
    eager = gradients(plain, drawn(plain))
    network = policy.network
    for method in ("prefix", "hidden", "logits"):  # All of the network but the small heads, which are modules.
        setattr(network, method, torch.compile(getattr(network, method), backend=backend))
    for head in (network.value_head, network.keyframe_head, network.action_head, network.scale_head):
        if head is not None:
            head.compile(backend=backend)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert trained == eager.keys()
    found = gradients(policy, drawn(policy))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    assert_same(found, eager)
    for projection in ("q_proj", "k_proj"):
        own = [gradient for n, gradient in found.items() if projection in n]
        assert own and all(bool(gradient.any()) for gradient in own)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_the_option_changes_no_number_and_no_name(compiler, monkeypatch, backend):
    """Captured, and with aot_eager differentiated, ahead of time; but run by torch's own kernels: it takes seconds."""
    compile_ = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_(self, **options | {"backend": backend}))
    eager, compiled = openvla("parallel"), openvla("parallel", compile=True)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    chunk = drawn(eager)
    log_probs = [policy.evaluate(fake_observation(SPEC, 3), chunk).log_prob for policy in (compiled, eager)]
    torch.testing.assert_close(*log_probs, atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    assert_same(gradients(compiled, chunk), gradients(eager, chunk))
    if backend == "eager":  # Without gradients all is captured anew.
        return
    ours = drawn(compiled)
    np.testing.assert_array_equal(ours.tokens, chunk.tokens)
    np.testing.assert_allclose(ours.log_prob, chunk.log_prob, atol=1e-5)
