"""Fitting the objects part, and its probability of success on held-out episodes of the policy.

An episode's score is the highest logit of its frames, rolled from the first real one with the logged actions: as RL is
paid, but that RL's episodes may end before (`stop_probability`, the horizon). Platt's sigmoid turns it into a
probability, as for the success networks. Poses are not needed for that.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.evaluation.probability import SuccessProbability, fit_probability
from vla_rl.training.trainer import Loss
from world_model.config import ObjectsStageConfig
from world_model.data.clips import ClipDataset
from world_model.data.objects import ObjectSamples
from world_model.model.objects import ObjectModel
from world_model.model.world_model import WorldModel

log = logging.getLogger(__name__)

EPISODES_AT_ONCE = 256


def prepare_objects(world_model: WorldModel, stage: ObjectsStageConfig) -> bool:
    """Give a world model the part that a stage is to fit: a fresh one, unless it has just that; seed torch before.

    Returns:
        Whether it is fresh.

    Raises:
        ConfigError: it has none, and the stage does not say which objects.
    """
    found = world_model.config.objects
    if not stage.steps or (found is not None and stage.network in (None, found)):
        return False
    if stage.network is None:
        raise ConfigError(
            f"world_model.objects.network: got null with steps={stage.steps}, and start_from has no objects part; say "
            "which objects it has, network={slots: [[NAME, ...], ...]}, or set world_model.objects.steps=0"
        )
    world_model.set_objects(stage.network)
    return True


def objects_loss(network: ObjectModel, samples: ObjectSamples, stage: ObjectsStageConfig, seed: int) -> Loss:
    """What a step of the stage learns from."""
    device = network.reach.device

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return network.loss(samples.batch(stage.batch_size, seed, step).to(device))

    return loss


@torch.no_grad()
def objects_scores(world_model: WorldModel, clips: ClipDataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each episode's highest logit, float64 (E,), its outcome, bool (E,), and its initial state's name, (E,)."""
    scores, real, starts = [], [], []
    for number, part in enumerate(clips.parts):
        frames = part.frames
        for begin in range(0, len(frames.episodes), EPISODES_AT_ONCE):
            rows = np.arange(begin, min(begin + EPISODES_AT_ONCE, len(frames.episodes)))
            count = frames.counts[rows][:, None]
            index = np.arange(int(count.max()))
            frame = frames.starts[rows][:, None] + np.minimum(index, count - 1)
            clip = clips.clip_of(np.full(len(rows), number), frame, index < count).to(world_model.device)
            memory = world_model.begin(clip.frames.at(slice(0, 1)), clip.instruction, [0] * len(rows))
            scores.append(world_model.objects_scores(memory, clip.actions.at(slice(1, None))).amax(1).cpu().numpy())
        real.append(frames.dataset.success[frames.episodes])
        starts += [frames.dataset.initial_states[episode] for episode in frames.episodes]
    return np.concatenate(scores).astype(np.float64), np.concatenate(real), np.array(starts)


def calibrate_objects(world_model: WorldModel, clips: ClipDataset) -> None:
    """Turn the part's logit into a probability, on the held-out episodes; the part goes where it tells nothing of them.

    Args:
        clips: the held-out episodes.
    """
    found: SuccessProbability | None = fit_probability(*objects_scores(world_model, clips))
    if found is None:
        log.warning(
            "objects: on the held-out episodes, a higher logit does not mean more success, so the world model is saved "
            "without this part; fit it longer (world_model.objects.steps) or on more of the policy's episodes"
        )
        world_model.set_objects(None)
    values = {
        "objects_probability": None if found is None else (found.slope, found.intercept),
        "objects_calibration": {} if found is None else found.model_dump(mode="json"),
    }
    world_model.metadata = world_model.metadata.model_copy(update=values)
