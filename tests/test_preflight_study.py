"""The study of what a preflight predicts (scripts/preflight_study.py): its correlations, and recipes that are taken."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from vla_rl.recipe.recipe import TRAIN, check, load_recipe

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

import preflight_study as study


def test_correlations_tell_what_orders_the_gains_from_what_does_not() -> None:
    gain = np.arange(12.0)
    values = np.stack([-(gain**3), gain % 2, gain, np.tile([0.0, 1, 1, 0], 3), gain % 3])
    lines = dict(zip(study.PREDICTORS, study.correlations(values, gain), strict=True))
    assert "| -1.00 [-1.00, -1.00] | 0.0001 | [+0." in lines["success"], (
        "a falling one is as good, and better than mixed"
    )
    assert "| +1.00 [+1.00, +1.00] | 0.0001 | [+0." in lines["best of 8 minus success"]
    assert lines["mixed"].endswith("|  |") and "| +0.00 [" in lines["spread"]
    assert float(lines["spread"].split("|")[3]) > 0.9


def test_each_base_is_a_recipe() -> None:
    for overrides in study.BASES.values():
        check(load_recipe(study.RECIPE, [*overrides, *study.BUDGET, *study.EVALUATION, *study.ONE_CORE]), TRAIN)
