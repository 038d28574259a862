"""The training loop that the world model's parts share: float32 masters, optimizer, schedule, averages, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vla_rl.training.checkpoint import flatten_optimizer, restore_optimizer
from world_model.config import StageConfig

LossFunction = Callable[[int], tuple[torch.Tensor, dict[str, Any]]]
MAX_BAD_STEPS = 20  # in a row
_NOT_HIDDEN = ("embed", "head", "place", "offset")  # Rows that are looked up, outputs, positions: not for Muon.


class FitDivergedError(RuntimeError):
    """Losses or gradients were not finite for too long."""


class Fitting:
    """Fits a module by a loss, one step at a time, so that a stopped fit goes on exactly.

    The module may compute in bfloat16: the optimizer works on float32 copies (masters), which are what is saved.

    Args:
        loss: step number -> (loss, metrics). What a step draws must depend on its number alone.
        low_precision: compute in bfloat16.
    """

    def __init__(self, module: nn.Module, loss: LossFunction, config: StageConfig, low_precision: bool = False) -> None:
        self.module, self.loss, self.config = module, loss, config
        self.step = 0
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.masters = {n: p.detach().float().clone().requires_grad_() for n, p in self.parameters.items()}
        self.averages = {n: m.detach().clone() for n, m in self.masters.items()} if config.ema else {}
        self.optimizers = self._build_optimizers()
        self._bad_steps = 0
        if low_precision:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.bfloat16()

    def run(self, on_step: Callable[[int, dict[str, float]], None] | None = None) -> None:
        """All remaining steps, then `finish`.

        Args:
            on_step: called with the number of steps done and the metrics of the last.

        Raises:
            FitDivergedError: 20 steps in a row without a finite loss and gradient.
        """
        while self.step < self.config.steps:
            metrics = self.advance()
            if on_step is not None:
                on_step(self.step, metrics)
        self.finish()

    def advance(self) -> dict[str, float]:
        """One step. A step whose loss or gradient is not finite changes nothing and is counted."""
        loss, metrics = self.loss(self.step)
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        for master, gradient in zip(self.masters.values(), gradients, strict=True):
            master.grad = None if gradient is None else gradient.float().contiguous()
        norm = nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        rate = self.learning_rate(self.step)
        self.step += 1
        if torch.isfinite(loss) and torch.isfinite(norm):
            self._bad_steps = 0
            self._update(rate)
        else:
            self._bad_steps += 1
            if self._bad_steps >= MAX_BAD_STEPS:
                raise FitDivergedError(
                    f"{MAX_BAD_STEPS} steps in a row had a loss or gradient that is not finite (step {self.step}); "
                    "lower the stage's lr, or look for NaN in the data"
                )
        return {"loss": float(loss.detach()), **metrics, "grad_norm": float(norm), "lr": rate}

    def _update(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.masters[name])
            # Early averages would remember the start: the decay rises to its value.
            decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
            for name, average in self.averages.items():
                average.lerp_(self.masters[name], 1 - decay)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `final_lr_fraction` of the peak."""
        c = self.config
        if step < c.warmup_steps:
            return c.lr * (step + 1) / c.warmup_steps
        done = (step - c.warmup_steps) / max(c.steps - c.warmup_steps, 1)
        return c.lr * (c.final_lr_fraction + (1 - c.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * done)))

    def finish(self) -> None:
        """Leave the module in float32, with the averaged weights where they are kept."""
        final = self.averages or self.masters
        for name, parameter in self.parameters.items():
            parameter.data = final[name].detach().clone()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Everything that the remaining steps depend on: tensors and a JSON-able rest, for a checkpoint."""
        tensors = {f"masters.{n}": m.detach() for n, m in self.masters.items()}
        tensors |= {f"averages.{n}": a for n, a in self.averages.items()}
        state: dict[str, Any] = {"step": self.step, "bad_steps": self._bad_steps}
        for i, optimizer in enumerate(self.optimizers):
            more, state[f"optimizer{i}"] = flatten_optimizer(optimizer, f"optimizer{i}")
            tensors |= more
        return tensors, state

    def load_state(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Go on from what `state` gave.

        Raises:
            CheckpointError: it is of another optimizer.
        """
        self.step, self._bad_steps = int(state["step"]), int(state["bad_steps"])
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(tensors[f"masters.{name}"])
                self.parameters[name].copy_(master)
            for name, average in self.averages.items():
                average.copy_(tensors[f"averages.{name}"])
        for i, optimizer in enumerate(self.optimizers):
            restore_optimizer(optimizer, tensors, state[f"optimizer{i}"], f"optimizer{i}")

    def _build_optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW, or Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for the hidden matrices."""
        c = self.config

        def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=c.lr, betas=(0.9, 0.95), weight_decay=c.weight_decay)

        def is_hidden(name: str, master: torch.Tensor) -> bool:
            return master.ndim == 2 and not any(part in name for part in _NOT_HIDDEN)

        if c.optimizer == "adamw":
            return [adamw(list(self.masters.values()))]
        hidden = [m for n, m in self.masters.items() if is_hidden(n, m)]
        others = [m for n, m in self.masters.items() if not is_hidden(n, m)]
        # "match_rms_adamw" scales Muon's step so that AdamW's learning rate fits both (arXiv 2502.16982).
        muon = torch.optim.Muon(hidden, lr=c.lr, weight_decay=c.weight_decay, adjust_lr_fn="match_rms_adamw")
        return [muon, adamw(others)]
