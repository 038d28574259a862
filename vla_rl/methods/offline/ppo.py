"""Offline PPO: updates from logged episodes alone (RL-100, arXiv 2510.14830), with two differences.

What is learned from is not the logged chunk but chunks that the policy draws at logged observations, judged by the
critic. A logged chunk has no denoising path, so that a flow policy's likelihood of it is not to be had, and one of
another driver may have next to none; the policy's own chunk has both in every family, and its ratio to the policy
before the iteration is 1 at first.

No update is admitted or undone by the critic's Q. Where no action matters, that admitted 19 updates of 20, with an
interval that should have let one of 40 pass: the critic is the logging policy's, and its errors are the update's too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, PositiveInt, SerializeAsAny, model_validator

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.algorithms.batch import Batch, rollout_log_prob
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.offpolicy.critic import Critic
from vla_rl.algorithms.offpolicy.logged import FACTS_FILE, CriticOfLogsConfig, observations
from vla_rl.algorithms.offpolicy.offline import LoggedRun
from vla_rl.algorithms.offpolicy.transitions import choose
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.tensor_files import load_weights, trained_weights
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import component
from vla_rl.data.dataset import BCDataset
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import derived_seed, evaluation_mode
from vla_rl.training.bc_trainer import open_bc_dataset
from vla_rl.training.checkpoint import checkpoint_path, keep_last, latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.types import ActionChunk, Observation

_BATCH = 64  # Chunks drawn together.
_PLACES, _CHUNKS, _ORDER = range(3)  # What random numbers are for.


class OfflinePPOConfig(CriticOfLogsConfig):
    """No cloning: `algo`'s updates on the policy's own chunks at logged observations, by the critic (RL-100)."""

    kind: Literal["ppo"] = "ppo"
    algo: Annotated[SerializeAsAny[AlgoConfig], component("algo")] = Field(
        default_factory=GRPOConfig, description="Whose optimizer, epochs and bounds it has, of kind grpo."
    )
    candidates: PositiveInt = Field(default=8, description="Chunks drawn from the policy.")
    iterations: PositiveInt = Field(default=1, description="More than one has not been shown to gain.")
    decisions: PositiveInt = Field(
        default=1000,
        description="Logged observations that chunks are drawn at for each; each dataset by its episodes.",
    )

    @model_validator(mode="after")
    def _all_options_do_something(self) -> OfflinePPOConfig:
        if self.algo.kind != "grpo":
            raise ValueError(f"algo.kind: got {self.algo.kind!r}, and kind ppo has a critic of its own; allowed: grpo")
        for name in ("kl_coef", "bc_coef", "decay_iterations"):
            if value := getattr(self.algo, name, 0):
                raise ValueError(
                    f"algo.{name}: got {value:g}, which kind ppo makes no use of: it learns from no episodes' rewards "
                    "or demonstrations, and begins each iteration anew; leave it at 0"
                )
        return self

    def improve(self, policy: Policy, run: LoggedRun) -> dict[str, Any]:
        """Make the iterations that remain after the last checkpoint. See `OfflineConfig.improve`."""
        if policy.no_rl_reason:
            raise ValueError(f"RL cannot train this policy: {policy.no_rl_reason}")
        folder, done = RunFolder(run.folder), 0
        data = BCDataset(open_bc_dataset(run.sft, policy, run.spec).parts, policy.chunk_size)
        critic, _, found = self.fitted(policy, data, run)
        if (path := latest_checkpoint(folder.checkpoints)) is not None:
            tensors, state = load_checkpoint(path)
            load_weights(policy, tensors, str(path))
            done = state["iteration"]
        while done < self.iterations:
            batch = own_chunks(self, policy, data, critic, run.seed, done)
            metrics = batch.metrics | update(self, policy, batch, run.seed, done)
            done += 1
            run.show(f"iteration {done} of {self.iterations}")
            run.log(done, metrics)
            path = checkpoint_path(folder.checkpoints, done)
            save_checkpoint(path, trained_weights(policy), {"iteration": done})
            keep_last(path, 2)
        run.examples.mkdir(exist_ok=True)
        write_text_atomic(run.examples / FACTS_FILE, json.dumps(found, indent=1) + "\n")
        policy.save(folder.policy)
        return {"policy": str(folder.policy), "steps": done} | found


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


def own_chunks(
    config: OfflinePPOConfig, policy: Policy, data: BCDataset, critic: Critic, seed: int, iteration: int
) -> PlacesBatch:
    """Chunks that the policy draws at logged observations, and their advantages.

    Observations are drawn as the critic draws them: each dataset by its episodes, however many decisions were logged.

    An advantage is the ensemble's smallest Q less its mean over the policy's chunks there (which is the policy's own V,
    where the critic's V is that of who was logged), over the deviation of all.
    """
    count = config.candidates
    rng = np.random.default_rng(derived_seed(seed, _PLACES, iteration))
    logged = critic.transitions
    rows = choose(logged.weight, np.arange(len(logged)), config.decisions, rng)
    obs = policy.prepare(observations(data, rows))
    generator = torch.Generator().manual_seed(derived_seed(seed, _CHUNKS, iteration))
    chunks = draw(policy, obs, count, generator)
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


def update(config: OfflinePPOConfig, policy: Policy, batch: Batch, seed: int, iteration: int) -> dict[str, float]:
    """Make the algorithm's epochs on a batch, with a fresh optimizer; its metrics."""
    order = derived_seed(seed, _ORDER, iteration)
    return config.algo.build(policy, order).update(batch)


def draw(policy: Policy, obs: Observation, count: int, generator: torch.Generator) -> ActionChunk:
    """`count` chunks of the policy at each of B observations, (B * count) of them, with their likelihoods."""
    rows, obs, found = np.repeat(np.arange(obs.batch_size), count), policy.prepare(obs), []
    with evaluation_mode(policy):
        for first in range(0, len(rows), _BATCH):
            found.append(policy.act(obs.select(rows[first : first + _BATCH]), generator))
    return ActionChunk.concatenate(found)


METHOD = OfflinePPOConfig
