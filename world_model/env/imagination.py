"""One chunk of actions imagined, and what is believed of it: success verified with new noise, and disagreement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from world_model.config import ImaginationConfig
from world_model.model.world_model import Memory, WorldModel, put_frames
from world_model.types import Actions, Frames


@dataclass(frozen=True)
class ImaginedChunk:
    """What is imagined of B episodes during one chunk of actions.

    Attributes:
        frames, actions: B x F.
        success_score, clip_score: float32 (B, F), logits of the success head and the clip classifier.
        success: bool (B, F), the episode has succeeded by that frame: predicted, verified, trusted; latched.
        discarded: bool (B,), a success was predicted and did not hold under new noise.
        disagreement: float32 (B,), spread of the futures; zeros where only one is imagined.
        untrusted: bool (B,), they spread by more than is allowed.
    """

    frames: Frames
    actions: Actions
    success_score: torch.Tensor
    clip_score: torch.Tensor
    success: torch.Tensor
    discarded: torch.Tensor
    disagreement: torch.Tensor
    untrusted: torch.Tensor


@torch.no_grad()
def imagine_chunk(
    world_model: WorldModel,
    memory: Memory,
    actions: Actions,
    config: ImaginationConfig,
    judged: torch.Tensor | None = None,
) -> ImaginedChunk:
    """Imagine the F frames that a chunk of actions leads to. `memory` is not extended.

    Args:
        judged: bool (B, F), frames of the episode, which may succeed and disagree; None: those with an executed action.

    Ensemble: `ensemble` - 1 more futures are imagined with other noise. Disagreement is the standard deviation over
    the futures (n - 1) of each latent, averaged over the latents of the judged frames. A chunk with more than
    `max_disagreement` has no success.

    Dual noise (RAW-Dream): where a success is predicted, the chunk is imagined again from the same memory, `dual_noise`
    times. It stands if each of these has a success in the chunk as well. Else there was none, and the episode goes on
    in the first future in which it failed, so that no later frame inherits a success that was luck.
    """
    frames = world_model.dynamics.imagine(memory.context, actions, memory.noise)
    success_score, clip_score = world_model.scores(memory, frames)
    counted: torch.Tensor = actions.executed.any(2) if judged is None else judged
    success = _predicted(world_model, success_score, clip_score, counted, config)
    disagreement = _disagreement(world_model, memory, actions, frames, counted, config.ensemble - 1)
    untrusted = disagreement > (float("inf") if config.max_disagreement is None else config.max_disagreement)
    success = success & ~untrusted[:, None]
    discarded = torch.zeros_like(untrusted)
    rows = success.any(1).nonzero().flatten()
    if config.dual_noise and len(rows):
        again, again_memory = _again(world_model, memory, actions, rows, config.dual_noise, config.ensemble - 1)
        scores = world_model.scores(again_memory, again)
        repeated = counted[rows.repeat_interleave(config.dual_noise)]
        held = _predicted(world_model, *scores, repeated, config).any(1).unflatten(0, (-1, config.dual_noise))
        flipped = ~held.all(1)
        first_flip = (~held[flipped]).int().argmax(1)
        source = flipped.nonzero().flatten() * config.dual_noise + first_flip
        target = rows[flipped]
        frames = put_frames(frames, target, again.select(source))
        success_score = success_score.index_copy(0, target, scores[0][source])
        clip_score = clip_score.index_copy(0, target, scores[1][source])
        success = success.index_fill(0, target, False)
        discarded = discarded.index_fill(0, target, True)
    return ImaginedChunk(frames, actions, success_score, clip_score, success, discarded, disagreement, untrusted)


def _predicted(
    world_model: WorldModel,
    success_score: torch.Tensor,
    clip_score: torch.Tensor,
    judged: torch.Tensor,
    config: ImaginationConfig,
) -> torch.Tensor:
    """bool (B, F): a success is predicted at that frame or an earlier one of the chunk, if judged."""
    counted = world_model.counts(success_score, clip_score, config.require_both)
    return (counted & judged).cummax(1).values


def _again(
    world_model: WorldModel, memory: Memory, actions: Actions, rows: torch.Tensor, count: int, first: int = 0
) -> tuple[Frames, Memory]:
    """The chunk of the episodes at `rows` imagined `count` times more, row by row: other futures, from `first` on."""
    each = rows.repeat_interleave(count)
    noise = memory.noise.select(rows).other_futures(count, first)
    repeated = replace(memory.select(each.tolist()), noise=noise)
    return world_model.dynamics.imagine(repeated.context, actions.select(each), noise), repeated


def _disagreement(
    world_model: WorldModel, memory: Memory, actions: Actions, frames: Frames, judged: torch.Tensor, count: int
) -> torch.Tensor:
    if not count:
        return torch.zeros(memory.size, device=judged.device)
    rows = torch.arange(memory.size, device=judged.device)
    others, _ = _again(world_model, memory, actions, rows, count)
    futures = torch.cat([frames.latents[:, None], others.latents.unflatten(0, (-1, count))], 1)
    spread = futures.std(1).flatten(2).mean(2)
    return (spread * judged).sum(1) / judged.sum(1).clamp_min(1)
