"""Fitting the model posterior: each member on its own bootstrap resample of the initial states, the dynamics frozen.

All members are fitted together: a batch's clips go to them in turn, drawn from a member's own resample, with
noise of their own. They begin as the dynamics itself, and differ by what they have seen.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.config import ConfigError
from vla_rl.training.trainer import Loss
from world_model.data.clips import ClipDataset
from world_model.fit.config import FitConfig
from world_model.interfaces import DynamicsConfig, PosteriorConfig
from world_model.model.dynamics import VideoDynamics
from world_model.model.world_model import WorldModel
from world_model.stage_config import PosteriorStageConfig

log = logging.getLogger(__name__)

_RESAMPLE, _BATCH = 11, 12  # Streams of the random generator.


def check_members(dynamics: DynamicsConfig) -> None:
    """Check, before anything is fitted, that a dynamics with these options can have members.

    Raises:
        ConfigError: it can have none.
    """
    if not dynamics.can_have_members:
        raise ConfigError(f"world_model.posterior.steps: not for dynamics of kind {dynamics.kind!r}; set it to 0")


def drop_stale(world_model: WorldModel, config: FitConfig) -> None:
    """Take away the members of a start whose dynamics, or they themselves, will be fitted anew."""
    changes = config.dynamics.steps or config.posterior.steps
    if world_model.config.posterior is None or not changes:
        return
    if not config.posterior.steps:
        log.warning(
            "world_model.posterior: %s has members, which belong to its dynamics; this is fitted, so they are dropped. "
            "Set world_model.posterior.steps to fit others",
            config.start_from,
        )
    world_model.set_posterior(None)


def add_posterior(world_model: WorldModel, stage: PosteriorStageConfig, seed: int) -> nn.Module:
    """Give a world model fresh members, which are returned."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        world_model.set_posterior(PosteriorConfig(members=stage.members, rank=stage.rank))
    network = world_model.dynamics
    assert isinstance(network, VideoDynamics) and network.posterior is not None, "it has just got them"
    return network.posterior


def posterior_loss(world_model: WorldModel, clips: ClipDataset, stage: PosteriorStageConfig, seed: int) -> Loss:
    """What a step of the stage learns from: `stage.batch_size` clips, assigned to the members in turn."""
    network, device = world_model.dynamics, world_model.device
    assert isinstance(network, VideoDynamics), "others refuse to have members"
    resamples = [resample(clips, [seed, _RESAMPLE, member]) for member in range(stage.members)]

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        sizes = np.bincount(np.arange(stage.batch_size) % stage.members, minlength=stage.members)
        drawn = [
            clips.draw(int(size), _seed(seed, member, step), step, among)
            for member, (size, among) in enumerate(zip(sizes, resamples, strict=True))
        ]
        clip = clips.clip_of(*(np.concatenate(parts) for parts in zip(*drawn, strict=True)))
        generator = torch.Generator().manual_seed(_seed(seed, stage.members, step))
        member = torch.from_numpy(np.repeat(np.arange(stage.members), sizes)).to(device)
        return network.loss(clip.to(device), generator, member=member)

    return loss


def resample(clips: ClipDataset, seed: list[int]) -> list[np.ndarray]:
    """Frames that a bootstrap resample of the initial states may draw, part by part: int64, as often as their episode.

    A dataset has the same in all its cuts. An initial state's episodes are drawn together, each as often as its state;
    frame 0 of an episode is left out.
    """
    found = []
    datasets = [part.frames.dataset.cache.name for part in clips.parts]
    for part, name in zip(clips.parts, datasets, strict=True):
        frames, rng = part.frames, np.random.default_rng([*seed, datasets.index(name)])  # Its other cuts draw alike.
        starts = np.array([frames.dataset.initial_states[frames.episodes[episode]] for episode in part.chosen])
        names, place = np.unique(starts, return_inverse=True)
        times = np.zeros(len(frames.episodes), np.int64)
        times[part.chosen] = rng.multinomial(len(names), np.full(len(names), 1 / len(names)))[place]
        later = np.flatnonzero(frames.number > 0)
        found.append(np.repeat(later, times[frames.owner[later]]))
    return found


def _seed(seed: int, number: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, _BATCH, number, step]).generate_state(1)[0])
