"""Continuous heads of the parallel decoder: OpenVLA-OFT's L1 head, and RIPT-VLA's scale head beside it.

Both read, for each step of the chunk, the hidden states of its A action positions side by side. The
L1 head alone gives one action and no likelihood; with the scale head the pair is a Laplace
distribution per component, which is what L1 regression fits the median of:

    p(a) = exp(-|a - mu| / b) / (2 b),   entropy = 1 + log(2 b)
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vla_rl.common.row_noise import by_row
from vla_rl.policies.normalization import QuantileStats
from vla_rl.policies.openvla.options import MAX_SCALE, LaplaceOptions


class _ResidualBlock(nn.Module):
    """x + ReLU(W LN(x)); a Sequential, so that names are OFT's."""

    def __init__(self, size: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class MLPResNet(nn.Module):
    """LN, linear, ReLU, residual blocks, LN, linear (moojink/openvla-oft, `action_heads.py`); LN's eps is 1e-5."""

    def __init__(self, input_size: int, hidden_size: int, output_size: int, num_blocks: int = 2):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_size)
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.mlp_resnet_blocks = nn.ModuleList(_ResidualBlock(hidden_size) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(hidden_size)
        self.fc2 = nn.Linear(hidden_size, output_size)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """OFT's action head: hidden states of the action positions to normalized actions."""

    def __init__(self, hidden_size: int, action_dim: int):
        super().__init__()
        self.action_dim = action_dim
        self.model = MLPResNet(hidden_size * action_dim, hidden_size, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, H * A, hidden) -> (B, H, A), in [-1, 1] where it was trained."""
        return self.model(_by_step(hidden, self.action_dim))


class ScaleHead(nn.Module):
    """RIPT-VLA's scale head: log b of each component of the chunk (arXiv:2505.17016)."""

    def __init__(self, hidden_size: int, action_dim: int, options: LaplaceOptions):
        super().__init__()
        self.action_dim = action_dim
        self.bounds = (math.log(options.min_scale), math.log(MAX_SCALE))
        self.trunk = MLPResNet(hidden_size * action_dim, hidden_size, hidden_size)
        self.log_b_head = nn.Linear(hidden_size, action_dim)
        self.initial = math.log(options.initial_scale)
        self.reset()

    def reset(self) -> None:
        """Fresh output layer: every b close to `initial_scale`, whatever the input."""
        nn.init.xavier_uniform_(self.log_b_head.weight, gain=0.01)
        nn.init.constant_(self.log_b_head.bias, self.initial)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, H * A, hidden) -> log b (B, H, A), between the options' bounds."""
        return self.log_b_head(self.trunk(_by_step(hidden, self.action_dim))).clamp(*self.bounds)


def _by_step(hidden: Tensor, action_dim: int) -> Tensor:
    """(B, H * A, hidden) -> (B, H, A * hidden)."""
    return hidden.reshape(hidden.shape[0], hidden.shape[1] // action_dim, -1)


def position_loss(predicted: Tensor, position: np.ndarray, stats: QuantileStats | None) -> Tensor:
    """Smooth L1 error of predicted end-effector positions (B, 3), normalized, where a position is known; a scalar.

    Args:
        position: float (B, 3), meters; rows with NaN are left out.
        stats: of the state, whose first three numbers are the position.

    Raises:
        ValueError: no statistics.
    """
    if stats is None:
        raise ValueError("keyframe: needs state statistics, since positions are normalized by them; see set_norm_stats")
    known = np.asarray(np.isfinite(position).all(1))
    target = 2.0 * (position - stats.q01[:3]) / (stats.q99[:3] - stats.q01[:3] + 1e-8) - 1.0
    target = torch.from_numpy(np.where(known[:, None], target, 0.0).astype(np.float32)).to(predicted.device)
    error = F.smooth_l1_loss(predicted, target, reduction="none").mean(1)
    weight = torch.from_numpy(known).to(predicted.device).float()
    return (error * weight).sum() / weight.sum().clamp_min(1.0)


def laplace_log_prob(x: Tensor, location: Tensor, log_scale: Tensor) -> Tensor:
    """Log-density of x, elementwise."""
    return -(x - location).abs() * torch.exp(-log_scale) - log_scale - math.log(2.0)


def laplace_entropy(log_scale: Tensor) -> Tensor:
    """Differential entropy in nats, elementwise."""
    return 1.0 + math.log(2.0) + log_scale


def laplace_draw(location: Tensor, log_scale: Tensor, generator: torch.Generator | None) -> Tensor:
    """One draw per component, by inverse CDF; float32, never infinite."""
    device = location.device if generator is None else generator.device

    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.rand(shape, generator=generator, device=device, dtype=torch.float64)

    uniform = by_row(draw, location.shape, generator).to(location.device)
    centered = (uniform - 0.5).clamp(-0.5 + 1e-9, 0.5 - 1e-9)
    noise = -centered.sign() * torch.log1p(-2.0 * centered.abs())
    return location + (log_scale.double().exp() * noise).float()
