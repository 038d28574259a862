"""Action following: responses to other actions, and an inverse dynamics on imagined frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.optim.lr_scheduler import OneCycleLR

from vla_rl.training.config import OptimConfig, TrainerConfig
from vla_rl.training.trainer import Trainer
from world_model.model.inverse import InverseDynamics, mean_actions
from world_model.trust.types import WorldModel
from world_model.types import Actions, Frames, LoggedEpisode, collate

_ENCODE_EPISODES = 16
_PAIRS = 2000  # Of frames, that the network is trained on, at most.


def other_actions(episodes: Sequence[LoggedEpisode], kind: str, seed: int) -> list[np.ndarray]:
    """For each episode other actions of the same scale, float32 (T_i, G, A); frame 0 keeps its zeros.

    Args:
        kind: "swapped": another episode's, from an other initial state where there is one; past that episode's end its
            own. "zero": zeros. "random": each control step's drawn from all logged ones.
    """
    if kind == "zero":
        return [np.zeros_like(e.actions) for e in episodes]
    if kind == "swapped":
        return [_replaced(e, episodes[i].actions) for e, i in zip(episodes, partners(episodes, seed), strict=True)]
    assert kind == "random", f"unknown kind of other actions: {kind!r}"
    rng = np.random.default_rng(seed)
    pool = np.concatenate([e.actions[e.executed] for e in episodes])
    return [_replaced(e, pool[rng.integers(len(pool), size=e.actions.shape[:2])]) for e in episodes]


def partners(episodes: Sequence[LoggedEpisode], seed: int) -> list[int]:
    """For each episode another one, drawn at random, with another initial state where there is one."""
    order = np.random.default_rng(seed).permutation(len(episodes))
    chosen = [0] * len(episodes)
    for place, i in enumerate(order):
        following = [int(j) for j in np.roll(order, -place - 1)]  # Ends with i itself.
        chosen[i] = next((j for j in following if episodes[j].start != episodes[i].start), following[0])
    return chosen


def _replaced(episode: LoggedEpisode, actions: np.ndarray) -> np.ndarray:
    length = min(len(episode.actions), len(actions))
    result = episode.actions.copy()
    result[1:length] = actions[1:length]
    return result


class ActionReader:
    """The inverse dynamics (world_model/model/inverse.py), trained on real frames alone.

    Its error on imagined frames shows whether their motion is the motion that the actions ask for.

    Args:
        world_model: encodes the frames.
        episodes: real ones to train on.
        num_updates: AdamW steps of 64 pairs.
    """

    def __init__(self, world_model: WorldModel, episodes: Sequence[LoggedEpisode], num_updates: int, seed: int) -> None:
        before, after, actions = _training_pairs(world_model, episodes, seed)
        num_views, *shape = before.shape[1:]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = InverseDynamics((shape[0], shape[1], shape[2]), num_views, actions.shape[1])
        self.network.learn_scale(actions)
        self._fit(before, after, actions, num_updates, seed)
        self.num_pairs = len(actions)

    def _fit(
        self, before: torch.Tensor, after: torch.Tensor, actions: torch.Tensor, num_updates: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        optim = OptimConfig(lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05, grad_clip=None)
        config = TrainerConfig(steps=num_updates, batch_size=64, optim=optim)

        def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
            return OneCycleLR(optimizer, optim.lr, total_steps=max(num_updates, 2))

        def loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
            rows = torch.randint(len(actions), (config.batch_size,), generator=generator)
            return self.network.loss(before[rows], after[rows], actions[rows]), {}

        parameters = dict(self.network.named_parameters())
        Trainer(parameters, config, "inverse_dynamics", scheduler=one_cycle).run(loss)

    def errors(self, frames: Frames, actions: torch.Tensor, executed: torch.Tensor) -> np.ndarray:
        """Mean squared error of the actions read off each pair of frames, in variances of the action.

        Args:
            frames: B x T. actions: (B, T, G, A), executed: bool (B, T, G), those that led to each.

        Returns:
            float64 (B, T - 1) for frames 1 .. T - 1; NaN where nothing was executed.
        """
        led = Actions(actions[:, 1:], executed[:, 1:])
        return self.network.errors(frames.latents.float().cpu(), led).double().numpy()


def _training_pairs(
    world_model: WorldModel, episodes: Sequence[LoggedEpisode], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents before and after (N, V, C, h, w), and the mean action between (N, A), of pairs drawn at random."""
    share = min(1.0, _PAIRS / max(sum(e.num_frames - 1 for e in episodes), 1))
    rng = np.random.default_rng(seed)
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for chunk in _chunks(episodes, _ENCODE_EPISODES):
        batch = collate(chunk)
        wanted = batch.executed[:, 1:].any(-1) & (rng.random(batch.executed[:, 1:].shape[:2]) < share)
        if not wanted.any():
            continue
        latents = world_model.encode(batch.images, batch.states).latents.float().cpu()
        keep = torch.from_numpy(wanted)
        led = Actions(torch.from_numpy(batch.actions[:, 1:]), torch.from_numpy(batch.executed[:, 1:]))
        found.append((latents[:, :-1][keep], latents[:, 1:][keep], mean_actions(led)[keep]))
    if not found:
        raise ValueError("no frame with an executed action to train the inverse dynamics on")
    before, after, actions = (torch.cat(parts) for parts in zip(*found, strict=True))
    return before, after, actions


def _chunks(episodes: Sequence[LoggedEpisode], size: int) -> Iterator[Sequence[LoggedEpisode]]:
    for start in range(0, len(episodes), size):
        yield [episodes[i] for i in range(start, min(start + size, len(episodes)))]
