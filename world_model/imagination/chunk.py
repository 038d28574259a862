"""Imagination of one action chunk: frames, success verified with new noise, and ensemble disagreement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from world_model.config import ImaginationConfig
from world_model.model.memory import Memory
from world_model.model.world_model import WorldModel
from world_model.noise import NoiseStream
from world_model.types import Actions, Frames


@dataclass(frozen=True)
class Future:
    """One of the futures of B episodes during a chunk; see `ImaginedChunk`."""

    frames: Frames
    success_score: torch.Tensor
    clip_score: torch.Tensor
    objects_score: torch.Tensor | None = None


@dataclass(frozen=True)
class ImaginedChunk:
    """What is imagined of B episodes during one chunk of actions.

    Attributes:
        frames, actions: B x F.
        success_score, clip_score: float32 (B, F), logits of the success head and the clip classifier.
        objects_score: float32 (B, F), the objects part's, which knows no noise; None where nobody is paid by it.
        success: bool (B, F), the episode has succeeded by that frame: predicted, verified; latched.
        discarded: bool (B,), a success was predicted and did not hold under new noise.
        disagreement: float32 (B,), spread of the futures; zeros where only one is imagined.
    """

    frames: Frames
    actions: Actions
    success_score: torch.Tensor
    clip_score: torch.Tensor
    success: torch.Tensor
    discarded: torch.Tensor
    disagreement: torch.Tensor
    objects_score: torch.Tensor | None = None


@torch.no_grad()
def imagine_future(
    world_model: WorldModel,
    memory: Memory,
    noise: NoiseStream,
    actions: Actions,
    config: ImaginationConfig,
    states: torch.Tensor | None,
) -> Future:
    """Imagine a chunk once and score its frames. See `imagine_chunk`."""
    frames = world_model.dynamics.imagine(memory.context, actions, noise)
    if states is not None:
        frames = replace(frames, states=torch.where(states.isnan(), frames.states, states))
    objects = world_model.objects_scores(memory, actions) if config.reward == "objects" else None
    return Future(frames, *world_model.scores(memory, frames), objects)


@torch.no_grad()
def imagine_chunk(
    world_model: WorldModel,
    memory: Memory,
    actions: Actions,
    config: ImaginationConfig,
    judged: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    future: Callable[[NoiseStream], Future] | None = None,
) -> ImaginedChunk:
    """Imagine the F frames that a chunk of actions leads to. `memory` is not extended.

    Args:
        judged: bool (B, F), frames of the episode, which may succeed and disagree; None: those with an executed action.
        states: float32 (B, F, S), normalized, in place of the imagined ones where not NaN; None: all are imagined. The
            pictures of a chunk's second frame and later ones follow from imagined states all the same.
        future: what imagines one, of all B episodes, whose sizes never change; None: `imagine_future`.

    Ensemble: `ensemble` - 1 more futures are imagined with other noise. Disagreement is the standard deviation over the
    futures (n - 1) of each latent, averaged over the latents of the judged frames.

    Dual noise (RAW-Dream): where a success is predicted, the chunk is imagined again from the same memory, `dual_noise`
    times. It stands if each of these has a success in the chunk as well. Else there was none, and the episode goes on
    in the first future in which it failed, so that no later frame inherits a success that was luck.
    """

    def another(noise: NoiseStream) -> Future:
        return imagine_future(world_model, memory, noise, actions, config, states)

    first = (future or another)(memory.noise)
    counted: torch.Tensor = actions.executed.any(2) if judged is None else judged
    success = _predicted(world_model, first, counted)
    others = [(future or another)(memory.noise.other_futures(1, i)) for i in range(config.ensemble - 1)]
    disagreement = _disagreement(first, others, counted)
    scores = first.success_score, first.clip_score
    chunk = ImaginedChunk(
        first.frames,
        actions,
        *scores,
        success,
        torch.zeros_like(disagreement, dtype=torch.bool),
        disagreement,
        first.objects_score,
    )
    # The one question whose answer the host waits for here: what follows depends on how many rows there are.
    predicted = success.any(1)
    chosen = [row for row, found in enumerate(predicted.tolist()) if found] if config.dual_noise else []
    if not chosen:
        return chunk
    if future is not None:
        chosen = list(range(memory.size))
    rows = torch.tensor(chosen, device=success.device)
    noises = [memory.noise.other_futures(1, config.ensemble - 1 + i) for i in range(config.dual_noise)]
    if future is None:
        part, done, known = memory.select(chosen), actions.select(rows), None if states is None else states[rows]
        again = [imagine_future(world_model, part, noise.select(rows), done, config, known) for noise in noises]
    else:
        again = [future(noise) for noise in noises]
    return _verified(world_model, chunk, rows, again, counted)


def _verified(
    world_model: WorldModel, chunk: ImaginedChunk, rows: torch.Tensor, again: list[Future], counted: torch.Tensor
) -> ImaginedChunk:
    """The chunk after other futures of the episodes at `rows`, int64, of which only predicted successes are doubted."""
    held = torch.stack([_predicted(world_model, future, counted[rows]).any(1) for future in again], 1)
    flipped = ~held.all(1) & chunk.success[rows].any(1)
    number, source = (~held).int().argmax(1), torch.arange(len(rows), device=rows.device)

    def gone_on_with(first: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        is_other = flipped.view(-1, *[1] * (first.ndim - 1))
        return first.index_copy(0, rows, torch.where(is_other, torch.stack(others)[number, source], first[rows]))

    frames = Frames(
        gone_on_with(chunk.frames.latents, [future.frames.latents for future in again]),
        gone_on_with(chunk.frames.states, [future.frames.states for future in again]),
    )
    return replace(
        chunk,
        frames=frames,
        success_score=gone_on_with(chunk.success_score, [future.success_score for future in again]),
        clip_score=gone_on_with(chunk.clip_score, [future.clip_score for future in again]),
        success=chunk.success.index_copy(0, rows, chunk.success[rows] & ~flipped[:, None]),
        discarded=chunk.discarded.index_copy(0, rows, flipped),
    )


def _predicted(world_model: WorldModel, future: Future, judged: torch.Tensor) -> torch.Tensor:
    """bool (B, F): a success is predicted at that frame or an earlier one of the chunk, if judged."""
    return (world_model.counts(future.success_score, future.clip_score) & judged).cummax(1).values


def _disagreement(first: Future, others: list[Future], judged: torch.Tensor) -> torch.Tensor:
    """Spread of the futures, float32 (B,)."""
    if not others:
        return torch.zeros(len(judged), device=judged.device)
    spread = torch.stack([future.frames.latents for future in (first, *others)], 1).std(1).flatten(2).mean(2)
    return (spread * judged).sum(1) / judged.sum(1).clamp_min(1)
