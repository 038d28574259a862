"""Functional conformal band: up to where the score curves of successes reach, with a guaranteed rate.

Curves of successes are split in two. The first part gives the band's center mu_t and its modulation S_t, the second
the standing of a whole curve, D = max_t (s_t - mu_t) / S_t. With q the ceil((n+1)(1-alpha))-th smallest of the n
values of D, a fresh success stays below mu_t + q S_t over its whole life with probability at least 1 - alpha, for any
distribution of the scores (Vovk et al. 2005, sec. 2.2; Diquigiovanni, Fontana & Vantini 2022, J. Multivar. Anal. 189).
Episodes may differ in length: D is then taken over the chunks an episode lived.

The promise holds for any mu and S that do not look at the second part: `functional` takes both from the first,
`centered` mu alone (S = 1), `constant` neither (mu = 0, S = 1: one threshold for all chunks). Dividing by S makes every
chunk equally likely to alarm; where early chunks say little, that spends false alarms on them.

At the end: the options of `vla-rl failure fit` and `eval`, a recipe's `failure` section.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from vla_rl.config import Config
from vla_rl.data.config import MaybeDatasets
from vla_rl.interfaces import FailureDetectionConfig
from vla_rl.types import Split

BandKind = Literal["functional", "centered", "constant"]
Kind = Literal["float_ot", "rnd", "logpzo", "safe_mlp", "safe_lstm"]
ALL = ""  # The name of the shape that instructions without one of their own use.
MIN_SHAPE = 5  # Successes that a center and a modulation are made from, at least.


class CalibrationError(ValueError):
    """Too few successful episodes for the false-alarm rate asked for; the message says how many are needed."""


def successes_needed(alpha: float) -> int:
    """The fewest calibration curves with which a band at `alpha` is finite: ceil((n+1)(1-alpha)) <= n."""
    return math.ceil(round((1 - alpha) / alpha, 9))


def conformal_quantile(values: np.ndarray, alpha: float, states: Sequence[object] | None = None) -> float:
    """The value that a fresh one, of a fresh initial state, exceeds with probability <= alpha.

    Of n states of one value each the ceil((n+1)(1-alpha))-th smallest. Not `np.quantile(values, 1 - alpha)`, which
    interpolates around rank 1 + (n-1)(1-alpha) and is exceeded too often. Several values of a state share its weight,
    1 / (n+1), since they are not exchangeable with those of others (hierarchical conformal prediction: Lee, Barber and
    Willett 2023, arXiv 2306.06342).

    Args:
        states: the initial state of each value; None: each its own.

    Raises:
        CalibrationError: fewer states than `successes_needed(alpha)`.
    """
    state = np.arange(len(values)) if states is None else _numbered(states)
    counts = np.bincount(state)
    n = len(counts)
    if math.ceil(round((n + 1) * (1 - alpha), 9)) > n:
        raise CalibrationError(
            f"alpha={alpha:g} needs successful episodes from at least {successes_needed(alpha)} initial states to "
            f"calibrate the threshold on, got {len(values)} from {n}. Record more successes, or accept more false "
            "alarms (failure.alpha)."
        )
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(1 / counts[state[order]])
    return float(np.asarray(values)[order][np.searchsorted(reached, (n + 1) * (1 - alpha) - 1e-9)])


def _numbered(states: Sequence[object]) -> np.ndarray:
    """Return int (n,): the states' numbers, in the order of their first episodes."""
    numbers = {state: number for number, state in enumerate(dict.fromkeys(states))}
    return np.asarray([numbers[state] for state in states])


@dataclass(frozen=True)
class Shape:
    """Center mu_t and modulation S_t > 0 at chunk t, float64 (T,) each. Beyond T their last values hold."""

    center: np.ndarray
    modulation: np.ndarray

    @staticmethod
    def of(curves: Sequence[np.ndarray], alpha: float, kind: BandKind = "functional") -> Shape:
        """From curves of successes, float (count,) each; `kind` is functional or centered.

        S_t is the largest |s_t - mu_t| among the curves whose own largest deviation is within its
        ceil((n+1)(1-alpha))-th order statistic (all, where n is too small for that rank).
        """
        longest = max(len(curve) for curve in curves)
        table = np.full((len(curves), longest), np.nan)
        for row, curve in zip(table, curves, strict=True):
            row[: len(curve)] = curve
        center = np.nanmean(table, axis=0)
        if kind == "centered":
            return Shape(center, np.ones(longest))
        deviation = np.abs(table - center)
        largest = np.nanmax(deviation, axis=1)
        rank = min(math.ceil(round((len(curves) + 1) * (1 - alpha), 9)), len(curves))
        usual = deviation[largest <= np.sort(largest)[rank - 1]]
        # A chunk that none of the usual curves reached has no modulation of its own: the one before holds.
        modulation = np.asarray([np.nanmax(column) if (~np.isnan(column)).any() else np.nan for column in usual.T])
        for t in range(1, longest):
            if np.isnan(modulation[t]):
                modulation[t] = modulation[t - 1]
        spread = float(np.nanmax(modulation))
        return Shape(center, np.maximum(modulation, 1e-3 * spread if spread > 0 else 1e-9))

    def standing(self, curve: np.ndarray, first: int = 0) -> np.ndarray:
        """(s_t - mu_t) / S_t for t = first, first + 1, ..., float64 (count,)."""
        at = np.minimum(np.arange(first, first + len(curve)), len(self.center) - 1)
        return (np.asarray(curve, np.float64) - self.center[at]) / self.modulation[at]


@dataclass(frozen=True)
class Band:
    """The upper threshold mu_t + q S_t of each instruction.

    Attributes:
        shapes: instruction -> its shape; `ALL` for every other instruction.
        q: how many modulations above the center a curve may rise.
        alpha: the largest probability that a fresh success rises above.
        num_successes: n, the curves that q was taken from.
    """

    shapes: dict[str, Shape]
    q: float
    alpha: float
    num_successes: int

    @staticmethod
    def fit(
        curves: Sequence[np.ndarray],
        instructions: Sequence[str],
        alpha: float,
        seed: int = 0,
        shape_share: float = 0.3,
        kind: BandKind = "functional",
        states: Sequence[object] | None = None,
    ) -> Band:
        """The band of successful episodes that nothing was trained on.

        The shapes are each instruction's own where `MIN_SHAPE` curves allow it; q is common to all, so its guarantee
        is for the mixture of instructions that was calibrated on.

        Args:
            curves: float (count,) each. instructions: of each.
            shape_share: of the initial states, those whose curves give the shapes; the others' give q.
            kind: see the module's docstring; a constant band needs no curves for its shape.
            states: the initial state of each curve; None: each its own.

        Raises:
            CalibrationError: too few curves for alpha, after those for the shapes.
        """
        if not 0 < alpha < 1:
            raise ValueError(f"failure.alpha: got {alpha}, must lie between 0 and 1, e.g. 0.05")
        if kind == "constant":
            largest = [float(np.max(curve)) for curve in curves]
            flat = Shape(np.zeros(1), np.ones(1))
            return Band({ALL: flat}, conformal_quantile(np.asarray(largest), alpha, states), alpha, len(curves))
        state = np.arange(len(curves)) if states is None else _numbered(states)
        num_states, needed = len(np.unique(state)), successes_needed(alpha)
        order = np.random.default_rng(seed).permutation(num_states)
        if num_states < needed + MIN_SHAPE:
            raise CalibrationError(
                f"calibration has {len(curves)} successful episodes from {num_states} initial states, alpha={alpha:g} "
                f"needs at least {needed + MIN_SHAPE} states ({needed} for the threshold, {MIN_SHAPE} for the band's "
                "shape); there is no detector without them. Record more successes, or accept more false alarms "
                "(failure.alpha)."
            )
        num_shape = min(max(round(shape_share * num_states), MIN_SHAPE), num_states - needed)
        rows: list[list[int]] = [np.flatnonzero(state == number).tolist() for number in order]
        for_shape, for_rank = ([i for row in part for i in row] for part in (rows[:num_shape], rows[num_shape:]))
        shapes = {ALL: Shape.of([curves[i] for i in for_shape], alpha, kind)}
        for instruction in dict.fromkeys(instructions):
            own = [curves[i] for i in for_shape if instructions[i] == instruction]
            if len(own) >= MIN_SHAPE:
                shapes[instruction] = Shape.of(own, alpha, kind)
        band = Band(shapes, 0.0, alpha, len(for_rank))
        largest = [band.shape(instructions[i]).standing(curves[i]).max() for i in for_rank]
        return Band(
            shapes, conformal_quantile(np.asarray(largest), alpha, state[for_rank].tolist()), alpha, len(for_rank)
        )

    def shape(self, instruction: str) -> Shape:
        """The center and modulation for an instruction."""
        return self.shapes.get(instruction, self.shapes[ALL])

    def standing(self, curve: np.ndarray, instruction: str) -> np.ndarray:
        """(s_t - mu_t) / S_t of a curve from its episode's start on; above q it is an alarm."""
        return self.shape(instruction).standing(curve)

    def center(self, number: int, instruction: str) -> float:
        """mu_t at chunk `number`, from 0."""
        center = self.shape(instruction).center
        return float(center[min(number, len(center) - 1)])

    def threshold(self, number: int, instruction: str) -> float:
        """mu_t + q S_t at chunk `number`, from 0."""
        modulation = self.shape(instruction).modulation
        return self.center(number, instruction) + self.q * float(modulation[min(number, len(modulation) - 1)])


class EpisodesConfig(Config):
    """Where episodes of the policy come from: recorded ones, or new ones run in the recipe's environment."""

    datasets: MaybeDatasets = Field(default=(), description="Recorded episodes; empty runs new ones, as below.")
    same_policy: bool = Field(default=True, description="Refuse recorded episodes in which another checkpoint acted.")
    episodes_per_task: PositiveInt = Field(default=200, description="How many new episodes of each task are run.")
    split: Split = Field(default="train", description="Split of the initial states that new episodes begin in.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split that is used.")
    temperature: NonNegativeFloat = Field(
        default=1.0, description="Temperature of the policy's sampling, as it will be deployed."
    )


class FailureConfig(FailureDetectionConfig):
    """Scores on embeddings of the policy, each with a conformal band."""

    kind: Literal["conformal"] = "conformal"
    detectors: tuple[Kind, ...] = Field(
        default=("float_ot", "rnd", "logpzo", "safe_mlp", "safe_lstm"),
        min_length=1,
        description="Which detectors are fitted.",
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="Largest probability of a false alarm in a whole successful episode."
    )
    band: BandKind = Field(
        default="functional",
        description="How the threshold of the scores that learn from successes alone varies over time (see "
        "real_robot/failure/conformal.py); SAFE's is constant, since a probability has a scale of its own.",
    )
    every: NonNegativeInt = Field(
        default=0, description="Control steps from one embedding of a recorded episode to the next; 0: the chunk size."
    )
    fit_on: EpisodesConfig = EpisodesConfig(episodes_per_task=400)
    calibrate_on: EpisodesConfig = EpisodesConfig(episodes_per_task=200, start_index=10_000)
    evaluate_on: EpisodesConfig = EpisodesConfig(episodes_per_task=200, split="eval")
    min_failures: PositiveInt = Field(default=20, description="Failed episodes that the supervised scores ask for.")
