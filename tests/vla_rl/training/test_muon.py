"""Muon in float32: torch's steps, without bfloat16's rounding."""

from __future__ import annotations

import pytest
import torch

from vla_rl.training.optimizers import Float32Muon, orthogonal

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
@pytest.mark.parametrize("nesterov", [True, False])
def test_its_steps_are_those_of_torch(shape, nesterov):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    made = [torch.optim.Muon(weights[:1], nesterov=nesterov, **OPTIONS)]
    made += [Float32Muon(weights[1:], nesterov=nesterov, **OPTIONS)]
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for weight, optimizer in zip(weights, made, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
            assert torch.equal(weight.grad, gradient), "an optimizer leaves gradients alone"
    moved = [weight.detach() - start for weight in weights]
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[0].norm()
    buffers = [optimizer.state_dict()["state"][0]["momentum_buffer"] for optimizer in made]
    assert torch.equal(*buffers), "a checkpoint of one goes on with the other"


def test_singular_values_come_near_1_and_directions_stay():
    matrix = torch.randn(12, 30, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    values = left.T @ found @ right.T
    assert values.diagonal().min() > 0.6 and values.diagonal().max() < 1.3
    assert (values - values.diagonal().diag()).abs().max() < 1e-4


def test_weights_in_bfloat16_are_stepped_in_float32():
    weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    weight.grad = torch.eye(8, dtype=torch.bfloat16)
    Float32Muon([weight], **OPTIONS).step()
    assert weight.dtype == torch.bfloat16 and weight.diagonal().max() < 1
