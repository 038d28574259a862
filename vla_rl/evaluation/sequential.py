"""Sequential test of two policies, pair by pair, with controlled error.

`PairedSequentialTest` may be looked at after every pair, as often as one likes: the probability
that it ever calls two equal policies different is at most alpha (Ville's inequality), unlike a
fixed-n test that is looked at repeatedly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import scipy  # Its `optimize` comes with the first use.
from scipy.special import betaln, logsumexp

from vla_rl.evaluation.statistics import Interval

# Gauss-Legendre nodes and weights on [-1, 1]: exact up to 511 pairs, a valid mixture at any number.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)
_EDGE = 1 - 1e-9
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


def difference_e_value(gained: int, lost: int, tied: int, difference: float) -> float:
    """Evidence against "the success rates differ by `difference`" (b minus a); anytime-valid.

    What a gambler with fair odds would have won by betting on each pair's outcome d in {-1, 0, 1}:
    the product of 1 + lambda (d - difference), averaged over the admissible lambda with uniform
    weight (Waudby-Smith & Ramdas 2024, JRSS-B 86:1-27, on betting; Orabona & Jun 2024, IEEE Trans.
    Inf. Theory 70:436-455, on averaging). At difference = 0 this is `discordant_e_value`.
    """
    low, high = -1 / (1 - difference), 1 / (1 + difference)
    bets = low + (high - low) * (_NODES + 1) / 2
    log_wealth = np.log(_WEIGHTS / 2)
    for count, outcome in ((gained, 1), (lost, -1), (tied, 0)):
        log_wealth = log_wealth + count * np.log1p(bets * (outcome - difference))
    return float(np.exp(min(logsumexp(log_wealth), 700.0)))


def difference_confidence_sequence(gained: int, lost: int, tied: int, confidence: float = 0.95) -> Interval:
    """Anytime-valid interval of the difference of success rates, b minus a.

    All differences that `difference_e_value` has not refuted: covers the truth at every n at once with
    the given probability, and excludes 0 just when `discordant_e_value` reaches 1 / (1 - confidence).
    Wider than an interval for a fixed n.
    """
    n = gained + lost + tied
    if n == 0:
        return Interval(-1.0, 1.0)
    center = float(np.clip((gained - lost) / n, -_EDGE, _EDGE))

    def excess(difference: float) -> float:
        return math.log(difference_e_value(gained, lost, tied, difference)) + math.log(1 - confidence)

    def root(edge: float) -> float:
        if excess(edge) < 0 or edge == center:
            return math.copysign(1.0, edge)
        return cast(float, scipy.optimize.brentq(excess, center, edge, xtol=1e-7))

    return Interval(root(-_EDGE), root(_EDGE))


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
        if self.min_gain is not None and self.gained - self.lost < self.min_gain * self.num_pairs:
            refuted = difference_e_value(self.gained, self.lost, self.tied, self.min_gain) >= 1 / self.alpha
            return "no_gain" if refuted else "undecided"
        return "undecided"
