"""The computed roofline: what it counts of one product, and that bigger batches never take less."""

from __future__ import annotations

import pytest
import torch

from vla_rl.workflows.gpu_bench.large_policy import AUTOREGRESSIVE, PARALLEL
from vla_rl.workflows.gpu_bench.roofline import LAUNCH_SECONDS, Gpu, Roofline, of_act, of_update

GPU = Gpu("round numbers", bf16=1e12, fp32=1e11, bandwidth=1e12)


@pytest.mark.parametrize(("dtype", "rate"), [(torch.bfloat16, 1e12), (torch.float32, 1e11)])
def test_a_large_product_is_bound_by_its_arithmetic(dtype, rate):
    a = torch.ones(256, 256, dtype=dtype)
    with Roofline(GPU) as found:
        a @ a
    assert found.kernels == 1 and found.flops == 2 * 256**3 and found.seconds == pytest.approx(2 * 256**3 / rate)
    assert found.eager_seconds == max(found.seconds, LAUNCH_SECONDS)


def test_a_sum_is_bound_by_its_bytes_and_a_view_costs_nothing():
    a = torch.ones(1000, 1000)
    with Roofline(GPU) as found:
        a.view(-1).add(1.0)
    assert found.kernels == 1 and found.seconds == pytest.approx(2 * 4e6 / 1e12)


def test_acting_and_updating_are_counted_without_values():
    one, four = (of_act(False, PARALLEL, n, GPU) for n in (1, 4))
    # What the last layer reads of a batch does not lie in one piece, and is copied once.
    assert four.flops == pytest.approx(4 * one.flops, rel=0.1) and four.kernels == one.kernels + 1
    assert of_act(False, AUTOREGRESSIVE, 1, GPU).kernels > 3 * one.kernels  # A pass for each token.
    update = of_update(False, 4, GPU)
    assert 2 * four.flops < update.flops < 4 * four.flops  # Forward, again, backward; frozen weights have no gradient.
