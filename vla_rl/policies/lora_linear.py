"""peft's adapted linear layer with fewer passes over large arrays. Imports peft, so only where there are adapters."""

from __future__ import annotations

from typing import Any, cast

import peft
import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

ADAPTER = "default"


class LoraLinear(Linear):
    """W x + s B (A x), where peft's own takes the input to float32 and back, and scales and adds a product apart.

    On large batches these copies, each as large as the layer's input or output, cost a GPU more than the adapter's own
    products. What it computes is peft's but for the order of rounding; whatever is unusual is left to peft.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        down, up = (cast(nn.Linear, part[ADAPTER]).weight for part in (self.lora_A, self.lora_B))
        is_cast = torch.is_autocast_enabled(x.device.type)
        if args or kwargs or self.merged or self.disable_adapters or not (is_cast or x.dtype == down.dtype):
            return super().forward(x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1])
        result: Tensor = cast(nn.Linear, self.get_base_layer())(flat)
        low = linear(self.lora_dropout[ADAPTER](flat), down)
        if result.dtype != low.dtype:  # A layer that autocast leaves alone.
            return super().forward(x)
        return result.addmm_(low, up.to(low.dtype).t(), alpha=self.scaling[ADAPTER]).view(
            *x.shape[:-1], result.shape[-1]
        )


def inject(network: nn.Module, targets: list[str], rank: int, alpha: int, dropout: float) -> None:
    """Put adapters on linear layers, by their names, in place; they change nothing until trained."""
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
    config._register_custom_module({nn.Linear: LoraLinear})
    peft.inject_adapter_in_model(config, network)
