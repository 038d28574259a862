"""What policies record as a CUDA graph can be recorded: the host neither waits for the device nor copies to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from representatives import slow_but_for

from pretend_device import budgets, pretending
from pretend_device.rules import NAME
from vla_rl.policies.fake_input import fake_observation
from vla_rl.types import ActionPrefix
from vla_rl.workflows.gpu_bench import policy_matrix

OBS = fake_observation(policy_matrix.SPEC, policy_matrix.BATCH)
REST = np.zeros((policy_matrix.BATCH, 2, 7), np.float32)
# How a policy acts, and the method that it needs for it.
WAYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "drawn": ("act", lambda policy: policy.act(OBS, torch.Generator().manual_seed(0), 1.0)),
    "greedy": ("act", lambda policy: policy.act(OBS, None, 0.0)),
    "guided": ("steer", lambda policy: policy.act_guided(OBS, [OBS], 1.5, torch.Generator().manual_seed(0), 1.0)),
    "steered": ("steer", lambda policy: policy.steer(OBS, lambda seen: seen.new_ones(3, 1, *policy.noise_shape))),
    "continued": ("act_with_prefix", lambda policy: policy.act_with_prefix(OBS, ActionPrefix(REST, 1))),
}


def test_kept_constants_are_copies_by_value_type_and_device():
    from vla_rl.common.cuda_graphs import KeptConstants

    with KeptConstants() as kept:
        first = torch.tensor([1, 2], device="cpu")
        first += 1
        again, other = torch.tensor([1, 2], device="cpu"), torch.tensor([1, 2], device="cpu", dtype=torch.float32)
        without_device = torch.tensor([1, 2])
        arrays = [torch.tensor(np.array([0.1 + i * 1e-12]), device="cpu") for i in range(2)]
    assert again.tolist() == [1, 2] and other.dtype == torch.float32 and without_device.tolist() == [1, 2]
    assert len(kept._kept) == 2 and not torch.equal(*arrays)  # An array's text does not tell all of it.


FAST = ("openvla-graphs", "openvla-graphs-autoregressive", "pi0-graphs")


@pytest.fixture(scope="module", params=slow_but_for(FAST, budgets.RECORDED))
def named(request):
    if request.param.startswith("smolvla"):
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    with pretending():
        yield request.param, policy_matrix.build(request.param, NAME)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_an_act_is_one_pass_in_which_the_host_has_no_part(named, way):
    (name, policy), (needed, act) = named, WAYS[way]
    if not hasattr(policy, needed):
        pytest.skip(f"the policy has no {needed}")
    recorded = budgets.watch_act(policy, lambda: act(policy))
    assert recorded.passes == 1 and recorded.inside.kernels
    counted = recorded.inside
    assert not (counted.syncs or counted.uploads or counted.downloads), counted.places()
    assert way != "drawn" or recorded.left <= budgets.RECORDED[name], f"{recorded.left} launches beside the graph"


@torch.no_grad()
def test_lerobots_constants_would_be_copied_if_they_were_not_kept():
    with pretending():
        policy: Any = policy_matrix.build("pi0-graphs", NAME)
        policy.replayed.constants = nullcontext()
        assert budgets.watch_act(policy, lambda: WAYS["drawn"][1](policy)).inside.uploads
