"""Comparing two policies pair by pair, stopping as soon as the answer is clear, with controlled error.

`PairedSequentialTest` may be looked at after every pair, as often as one likes: the probability
that it ever calls two equal policies different is at most alpha (Ville's inequality), unlike a
fixed-n test that is looked at repeatedly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import betaln, gammaln

from vla_rl.statistics import Interval

Decision = Literal["better", "worse", "no_gain", "undecided"]


def discordant_e_value(gained: int, lost: int, prior: float = 1.0) -> float:
    """Evidence against "a discordant pair is as likely a gain as a loss"; anytime-valid.

    The Bayes factor of a Beta(prior, prior) mixture against 1/2 on the discordant pairs,
    E = 2^n B(prior + gained, prior + lost) / B(prior, prior), a martingale with mean 1 under the
    null, so P(E ever >= 1/alpha) <= alpha (Robbins 1970, Ann. Math. Stat. 41:1397-1409; Ramdas et
    al. 2023, Statist. Sci. 38:576-601). 1/E, capped at 1, is an anytime-valid p-value.
    """
    log_e = (gained + lost) * math.log(2) + betaln(prior + gained, prior + lost) - betaln(prior, prior)
    return float(np.exp(min(log_e, 700.0)))


def difference_confidence_sequence(gained: int, lost: int, tied: int, confidence: float = 0.95) -> Interval:
    """Anytime-valid interval of the difference of success rates, b minus a.

    All (gain, loss, tie) probabilities p whose Dirichlet(1, 1, 1) mixture likelihood ratio stays below
    1/alpha form a confidence sequence (Lindon & Malek 2022, "Anytime-valid inference for multinomial
    count data", NeurIPS); this is its range of p_gain - p_loss. Wider than a fixed-n interval; with
    confidence 0.95 it covers the truth at every n at once with probability 0.95.
    """
    counts = np.array([gained, lost, tied], np.float64)
    n = counts.sum()
    if n == 0:
        return Interval(-1.0, 1.0)
    # log of the mixture: B(1 + counts) / B(1, 1, 1); p is inside while log-likelihood(p) > mixture - log(1/alpha).
    log_mixture = float(gammaln(1 + counts).sum() - gammaln(n + 3) + gammaln(3))
    threshold = log_mixture + math.log(1 - confidence)

    def excess(difference: float) -> float:
        return _profile_log_likelihood(counts, difference) - threshold

    centre = (gained - lost) / n
    edge = 1 - 1e-9
    high = 1.0 if excess(edge) >= 0 else _root(excess, min(centre, edge), edge)
    low = -1.0 if excess(-edge) >= 0 else _root(excess, -edge, max(centre, -edge))
    return Interval(low, high)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(function, low, high, xtol=1e-6))  # type: ignore[arg-type]


def _profile_log_likelihood(counts: np.ndarray, difference: float) -> float:
    """Largest multinomial log-likelihood over p with p_gain - p_loss = difference.

    With p_loss = q, p_gain = q + d and p_tie = 1 - d - 2q, the derivative in q is
    gained/(q+d) + lost/q - 2 tied/(1-d-2q), whose numerator is a quadratic in q.
    """
    gained, lost, tied = counts
    d = difference
    low, high = max(0.0, -d), (1 - d) / 2
    # -2 n q^2 + [(gained + lost)(1 - d) - 2 d lost - 2 d tied] q + lost d (1 - d) = 0
    n = counts.sum()
    linear = (gained + lost) * (1 - d) - 2 * d * (lost + tied)
    constant = lost * d * (1 - d)
    root = math.sqrt(max(linear**2 + 8 * n * constant, 0.0))
    candidates = [low, high, (linear + root) / (4 * n), (linear - root) / (4 * n)]

    def log_likelihood(q: float) -> float:
        total = 0.0
        for count, p in ((gained, q + d), (lost, q), (tied, 1 - d - 2 * q)):
            if count > 0:
                total += count * math.log(p) if p > 0 else -math.inf
        return total

    return max(log_likelihood(min(max(q, low), high)) for q in candidates)


@dataclass
class PairedSequentialTest:
    """Feed pairs as they come and stop when `decision` is no longer "undecided".

    Attributes:
        alpha: probability, over all looks, of calling two equally good policies different.
        min_gain: stop with "no_gain" once b's advantage is below this with confidence 1 - alpha;
            None: never stop for lack of a gain.
        gained, lost, tied: pairs so far.
    """

    alpha: float = 0.05
    min_gain: float | None = None
    gained: int = 0
    lost: int = 0
    tied: int = 0

    def update(self, success_a: bool, success_b: bool) -> None:
        """Count one pair."""
        if success_a == success_b:
            self.tied += 1
        elif success_b:
            self.gained += 1
        else:
            self.lost += 1

    @property
    def num_pairs(self) -> int:
        return self.gained + self.lost + self.tied

    @property
    def e_value(self) -> float:
        return discordant_e_value(self.gained, self.lost)

    @property
    def p_value(self) -> float:
        """Anytime-valid: may be read at any moment. A little larger than a fixed-n p-value."""
        return min(1.0, 1 / self.e_value)

    @property
    def interval(self) -> Interval:
        """Anytime-valid interval of the difference, b minus a."""
        return difference_confidence_sequence(self.gained, self.lost, self.tied, 1 - self.alpha)

    @property
    def decision(self) -> Decision:
        if self.e_value >= 1 / self.alpha:
            return "better" if self.gained > self.lost else "worse"
        if self.min_gain is not None and self.interval.high < self.min_gain:
            return "no_gain"
        return "undecided"
