"""Muon on a CPU: torch's steps, orthogonal in float32.

torch.optim.Muon multiplies in bfloat16, which a GPU does fastest and most CPUs do not do at all: there its products
take some eighty times as long as in float32, and were two thirds of an update. In float32 they are a hundredth of one
on any CPU, and every processor makes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with `match_rms_adamw` (Liu et al. 2025, arXiv 2502.16982), its products in float32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See torch.optim.Muon."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            assert group["adjust_lr_fn"] == "match_rms_adamw", "the only scale of its steps"
            parameters: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            buffers: list[torch.Tensor] = []
            self._init_group(group, parameters, gradients, buffers)
            lr, momentum = float(group["lr"]), group["momentum"]
            for parameter, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
                buffer.lerp_(gradient, 1 - momentum)
                step = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()
                step = orthogonal(step.float(), group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(step, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))
        return loss


def orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Bring a matrix's singular values near 1, by Newton and Schulz's iteration; overwrites it.

    Args:
        matrix: (M, N), in the precision to compute in.
        coefficients: of X, (X X^T) X and (X X^T)^2 X in each step (Jordan et al. 2024).

    Returns:
        (M, N), with singular values within about .7 and 1.2.
    """
    a, b, c = coefficients
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide.div_(wide.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
