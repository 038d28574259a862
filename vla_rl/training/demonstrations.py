"""Demonstrations inside an RL run: the behavior-cloning anchor, and the control that clones instead of RL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.batch import Batch
from vla_rl.algorithms.learner import Learner
from vla_rl.common.distributed.process_group import ALONE, ProcessGroup
from vla_rl.data.dataset import BCBatch
from vla_rl.interfaces import Policy
from vla_rl.training.bc_trainer import BCTrainer, open_bc_dataset
from vla_rl.training.config import SFTConfig
from vla_rl.types import EnvSpec, Episode


class Demonstrations:
    """Batches of the recipe's `sft.datasets`, the same sequence for the same seed.

    Attributes:
        num_drawn: batches drawn so far; set it to go on where a checkpoint left off.
    """

    def __init__(self, policy: Policy, config: SFTConfig, env_spec: EnvSpec, seed: int, world: ProcessGroup = ALONE):
        self.policy, self.config, self.seed, self.world = policy, config, seed, world
        with world.main_first():  # It decodes the datasets into their caches.
            self.data = open_bc_dataset(config, policy, env_spec)
        self.num_drawn = 0

    def batch(self) -> BCBatch:
        """The next batch of `sft.batch_size` examples."""
        batch = self.data.batch(self.config.batch_size, self.seed, self.num_drawn)
        self.num_drawn += 1
        return batch

    def loss(self) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Behavior-cloning loss of the next batch and its metrics: `Learner.update`'s extra loss.

        With several processes: this one's share of it, so that the shares add up.
        """
        batch = self.batch()
        part = batch.select(np.arange(batch.size)[self.world.share(batch.size)])
        loss, metrics = self.policy.bc_loss(part.obs, part.actions, part.valid, keyframe=part.keyframe)
        return batch.share_of(part) * loss, metrics


class ContinueBC:
    """Negative control: in place of each RL update, as many behavior-cloning steps as RL would have made.

    It stands where the learner stands and leaves everything else of the run as it is.
    """

    def __init__(self, learner: Learner, demonstrations: Demonstrations):
        self.learner = learner
        self.demonstrations = demonstrations
        config = demonstrations.config.with_optim(warmup_steps=0)
        constant_lr = config.model_copy(update={"final_lr_fraction": 1.0})
        self.cloning = BCTrainer(demonstrations.policy, constant_lr, demonstrations.seed, world=demonstrations.world)

    def prepare(self, episodes: Sequence[Episode]) -> Batch:
        """The batch RL would learn from; it only decides how many steps are made."""
        return self.learner.prepare(episodes)

    def update(self, batch: Batch, extra_loss: object = None) -> dict[str, float]:
        """As many cloning steps as `Learner.update` would make on this batch."""
        num_steps = self.learner.num_steps(batch)
        metrics: dict[str, float] = dict(batch.metrics)
        for _ in range(num_steps):
            with self.learner.stopwatch.measure("forward_backward"):
                metrics |= {f"bc/{k}": v for k, v in self.cloning.step(self.demonstrations.batch()).items()}
        self.learner.iteration += 1
        return metrics | {"update/num_steps": float(num_steps)}

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a checkpoint needs besides the policy's weights."""
        tensors, state = self.cloning.trainer.state()
        return tensors, {"trainer": state, "iteration": self.learner.iteration}

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Undo `state`, after the policy's own weights were loaded."""
        self.cloning.trainer.load_state(tensors, state["trainer"])
        self.learner.iteration = int(state["iteration"])
