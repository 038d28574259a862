"""Imagination of one action chunk: frames, success verified with new noise, and ensemble disagreement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from world_model.config import ImaginationConfig
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.types import Actions, Frames


@dataclass(frozen=True)
class ImaginedChunk:
    """What is imagined of B episodes during one chunk of actions.

    Attributes:
        frames, actions: B x F.
        success_score, clip_score: float32 (B, F), logits of the success head and the clip classifier.
        objects_score: float32 (B, F), the objects part's, which knows no noise; None where nobody is paid by it.
        success: bool (B, F), the episode has succeeded by that frame: predicted, verified, trusted; latched.
        discarded: bool (B,), a success was predicted and did not hold under new noise.
        disagreement: float32 (B,), spread of the futures; zeros where only one is imagined.
        untrusted: bool (B,), they spread by more than is allowed.
        action_error: float32 (B, F), see `WorldModel.action_errors`; None where nothing is taken off for it.
    """

    frames: Frames
    actions: Actions
    success_score: torch.Tensor
    clip_score: torch.Tensor
    success: torch.Tensor
    discarded: torch.Tensor
    disagreement: torch.Tensor
    untrusted: torch.Tensor
    objects_score: torch.Tensor | None = None
    action_error: torch.Tensor | None = None


@torch.no_grad()
def imagine_chunk(
    world_model: WorldModel,
    memory: Memory,
    actions: Actions,
    config: ImaginationConfig,
    judged: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
) -> ImaginedChunk:
    """Imagine the F frames that a chunk of actions leads to. `memory` is not extended.

    Args:
        judged: bool (B, F), frames of the episode, which may succeed and disagree; None: those with an executed action.
        states: float32 (B, F, S), normalized, in place of the imagined ones where not NaN; None: all are imagined. The
            pictures of a chunk's second frame and later ones follow from imagined states all the same.

    Ensemble: `ensemble` - 1 more futures are imagined with other noise. Disagreement is the standard deviation over the
    futures (n - 1) of each latent, averaged over the latents of the judged frames. A chunk with more than
    `max_disagreement` has no success.

    Dual noise (RAW-Dream): where a success is predicted, the chunk is imagined again from the same memory, `dual_noise`
    times. It stands if each of these has a success in the chunk as well. Else there was none, and the episode goes on
    in the first future in which it failed, so that no later frame inherits a success that was luck.
    """
    frames = _told(world_model.dynamics.imagine(memory.context, actions, memory.noise), states)
    success_score, clip_score = world_model.scores(memory, frames)
    counted: torch.Tensor = actions.executed.any(2) if judged is None else judged
    success = _predicted(world_model, success_score, clip_score, counted, config)
    disagreement = _disagreement(world_model, memory, actions, frames, counted, config)
    limit = config.max_disagreement  # Futures that are not finite are above any.
    untrusted = torch.zeros_like(disagreement, dtype=torch.bool) if limit is None else ~(disagreement <= limit)
    success = success & ~untrusted[:, None]
    discarded = torch.zeros_like(untrusted)
    # The one question whose answer the host waits for here: what follows depends on how many rows there are.
    chosen = [row for row, predicted in enumerate(success.any(1).tolist()) if predicted] if config.dual_noise else []
    if chosen:
        again, again_memory = _again(world_model, memory, actions, chosen, config.dual_noise, config.ensemble - 1)
        rows = torch.tensor(chosen, device=success.device)
        again = _told(again, None if states is None else states[rows.repeat_interleave(config.dual_noise)])
        scores = world_model.scores(again_memory, again)
        repeated = counted[rows.repeat_interleave(config.dual_noise)]
        held = _predicted(world_model, *scores, repeated, config).any(1).unflatten(0, (-1, config.dual_noise))
        flipped = ~held.all(1)
        source = torch.arange(len(chosen), device=rows.device) * config.dual_noise + (~held).int().argmax(1)

        def gone_on_with(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            is_other = flipped.view(-1, *[1] * (first.ndim - 1))
            return first.index_copy(0, rows, torch.where(is_other, other[source], first[rows]))

        frames = Frames(gone_on_with(frames.latents, again.latents), gone_on_with(frames.states, again.states))
        success_score, clip_score = gone_on_with(success_score, scores[0]), gone_on_with(clip_score, scores[1])
        success = success.index_copy(0, rows, success[rows] & ~flipped[:, None])
        discarded = discarded.index_copy(0, rows, flipped)
    objects = world_model.objects_scores(memory, actions) if config.reward == "objects" else None
    error = world_model.action_errors(memory, frames, actions) if config.action_penalty else None
    scores = (success_score, clip_score)
    return ImaginedChunk(frames, actions, *scores, success, discarded, disagreement, untrusted, objects, error)


def _told(frames: Frames, states: torch.Tensor | None) -> Frames:
    """The frames with the states that are known in place of the imagined ones."""
    return frames if states is None else replace(frames, states=torch.where(states.isnan(), frames.states, states))


def _predicted(
    world_model: WorldModel,
    success_score: torch.Tensor,
    clip_score: torch.Tensor,
    judged: torch.Tensor,
    config: ImaginationConfig,
) -> torch.Tensor:
    """bool (B, F): a success is predicted at that frame or an earlier one of the chunk, if judged."""
    counted = world_model.counts(success_score, clip_score)
    return (counted & judged).cummax(1).values


def _again(
    world_model: WorldModel, memory: Memory, actions: Actions, rows: list[int], count: int, first: int = 0
) -> tuple[Frames, Memory]:
    """The chunk of the episodes at `rows` imagined `count` times more, row by row: other futures, from `first` on."""
    index = torch.tensor(rows, device=memory.reference.states.device)
    noise = memory.noise.select(index).other_futures(count, first)
    repeated = replace(memory.select([row for row in rows for _ in range(count)]), noise=noise)
    actions = actions.select(index.repeat_interleave(count))
    return world_model.dynamics.imagine(repeated.context, actions, noise), repeated


def _disagreement(
    world_model: WorldModel,
    memory: Memory,
    actions: Actions,
    frames: Frames,
    judged: torch.Tensor,
    config: ImaginationConfig,
) -> torch.Tensor:
    """Spread of the frames and of other futures, float32 (B,)."""
    count = config.ensemble - 1
    if not count:
        return torch.zeros(memory.size, device=judged.device)
    others, _ = _again(world_model, memory, actions, list(range(memory.size)), count)
    futures = torch.cat([frames.latents[:, None], others.latents.unflatten(0, (-1, count))], 1)
    spread = futures.std(1).flatten(2).mean(2)
    return (spread * judged).sum(1) / judged.sum(1).clamp_min(1)
