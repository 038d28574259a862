"""What policies record as a CUDA graph can be recorded: the host neither waits for the device nor copies to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pretend_device import counting, pretending
from pretend_device.rules import NAME
from vla_rl.policies.fake_input import fake_observation
from vla_rl.workflows.gpu_bench import policy_matrix

RECORDED = [name for name, options in policy_matrix.ON_DEVICES.items() if options.get("cuda_graphs")]


def passes(policy: Any) -> list[tuple[Any, ...]]:
    """The inputs of each pass of one act."""
    found, plain = [], policy.replayed.function

    def noted(*given: Any) -> Any:
        found.append(given)
        return plain(*given)

    policy.replayed.function = noted
    policy.act(fake_observation(policy_matrix.SPEC, policy_matrix.BATCH), torch.Generator().manual_seed(0), 1.0)
    policy.replayed.function = plain
    return found


@pytest.mark.parametrize("name", RECORDED)
@torch.no_grad()
def test_the_host_has_no_part_in_a_pass(name):
    if name.startswith("smolvla"):
        pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
    with pretending():
        policy: Any = policy_matrix.build(name, NAME)
        given = passes(policy)
        assert len(given) == (policy.num_steps if hasattr(policy, "num_steps") else 1)
        with policy.replayed.constants:
            policy.replayed.function(*given[0])
            with counting() as counts:
                policy.replayed.function(*given[-1])
        assert counts.kernels and not (counts.syncs or counts.uploads or counts.downloads)


@torch.no_grad()
def test_lerobots_constants_would_be_copied_at_each_step_if_they_were_not_kept():
    with pretending():
        policy: Any = policy_matrix.build("pi0-graphs", NAME)
        given = passes(policy)
        with counting() as counts:
            policy.replayed.function(*given[-1])
        assert counts.uploads


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
