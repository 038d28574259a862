"""A figure with its interval and n, and bootstrap intervals of means and of ratios of sums, over episodes."""

from __future__ import annotations

import math

import numpy as np

from vla_rl.config import Config, Number
from vla_rl.evaluation.statistics import Interval

NUM_RESAMPLES = 2000
# A denominator below this counts as this, so that a perfect prediction gives a large ratio and not an infinite one.
SMALLEST = 1e-9


def resampled_counts(num_groups: int, seed: int = 0) -> np.ndarray:
    """How often each group is drawn: float (NUM_RESAMPLES, num_groups)."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_groups, 1 / num_groups)
    return rng.multinomial(num_groups, shares, size=NUM_RESAMPLES).astype(np.float64)


def ratio_bands(
    numerator: np.ndarray, denominator: np.ndarray, groups: np.ndarray, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ratios of sums over episodes, column by column, with percentile bootstrap intervals.

    Episodes of one initial state are drawn together (Efron & Tibshirani 1993, ch. 8; Field & Welsh 2007). With ones as
    the denominator a ratio is a mean.

    Args:
        numerator, denominator: float (E, K); NaN leaves the episode out of a column.
        groups: (E,), the initial state of each.

    Returns:
        value, low, high: float (K,). NaN for a column without episodes; the interval also with one initial state.
    """
    valid = np.isfinite(numerator) & np.isfinite(denominator)
    rows = np.unique(groups, return_inverse=True)[1]
    num_groups = int(rows.max()) + 1
    sums = np.zeros((2, num_groups, numerator.shape[1]))
    for total, part in zip(sums, (numerator, denominator), strict=True):
        np.add.at(total, rows, np.where(valid, part, 0.0))
    counts = np.zeros((num_groups, numerator.shape[1]))
    np.add.at(counts, rows, valid.astype(np.float64))

    weights = resampled_counts(num_groups)
    drawn = weights @ counts > 0
    draws = np.where(drawn, (weights @ sums[0]) / np.maximum(weights @ sums[1], SMALLEST), np.nan)
    value = np.where(valid.any(0), sums[0].sum(0) / np.maximum(sums[1].sum(0), SMALLEST), np.nan)
    low, high = np.full((2, len(value)), np.nan)
    for k in np.flatnonzero((counts > 0).sum(0) > 1):
        low[k], high[k] = np.nanquantile(draws[:, k], [(1 - confidence) / 2, (1 + confidence) / 2])
    return value, low, high


def mean_bands(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means over episodes of each column, float (E, K), NaN left out, with intervals; see `ratio_bands`."""
    return ratio_bands(values, np.where(np.isfinite(values), 1.0, np.nan), groups)


def ratio_interval(numerator: np.ndarray, denominator: np.ndarray, groups: np.ndarray) -> tuple[float, Interval]:
    """Ratio of sums of float (E,) and its interval; see `ratio_bands`."""
    value, low, high = ratio_bands(numerator[:, None], denominator[:, None], groups)
    return float(value[0]), Interval(float(low[0]), float(high[0]))


NO_INTERVAL = Interval(math.nan, math.nan)


class Figure(Config):
    """A measured figure: value, 95 % interval (NaN where it has none), and from how many of what."""

    value: Number
    low: Number = math.nan
    high: Number = math.nan
    n: int
    of: str = "episodes"


def figure(value: float, interval: Interval, n: int, of: str = "episodes") -> Figure:
    """A figure with its interval."""
    return Figure(value=value, low=interval.low, high=interval.high, n=n, of=of)
