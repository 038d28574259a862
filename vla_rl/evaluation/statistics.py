"""Intervals and tests for success rates: one policy, two policies on the same states, several seeds.

Conventions: an outcome is 1 (success) or 0; a *difference* is b minus a, so positive means that b
is better; a *pair* is one episode of each policy from the same initial state; `gained` counts the
pairs that a failed and b solved, `lost` the reverse. All p-values are two-sided. Everything drawn
at random is seeded. Tests that may stop early are in `vla_rl.evaluation.sequential_compare`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy  # Its `stats`, which are slow to import, come with the first use.
from scipy.special import ndtr, stdtrit

from vla_rl.config import Config, Number

DEFAULT_RESAMPLES = 10_000  # Of a paired difference.
NUM_RESAMPLES = 2000  # Of a judge's figures, of which there are many.
# A denominator below this counts as this, so that a perfect prediction gives a large ratio and not an infinite one.
SMALLEST = 1e-9
# To be said beside every interval over seeds (tests/test_nulls.py).
SEEDS_ALIKE = "Intervals assume that seeds are alike: where one in five falls 25 points behind, 95 % covers 82 %."
# Resamples are drawn in blocks of at most this many random counts, which bounds memory to some 30 MB.
_BLOCK = 4_000_000


class Interval(NamedTuple):
    """A confidence interval, ends included; NaN where there is none."""

    low: Number
    high: Number

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def percent(self, sign: str = "") -> str:
        """For people, in per cent: "[37.7, 47.4]"; with sign "+", as a difference's: "[-1.0, +3.2]"."""
        return f"[{100 * self.low:{sign}.1f}, {100 * self.high:{sign}.1f}]"


NO_INTERVAL = Interval(math.nan, math.nan)


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval for a success rate (Wilson 1927, JASA 22:209-212).

    With n = 0 nothing is known: [0, 1].

    Raises:
        ValueError: successes outside 0 .. n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0 .. n = {n}, got {successes}")
    if n == 0:
        return Interval(0.0, 1.0)
    interval = scipy.stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return Interval(float(interval.low), float(interval.high))


def clustered_wilson_interval(
    outcomes: np.ndarray, clusters: np.ndarray, strata: np.ndarray | None = None, confidence: float = 0.95
) -> Interval:
    """Wilson interval of a success rate when states were sampled several times each.

    Samples of one state resemble each other, so n is divided by the design effect, the variance of
    the rate over clusters relative to independent episodes (Korn & Graubard 1998, Survey
    Methodology 24:193-201), never below 1. With one sample per state this is `wilson_interval`. Where all succeeded, or
    none, and where there is one state, outcomes do not say how alike a state's are: then each state counts once, as if
    they were the same. Strata of one state each are taken together; see `_numbered`.

    Args:
        outcomes: 0/1 (n,). clusters: (n,) the state of each. strata: (n,) the task of each.
    """
    outcomes = np.asarray(outcomes, np.float64)
    n, successes = outcomes.size, int(outcomes.sum())
    cluster, stratum = _numbered(n, clusters, strata)
    states = int(cluster.max()) + 1 if n else 0
    if states == n:
        return wilson_interval(successes, n, confidence)
    if successes in (0, n):
        return wilson_interval(states if successes else 0, states, confidence)
    rate = successes / n
    variance = 0.0
    for s in range(stratum.max() + 1):
        inside = stratum == s
        _, rows = np.unique(cluster[inside], return_inverse=True)
        residual = np.bincount(rows, weights=outcomes[inside] - rate)
        size = residual.size
        variance += residual.var() * size * size / max(size - 1, 1) / n**2
    effective = n / max(variance / (rate * (1 - rate) / n), 1.0) if states > 1 else 1.0
    z = float(scipy.stats.norm.ppf(0.5 + confidence / 2))
    center = (rate + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z / (1 + z * z / effective) * math.sqrt(rate * (1 - rate) / effective + z * z / (4 * effective**2))
    return Interval(center - half, center + half)


def mean_interval(rates: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """Interval of the mean of independent rates, each weighed alike, from each one's own interval.

    Each end is as far from the mean as the rates' own ends are from the rates, added as variances are: sqrt(sum of
    squares) / K. So it inherits what the rates' intervals do near 0 and 1, where a standard error does not (the method
    of variance estimates recovery: Zou and Donner 2008, Statistics in Medicine 27:1693-1702).

    Args:
        rates: K of them. intervals: all of the same confidence, which the result has.
    """
    mean = sum(rates) / len(rates)
    below = math.sqrt(sum((rate - interval.low) ** 2 for rate, interval in zip(rates, intervals, strict=True)))
    above = math.sqrt(sum((interval.high - rate) ** 2 for rate, interval in zip(rates, intervals, strict=True)))
    return Interval(mean - below / len(rates), mean + above / len(rates))


def clustered_sign_test(cluster_differences: Sequence[int] | np.ndarray) -> float:
    """Exact p-value for paired differences that come in clusters (several samples of one state).

    The sum of each cluster's differences keeps or flips its sign with probability 1/2 under the null
    hypothesis that the two policies are exchangeable within a state; the distribution of the total is
    computed exactly by convolution. With one pair per cluster this is the exact McNemar test, a binomial
    test of 1/2 on the discordant pairs. (Fisher's randomization test; for clustered pairs see Durkalski
    et al. 2003, Stat. Med. 22:2417-2428.)

    Returns:
        1.0 when no cluster differs.

    Args:
        cluster_differences: int (states,), gained minus lost in each state.
    """
    sizes = np.abs(np.asarray(cluster_differences, dtype=np.int64))
    sizes = sizes[sizes > 0]
    total = int(sizes.sum())
    if total == 0:
        return 1.0
    probability = np.zeros(2 * total + 1)  # of each sum -total .. total
    probability[total] = 1.0
    for size in sizes:
        probability = 0.5 * (np.roll(probability, size) + np.roll(probability, -size))
    observed = abs(int(np.sum(cluster_differences)))
    sums = np.abs(np.arange(-total, total + 1))
    return float(min(1.0, probability[sums >= observed].sum()))


def unpaired_difference_interval(
    outcomes_a: np.ndarray,
    outcomes_b: np.ndarray,
    clusters_a: np.ndarray | None = None,
    clusters_b: np.ndarray | None = None,
    confidence: float = 0.95,
) -> Interval:
    """Interval of the difference b minus a of two success rates, each of episodes of its own.

    Newcombe's hybrid score interval (Newcombe 1998, Stat. Med. 17:873-890, method 10) of `clustered_wilson_interval`s,
    put together as the recovered variances of Zou & Donner (2008, Stat. Med. 27:1693-1702). Honest for few episodes,
    where a bootstrap is too narrow. Without an episode of either nothing is known: [-1, 1].

    Args:
        outcomes_a, outcomes_b: 0/1 (n_a,), (n_b,).
        clusters_a, clusters_b: (n_a,), (n_b,) the state of each; None: each its own.
    """
    if len(outcomes_a) == 0 or len(outcomes_b) == 0:
        return Interval(-1.0, 1.0)
    rates, limits = [], []
    for outcomes, clusters in ((outcomes_a, clusters_a), (outcomes_b, clusters_b)):
        rates.append(float(np.mean(outcomes)))
        states = np.arange(len(outcomes)) if clusters is None else clusters
        limits.append(clustered_wilson_interval(outcomes, states, confidence=confidence))
    difference, (a, b) = rates[1] - rates[0], limits
    return Interval(
        difference - math.hypot(rates[1] - b.low, a.high - rates[0]),
        difference + math.hypot(b.high - rates[1], rates[0] - a.low),
    )


def paired_bootstrap_interval(
    outcomes_a: np.ndarray,
    outcomes_b: np.ndarray,
    *,
    clusters: np.ndarray | None = None,
    strata: np.ndarray | None = None,
    confidence: float = 0.95,
    num_resamples: int = DEFAULT_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the mean paired difference, b minus a.

    Initial states are resampled, with all samples of a state together, since they are not
    independent; within each stratum (task), since the tasks are fixed (Efron & Tibshirani 1993,
    ch. 8; Field & Welsh 2007 for clusters). Strata of one state each are resampled together; see `_numbered`.

    Resampling m states of m has (m - 1) / m of their mean's variance, half of it where m = 2. So how often a state is
    drawn, w, counts as 1 + sqrt(m / (m - 1)) (w - 1) (the rescaling bootstrap: Rao & Wu 1988, JASA 83:231-241), and the
    percentiles are those that a normal distribution's would have to be to reach Student's t (expanded percentiles:
    Hesterberg 2015, The American Statistician 69:371-386). Its degrees of freedom are those of a sum of variances, v of
    each stratum, (sum v)^2 / sum v^2 / (m - 1) (Satterthwaite 1946, Biometrics Bulletin 2:110-114): a task whose states
    are all alike tells nothing of how the others' differ.

    Args:
        outcomes_a, outcomes_b: in 0 .. 1, (n,), pair by pair.
        clusters: (n,) the state of each pair; None: each pair its own.
        strata: (n,) the task of each pair; None: one stratum.
    """
    difference = np.asarray(outcomes_b, np.float64) - np.asarray(outcomes_a, np.float64)
    if difference.ndim != 1 or difference.size == 0:
        raise ValueError(f"needs two equally long, non-empty lists of outcomes, got shape {difference.shape}")
    cluster, stratum = _numbered(difference.size, clusters, strata)
    rng = np.random.default_rng(seed)
    sums = np.zeros(num_resamples)
    counts = np.zeros(num_resamples)
    variance = squares = 0.0  # Of the sum of differences, and what they are squared over the degrees of freedom.
    for s in range(stratum.max() + 1):
        inside = stratum == s
        _, rows = np.unique(cluster[inside], return_inverse=True)
        cluster_sum = np.bincount(rows, weights=difference[inside])
        cluster_count = np.bincount(rows).astype(np.float64)
        size = cluster_sum.size
        stretch = math.sqrt(size / (size - 1)) if size > 1 else 1.0
        own = float((cluster_sum - difference.mean() * cluster_count).var()) * size * stretch**2
        variance += own
        squares += own**2 / max(size - 1, 1)
        for block, drawn in _resample_counts(rng, size, num_resamples):
            weights = 1 + stretch * (drawn - 1)
            sums[block] += weights @ cluster_sum
            counts[block] += weights @ cluster_count
    freedom = variance**2 / squares if squares > 0 else 0.0
    low, high = _percentile_interval(sums / counts, _expanded(confidence, freedom))
    return Interval(max(low, -1.0), min(high, 1.0))


def _expanded(confidence: float, freedom: float) -> float:
    """Return the confidence at which a normal distribution's interval is as wide as Student's t at `confidence`."""
    return float(1 - 2 * ndtr(-stdtrit(freedom, 0.5 + confidence / 2))) if freedom > 0 else confidence


class SeedSummary(NamedTuple):
    """A gain over several training seeds.

    Attributes:
        mean: mean over seeds of each seed's mean difference.
        per_seed: that mean difference for each seed.
        interval: of the gain of a new seed on new states; see `summarize_seeds`. Two seeds or fewer carry no such
            information: NaN.
        num_seeds, num_states: how many of each.
    """

    mean: float
    per_seed: tuple[float, ...]
    interval: Interval
    num_seeds: int
    num_states: int


def summarize_seeds(differences: np.ndarray, confidence: float = 0.95) -> SeedSummary:
    """Return the mean gain over seeds, with an interval that allows for few seeds and for the choice of states.

    The seeds' differences from their mean carry the spread between seeds and each seed's own luck on the states; the t
    interval of their means (seeds - 1 degrees of freedom) is right for both, at any number of seeds. It misses what all
    seeds share: the choice of initial states, and one evaluation of the base policy under all of them. That part's
    variance is the mean covariance of two seeds over the states. Both half-widths, t of the seeds and t of the states,
    are squared and added (Howe 1974, JASA 69:789-794; Graybill & Wang 1980, JASA 75:869-873): right whichever part
    is larger, too wide where they are alike. docs/results.md has the simulated coverage.

    Args:
        differences: float (seeds, states), difference of success rates per seed and initial state, averaged over
            samples of a state; NaN where a state is missing (a lost episode). With one state, the interval is about
            that state alone.

    Raises:
        ValueError: a seed without any value.
    """
    table = np.atleast_2d(np.asarray(differences, np.float64))
    valid = np.isfinite(table)
    if table.ndim != 2 or not valid.any(1).all():
        raise ValueError(f"needs (seeds, states) with a value in every seed, got shape {table.shape}")
    num_seeds, num_states = table.shape
    per_seed = np.nanmean(table, axis=1)
    mean = float(per_seed.mean())
    interval = Interval(math.nan, math.nan)
    if num_seeds > 2:
        half = math.hypot(_half_width_of_seeds(per_seed, confidence), _half_width_of_states(table, confidence))
        interval = Interval(max(mean - half, -1.0), min(mean + half, 1.0))
    return SeedSummary(mean, tuple(map(float, per_seed)), interval, num_seeds, num_states)


def _half_width_of_seeds(per_seed: np.ndarray, confidence: float) -> float:
    """Return half the t interval of the mean of float (seeds,)."""
    quantile = float(scipy.stats.t.ppf(0.5 + confidence / 2, per_seed.size - 1))
    return quantile * float(per_seed.std(ddof=1)) / math.sqrt(per_seed.size)


def _half_width_of_states(table: np.ndarray, confidence: float) -> float:
    """Return half the interval of what the seeds of float (seeds, states), NaN where missing, share by their states."""
    valid = np.isfinite(table)
    num_states = int(valid.any(0).sum())
    residual = np.where(valid, table - np.nanmean(table, axis=1, keepdims=True), 0.0)
    products = (residual.sum(0) ** 2 - (residual**2).sum(0)).sum()  # Over ordered pairs of different seeds.
    count = valid.sum(0)
    num_products = float((count * (count - 1)).sum())
    if num_states < 2 or num_products == 0:
        return 0.0
    covariance = max(float(products) / num_products * num_states / (num_states - 1), 0.0)
    return float(scipy.stats.t.ppf(0.5 + confidence / 2, num_states - 1)) * math.sqrt(covariance / num_states)


def pearson(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson correlation along the last axis, float (..., P); NaN where either is constant."""
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.where(scale > 1e-12, (a * b).sum(-1) / np.maximum(scale, 1e-12), np.nan)


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis, float (..., P): Pearson's of the ranks, ties sharing theirs."""
    return pearson(scipy.stats.rankdata(a, axis=-1), scipy.stats.rankdata(b, axis=-1))


def _numbered(n: int, clusters: np.ndarray | None, strata: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the state and the stratum of each of n outcomes, int (n,) each, numbered from 0.

    A stratum of one state does not say how its states differ. All such strata become one, whose states' spread stands
    in for it, with what the strata differ by on top (collapsed strata: Wolter 2007, Introduction to Variance
    Estimation, 2.5); the only one joins another stratum.

    Args:
        clusters, strata: (n,) the state and the task of each; None: each its own state, one stratum.
    """
    cluster = np.arange(n) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    if strata is None or n == 0:
        return cluster, np.zeros(n, np.int64)
    stratum = np.unique(strata, return_inverse=True)[1]
    _, first, cluster = np.unique(stratum * (cluster.max() + 1) + cluster, return_index=True, return_inverse=True)
    num_states = np.bincount(stratum[first])
    lone = np.flatnonzero(num_states == 1)
    joined = np.flatnonzero(num_states > 1) if len(lone) == 1 < len(num_states) else lone
    merged = np.where(np.isin(stratum, lone), joined[0] if len(joined) else 0, stratum)
    return cluster, np.unique(merged, return_inverse=True)[1]


def _resample_counts(rng: np.random.Generator, size: int, num_resamples: int):
    """Yield (slice of resamples, float (resamples in it, size)): how often each of `size` items is drawn."""
    step = max(1, _BLOCK // size)
    for start in range(0, num_resamples, step):
        stop = min(start + step, num_resamples)
        counts = rng.multinomial(size, np.full(size, 1 / size), size=stop - start)
        yield slice(start, stop), counts.astype(np.float64)


def _percentile_interval(draws: np.ndarray, confidence: float) -> Interval:
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def resampled_counts(num_groups: int, seed: int = 0) -> np.ndarray:
    """Return how often each group is drawn, float (NUM_RESAMPLES, num_groups)."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_groups, 1 / num_groups)
    return rng.multinomial(num_groups, shares, size=NUM_RESAMPLES).astype(np.float64)


def ratio_bands(
    numerator: np.ndarray, denominator: np.ndarray, groups: np.ndarray, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ratios of sums over episodes, column by column, with percentile bootstrap intervals.

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
    """Return means over episodes of each column, float (E, K), NaN left out, with intervals; see `ratio_bands`."""
    return ratio_bands(values, np.where(np.isfinite(values), 1.0, np.nan), groups)


def ratio_interval(numerator: np.ndarray, denominator: np.ndarray, groups: np.ndarray) -> tuple[float, Interval]:
    """Return the ratio of sums of float (E,) and its interval; see `ratio_bands`."""
    value, low, high = ratio_bands(numerator[:, None], denominator[:, None], groups)
    return float(value[0]), Interval(float(low[0]), float(high[0]))


class Figure(Config):
    """A measured figure: value, 95 % interval (NaN where it has none), and from how many of what."""

    value: Number
    low: Number = math.nan
    high: Number = math.nan
    n: int
    of: str = "episodes"


def figure(value: float, interval: Interval, n: int, of: str = "episodes") -> Figure:
    """Return a figure with its interval."""
    return Figure(value=value, low=interval.low, high=interval.high, n=n, of=of)
