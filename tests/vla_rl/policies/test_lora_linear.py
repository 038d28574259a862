"""The adapted layer gives peft's numbers and gradients, makes no copy in float32, and leaves the unusual to peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import peft
import pytest
import torch
from peft.tuners.lora import Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vla_rl.policies.lora import ADAPTER, LoraLinear, inject, read_adapters


def adapted(dropout: float = 0.0, weights: torch.dtype = torch.float32) -> LoraLinear:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 40))
    network.to(weights).requires_grad_(False)
    inject(network, ["0"], rank=4, alpha=2, dropout=dropout)
    layer = cast(LoraLinear, network[0])
    for part in (layer.lora_A, layer.lora_B):
        part[ADAPTER].weight.data = torch.randn(part[ADAPTER].weight.shape) * 0.3
    return layer


def found(layer: LoraLinear, forward, x: torch.Tensor, in_bf16: bool) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        y = forward(layer, x)
    y.float().square().sum().backward()
    gradients = [cast(torch.Tensor, part[ADAPTER].weight.grad).clone() for part in (layer.lora_A, layer.lora_B)]
    return [y.detach(), cast(torch.Tensor, x.grad), *gradients]


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_numbers_and_gradients_are_pefts(in_bf16, weights):
    if weights == torch.bfloat16 and not in_bf16:
        pytest.skip("weights in bfloat16 are multiplied under autocast")
    layer, x = adapted(weights=weights), torch.randn(2, 5, 24, dtype=weights)
    ours, pefts = (found(layer, forward, x, in_bf16) for forward in (LoraLinear.forward, Linear.forward))
    tolerance = 0.02 if in_bf16 else 1e-5
    for a, b in zip(ours, pefts, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance * float(b.float().abs().max()))


class _Casts(TorchDispatchMode):
    """Counts copies to another dtype of what is as large as the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::_to_copy" and args[0].numel() >= self.size
        return func(*args, **(kwargs or {}))


def test_no_input_is_copied_to_float32_and_back():
    layer, x = adapted(weights=torch.bfloat16), torch.randn(64, 24, dtype=torch.bfloat16)
    counts = []
    for forward in (LoraLinear.forward, Linear.forward):
        with _Casts(x.numel()) as casts, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            forward(layer, x)
        counts.append(casts.count)
    assert counts[0] == 0 < counts[1]


def test_what_is_merged_switched_off_or_of_mixed_types_is_left_to_peft():
    layer, x = adapted(), torch.randn(3, 24)
    plain = layer.get_base_layer()(x)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), plain)
    layer.enable_adapters(True)
    separate = layer(x)
    assert not torch.allclose(separate, plain)
    layer.merge()
    torch.testing.assert_close(layer(x), separate)
    layer.unmerge()
    mixed = adapted(weights=torch.bfloat16)  # Without autocast: peft adds in float32 and rounds once.
    x = torch.randn(3, 24, dtype=torch.bfloat16)
    assert torch.equal(mixed(x), Linear.forward(mixed, x)) and mixed(x).dtype == torch.bfloat16


def test_no_rows_give_no_rows():
    assert adapted()(torch.zeros(2, 0, 24)).shape == (2, 0, 40)


def test_dropout_is_applied_while_training_alone():
    layer, x = adapted(dropout=0.5), torch.randn(200, 24)
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("start", ["gaussian", "pissa", "olora"])
def test_adapters_that_changed_their_base_when_they_were_made_are_refused(start, tmp_path: Path):
    """peft takes the first directions out of the base's weights for them, and does so again when it reads them."""
    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(2, 16)
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=start)
    trained = peft.get_peft_model(copy.deepcopy(base), config)  # type: ignore[arg-type]
    for parameter in trained.parameters():
        parameter.data += 0.01 * parameter.requires_grad
    trained.save_pretrained(str(tmp_path))
    if start == "gaussian":
        read_adapters(base, tmp_path)
        torch.testing.assert_close(base(x), trained(x))
        return
    with pytest.raises(ValueError, match=f"init_lora_weights is '{start}'.*merge_and_unload"):
        read_adapters(base, tmp_path)
