"""torch.compile of SmolVLA and pi0.5: what is compiled as a whole gives every trained weight the eager gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.config import validate
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig

pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")

SPEC = fake_env_spec()


def make(kind: str) -> Any:
    options = {"type": kind, "preset": "tiny", "value_head": True, "precision": "fp32"}
    policy: Any = validate(LeRobotConfig, options, prefix="policy").build(SPEC, seed=0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy.eval()


def gradients(policy: Any, chunk: Any) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Log-probabilities of a chunk, and the gradients of them, the value and the cloning loss."""
    obs = fake_observation(SPEC, 2)
    policy.zero_grad()
    out = policy.evaluate(obs, chunk)
    loss = out.log_prob.mean() + out.value.mean() + policy.bc_loss(obs, chunk.actions)[0]
    loss.backward()
    found = {n: p.grad.clone() for n, p in policy.named_parameters() if p.requires_grad and p.grad is not None}
    return out.log_prob.detach().numpy(), found


@pytest.mark.slow  # Nothing of ours compiles them: `policy.compile` is OpenVLA's.
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["smolvla", "pi05"])
def test_every_trained_weight_of_a_flow_policy_keeps_its_gradient(kind, backend):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    policy = make(kind)
    chunk = policy.act(fake_observation(SPEC, 2), torch.Generator().manual_seed(0), 1.0)
    likelihood, eager = gradients(policy, chunk)
    for method in ("prefix", "velocity", "losses"):  # All of the network but the small heads.
        setattr(policy.network, method, torch.compile(getattr(policy.network, method), backend=backend))
    try:
        again, compiled = gradients(policy, chunk)
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
    finally:
        torch.compiler.reset()
    np.testing.assert_allclose(again, likelihood, atol=1e-4, rtol=1e-4)
    assert compiled.keys() >= eager.keys() and len(eager) > 20
    # What no loss reaches (the last layer of pi0.5's language model) has no gradient, or compiled ahead of time zeros.
    assert not any(compiled[name].any() for name in compiled.keys() - eager.keys())
    for name, gradient in eager.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(compiled[name], gradient, atol=1e-3 * scale + 1e-9, rtol=1e-3, msg=name)
    assert any("q_proj" in n and float(g.abs().max()) > 0 for n, g in compiled.items())
