"""Acting with merged adapters: the plain network's work, the adapters' numbers, and nothing left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vla_rl.config import build_component
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics

SPEC = fake_env_spec()
OBS = fake_observation(SPEC, 3)
KINDS = {
    "openvla": {"kind": "openvla", "precision": "fp32", "image_size": 32, "chunk_size": 2},
    "smolvla": {"kind": "lerobot", "type": "smolvla", "preset": "tiny", "precision": "fp32"},
}


def make(kind: str, **options: Any) -> Any:
    policy = build_component("policy", KINDS[kind] | options).build(SPEC, "cpu", 0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, 0.0, 0.1)
    return policy.eval()


def act(policy: Any) -> Any:
    return policy.act(OBS, torch.Generator().manual_seed(0), 1.0)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_cost_no_pass_and_change_nothing_else(kind):
    if kind == "smolvla":
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    adapters = {"lora": {"rank": 2}, "trainable": "lora"}
    plain, separate, merged = make(kind), make(kind, **adapters), make(kind, **adapters, merge_lora=True)
    before = {n: t.clone() for n, t in merged.state_dict().items()}
    chunk = act(merged)
    with Products() as as_plain:
        act(plain)
    with Products() as as_merged:
        again = act(merged)
    assert as_merged.num == as_plain.num
    np.testing.assert_array_equal(again.actions, chunk.actions)
    for name in ("actions", "log_prob"):
        np.testing.assert_allclose(getattr(chunk, name), getattr(act(separate), name), atol=1e-4)
    assert all(torch.equal(t, before[n]) for n, t in merged.state_dict().items())
    ours, theirs, bare = (p.evaluate(OBS, chunk).log_prob for p in (merged, separate, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)  # Training takes no notice.
    assert not torch.allclose(bare, theirs, atol=1e-3), "the adapters do nothing here"


def test_changed_adapters_are_merged_anew_and_training_frees_the_copy():
    policy = make("openvla", lora={"rank": 2}, trainable="lora", merge_lora=True)
    first = act(policy).log_prob
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-3.0)
    chunk = act(policy)
    assert not np.allclose(first, chunk.log_prob, atol=1e-3)
    np.testing.assert_allclose(chunk.log_prob, policy.evaluate(OBS, chunk).log_prob.detach(), atol=1e-4)
    assert policy._merged_lora is None
