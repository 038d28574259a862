"""FLOAT's index against transport worked out by hand, and against POT's own single-problem solver."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from real_robot.failure.scorer import Standardizer, with_previous

pytest.importorskip("ot.batch", reason="POT is not installed: pip install '.[robot]'")
from real_robot.failure import float_ot as module
from real_robot.failure.float_ot import FloatOT
from vla_rl.config import ConfigError


@pytest.fixture(autouse=True)
def little_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REGULARIZATION", 0.02)


def scorer(demonstrations: list[np.ndarray], horizon: int) -> FloatOT:
    plain = Standardizer(np.zeros(2, np.float32), np.ones(2, np.float32))
    rows = [with_previous(d) / np.linalg.norm(with_previous(d), axis=1, keepdims=True) for d in demonstrations]
    return FloatOT(plain, np.concatenate(rows), np.asarray([len(r) for r in rows]), horizon)


UP, RIGHT = np.array([0, 1], np.float32), np.array([1, 0], np.float32)


def test_demonstrations_are_kept_at_length_one() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    kept = module._unit(3 * rows)
    np.testing.assert_allclose(np.linalg.norm(kept, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(kept, module._unit(rows), rtol=1e-5)


def test_without_pot_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    FloatOT.check_installed()
    monkeypatch.setitem(sys.modules, "ot.batch", None)
    with pytest.raises(ConfigError, match=r"float_ot needs POT .*pip install"):
        FloatOT.check_installed()


def test_partial_transport_by_hand() -> None:
    """Demonstration up, right (with its previous: up up, up right); horizon 2.

    After `up`: its column matches `up up` for nothing, F = 0. After `up, up`: both columns are `up up`; half of
    the mass must go to `up right`, at 1 - cos = 1/2: F = 1/4. Instead `up, right` costs nothing.
    """
    float_ot = scorer([np.stack([UP, RIGHT])], horizon=2)
    np.testing.assert_allclose(float_ot.curve(np.stack([UP, UP])), [0.0, 0.25], atol=2e-3)
    np.testing.assert_allclose(float_ot.curve(np.stack([UP, RIGHT])), [0.0, 0.0], atol=2e-3)


def test_what_is_still_to_come_costs_nothing() -> None:
    """Without the columns of zero cost, `up` alone would be matched to all of the demonstration: 0 / 2 + 1/2 / 2."""
    demonstration = np.stack([UP, RIGHT])
    assert scorer([demonstration], horizon=2).curve(UP[None])[0] == pytest.approx(0.0, abs=2e-3)
    assert scorer([demonstration], horizon=1).curve(UP[None])[0] == pytest.approx(0.25, abs=2e-3)


def test_the_best_candidate_counts_and_far_ones_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = np.stack([UP, RIGHT]), np.stack([-UP, -RIGHT])
    episode = np.stack([UP, RIGHT])
    monkeypatch.setattr(module, "NUM_CANDIDATES", 1)
    assert scorer([bad, good], horizon=2).curve(episode)[-1] == pytest.approx(0, abs=2e-3)
    # Costs 2, 3/2 / 3/2, 2: the cheapest plan crosses over.
    assert scorer([bad], horizon=2).curve(episode)[-1] == pytest.approx(1.5, abs=1e-2)


def test_the_batched_plan_is_that_of_pot_for_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import ot

    monkeypatch.setattr(module, "REGULARIZATION", 0.1)
    rng = np.random.default_rng(0)
    demonstrations = [rng.standard_normal((n, 2)).astype(np.float32) for n in (3, 5, 3)]
    episode = rng.standard_normal((2, 2)).astype(np.float32)
    float_ot = scorer(demonstrations, horizon=4)
    found = float_ot.curve(episode)[-1]
    z = with_previous(episode)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    expected = []
    for demonstration in float_ot.demonstrations:
        cost = np.zeros((len(demonstration), 4))
        cost[:, :2] = 1 - demonstration @ z.T
        plan = ot.sinkhorn(np.full(len(cost), 1 / len(cost)), np.full(4, 1 / 4), cost, 0.1, "sinkhorn_log", 3000)
        expected.append((plan * cost)[:, :2].sum())
    assert found == pytest.approx(min(expected), abs=1e-3)
