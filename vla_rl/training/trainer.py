"""Trainer of anything that gives `(loss, metrics)`: cloning, world models, failure detectors.

    trainer = Trainer(dict(module.named_parameters()), config, "sft")
    trainer.run(lambda step: (loss, metrics))

The RL learner (`vla_rl.algorithms.learner`) makes minibatches of its own, by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from vla_rl.common.distributed.fsdp import like, local
from vla_rl.common.distributed.process_group import ALONE, ProcessGroup, reduce_metrics
from vla_rl.common.distributed.tensor_files import CheckpointError
from vla_rl.training.checkpoint import flatten_optimizer, restore_optimizer
from vla_rl.training.config import AveragedConfig, TrainerConfig
from vla_rl.training.optimizers import build_optimizers, clip_gradients, read_scalars

Loss = Callable[[int], tuple[torch.Tensor, Mapping[str, Any]]]


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row had NaN or infinite loss or gradients; the last good weights are in place."""


@dataclass
class BadSteps:
    """The rule for steps with a NaN or infinite loss or gradient: each is skipped, too many in a row stop the run.

    Attributes:
        limit: bad steps in a row that stop the run.
        total: bad steps so far.
        streak: of these, the latest in a row.
    """

    limit: int
    total: int = 0
    streak: int = 0

    def add(self) -> bool:
        """Count a bad step; whether that makes too many in a row."""
        self.total += 1
        self.streak += 1
        return self.streak >= self.limit

    def end_streak(self) -> None:
        """Take note of a good step."""
        self.streak = 0


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Return the share of the peak learning rate at a step: a linear rise over `warmup_steps`, then 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def lr_factor(step: int, config: TrainerConfig) -> float:
    """Return the share of the peak learning rate at a step: warm-up, then a cosine to `last_lr_share`."""
    warmup = config.optim.warmup_steps
    if step < warmup:
        return warmup_factor(step, warmup)
    done = min((step - warmup) / max(config.steps - warmup, 1), 1.0)
    return config.last_lr_share + (1 - config.last_lr_share) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """Trains parameters by anything that gives `(loss, metrics)`, one step at a time, resumable to the bit.

    Attributes:
        parameters: what is trained, by name.
        masters: what the optimizers step on: float32 copies of the parameters, or the parameters themselves.
        ema: averaged weights by name; empty without `ema_decay`.
        num_steps: steps taken, skipped ones included.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: TrainerConfig,
        name: str,
        *,
        keep_masters: bool = False,
        compute_dtype: torch.dtype | None = None,
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        world: ProcessGroup = ALONE,
    ) -> None:
        """Build the optimizers.

        Args:
            parameters: those without gradient are left out.
            name: of the section with the options, for messages: "sft".
            keep_masters: step on float32 copies, which are then part of `state`.
            compute_dtype: what the parameters become, after the copies are made.
            scheduler: makes torch's own learning-rate scheduler, in place of `lr_factor`. `state` leaves it out.
            world: processes that train together; each steps on the sum of all their gradients.

        Raises:
            ValueError: nothing to train.
            ConfigError: adamw_8bit without torchao.
        """
        self.config, self.name, self.world = config, name, world
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError(f"{name}: there are no trainable parameters")
        self.masters: Mapping[str, torch.Tensor] = self.parameters
        if keep_masters:
            self.masters = {n: p.detach().float().clone().requires_grad_() for n, p in self.parameters.items()}
        self.decay = config.ema_decay if isinstance(config, AveragedConfig) else 0.0
        self.ema = {n: m.detach().clone() for n, m in self.masters.items()} if self.decay else {}
        self.optimizers = build_optimizers(config.optim, self.masters)
        self._schedulers = [scheduler(optimizer) for optimizer in self.optimizers] if scheduler is not None else []
        self.num_steps = 0
        self._bad_steps = BadSteps(config.max_bad_steps)
        if compute_dtype is not None:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.to(compute_dtype)

    @property
    def num_bad_steps(self) -> int:
        """Steps skipped for a NaN or infinite loss or gradient, in all."""
        return self._bad_steps.total

    def run(
        self, loss: Loss, on_step: Callable[[int, dict[str, float]], None] | None = None, read_every: int = 1
    ) -> None:
        """Make all remaining steps, then `finish`.

        Args:
            loss: step number -> (loss, metrics). What it draws must depend on that number alone.
            on_step: called with the number of steps taken and the metrics of the last.
            read_every: steps whose numbers are read together, so that the host waits for the device once; `on_step` is
                told of each after the last. Needs masters, and the room of a second state.

        Raises:
            TrainingDivergedError: `max_bad_steps` bad steps in a row.
        """
        while self.num_steps < self.config.steps:
            done = self.num_steps
            until = min(done - done % read_every + read_every, self.config.steps)
            found = [self.step(loss)] if read_every == 1 else self._steps(loss, until)
            for number, metrics in enumerate(found, done + 1):
                if on_step is not None:
                    on_step(number, metrics)
        self.finish()

    def _steps(self, loss: Loss, until: int) -> list[dict[str, float]]:
        """Steps up to number `until`, read together; from the first again, each read, where one of them was bad."""
        assert self._copies and not self._schedulers and self.world is ALONE, "what `state` does not hold"
        tensors, rest = self.state()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        launched = [self.launch(loss) for _ in range(self.num_steps, until)]
        values = read_scalars([value for metrics in launched for value in metrics.values()])
        found = [{name: next(values) for name in metrics} for metrics in launched]
        if all(math.isfinite(one["loss"]) and math.isfinite(one["grad_norm"]) for one in found):
            self._bad_steps.end_streak()
            return found
        self.load_state(before, rest)
        return [self.step(loss) for _ in range(self.num_steps, until)]

    def step(self, loss: Loss) -> dict[str, float]:
        """Make one update; see `update`."""
        return self.update(self._backward(loss))

    def launch(self, loss: Loss) -> dict[str, Any]:
        """Make one update without a look at its numbers, so that the host need not wait: a NaN goes into the weights.

        Returns:
            The metrics as `loss` gave them, with loss, grad_norm and lr.
        """
        metrics = self._backward(loss)
        return metrics | {"grad_norm": self._clipped(), "lr": self._advance()}

    def _backward(self, loss: Loss) -> dict[str, Any]:
        self._zero_grad()
        value, metrics = loss(self.num_steps)
        value.backward(inputs=list(self.parameters.values()))
        return {"loss": value.detach(), **metrics}

    def update(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Clip and apply the gradients that were accumulated in the parameters.

        Args:
            metrics: the step's, "loss" among them, numbers or scalars on the device, which are read together, once;
                with several processes this one's shares, which are added up.

        Returns:
            The metrics with grad_norm and lr; {"bad_step": 1.0} when the step was skipped.

        Raises:
            TrainingDivergedError: `max_bad_steps` bad steps in a row. The weights are those of the last good
                step.
        """
        grad_norm, *own = read_scalars([self._clipped(), *metrics.values()])
        result = reduce_metrics(self.world.gather(dict(zip(metrics, own, strict=True))))
        result["grad_norm"] = grad_norm
        if not (math.isfinite(result["loss"]) and math.isfinite(grad_norm)):
            return self._skip()
        result["lr"] = self._advance()
        self._bad_steps.end_streak()
        return result

    def _clipped(self) -> torch.Tensor:
        """Bring the gradients to the masters, and clip them; their norm before."""
        self.world.all_reduce_gradients(list(self.parameters.values()))
        for name, master in self._copies.items():
            gradient = self.parameters[name].grad
            master.grad = None if gradient is None else gradient.float().contiguous()
            self.parameters[name].grad = None
        return clip_gradients(list(self.masters.values()), self.config.optim.grad_clip or math.inf)

    def _advance(self) -> float:
        """Apply the gradients, and bring the parameters and averages along; the learning rate."""
        lr = self._apply()
        self.num_steps += 1
        self._follow()
        return lr

    @property
    def _copies(self) -> Mapping[str, torch.Tensor]:
        """The masters, where they are not the parameters themselves."""
        return {} if self.masters is self.parameters else self.masters

    def _apply(self) -> float:
        """Step the optimizers; the learning rate."""
        lr = self.config.optim.lr * lr_factor(self.num_steps, self.config)
        if self._schedulers:
            lr = float(self._schedulers[0].get_last_lr()[0])
        else:
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = lr
        for stepped in (*self.optimizers, *self._schedulers):
            stepped.step()
        self._zero_grad()
        return lr

    @torch.no_grad()
    def _follow(self) -> None:
        """Bring the parameters and the average up to the masters."""
        for name, master in self._copies.items():
            self.parameters[name].copy_(master)
        # Early averages would remember the start: the decay rises to its value.
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        for name, value in self.ema.items():
            local(value).lerp_(local(self.masters[name]), 1 - decay)

    def _skip(self) -> dict[str, float]:
        self._zero_grad()
        self.num_steps += 1
        if self._bad_steps.add():
            raise TrainingDivergedError(
                f"{self._bad_steps.streak} steps in a row, to step {self.num_steps}, had a NaN or infinite loss or "
                "gradient. The weights are those of the last good step. Look for NaN in the data, or try a smaller "
                f"{self.name}.optim.lr (now {self.config.optim.lr:g}) or more {self.name}.optim.warmup_steps."
            )
        return {"bad_step": 1.0}

    def _zero_grad(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Leave in the parameters the averaged weights where they are kept, in the precision of the masters."""
        for name, value in (self.ema or self._copies).items():
            parameter = self.parameters[name]
            if parameter.dtype != value.dtype:
                parameter.data = parameter.data.to(value.dtype)
            local(parameter).copy_(local(value))

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return what the remaining steps depend on besides the parameters: flat tensors, and a JSON-able rest.

        Where parameters are sharded, so are the tensors.
        """
        tensors = {f"masters.{name}": master.detach() for name, master in self._copies.items()}
        tensors |= {f"ema.{name}": value for name, value in self.ema.items()}
        optimizers = []
        for number, optimizer in enumerate(self.optimizers):
            flat, rest = flatten_optimizer(optimizer, f"optimizer.{number}")
            tensors |= flat
            optimizers.append(rest)
        bad = self._bad_steps
        counters = {"num_steps": self.num_steps, "num_bad_steps": bad.total, "_bad_streak": bad.streak}
        return tensors, {"optimizers": optimizers, "counters": counters}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Undo `state`. Without masters the parameters themselves are to be loaded before.

        Raises:
            CheckpointError: made with another optimizer, or without averaged weights.
        """
        wanted = [f"masters.{name}" for name in self._copies] + [f"ema.{name}" for name in self.ema]
        if len(state["optimizers"]) != len(self.optimizers) or any(name not in tensors for name in wanted):
            raise CheckpointError(
                f"the checkpoint was made with another {self.name}.optim.name or {self.name}.ema_decay; resume with "
                "the recipe that the run began with"
            )
        for name, master in self._copies.items():
            master.copy_(tensors[f"masters.{name}"])
            self.parameters[name].copy_(master)
        self.ema = {n: like(tensors[f"ema.{n}"].to(value.device), value) for n, value in self.ema.items()}
        self._restore_optimizers(tensors, state["optimizers"])
        counters = state["counters"]
        self.num_steps = int(counters["num_steps"])
        self._bad_steps.total, self._bad_steps.streak = int(counters["num_bad_steps"]), int(counters["_bad_streak"])

    def _restore_optimizers(self, tensors: Mapping[str, torch.Tensor], states: Sequence[Mapping[str, Any]]) -> None:
        for number, (optimizer, rest) in enumerate(zip(self.optimizers, states, strict=True)):
            restore_optimizer(optimizer, tensors, rest, f"optimizer.{number}")
