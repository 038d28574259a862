"""Replayed passes: the plain function without a CUDA device; which policies have them. Graphs: `vla-rl bench gpu`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.common.cuda_graphs import MOST, ReplayedPass
from vla_rl.common.distributed.fsdp import shard
from vla_rl.config import ConfigError, build_component
from vla_rl.interfaces import PolicyOutput
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.load import load_policy

SPEC = fake_env_spec()
TINY = {"kind": "openvla", "precision": "fp32", "image_size": 32, "chunk_size": 2}


def make(**options: Any) -> Any:
    policy = build_component("policy", TINY | options).build(SPEC, "cpu", 0)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy.eval()


def test_on_a_cpu_it_is_the_plain_function():
    layer = nn.Linear(3, 2)
    replayed = ReplayedPass(lambda x, missing: (layer(x), missing), layer)
    x = torch.randn(4, 3)
    result, missing = replayed(x, None)
    assert result is not None and torch.equal(result, layer(x)) and not result.requires_grad and missing is None


def test_a_copied_policy_replays_its_own_weights(tmp_path):
    policy = make(cuda_graphs=True)
    policy.replayed._recordings = {((), ()): object()}
    copied = copy.deepcopy(policy)
    assert copied.replayed._network is copied.network and not copied.replayed._recordings
    with torch.no_grad():
        next(copied.parameters()).add_(1.0)
    obs = fake_observation(SPEC, 2)
    assert copied.act(obs, None, 0.0).actions.shape == policy.act(obs, None, 0.0).actions.shape
    assert copied.replayed.function.__self__ is copied
    policy.save(tmp_path / "policy")
    assert load_policy(tmp_path / "policy").replayed is not None


def test_a_weight_that_lies_elsewhere_is_noticed():
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    replayed = ReplayedPass(lambda x: (network(x),), network)
    seen = [replayed._places()]
    kept = replayed._weights
    network[0].weight.data = network[0].weight.data.clone()
    seen.append(replayed._places())
    network[0]._parameters["weight"] = nn.Parameter(torch.ones(2, 3))
    seen.append(replayed._places())
    nn.Linear(4, 4)
    assert replayed._places() == seen[-1] and replayed._weights is kept, "other networks are nothing to this one"
    network[1] = nn.Linear(2, 2)
    seen.append(replayed._places())
    network[1].register_parameter("scale", nn.Parameter(torch.ones(1)))
    seen.append(replayed._places())
    assert len(set(seen)) == 5 and len(seen[-1]) == 5


def test_only_graphs_of_weights_that_lie_elsewhere_give_way():
    layer = nn.Linear(3, 2)
    replayed = ReplayedPass(lambda x: (layer(x),), layer)
    here, elsewhere = (1, 2), (1, 3)
    made: Any = object()
    replayed._recordings = {(elsewhere if i < 2 else here, i): made for i in range(MOST)}
    assert replayed._has_room(here) and len(replayed._recordings) == MOST - 2
    replayed._recordings |= {(here, MOST + i): made for i in range(2)}
    assert not replayed._has_room(here) and len(replayed._recordings) == MOST


@pytest.mark.parametrize("decoder", ["parallel", "l1", "autoregressive"])
def test_a_policy_acts_and_learns_the_same_with_them(decoder):
    options: dict[str, Any] = {"decoder": decoder} | ({"laplace": {}} if decoder == "l1" else {})
    plain, replaying = make(**options), make(**options, cuda_graphs=True)
    obs = fake_observation(SPEC, 3)
    for temperature in (0.0, 1.0):
        a, b = (policy.act(obs, torch.Generator().manual_seed(0), temperature) for policy in (plain, replaying))
        np.testing.assert_array_equal(a.actions, b.actions)
    out = replaying.evaluate(obs, b)
    out.log_prob.mean().backward()
    assert any(p.grad is not None and bool(p.grad.any()) for p in replaying.parameters())


def test_a_policy_that_does_not_denoise_by_a_flow_has_none():
    with pytest.raises(ConfigError, match=r"policy.cuda_graphs: only for smolvla, pi0, pi05, xvla; got 'act'"):
        config = build_component("policy", {"kind": "lerobot", "type": "act", "preset": "tiny", "cuda_graphs": True})
        config.build(SPEC, "cpu", 0)


def test_weights_that_are_gathered_for_each_pass_have_none():
    mesh: Any = None
    with pytest.raises(ConfigError, match=r"policy.cuda_graphs: got true, but with parallel=fsdp"):
        shard(make(cuda_graphs=True), mesh, PolicyOutput)
