"""The learned reward's network: logits of success and of progress.

It sees the first image of the episode, the one judged before, and the present one; of each camera. Words modulate the
channels (FiLM), as they do in the world model's clip classifier. It answers from the strongest evidence at any place
and from the mean over places. Nothing tells it the time: an episode that lasts has not succeeded, which would rank
episodes well and mean nothing.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vla_rl.common.instruction_embedding import FilmResidual, WordEmbedding
from vla_rl.rewards.config import RewardNetworkConfig

NUM_IMAGES = 3  # First, previous, present.
SHIFT = 2  # Pixels that training images are moved by, at most.
BRIGHTNESS, STATE_NOISE = 0.1, 0.1  # Standard deviations, of full scale and of a normalized state.


class RewardNetwork(nn.Module):
    """Logits of success and of progress.

    Args:
        num_views: V, cameras. state_dim: S, 0 without a state.
    """

    state_mean: torch.Tensor
    state_spread: torch.Tensor

    def __init__(self, config: RewardNetworkConfig, num_views: int, state_dim: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        width = config.width
        self.register_buffer("state_mean", torch.zeros(state_dim))
        self.register_buffer("state_spread", torch.ones(state_dim))
        self.words = WordEmbedding(width, pairs=True)
        self.stem = nn.Conv2d(num_views * NUM_IMAGES * 3, width // 2, 6, stride=4, padding=1)
        self.fine = nn.Conv2d(width // 2, width, 3, padding=1)
        self.blocks = nn.ModuleList([FilmResidual(width, width), FilmResidual(width, width)])
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.embed_state = nn.Linear(NUM_IMAGES * state_dim, width) if state_dim else None
        self.hidden = nn.Linear((3 if state_dim else 2) * width + width, 2 * width)
        self.head = nn.Linear(2 * width, 2)

    def forward(
        self, images: torch.Tensor, states: torch.Tensor, instruction: list[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of success and of progress, float32 (B,) each.

        Args:
            images: uint8 (B, 3, V, height, width, 3): first, previous and present. states: float32 (B, 3, S), likewise.
        """
        pixels, states = images.float() / 255 - 0.5, (states - self.state_mean) / self.state_spread
        if self.training:
            pixels, states = _augmented(pixels, states)
        first, previous, now = pixels.unbind(1)
        changes = torch.stack([now, now - first, now - previous], 1)  # (B, 3, V, height, width, 3)
        vectors, is_word = self.words(instruction)
        words = vectors.sum(1) / is_word.sum(1, keepdim=True)
        x = F.silu(self.fine(F.silu(self.stem(changes.permute(0, 1, 2, 5, 3, 4).flatten(1, 3)))))
        x = self.blocks[1](self.down(self.blocks[0](x, words)), words)
        parts = [x.amax((2, 3)), x.mean((2, 3)), words]
        if self.embed_state is not None:
            parts.append(self.embed_state(states.flatten(1)))
        hidden = F.silu(self.hidden(F.dropout(torch.cat(parts, 1), self.dropout, self.training)))
        success, progress = self.head(F.dropout(hidden, self.dropout, self.training)).float().unbind(1)
        return success, progress


def _augmented(pixels: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each example's images moved alike by a few pixels, and made brighter or darker alike; states with noise."""
    batch, (height, width) = len(pixels), pixels.shape[3:5]
    moves = torch.randint(-SHIFT, SHIFT + 1, (2, batch, 1))
    rows = (torch.arange(height) + moves[0]).clamp(0, height - 1).to(pixels.device)
    columns = (torch.arange(width) + moves[1]).clamp(0, width - 1).to(pixels.device)
    example = torch.arange(batch, device=pixels.device)[:, None, None]
    moved = pixels.permute(0, 3, 4, 1, 2, 5)[example, rows[:, :, None], columns[:, None, :]].permute(0, 3, 4, 1, 2, 5)
    light = BRIGHTNESS * torch.randn(batch, 1, 1, 1, 1, 1, device=pixels.device)
    return moved + light, states + STATE_NOISE * torch.randn_like(states)
