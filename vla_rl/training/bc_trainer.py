"""The behavior-cloning trainer: one step at a time (`BCTrainer`), and the loop around it (`run_training`).

Everything random in a step follows from (seed, step): which examples, how images are changed,
dropout. So a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from vla_rl.algorithms.learner import TrainingDivergedError
from vla_rl.data.augment import augment
from vla_rl.data.dataset import BCBatch, BCDataset, DataNeeds, open_dataset
from vla_rl.data.statistics import compute_statistics
from vla_rl.distributed.fsdp import full, like, local, swap_weights
from vla_rl.distributed.process_group import ALONE, ProcessGroup, current, reduce_metrics
from vla_rl.interfaces import Policy
from vla_rl.training.checkpoint import (
    CheckpointError,
    checkpoint_path,
    flatten_optimizer,
    keep_last,
    latest_checkpoint,
    load_checkpoint,
    load_weights,
    restore_optimizer,
    save_checkpoint,
    trained_weights,
)
from vla_rl.training.optimizers import build_optimizers, clip_gradients
from vla_rl.training.sft import SFTConfig
from vla_rl.types import EnvSpec

# Streams of the random generators, so that they share no numbers.
_DATA, _AUGMENT, _DROPOUT, _VALIDATION = range(4)
_VALIDATION_BATCHES = 4
# What a resumed run may change.
_FREE = {"log_every", "save_every", "keep_checkpoints", "num_threads", "max_bad_steps", "cache_folder"}


def open_bc_dataset(config: SFTConfig, policy: Policy, env_spec: EnvSpec | None = None) -> BCDataset:
    """The config's datasets, checked against the policy and the environment, and decoded into their caches.

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
    folder = None if config.cache_folder is None else Path(config.cache_folder)
    size = policy.demonstration_size or policy.chunk_size  # Some denoise more than they execute.
    return BCDataset([open_dataset(d, needs, folder) for d in config.datasets], size)


class BCTrainer:
    """Improves a policy by one behavior-cloning update at a time.

    Attributes:
        num_steps: steps taken, skipped ones included.
        num_bad_steps: steps skipped for a NaN or infinite loss or gradient, in all.
        ema: averaged weights by name, empty when `config.ema_decay` is 0.
    """

    def __init__(
        self,
        policy: Policy,
        config: SFTConfig,
        seed: int = 0,
        total_steps: int | None = None,
        world: ProcessGroup = ALONE,
    ) -> None:
        """`total_steps`: length of the learning-rate schedule; None: `config.steps`."""
        self.world = world
        self.policy, self.config, self.seed = policy, config, seed
        self.total_steps = total_steps or config.steps
        self.num_steps = self.num_bad_steps = self._bad_streak = 0
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the policy has no trainable parameters; check policy.trainable")
        device = next(iter(self.parameters.values())).device
        self.accelerator = _accelerator("bf16" if config.precision == "bf16" else "no", device)
        self.optimizers = build_optimizers(config, self.parameters)
        self.ema = {n: p.detach().clone() for n, p in self.parameters.items()} if config.ema_decay else {}

    def step(self, batch: BCBatch) -> dict[str, float]:
        """One update on a batch; {"bad_step": 1.0} when it was skipped for a NaN or infinite loss or gradient.

        With several processes each gives the same whole batch, and learns from its share of it.

        Raises:
            TrainingDivergedError: `config.max_bad_steps` skipped in a row. The weights are those of the last
                good step.
        """
        config = self.config
        own = batch.select(np.arange(batch.size)[self.world.share(batch.size)]) if self.world.size > 1 else batch
        generator = torch.Generator().manual_seed(_derive(self.seed, _AUGMENT, self.num_steps, *self._stream))
        own = replace(own, obs=replace(own.obs, images=augment(own.obs.images, config.augment, generator)))
        self._set_lr()
        self.policy.train()
        try:
            metrics = self._forward_backward(own, batch.share_of(own))
        finally:
            self.policy.eval()
        metrics = reduce_metrics(self.world.gather(metrics))
        if not math.isfinite(metrics["loss"]):
            return self._skip()
        parameters = list(self.parameters.values())
        self.world.all_reduce_gradients(parameters)
        metrics["grad_norm"] = clip_gradients(parameters, config.grad_clip)
        if not math.isfinite(metrics["grad_norm"]):
            return self._skip()
        for optimizer in self.optimizers:
            optimizer.step()
        self._zero_grad()
        self._bad_streak = 0
        self.num_steps += 1
        self._update_ema()
        metrics["lr"] = config.lr * self._lr_factor(self.num_steps - 1)
        return metrics

    @property
    def _stream(self) -> tuple[int, ...]:
        """What tells this process's random numbers from the others'."""
        return (self.world.rank,) if self.world.size > 1 else ()

    def _loss(self, batch: BCBatch) -> tuple[torch.Tensor, dict[str, Any]]:
        with self.accelerator.autocast():
            return self.policy.bc_loss(batch.obs, batch.actions, batch.valid, keyframe=batch.keyframe)

    def _forward_backward(self, batch: BCBatch, weight: float) -> dict[str, float]:
        """Gradients of the batch's loss, a part at a time, and its metrics, all times `weight`."""
        # As many parts in each process, which have to keep step: none has fewer examples than the last one.
        smallest = self.config.batch_size // self.world.size if self.world.size > 1 else batch.size
        parts = np.array_split(np.arange(batch.size), min(self.config.grad_accumulation, smallest))
        metrics: defaultdict[str, float] = defaultdict(float)
        for number, rows in enumerate(parts):
            part = batch if len(parts) == 1 else batch.select(rows)
            share = weight * batch.share_of(part)
            with self._dropout_seed(number):
                loss, values = self._loss(part)
                (loss * share).backward()
            metrics["loss"] += share * float(loss.detach())
            for name, value in values.items():
                metrics[name] += share * float(value)
        return dict(metrics)

    def _skip(self) -> dict[str, float]:
        self._zero_grad()
        self.num_steps += 1
        self.num_bad_steps += 1
        self._bad_streak += 1
        if self._bad_streak >= self.config.max_bad_steps:
            raise TrainingDivergedError(
                f"{self._bad_streak} steps in a row, to step {self.num_steps}, had a NaN or infinite loss or gradient "
                f"(sft.max_bad_steps={self.config.max_bad_steps}). The weights are those of the last good step. "
                f"Try a smaller sft.lr (now {self.config.lr:g}), or more sft.warmup_steps."
            )
        return {"bad_step": 1.0}

    @torch.no_grad()
    def evaluate(self, batch: BCBatch) -> dict[str, float]:
        """The loss and metrics on a batch, without an update or augmentation."""
        self.policy.eval()
        loss, values = self._loss(batch)
        return {"loss": float(loss), **{name: float(value) for name, value in values.items()}}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the policy has its averaged weights (its own without averaging)."""
        swap_weights(self.parameters, self.ema)
        try:
            yield
        finally:
            swap_weights(self.parameters, self.ema)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What a checkpoint needs besides the policy's weights: flat tensors, and a JSON-able rest.

        Called by all processes together; where the policy is sharded, process 0 alone has the whole tensors.
        """
        tensors = {f"ema.{name}": full(value) for name, value in self.ema.items()}
        rests = []
        for number, optimizer in enumerate(self.optimizers):
            flat, rest = flatten_optimizer(optimizer, f"optimizer.{number}")
            tensors |= flat
            rests.append(rest)
        counters = {name: getattr(self, name) for name in ("num_steps", "num_bad_steps", "_bad_streak")}
        return tensors, {"optimizers": rests, "counters": counters}

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Undo `state`, after the policy's own weights were loaded.

        Raises:
            CheckpointError: made with another optimizer, or without averaged weights.
        """
        if len(state["optimizers"]) != len(self.optimizers) or any(f"ema.{n}" not in tensors for n in self.ema):
            raise CheckpointError(
                "the checkpoint was made with another sft.optimizer or sft.ema_decay; resume with the recipe that the "
                "run began with"
            )
        for number, (optimizer, rest) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            restore_optimizer(optimizer, tensors, rest, f"optimizer.{number}")
        self.ema = {n: like(tensors[f"ema.{n}"].to(value.device), value) for n, value in self.ema.items()}
        for name, value in state["counters"].items():
            setattr(self, name, value)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _lr_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine from 1 to `final_lr_fraction`."""
        config = self.config
        warmup = min(config.warmup_steps, self.total_steps)
        if step < warmup:
            return (step + 1) / warmup
        done = min((step - warmup) / max(self.total_steps - warmup, 1), 1.0)
        return config.final_lr_fraction + (1 - config.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done))

    def _set_lr(self) -> None:
        factor = self._lr_factor(self.num_steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * factor

    @torch.no_grad()
    def _update_ema(self) -> None:
        if self.ema:
            decay = min(self.config.ema_decay, (1 + self.num_steps) / (10 + self.num_steps))  # Short memory at first.
            for name, value in self.ema.items():
                local(value).lerp_(local(self.parameters[name]), 1 - decay)

    @contextmanager
    def _dropout_seed(self, part: int) -> Iterator[None]:
        device = self.accelerator.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(_derive(self.seed, _DROPOUT, self.num_steps, part, *self._stream))
            yield


def run_training(
    policy: Any,
    config: SFTConfig,
    folder: Path,
    log: Callable[[int, dict[str, Any]], None],
    seed: int,
    *,
    env_spec: EnvSpec | None,
    progress: bool,
) -> dict[str, Any]:
    """See `vla_rl.sft.train_bc`."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    world = current()
    with world.main_first():  # It decodes the datasets into their caches.
        data = open_bc_dataset(config, policy, env_spec)
    held_out = None
    if config.validation_fraction:
        data, held_out = data.hold_out(config.validation_fraction, seed)
    if policy.norm_stats is None:
        statistics = compute_statistics(data.parts)
        if config.action_scale == "environment":
            statistics["action"]["mask"] = [False] * policy.action_dim
        policy.set_norm_stats(statistics["action"], statistics.get("proprio"), name=data.parts[0].path.resolve().name)
    world.distribute(policy)
    trainer = BCTrainer(policy, config, seed, world=world)
    checkpoints = folder / "checkpoints"
    _restore(trainer, checkpoints)
    data_seed = _derive(seed, _DATA)
    window: defaultdict[str, list[float]] = defaultdict(list)
    metrics: dict[str, float] = {}
    started, first = time.monotonic(), trainer.num_steps
    with _progress_bar(config.steps, progress and world.is_main) as advance, _interrupt_flag() as interrupted:
        advance(trainer.num_steps, "")
        while trainer.num_steps < config.steps:
            try:
                values = trainer.step(data.batch(config.batch_size, data_seed, trainer.num_steps))
            except TrainingDivergedError as error:
                saved = _save(trainer, checkpoints)
                raise TrainingDivergedError(f"{error} Saved as {saved}.") from None
            for name, value in values.items():
                window[name].append(value)
            step = trainer.num_steps
            if held_out is not None and (step % config.save_every == 0 or step == config.steps):
                window |= {f"validation/{n}": [v] for n, v in _validate(trainer, held_out).items()}
            if step % config.log_every == 0 or step == config.steps:
                metrics = {name: float(np.mean(values)) for name, values in window.items() if name != "bad_step"}
                metrics["num_bad_steps"] = float(trainer.num_bad_steps)
                metrics["samples_per_second"] = (step - first) * config.batch_size / (time.monotonic() - started)
                window.clear()
                if world.is_main:
                    log(step, metrics)
            advance(step, f"loss {metrics.get('loss', math.nan):.4f}")
            stopping = any(world.gather(interrupted.is_set()))
            if step % config.save_every == 0 or step == config.steps or stopping:
                _save(trainer, checkpoints)
            if stopping:
                raise KeyboardInterrupt(f"stopped at step {step}; saved, the same command goes on from there")
    with trainer.averaged_weights(), world.whole_weights(policy):
        if world.is_main:
            policy.save(folder / "policy")
    for name, value in trainer.ema.items():
        local(trainer.parameters[name]).data.copy_(local(value))
    totals = {"policy": str(folder / "policy"), "steps": config.steps, "num_bad_steps": trainer.num_bad_steps}
    return {**metrics, **totals, "episodes": data.num_episodes, "frames": data.num_frames}


def _validate(trainer: BCTrainer, held_out: BCDataset) -> dict[str, float]:
    """Mean metrics on the same few batches of held-out episodes each time, with the averaged weights if any."""
    seed, size = _derive(trainer.seed, _VALIDATION), trainer.config.batch_size
    with trainer.averaged_weights(), trainer.world.unsharded(trainer.policy):
        results = [trainer.evaluate(held_out.batch(size, seed, i)) for i in range(_VALIDATION_BATCHES)]
    return {name: float(np.mean([result[name] for result in results])) for name in results[0]}


def _save(trainer: BCTrainer, folder: Path) -> Path:
    path = checkpoint_path(folder, trainer.num_steps)
    with trainer.world.whole_weights(trainer.policy):
        tensors, state = trainer.state()
        if trainer.world.is_main:
            weights = trained_weights(trainer.policy)
            config = trainer.config.model_dump(mode="json")
            save_checkpoint(path, {**weights, **tensors}, {**state, "config": config, "seed": trainer.seed})
            keep_last(folder, trainer.config.keep_checkpoints)
    return path


def _restore(trainer: BCTrainer, folder: Path) -> None:
    """Go on from the newest whole checkpoint, if there is one.

    Raises:
        CheckpointError: it was made with other options.
    """
    path = latest_checkpoint(folder)
    if path is None:
        return
    tensors, state = load_checkpoint(path)
    now = {**trainer.config.model_dump(mode="json"), "seed": trainer.seed}
    then = {**state["config"], "seed": state["seed"]}
    changed = [f"{n}: there {then.get(n)!r}, now {now[n]!r}" for n in now if n not in _FREE and now[n] != then.get(n)]
    if changed:
        raise CheckpointError(
            f"{path} was made with other options (sft.{'; sft.'.join(changed)}). Use those, or another run folder."
        )
    load_weights(trainer.policy, tensors, str(path))
    trainer.load_state(tensors, state)


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


def _derive(*numbers: int) -> int:
    """A 63-bit seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def _progress_bar(total: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(step, text)`."""
    if not show:
        yield lambda step, text: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(TextColumn("behavior cloning"), *columns, TextColumn("{task.fields[text]}")) as bar:
        task = bar.add_task("", total=total, rate="", text="")
        started, first = time.monotonic(), None

        def advance(step: int, text: str) -> None:
            nonlocal first
            first = step if first is None else first
            rate = (step - first) / max(time.monotonic() - started, 1e-9)
            bar.update(task, completed=step, rate=f"{rate:.1f} steps/s", text=text)

        yield advance


@contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets, so that a step is never cut in two; the second one stops at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: Any) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
