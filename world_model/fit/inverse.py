"""Fitting the inverse dynamics on real frames, and the errors between which imagination's action penalty rises.

On held-out real frames the actions read off are compared with those that were executed, and with those of other
moments. An imagined frame is charged nothing where its error is below three quarters of the first, and all where it is
above three quarters of the second.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from vla_rl.training.trainer import Loss
from world_model.config import StageConfig
from world_model.data.clips import ClipDataset
from world_model.model.inverse import InverseDynamics, mean_actions
from world_model.model.world_model import WorldModel
from world_model.types import Actions

log = logging.getLogger(__name__)

QUANTILE = 0.75  # Of the errors on real frames: with the executed actions, and with others.
SCALE_CLIPS, JUDGED_CLIPS = 512, 1024
_SCALE, _JUDGED = 6, 7  # Streams of random numbers.

Pairs = tuple[torch.Tensor, torch.Tensor, Actions]


def real_pairs(clips: ClipDataset, size: int, seed: int, step: int) -> Pairs:
    """Frames that follow one another in `size` clips: latents (N, V, C, h, w) before and after, actions N x 1."""
    clip = clips.batch(size, seed, step)
    follows = clip.valid[:, 1:] & clip.actions.executed[:, 1:].any(-1)
    follows[:, 0] &= clip.first == 1  # Else frames lie between the reference and the clip's frame 1.
    latents, actions = clip.frames.latents, clip.actions.at(slice(1, None))
    rows = Actions(actions.values[follows][:, None], actions.executed[follows][:, None])
    return latents[:, :-1][follows], latents[:, 1:][follows], rows


def learn_scale(network: InverseDynamics, clips: ClipDataset, seed: int) -> None:
    """Of the actions in some of the clips."""
    actions = real_pairs(clips, SCALE_CLIPS, seed, _SCALE)[2]
    network.learn_scale(mean_actions(actions, len(network.mean))[:, 0].to(network.mean.device))


def inverse_loss(network: InverseDynamics, clips: ClipDataset, stage: StageConfig, seed: int) -> Loss:
    """What a step of the stage learns from; `action_error` is its error, in variances of the action."""
    device = network.mean.device

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        before, after, actions = real_pairs(clips, stage.batch_size, seed + _SCALE, step)
        wanted = mean_actions(actions, len(network.mean))[:, 0].to(device)
        found = network.loss(before.to(device), after.to(device), wanted)
        return found, {"action_error": found.detach()}

    return loss


def calibrate_inverse(world_model: WorldModel, clips: ClipDataset, seed: int) -> None:
    """Find the two errors on held-out real frames; the part goes where it does not tell the actions of one moment from
    those of another.

    Args:
        clips: the held-out episodes.
    """
    network = world_model.inverse
    assert network is not None, "there is something to calibrate"
    before, after, actions = real_pairs(clips, JUDGED_CLIPS, seed, _JUDGED)
    order = torch.from_numpy(np.random.default_rng([seed, _JUDGED]).permutation(len(before)))
    latents, device = torch.stack([before, after], 1).to(world_model.device), world_model.device

    def quantile(rows: Actions) -> float:
        errors = network.errors(latents, Actions(rows.values.to(device), rows.executed.to(device)))
        return float(errors.quantile(QUANTILE))

    following, other = quantile(actions), quantile(actions.select(order))
    if not following < other:  # Also where one is NaN.
        log.warning(
            "inverse: on real frames the actions that it reads are hardly nearer to the executed ones (error %.2f) "
            "than to those of other moments (%.2f), so the world model is saved without this part; fit it longer "
            "(world_model.inverse.steps) or on more episodes",
            *(following, other),
        )
        world_model.inverse = None
    found = None if world_model.inverse is None else (following, other)
    world_model.metadata = world_model.metadata.model_copy(update={"inverse_errors": found})
