"""PPO's updates from logged episodes alone, each admitted by off-policy evaluation or undone.

RL-100 (arXiv 2510.14830), with one difference: what is learned from is not the logged chunk but chunks that the policy
draws at logged observations, judged by the critic. A logged chunk has no denoising path, so that a flow policy's
likelihood of it is not to be had, and one of another driver may have next to none; the policy's own chunk has both in
every family, and its ratio to the policy before the iteration is 1 at first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.algorithms.batch import Batch, rollout_log_prob
from vla_rl.data.dataset import BCDataset
from vla_rl.evaluation.bootstrap import ratio_interval
from vla_rl.evaluation.statistics import Interval
from vla_rl.interfaces import Policy
from vla_rl.offpolicy.config import OfflineConfig
from vla_rl.offpolicy.critic import Critic
from vla_rl.offpolicy.examples import observations
from vla_rl.offpolicy.transitions import choose
from vla_rl.rollout.runner import derived_seed, evaluation_mode
from vla_rl.types import ActionChunk, Observation

HELD_OUT = 0  # The fold that no update sees.
_BATCH = 64  # Chunks drawn together.
_PLACES, _CHUNKS, _GATE, _ORDER = range(4)  # What random numbers are for.


@dataclass
class PlacesBatch(Batch):
    """Several chunks at each of some observations, which are held once.

    Attributes:
        places: the observations. place: int64 (N,), which of them each chunk was drawn at.
    """

    places: Observation | None = None
    place: np.ndarray | None = None

    def observations(self, rows: np.ndarray) -> Observation:
        """See `Batch.observations`."""
        assert self.places is not None and self.place is not None, "given when it is made"
        return self.places.select(self.place[rows])


@dataclass(frozen=True)
class Verdict:
    """What off-policy evaluation says of an update.

    Attributes:
        before, after: mean Q of the policy's chunks at held-out decisions. interval: of after - before, from initial
            states drawn anew.
    """

    before: float
    after: float
    interval: Interval

    @property
    def admitted(self) -> bool:
        """Whether the update is shown to be better."""
        return self.interval.low > 0


class OffPolicyEvaluation:
    """Judges a policy at logged decisions of held-out initial states, by a critic that no update asks.

    The held-out fold's own critic was fitted on the other folds' episodes; those are what updates are made on, and
    their chunks are judged by the other folds' critics.
    """

    def __init__(self, config: OfflineConfig, data: BCDataset, critic: Critic, seed: int) -> None:
        self.config, self.critic, self.seed = config, critic, derived_seed(seed, _GATE)
        held = np.flatnonzero(critic.fold == HELD_OUT)
        logged, rng = critic.transitions, np.random.default_rng(self.seed)
        self.rows = choose(logged.weight, held, config.ppo.held_out_decisions, rng)
        self._obs = observations(data, self.rows)
        self._groups = np.unique(logged.initial_state[logged.episode[self.rows]], return_inverse=True)[1]

    def values(self, policy: Policy) -> np.ndarray:
        """Mean Q of the policy's chunks at each held-out decision, float64 (G,); the same noise whenever asked."""
        count = self.config.candidates
        generator = torch.Generator().manual_seed(self.seed)
        chunks = draw(policy, self._obs, count, self.config.sampling_temperature, generator)
        actions = chunks.actions.reshape(len(self.rows), count, *chunks.actions.shape[1:])
        return self.critic.values(self.rows, actions).mean((0, 2)).astype(np.float64)

    def compare(self, before: np.ndarray, after: np.ndarray) -> Verdict:
        """Judge an update by `values` before and after it."""
        _, interval = ratio_interval(after - before, np.ones(len(before)), self._groups)
        return Verdict(float(before.mean()), float(after.mean()), interval)


def own_chunks(
    config: OfflineConfig, policy: Policy, data: BCDataset, critic: Critic, seed: int, iteration: int
) -> PlacesBatch:
    """Chunks that the policy draws at logged observations outside the held-out fold, and their advantages.

    Observations are drawn as the critic draws them: each dataset by its episodes, however many decisions were logged.

    An advantage is the ensemble's smallest Q less its mean over the policy's chunks there (which is the policy's own V,
    where the critic's V is that of who was logged), over the deviation of all.
    """
    count = config.candidates
    rng = np.random.default_rng(derived_seed(seed, _PLACES, iteration))
    rows = choose(critic.transitions.weight, np.flatnonzero(critic.fold != HELD_OUT), config.ppo.decisions, rng)
    obs = policy.prepare(observations(data, rows))
    generator = torch.Generator().manual_seed(derived_seed(seed, _CHUNKS, iteration))
    chunks = draw(policy, obs, count, config.sampling_temperature, generator)
    value = critic.values(rows, chunks.actions.reshape(len(rows), count, *chunks.actions.shape[1:])).min(0)
    advantage = value - value.mean(1, keepdims=True)
    advantage = (advantage / max(float(advantage.std()), 1e-6)).reshape(-1, 1)
    place = np.repeat(np.arange(len(rows)), count)
    valid = np.ones(chunks.actions.shape[:2], bool)
    return PlacesBatch(
        episodes=[],
        episode=place,
        chunk=np.zeros(len(place), np.int64),
        chunks=chunks,
        valid=valid,
        advantage=(advantage * valid).astype(np.float32),
        old_log_prob=rollout_log_prob(chunks),
        metrics={"ppo/q_of_own": float(value.mean()), "ppo/spread_of_own": float(value.std(1).mean())},
        places=obs,
        place=place,
    )


def update(
    config: OfflineConfig, algo: AlgoConfig, policy: Policy, batch: Batch, seed: int, iteration: int, lr: float
) -> dict[str, float]:
    """Make the algorithm's epochs on a batch at this learning rate, with a fresh optimizer; its metrics."""
    learner = algo.with_optim(lr=lr).build(
        policy, derived_seed(seed, _ORDER, iteration), temperature=config.sampling_temperature
    )
    return learner.update(batch)


def draw(policy: Policy, obs: Observation, count: int, temperature: float, generator: torch.Generator) -> ActionChunk:
    """`count` chunks of the policy at each of B observations, (B * count) of them, with their likelihoods."""
    rows, obs, found = np.repeat(np.arange(obs.batch_size), count), policy.prepare(obs), []
    with evaluation_mode(policy):
        for first in range(0, len(rows), _BATCH):
            found.append(policy.act(obs.select(rows[first : first + _BATCH]), generator, temperature))
    return ActionChunk.concatenate(found)
