"""A model posterior: members of one dynamics that fit the same episodes and differ where these say little.

As NEUBAY, a policy is trained in many models that the data allow, each episode in one of them, in place of one model
with a penalty. A member here is a low-rank adapter on the frozen dynamics: it changes what modulates each block where a
frame is predicted, by the frame's noise level and actions. What is remembered is computed without it, so any member
can go on from the same memory, and K futures cost K predictions.
"""

from __future__ import annotations

import torch
from torch import nn


class Posterior(nn.Module):
    """K adapters, which at first change nothing.

    Args:
        members: K. rank: of an adapter.
        width: of the features that modulation is computed from, and of each of its parts.
        depth: blocks. parts: of a block's modulation.
    """

    def __init__(self, members: int, rank: int, width: int, depth: int, parts: int) -> None:
        super().__init__()
        self.members, self.rank, self.shape = members, rank, (depth, parts, width)
        rows = members * rank
        self.down = nn.Parameter(torch.randn(rows, width) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(rows, depth * parts * width))

    def forward(self, features: torch.Tensor, member: torch.Tensor) -> torch.Tensor:
        """What the members at `member`, int64 (B,), add to each block's modulation: (B, T, depth, parts, width).

        All members' first halves are computed, and those of others set to zero: no weights are gathered row by row.

        Args:
            features: float (B, T, width).
        """
        numbers = torch.arange(self.members, device=member.device).repeat_interleave(self.rank)
        own = (member[:, None] == numbers).to(features.dtype)
        return ((features @ self.down.T * own[:, None]) @ self.up).unflatten(-1, self.shape)
