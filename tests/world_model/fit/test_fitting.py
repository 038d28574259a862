"""The shared training loop: learning, low precision, averages, exact resuming, bad steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from world_model.config import StageConfig
from world_model.fit.trainer import FitDivergedError, Fitting


def first_weight(fitting: Fitting) -> torch.Tensor:
    return next(fitting.module.parameters())


def make_fitting(low_precision: bool = False, **options: object) -> Fitting:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        g = torch.Generator().manual_seed(step)
        x = torch.randn(32, 4, generator=g)
        predicted = module(x.to(next(module.parameters()).dtype)).float()
        return (predicted[:, 0] - x.sum(1)).square().mean(), {"seen": float(step)}

    config = StageConfig.model_validate({"steps": 60, "lr": 0.02, "warmup_steps": 5, **options})
    return Fitting(module, loss, config, low_precision)


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon"}, {"ema": 0.9}])
@pytest.mark.parametrize("low_precision", [False, True])
def test_it_learns_and_leaves_float32(options: dict[str, object], low_precision: bool) -> None:
    fitting = make_fitting(low_precision, **options)
    losses = []
    fitting.run(lambda step, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    assert len(losses) == 60
    assert all(p.dtype == torch.float32 for p in fitting.module.parameters())


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon"}, {"ema": 0.9}])
def test_a_resumed_fit_ends_as_an_uninterrupted_one(options: dict[str, object]) -> None:
    whole = make_fitting(True, **options)
    whole.run()
    first = make_fitting(True, **options)
    for _ in range(25):
        first.advance()
    tensors, state = first.state()
    second = make_fitting(True, **options)
    second.load_state({n: t.clone() for n, t in tensors.items()}, state)
    second.run()
    for a, b in zip(whole.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_averages_differ_from_the_last_weights() -> None:
    fitting = make_fitting(ema=0.9)
    for _ in range(20):
        fitting.advance()
    last = first_weight(fitting).detach().clone()
    fitting.finish()
    assert not torch.equal(last, first_weight(fitting))


def test_bad_steps_change_nothing_then_stop() -> None:
    fitting = make_fitting()
    fitting.loss = lambda step: (first_weight(fitting).sum() * float("nan"), {})
    before = first_weight(fitting).detach().clone()
    for _ in range(19):
        fitting.advance()
    assert torch.equal(before, first_weight(fitting))
    with pytest.raises(FitDivergedError, match="lower the stage's lr"):
        fitting.advance()


def test_the_rate_rises_and_falls() -> None:
    fitting = make_fitting(final_lr_fraction=0.1)
    rates = [fitting.learning_rate(step) for step in range(60)]
    assert rates[0] == pytest.approx(0.004)
    assert max(rates) == pytest.approx(0.02)
    assert fitting.learning_rate(60) == pytest.approx(0.002)
