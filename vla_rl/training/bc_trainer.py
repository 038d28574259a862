"""Behavior-cloning trainer, one step at a time (the loop is in `bc_loop.py`); demonstrations that RL learns from too.

Everything random in a step follows from (seed, step): which examples, how images are changed,
dropout. So a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from vla_rl.algorithms.batch import Batch
from vla_rl.algorithms.learner import Learner
from vla_rl.common.distributed.fsdp import swap_weights
from vla_rl.common.distributed.process_group import ALONE, ProcessGroup, current
from vla_rl.data.augment import augment, cropped_at_random
from vla_rl.data.dataset import BCBatch, BCDataset, DataNeeds, EpisodeDataset, open_dataset
from vla_rl.interfaces import Policy
from vla_rl.training.config import SFTConfig
from vla_rl.training.optimizers import read_scalars
from vla_rl.training.trainer import Trainer
from vla_rl.types import EnvSpec, Episode

# Streams of the random generators, so that they share no numbers; `DATA` and `VALIDATION` are the loop's.
DATA, _AUGMENT, _DROPOUT, VALIDATION = range(4)


def open_bc_dataset(config: SFTConfig, policy: Policy, env_spec: EnvSpec | None = None) -> BCDataset:
    """The config's datasets, checked against the policy and the environment, and decoded into their caches.

    Warns of datasets all of whose instructions are other than those of the environment's tasks.

    Raises:
        DatasetError: a dataset that is missing, damaged or does not fit.
    """
    needs = DataNeeds(
        cameras=tuple(policy.cameras),
        action_dim=policy.action_dim,
        state_dim=env_spec.state_dim if env_spec is not None and policy.uses_state else None,
        image_size=config.image_size,
        fps=None if env_spec is None else env_spec.control_hz,
    )
    size = policy.demonstration_size or policy.chunk_size  # Some denoise more than they execute.
    data = BCDataset([open_dataset(d, needs) for d in config.datasets], size)
    if env_spec is not None and current().is_main:
        _compare_instructions(data.parts, env_spec)
    return data


def _compare_instructions(parts: Sequence[EpisodeDataset], env_spec: EnvSpec) -> None:
    """Warn, once, of datasets whose instructions are none of the environment's, in the words that a policy reads."""
    known = {_words(text) for text in env_spec.tasks.values()}
    foreign = []
    for part in parts:
        found = [part.instructions[number] for number in np.unique(part.task[part.rows])]
        if found and known.isdisjoint(map(_words, found)):
            foreign.append(f"{part.path} ({_some(found)})")
    if foreign:
        warnings.warn(
            f"datasets: no instruction in {', '.join(foreign)} is that of a task of {env_spec.title} "
            f"({_some(list(env_spec.tasks.values()))}), so a policy learns from them to follow instructions that it is "
            "never given there. Set env.tasks to the tasks that they show, or name datasets of these tasks",
            stacklevel=1,
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.lower()))


def _some(texts: Sequence[str]) -> str:
    """The first three, quoted, and how many more there are."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(map(repr, texts[:3])) + more


class BCTrainer:
    """Improves a policy by one behavior-cloning update at a time.

    Attributes:
        trainer: optimizer, schedule, averaged weights and what a checkpoint needs besides the policy's own.
    """

    def __init__(self, policy: Policy, config: SFTConfig, seed: int = 0, world: ProcessGroup = ALONE) -> None:
        self.world = world
        self.policy, self.config, self.seed = policy, config, seed
        parameters: dict[str, nn.Parameter] = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        if not parameters:
            raise ValueError("the policy has no trainable parameters; check policy.trainable")
        whole_warmup = config.with_optim(warmup_steps=min(config.optim.warmup_steps, config.steps))
        self.trainer = Trainer(parameters, whole_warmup, "sft", world=world)
        device = next(iter(parameters.values())).device
        self.accelerator = _accelerator("bf16" if config.precision == "bf16" else "no", device)

    def step(self, batch: BCBatch) -> dict[str, float]:
        """One update on a batch; {"bad_step": 1.0} when it was skipped for a NaN or infinite loss or gradient.

        With several processes each gives the same whole batch, and learns from its share of it.

        Raises:
            TrainingDivergedError: `max_bad_steps` skipped in a row. The weights are those of the last
                good step.
        """
        own = batch.select(np.arange(batch.size)[self.world.share(batch.size)]) if self.world.size > 1 else batch
        seed = derive_seed(self.seed, _AUGMENT, self.trainer.num_steps, *self.world.stream)
        generator = torch.Generator().manual_seed(seed)
        own = replace(own, obs=replace(own.obs, images=augment(own.obs.images, self.config.augment, generator)))
        self.policy.train()
        try:
            with cropped_at_random(self.config.augment):
                metrics = self._forward_backward(own, batch.share_of(own))
        finally:
            self.policy.eval()
        return self.trainer.update(metrics)

    def learn(self, data: BCDataset, seed: int) -> dict[str, float]:
        """One update on what this step draws of the data; see `step`."""
        return self.step(data.batch(self.config.batch_size, seed, self.trainer.num_steps))

    def _loss(self, batch: BCBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        with self.accelerator.autocast():
            return self.policy.bc_loss(batch.obs, batch.actions, batch.valid, keyframe=batch.keyframe)

    def _forward_backward(self, batch: BCBatch, weight: float) -> dict[str, float]:
        """Gradients of the batch's loss, a part at a time, and its metrics, all times `weight`."""
        # As many parts in each process, which have to keep step: none has fewer examples than the last one.
        smallest = self.config.batch_size // self.world.size if self.world.size > 1 else batch.size
        parts = np.array_split(np.arange(batch.size), min(self.config.grad_accumulation, smallest))
        found: list[tuple[float, dict[str, Any]]] = []
        for number, rows in enumerate(parts):
            part = batch if len(parts) == 1 else batch.select(rows)
            share = weight * batch.share_of(part)
            with self._dropout_seed(number):
                loss, values = self._loss(part)
                (loss * share).backward()
            found.append((share, {"loss": loss.detach(), **values}))
        scalars = read_scalars([value for _, values in found for value in values.values()])
        metrics: defaultdict[str, float] = defaultdict(float)
        for share, values in found:
            for name in values:
                metrics[name] += share * next(scalars)
        return dict(metrics)

    @torch.no_grad()
    def evaluate(self, batch: BCBatch) -> dict[str, float]:
        """The loss and metrics on a batch, without an update or augmentation."""
        self.policy.eval()
        loss, values = self._loss(batch)
        found = {"loss": loss, **values}
        return dict(zip(found, read_scalars(list(found.values())), strict=True))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the policy has its averaged weights (its own without averaging)."""
        swap_weights(self.trainer.parameters, self.trainer.ema)
        try:
            yield
        finally:
            swap_weights(self.trainer.parameters, self.trainer.ema)

    @contextmanager
    def _dropout_seed(self, part: int) -> Iterator[None]:
        device = self.accelerator.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed(self.seed, _DROPOUT, self.trainer.num_steps, part, *self.world.stream))
            yield


def _accelerator(precision: str, device: torch.device) -> Accelerator:
    """An `Accelerator` with this precision. Its state is one per process, and refuses to change unless reset.

    The policy is not `prepare`d by it: that would wrap a model's `forward`, which policies have none of.
    """
    on_cpu = device.type == "cpu"
    if AcceleratorState._shared_state:
        state = AcceleratorState()
        if state.mixed_precision != precision or (state.device.type == "cpu") != on_cpu:
            AcceleratorState._reset_state(reset_partial_state=current().size == 1)
    return Accelerator(mixed_precision=precision, cpu=on_cpu)


def derive_seed(*numbers: int) -> int:
    """Return a 63-bit seed made of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


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
