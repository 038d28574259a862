"""The shared trainer: learning, low precision, averages, exact resuming, bad steps, the schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.common.distributed.tensor_files import CheckpointError
from vla_rl.training.config import AveragedConfig, OptimConfig, OptimizedConfig
from vla_rl.training.trainer import Trainer, TrainingDivergedError, lr_factor, warmup_factor


class Falling(AveragedConfig):
    """A training whose learning rate falls to a tenth."""

    @property
    def last_lr_share(self) -> float:
        return 0.1


class Regression:
    """A small network, its loss on batches that follow from the step's number, and its trainer."""

    def __init__(self, low_precision: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        values = {"steps": 60, "optim": {"lr": 0.02, "warmup_steps": 5}}
        options["optim"] = values["optim"] | options.get("optim", {})
        config = Falling.model_validate(values | options)
        dtype = torch.bfloat16 if low_precision else None
        parameters = dict(self.module.named_parameters())
        self.trainer = Trainer(parameters, config, "toy", keep_masters=low_precision, compute_dtype=dtype)

    @property
    def weight(self) -> torch.Tensor:
        return next(self.module.parameters())

    def loss(self, step: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
        predicted = self.module(x.to(self.weight.dtype)).float()
        return (predicted[:, 0] - x.sum(1)).square().mean(), {"seen": step}

    def bad_loss(self, step: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        return self.weight.sum() * math.nan, {}

    def bad_gradient(self, step: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
        zero = self.weight.sum() * 0
        return zero.sqrt() * 1.0, {}  # 0, with an infinite slope.


@pytest.mark.parametrize("options", [{}, {"optim": {"name": "muon"}}, {"ema_decay": 0.9}])
@pytest.mark.parametrize("low_precision", [False, True])
def test_it_learns_and_leaves_float32(options: dict[str, object], low_precision: bool) -> None:
    toy, rows = Regression(low_precision, **options), []
    toy.trainer.run(toy.loss, lambda step, metrics: rows.append(metrics))
    assert rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    assert [row["seen"] for row in rows] == list(range(60))
    assert all(p.dtype == torch.float32 for p in toy.module.parameters())


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("options", [{}, {"optim": {"name": "muon"}}, {"ema_decay": 0.9}])
def test_a_resumed_training_ends_as_an_uninterrupted_one(options: dict[str, object], low_precision: bool) -> None:
    whole = Regression(low_precision, **options)
    whole.trainer.run(whole.loss)
    first = Regression(low_precision, **options)
    for _ in range(25):
        first.trainer.step(first.loss)
    tensors, state = first.trainer.state()
    second = Regression(low_precision, **options)
    if not low_precision:  # Without masters the weights are kept by whoever trains.
        second.module.load_state_dict(first.module.state_dict())
    second.trainer.load_state({n: t.clone() for n, t in tensors.items()}, state)
    second.trainer.run(second.loss)
    for a, b in zip(whole.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_without_the_average_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"another toy.optim.name or toy.ema_decay"):
        Regression(ema_decay=0.9).trainer.load_state(*Regression().trainer.state())


def test_averages_differ_from_the_last_weights() -> None:
    toy = Regression(ema_decay=0.9)
    for _ in range(20):
        toy.trainer.step(toy.loss)
    last = toy.weight.detach().clone()
    toy.trainer.finish()
    assert not torch.equal(last, toy.weight)


@pytest.mark.parametrize("kind", ["bad_loss", "bad_gradient"])
@pytest.mark.parametrize("low_precision", [False, True])
def test_bad_steps_change_nothing_then_stop(kind: str, low_precision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OptimizedConfig, "max_bad_steps", 3)
    toy = Regression(low_precision, ema_decay=0.9)
    toy.trainer.step(toy.loss)
    before, average = toy.weight.detach().clone(), next(iter(toy.trainer.ema.values())).clone()
    bad = getattr(toy, kind)
    assert [toy.trainer.step(bad) for _ in range(2)] == [{"bad_step": 1.0}] * 2
    assert torch.equal(before, toy.weight) and torch.equal(average, next(iter(toy.trainer.ema.values())))
    toy.trainer.step(toy.loss)  # A good one ends the streak.
    for _ in range(2):
        toy.trainer.step(bad)
    with pytest.raises(TrainingDivergedError, match=r"3 steps in a row, to step 7.*toy.optim.lr"):
        toy.trainer.step(bad)
    assert toy.trainer.num_bad_steps == 5


@pytest.mark.parametrize("bad_at", [None, 0, 20])
def test_steps_that_are_read_together_are_those_read_alone(bad_at: int | None) -> None:
    def trained(read_every: int) -> tuple[Regression, list[tuple[int, dict[str, float]]]]:
        toy, told = Regression(low_precision=True, optim={"name": "muon"}, ema_decay=0.9), []
        toy.trainer.run(
            lambda step: (toy.bad_loss if step == bad_at else toy.loss)(step), lambda *row: told.append(row), read_every
        )
        return toy, told

    (alone, expected), (together, found) = trained(1), trained(7)
    assert found == expected and [step for step, _ in found] == list(range(1, 61))
    assert torch.equal(alone.weight, together.weight) and together.trainer.num_bad_steps == (bad_at is not None)


def test_gradients_left_by_others_do_not_count() -> None:
    toy, other = Regression(), Regression()
    toy.weight.grad = torch.full_like(toy.weight, 100.0)
    assert toy.trainer.step(toy.loss) == other.trainer.step(other.loss)
    assert torch.equal(toy.weight, other.weight)


def test_the_rate_rises_and_falls() -> None:
    config = Falling(steps=60, optim={"lr": 0.02, "warmup_steps": 5})
    factors = [lr_factor(step, config) for step in range(60)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert lr_factor(60, config) == lr_factor(1000, config) == pytest.approx(0.1)
    assert [warmup_factor(step, 2) for step in range(3)] == [0.5, 1.0, 1.0] and warmup_factor(0, 0) == 1.0
    toy = Regression(optim={"warmup_steps": 4, "grad_clip": None})
    assert toy.trainer.step(toy.loss)["lr"] == pytest.approx(0.02 / 4)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="toy: there are no trainable parameters"):
        Trainer({"a": nn.Parameter(torch.zeros(2), requires_grad=False)}, Falling(), "toy")


def test_options_of_the_optimizer_that_are_not_given_are_those_of_their_section() -> None:
    own = GRPOConfig().optim
    assert own != OptimConfig() and own.betas == (0.9, 0.999)
    for given in ({"lr": 0.1}, OptimConfig(lr=0.1)):
        assert GRPOConfig.model_validate({"optim": given}).optim == own.model_copy(update={"lr": 0.1})
    assert GRPOConfig().with_optim(lr=0.1) == GRPOConfig.model_validate({"optim": {"lr": 0.1}})
