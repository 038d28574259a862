"""Calibration of the value, and its AUC by frame number and by frames since a real one.

The value is P(the episode will succeed) under the policy whose episodes it was fitted on. Its network learns from
Monte-Carlo outcomes (world_model/data/outcomes.py) and never sees the held-out episodes; the probabilities that are
judged here come from sigmoids that were fitted without the episode's own initial state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import FiniteFloat, PositiveFloat

from vla_rl.config import Config
from vla_rl.evaluation.probability import CrossFitted, cross_fit, measure, platt
from vla_rl.training.trainer import Loss
from world_model.config import StageConfig
from world_model.data.clips import ClipDataset
from world_model.data.outcomes import Outcomes, ValueSamples, steps_left
from world_model.interfaces import SuccessHead
from world_model.model.world_model import WorldModel

DEEPEST = 3  # Frames since a real one that it is measured at.
FEWEST = 20  # Frames with one number that are worth a figure.
EPISODES_AT_ONCE = 64


class ValueCalibration(Config):
    """The value's sigmoid and figures. Here `CrossFitted.num_episodes` counts frames.

    Attributes:
        slope, intercept: P = sigmoid(slope * logit + intercept), fitted on open frames: real, without success yet, and
            with time left.
        open_frames: all of them. by_number: those at frame 0, 1, ... of an episode.
        by_depth: frames that are 0, 1, ... `DEEPEST` after a real one, imagined with the logged actions. Always the
            same frames: any, open or not, at least `DEEPEST` into their episode.
    """

    slope: PositiveFloat
    intercept: FiniteFloat
    open_frames: CrossFitted
    by_number: tuple[CrossFitted, ...]
    by_depth: tuple[CrossFitted, ...]


def value_loss(
    network: SuccessHead, samples: ValueSamples, stage: StageConfig, seed: int, device: torch.device
) -> Loss:
    """What a step of the stage learns from."""

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(np.random.SeedSequence([seed, 2, step]).generate_state(1)[0])  # Dropout.
        batch = samples.batch(stage.batch_size, seed, step).to(device)
        return network.loss(batch.frames, batch.reference, batch.instruction, batch.success)

    return loss


def calibrate_value(world_model: WorldModel, clips: ClipDataset, seed: int) -> ValueCalibration | None:
    """Fit the sigmoid on held-out episodes and measure it; None where a higher logit means no more success.

    Args:
        clips: the held-out episodes.

    Raises:
        ConfigError: the world model has no value head.
    """
    logits, outcomes, groups = [], [], []
    for number, part in enumerate(clips.parts):
        found = Outcomes.of(part.frames, world_model.metadata)
        logits.append(_logits(world_model, clips, number, seed))
        outcomes.append(found)
        starts = [part.frames.dataset.initial_states[episode] for episode in part.frames.episodes]
        groups += [starts[owner] for owner in found.owner]
    score = np.concatenate(logits)
    together = Outcomes.concatenate(outcomes)
    real, group = together.success, np.array(groups)
    is_open = ~together.reached & (together.steps_left > 0)
    fitted = platt(score[is_open, 0], real[is_open])
    if fitted is None:
        return None

    def worth(frames: np.ndarray, depth: int = 0) -> CrossFitted:
        return measure(cross_fit(score[frames, depth], real[frames], group[frames]), real[frames], group[frames])

    counts = np.bincount(together.number[is_open])
    far = together.number >= min(DEEPEST, together.number.max())
    return ValueCalibration(
        slope=fitted[0],
        intercept=fitted[1],
        open_frames=worth(is_open),
        by_number=tuple(worth(is_open & (together.number == n)) for n, count in enumerate(counts) if count >= FEWEST),
        by_depth=tuple(worth(far, depth) for depth in range(DEEPEST + 1)),
    )


@torch.no_grad()
def _logits(world_model: WorldModel, clips: ClipDataset, number: int, seed: int) -> np.ndarray:
    """The value head's logits at the frames of a part's `Outcomes`, 0 .. DEEPEST frames after a real one.

    A frame that is fewer frames into its episode is imagined from the first: float64 (N, 1 + DEEPEST).
    """
    part = clips.parts[number].frames
    left = steps_left(part, world_model.metadata)
    found = np.zeros((part.num_frames, 1 + DEEPEST))
    for start in range(0, len(part.episodes), EPISODES_AT_ONCE):
        rows = np.arange(start, min(start + EPISODES_AT_ONCE, len(part.episodes)))
        count, first = part.counts[rows], part.starts[rows][:, None]
        length = int(count.max())
        frame = first + np.minimum(np.arange(length), count[:, None] - 1)
        clip = clips.clip_of(np.full(len(rows), number), frame, np.arange(length) < count[:, None])
        clip = clip.to(world_model.device)
        seeds = np.random.SeedSequence([seed, number, start]).generate_state(len(rows)).tolist()
        memory = world_model.begin(clip.frames.at(slice(0, 1)), clip.instruction, seeds)
        each = np.zeros((len(rows), length, 1 + DEEPEST))
        each[:, 0] = world_model.value_logits(memory, None, left[frame[:, :1]]).cpu().numpy()
        for here in range(length - 1):
            following = memory.copy()
            for depth in range(1, min(DEEPEST, length - 1 - here) + 1):
                at = slice(here + depth, here + depth + 1)
                imagined = world_model.dynamics.imagine(following.context, clip.actions.at(at), following.noise)
                logits = world_model.value_logits(following, imagined, left[frame[:, at]])
                # Near the episode's start this is also what deeper imagining would give.
                deeper = slice(depth, depth + 1) if here else slice(depth, None)
                each[:, here + depth, deeper] = logits.cpu().numpy()
                following = world_model.extend(following, imagined, clip.actions.at(at))
            at = slice(here + 1, here + 2)
            real = clip.frames.at(at)
            each[:, here + 1, 0] = world_model.value_logits(memory, real, left[frame[:, at]])[:, 0].cpu().numpy()
            memory = world_model.extend(memory, real, clip.actions.at(at))
        inside = np.arange(length) < count[:, None]
        found[frame[inside]] = each[inside]
    return found[Outcomes.of(part, world_model.metadata).frame]
