"""Acting with merged adapters: the plain network's work, the adapters' numbers, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vla_rl.common.cuda_graphs import ReplayedPass
from vla_rl.config import build_component
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lora import acts_merged
from vla_rl.policies.openvla.options import PRESETS

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


def adapters(policy: Any) -> dict[str, Any]:
    return {name: parameter for name, parameter in policy.named_parameters() if "lora_B" in name}


def in_place(policy: Any) -> None:
    for parameter in adapters(policy).values():
        parameter.mul_(-3.0)


def loaded(policy: Any, **how: Any) -> None:
    policy.load_state_dict({n: -3.0 * p for n, p in adapters(policy).items()}, strict=False, **how)


def elsewhere(policy: Any) -> None:
    for parameter in adapters(policy).values():
        parameter.data = -3.0 * parameter.data


def other_parameters(policy: Any) -> None:
    for name, parameter in adapters(policy).items():
        policy.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(-3.0 * parameter)


def other_layers(policy: Any) -> None:
    in_place(policy)
    policy.merge_lora()


CHANGES = [in_place, loaded, functools.partial(loaded, assign=True), elsewhere, other_parameters, other_layers]


@pytest.mark.parametrize("is_copied", [False, True], ids=["itself", "a copy"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: str(getattr(change, "__name__", "assigned")))
@torch.no_grad()
def test_what_has_changed_is_merged_anew(change, is_copied):
    policy = original = make("openvla", lora={"rank": 2}, trainable="lora", merge_lora=True)
    first = act(policy)
    policy = copy.deepcopy(policy) if is_copied else policy
    change(policy)
    chunk = act(policy)
    assert not np.allclose(first.log_prob, chunk.log_prob, atol=1e-3)
    np.testing.assert_allclose(chunk.log_prob, policy.evaluate(OBS, chunk).log_prob, atol=1e-4)
    if is_copied:
        np.testing.assert_array_equal(act(original).actions, first.actions)


def test_weights_that_graphs_read_are_renewed_where_they_lie_and_freed_by_training():
    policy = make("openvla", lora={"rank": 2}, trainable="lora", merge_lora=True)
    act(policy)
    before = [weight.data_ptr() for weight in policy._merged_lora.weights]
    with torch.no_grad():
        in_place(policy)
    chunk = act(policy)
    assert [weight.data_ptr() for weight in policy._merged_lora.weights] == before
    assert policy.evaluate(OBS, chunk).log_prob.requires_grad
    assert policy._merged_lora is None


def test_the_host_visits_no_module_of_a_policy_of_full_depth(monkeypatch):
    full = PRESETS["7b"]
    towers = tuple(t.model_copy(update={"embed_dim": 8, "num_heads": 1, "mlp_ratio": 1.0}) for t in full.towers)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "num_kv_heads": 1}
    narrow = {"towers": towers, "llm": full.llm.model_copy(update=sizes | {"padded_vocab_size": 32064})}
    monkeypatch.setitem(PRESETS, "7b", full.model_copy(update=narrow))
    lora_of_the_recipe = {"lora": {"rank": 32, "targets": "all-linear"}, "trainable": "lora", "merge_lora": True}
    policy = make("openvla", preset="7b", image_size=28, **lora_of_the_recipe)
    replayed = ReplayedPass(lambda: (), policy.network)
    seen: Counter[str] = Counter()
    empty_act = acts_merged(lambda policy: replayed._places())
    first = empty_act(policy)
    sys.setprofile(lambda frame, event, what: seen.update([event]))
    try:
        again = empty_act(policy)
    finally:
        sys.setprofile(None)
    assert first == again and len(first) > 1800 and len(policy._merged_lora.layers) == 436
    assert seen["call"] < 30, "Python functions, of which a walk calls several for each of 5,900 modules"
    assert seen["c_call"] < 3 * len(first), "where each parameter lies, twice, and the swaps"
