"""Success head on latents and states, and a separate clip classifier.

A third network, of the success head's build, says whether the episode will succeed: the value.

They are to err independently, since a success counts where both see one. The head is a transformer over places in the
last frames and the reference, the state and the words. The classifier is a convolutional network that sees no state:
the newest frame, and what changed since the reference in one more of the last frames; words modulate its channels
(FiLM, Perez et al. 2018, arXiv 1709.07871). No weights are shared; only the classifier's training clips are shifted.
Both answer from the strongest evidence at any place, and from the mean over places: objects are a few pixels large.

`loss` is always the training loss and `score` always the plain prediction, whatever mode the module is in. Augmentation
and dropout draw from torch's global generator: seed it for each step where a fit must go on exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from vla_rl.common.instruction_embedding import MAX_WORDS, FilmResidual, WordEmbedding
from world_model.config import SuccessConfig
from world_model.interfaces import SuccessHead
from world_model.types import Frames

HEAD_DIM = 32  # Of an attention head.
WINDOW, STRIDE = 4, 2  # Of a token, latent pixels: windows overlap by half, so that no small object is cut in two.
LATENT_NOISE = 0.3  # Largest standard deviation added while training, because imagined latents are a little off.
STATE_NOISE = 0.1  # Likewise, of states.


class _SuccessNetwork(SuccessHead):
    """What both have in common: `loss` and `score`, by way of `_logits`."""

    num_frames: int  # R
    dropout: float  # share of activations dropped while training

    def loss(
        self, frames: Frames, reference: Frames, instruction: list[str], success: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """See `SuccessHead.loss`. Metrics: `accuracy` at logit 0."""
        frames, reference = self._augmented(frames, reference)
        logits = self._logits(frames, reference, instruction, self.dropout)
        loss = F.binary_cross_entropy_with_logits(logits, success.float())
        return loss, {"accuracy": ((logits > 0) == success).float().mean()}

    @torch.no_grad()
    def score(self, frames: Frames, reference: Frames, instruction: list[str]) -> torch.Tensor:
        """See `SuccessHead.score`."""
        return self._logits(frames, reference, instruction, 0.0)

    def _augmented(self, frames: Frames, reference: Frames) -> tuple[Frames, Frames]:
        raise NotImplementedError

    def _logits(self, frames: Frames, reference: Frames, instruction: list[str], dropout: float) -> torch.Tensor:
        """Logits, float32 (B,)."""
        raise NotImplementedError


class LatentSuccessHead(_SuccessNetwork):
    """The success head: attention among the places of all views, the state and the words. See `SuccessHead`.

    A place's token holds it as it is in the reference and in the last R frames, side by side.

    Args:
        latent_shape: (C, h, w) of one view. num_views: V. state_dim: S.

    Raises:
        ValueError: a width that is no multiple of 32.
    """

    def __init__(
        self, config: SuccessConfig, latent_shape: tuple[int, int, int], num_views: int, state_dim: int
    ) -> None:
        super().__init__()
        width = _checked_width(config)
        self.num_frames, self.dropout = config.num_frames, config.dropout
        channels, height, columns = latent_shape
        num_tokens = num_views * (height // STRIDE) * (columns // STRIDE)
        num_inputs = 1 + config.num_frames
        self.embed_patch = nn.Linear(num_inputs * channels * WINDOW**2, width)
        self.embed_state = nn.Linear(num_inputs * state_dim, width)
        self.words = WordEmbedding(width)
        self.place = nn.Parameter(0.1 * torch.randn(num_tokens, width))
        self.place_words = nn.Parameter(0.1 * torch.randn(MAX_WORDS, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(config.depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(2 * width, 1)

    def _augmented(self, frames: Frames, reference: Frames) -> tuple[Frames, Frames]:
        return _noisy(frames), _noisy(reference)

    def _logits(self, frames: Frames, reference: Frames, instruction: list[str], dropout: float) -> torch.Tensor:
        dtype, batch = self.place.dtype, len(instruction)
        latents = torch.cat([reference.latents, frames.latents], 1).to(dtype)
        states = torch.cat([reference.states, frames.states], 1).to(dtype)
        views = latents.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # (B * V, inputs * C, h, w)
        windows = F.unfold(views, WINDOW, padding=(WINDOW - STRIDE) // 2, stride=STRIDE).transpose(1, 2)
        patches = self.embed_patch(windows).unflatten(0, (batch, -1)).flatten(1, 2) + self.place
        state = self.embed_state(states.flatten(1))[:, None]
        words, is_word = self.words(instruction)
        words = words + self.place_words[: words.shape[1]]
        tokens = torch.cat([state, patches, words], 1)
        seen = F.pad(is_word, (tokens.shape[1] - is_word.shape[1], 0), value=True)
        for block in cast(Iterable[_Block], self.blocks):
            tokens = block(tokens, seen, dropout)
        places = self.norm(tokens[:, 1 : 1 + patches.shape[1]])
        return self.head(_dropped(torch.cat([places.amax(1), places.mean(1)], 1), dropout))[:, 0].float()


class ValueHead(LatentSuccessHead):
    """Whether the episode will succeed: the success head's network, whose states also tell the time left (`timed`)."""

    def __init__(
        self, config: SuccessConfig, latent_shape: tuple[int, int, int], num_views: int, state_dim: int
    ) -> None:
        super().__init__(config, latent_shape, num_views, state_dim + 1)

    @torch.no_grad()
    def start_from(self, success: LatentSuccessHead) -> None:
        """Take the success head's weights; the time left tells nothing yet."""
        weights = {name: tensor.clone() for name, tensor in success.state_dict().items()}
        states = weights["embed_state.weight"].unflatten(1, (1 + self.num_frames, -1))
        weights["embed_state.weight"] = F.pad(states, (0, 1)).flatten(1)
        self.load_state_dict(weights)


def timed(frames: Frames, left: torch.Tensor) -> Frames:
    """Frames whose states have one number more: the time left, of about unit variance as the others are.

    Args:
        left: float (B,), the share of the longest task's control steps that is left, 0 .. 1.
    """
    column = (4 * left - 2)[:, None, None].expand(-1, frames.states.shape[1], 1)
    return Frames(frames.latents, torch.cat([frames.states, column.to(frames.states)], 2))


class ClipSuccessClassifier(_SuccessNetwork):
    """The clip classifier: convolutions over what changed since the reference, modulated by the words.

    See `SuccessHead`. It sees one frame more than the success head, and no state.

    Args:
        latent_shape: (C, h, w) of one view. num_views: V.

    Raises:
        ValueError: a width that is no multiple of 32.
    """

    def __init__(self, config: SuccessConfig, latent_shape: tuple[int, int, int], num_views: int) -> None:
        super().__init__()
        width = _checked_width(config)
        self.num_frames, self.dropout = config.num_frames + 1, config.dropout
        self.words = WordEmbedding(width // 2, pairs=True)
        self.stem = nn.Conv2d(num_views * latent_shape[0] * (1 + self.num_frames), width // 2, 3, padding=1)
        self.fine = FilmResidual(width // 2, width // 2)
        self.down = nn.Conv2d(width // 2, width, 3, stride=2, padding=1)
        self.coarse = nn.ModuleList(FilmResidual(width, width // 2) for _ in range(config.depth))
        self.hidden = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 1)

    def _augmented(self, frames: Frames, reference: Frames) -> tuple[Frames, Frames]:
        latents = _shifted(torch.cat([_noisy(reference).latents, _noisy(frames).latents], 1))
        return Frames(latents[:, 1:], frames.states), Frames(latents[:, :1], reference.states)

    def _logits(self, frames: Frames, reference: Frames, instruction: list[str], dropout: float) -> torch.Tensor:
        inputs = torch.cat([frames.latents - reference.latents, frames.latents[:, -1:]], 1)
        vectors, is_word = self.words(instruction)
        words = vectors.sum(1) / is_word.sum(1, keepdim=True)
        x = self.fine(self.stem(inputs.flatten(1, 3).to(words.dtype)), words)
        x = self.down(x)
        for block in cast(Iterable[FilmResidual], self.coarse):
            x = block(x, words)
        pooled = torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1)
        return self.head(_dropped(F.silu(self.hidden(_dropped(pooled, dropout))), dropout))[:, 0].float()


class _Block(nn.Module):
    """Attention and MLP, (B, N, width) in and out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, seen: torch.Tensor, dropout: float) -> torch.Tensor:
        """`seen`: bool (B, N), tokens that the others may look at."""
        parts = self.attention(self.norm_attention(x)).unflatten(-1, (3, -1, HEAD_DIM))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, N, HEAD_DIM)
        scores = query * HEAD_DIM**-0.5 @ key.transpose(-1, -2)
        weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        x = x + _dropped(self.attention_out((weights @ value).transpose(1, 2).flatten(2)), dropout)
        return x + _dropped(self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x)))), dropout)


def _checked_width(config: SuccessConfig) -> int:
    if config.width % HEAD_DIM:
        raise ValueError(f"success.width: got {config.width}, must be a multiple of {HEAD_DIM}; take 64, 96 or 128")
    return config.width


def _noisy(frames: Frames) -> Frames:
    """With Gaussian noise: on latents of a strength drawn for each clip, on states of STATE_NOISE."""
    strength = LATENT_NOISE * torch.rand(len(frames.latents), device=frames.latents.device)
    latents = frames.latents + strength[:, None, None, None, None, None] * torch.randn_like(frames.latents)
    return Frames(latents, frames.states + STATE_NOISE * torch.randn_like(frames.states))


def _shifted(latents: torch.Tensor) -> torch.Tensor:
    """Each clip (B, ..., h, w) moved by -1, 0 or 1 pixel down and right, its border repeated."""
    (batch, height, columns), device = (latents.shape[0], *latents.shape[-2:]), latents.device
    moves = torch.randint(-1, 2, (2, batch, 1), device=device)
    row = (torch.arange(height, device=device) + moves[0]).clamp(0, height - 1)
    column = (torch.arange(columns, device=device) + moves[1]).clamp(0, columns - 1)
    clip = torch.arange(batch, device=device)[:, None, None]
    moved = latents.flatten(1, -3)[clip, :, row[:, :, None], column[:, None, :]]  # (B, h, w, ...)
    return moved.permute(0, 3, 1, 2).reshape(latents.shape)


def _dropped(x: torch.Tensor, rate: float) -> torch.Tensor:
    return F.dropout(x, rate) if rate else x
