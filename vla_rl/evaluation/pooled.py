"""Pooled sequential test: evidence over several checks of changing policies against one reference, and its power.

Two gamblers with fair odds, one betting on gains, one on losses: what each has made of 1 is the evidence for "better",
and for "worse". They bet no more than it takes to reach 1 / alpha by the last pair that is planned, which is what makes
this as strong as a test of a fixed number of pairs, though it may be looked at, and stopped, after every pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtri

from vla_rl.evaluation.sequential_compare import Decision, PairedSequentialTest

FAR_SHARE = 0.5  # Of the money, on the last planned pair; the rest is shared by the checks, each with its own pairs.
AIM = 1.2  # Bets aim at this much more than they need: that ends clear cases early, for little power.
MAX_BET = 0.9  # Of the money, on one pair.
MIN_PAIRS = 10  # Of the newest policy's own, before anything is said of it.
DIFFERING = 0.35  # Share of pairs that differ, assumed where the power is told; some 37 % on the tabletop after RL.
WANTED_POWER = 0.8
_GAINS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.45)
_SIGNS = np.array([1, -1])
_EXPECTED_SHARE, _EXPECTED_WEIGHT = 0.4, 10  # Pairs that differ, before any was seen; and for how many that stands.
_FLOOR = 1e-9


class PooledEvidence:
    """E-process against "no policy checked since the reference was better than it", and against "none was worse".

    Let d in {1, 0, -1} be a pair's outcome (gained, tied, lost) and mu its mean for the policy checked, given all that
    went before. The gambler for "better" multiplies the part of its money that it bets with by 1 + f d, where f in
    [0, `MAX_BET`] is chosen from earlier pairs alone. Where no policy checked since the reference is better, every
    mu <= 0, so E[1 + f d] = 1 + f mu <= 1: the money is a supermartingale that starts at 1 and is never negative,
    whatever policies follow, however the bets are chosen, and wherever one stops. So the chance that it ever reaches
    1 / alpha is at most alpha (Ville's inequality), over all checks together. "Worse" is the mirror image.

    Reaching it says that some policy checked since the reference was better (worse); not surely that the newest one
    is. So `PooledTest.decision` also asks that the newest policy's own pairs lean the same way, which can only take
    verdicts away.

    **The bets.** A fair gambler has the best chance of turning A into G by the time that the outcomes' remaining
    variance r has run out with f = phi(z) / (sqrt(r) A / G), z the normal quantile of A / G (Kulldorff 1993, SIAM J.
    Control Optim. 31:52-69; Browne 1999, Adv. Appl. Probab. 31:551-577); r is the number of remaining pairs times the
    share that differed so far. Half of the money looks as far as the last planned check, which pools the checks. Of the
    other half each check gets an equal part, to be decided by its own pairs: a bad or good stretch of earlier policies
    cannot lose it, or win with it, before its turn. In the last check both are one.

    Args:
        shape: of several runs at once, for simulations; () for one.
    """

    def __init__(self, alpha: float, shape: tuple[int, ...] = ()) -> None:
        self.alpha = alpha
        self.far = np.full((2, *shape), FAR_SHARE)
        self.reserve = np.full((2, *shape), 1 - FAR_SHARE)
        self.near = np.zeros((2, *shape))
        self.num_pairs = np.zeros(shape)
        self.num_differing = np.zeros(shape)
        self._left = self._left_after = 0  # Planned pairs, of this check and of later ones.
        self._signs = _SIGNS.reshape(2, *(1 for _ in shape))

    def begin(self, pairs: int, checks_left: int) -> None:
        """Deal the money for a check of at most so many pairs, with so many checks left, this one included."""
        self.reserve = self.reserve + self.near
        if checks_left <= 1:
            self.far, self.reserve = self.far + self.reserve, np.zeros_like(self.reserve)
        self.near = self.reserve / max(checks_left, 1)
        self.reserve = self.reserve - self.near
        self._left, self._left_after = pairs, pairs * (max(checks_left, 1) - 1)

    def update(self, outcome: np.ndarray | int, going: np.ndarray | bool = True) -> None:
        """Settle the bets on a pair's outcome: 1 gained, -1 lost, 0 tied.

        Args:
            going: of several runs, those that have this pair.
        """
        share = (self.num_differing + _EXPECTED_WEIGHT * _EXPECTED_SHARE) / (self.num_pairs + _EXPECTED_WEIGHT)
        total, signed = self.evidence, self._signs * np.where(going, outcome, 0)
        goal = AIM / self.alpha
        far = self._bet(self.far, goal - total + self.far, share * (self._left + self._left_after))
        near = self._bet(self.near, goal - total + self.near, share * self._left)
        self.far, self.near = self.far * (1 + far * signed), self.near * (1 + near * signed)
        self.num_pairs = self.num_pairs + going
        self.num_differing = self.num_differing + (signed[0] != 0)
        self._left = max(self._left - 1, 0)

    @staticmethod
    def _bet(money: np.ndarray, goal: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """Share of the money to bet on a pair."""
        reached = np.clip(money / np.maximum(goal, _FLOOR), _FLOOR, 1 - 1e-4)
        z = ndtri(reached)
        return np.minimum(np.exp(-z * z / 2) / (reached * np.sqrt(2 * np.pi * np.maximum(variance, 1))), MAX_BET)

    @property
    def evidence(self) -> np.ndarray:
        """For better, for worse: what 1 has become, float (2, *shape)."""
        return self.far + self.reserve + self.near

    def state(self) -> dict[str, Any]:
        """For a checkpoint, between checks, as JSON."""
        return {
            "far": self.far.tolist(),
            "reserve": (self.reserve + self.near).tolist(),
            "num_pairs": float(self.num_pairs),
            "num_differing": float(self.num_differing),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.far, self.reserve = np.array(state["far"]), np.array(state["reserve"])
        self.near = np.zeros_like(self.far)
        self.num_pairs, self.num_differing = np.array(state["num_pairs"]), np.array(state["num_differing"])


@dataclass
class PooledTest(PairedSequentialTest):
    """One check's pairs, decided by the evidence of all since the reference; `interval`, `p_value`: of its own."""

    evidence: PooledEvidence = field(default_factory=lambda: PooledEvidence(0.05))

    def update(self, success_a: bool, success_b: bool) -> None:
        """Count one pair."""
        super().update(success_a, success_b)
        self.evidence.update(int(success_b) - int(success_a))

    @property
    def decision(self) -> Decision:
        better, worse = self.evidence.evidence >= 1 / self.alpha
        if self.num_pairs < MIN_PAIRS:
            return "undecided"
        if better and self.gained > self.lost:
            return "better"
        return "worse" if worse and self.lost > self.gained else "undecided"


# --- power ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """How simulated runs of checks ended: at the first "better", at "worse", or undecided at the last check.

    Attributes:
        better, worse, undecided: float (B,), for each true gain. num_pairs: float (B,), the mean.
    """

    better: np.ndarray
    worse: np.ndarray
    undecided: np.ndarray
    num_pairs: np.ndarray


def simulate(
    gains: Sequence[Sequence[float]] | np.ndarray,
    pairs: int,
    alpha: float,
    differing: float,
    num_trials: int,
    seed: int = 0,
) -> Shares:
    """Simulate runs of checks against one reference policy, pair by pair.

    Args:
        gains: (B, checks): the true difference of success rates at each check, at most `differing` in size.
        differing: share of pairs in which one policy alone succeeds.
    """
    true = np.asarray(gains, float)
    num_checks, shape = true.shape[1], (len(true), num_trials)
    rng = np.random.default_rng(seed)
    evidence = PooledEvidence(alpha, shape)
    going = np.ones(shape, bool)
    verdict, used = np.zeros(shape, int), np.zeros(shape, int)
    for check in range(num_checks):
        evidence.begin(pairs, num_checks - check)
        gain, lead = true[:, check, None], np.zeros(shape, int)
        for pair in range(1, pairs + 1):
            draw = rng.random(num_trials)
            outcome = np.where(draw < (differing + gain) / 2, 1, np.where(draw < differing, -1, 0))
            evidence.update(outcome, going)
            used += going
            lead += outcome
            if pair >= MIN_PAIRS:
                better, worse = evidence.evidence >= 1 / alpha
                verdict = np.where(going & better & (lead > 0), 1, np.where(going & worse & (lead < 0), -1, verdict))
                going = verdict == 0
    shares = [(verdict == which).mean(1) for which in (1, -1, 0)]
    return Shares(*shares, num_pairs=used.mean(1))


def power_text(pairs: int, num_checks: int, alpha: float, differing: float = DIFFERING) -> str:
    """Say what the checks of a run can tell, by simulation: the gain found in 80 %, and a loss of 10 points."""
    gains = np.array([gain for gain in _GAINS if gain <= differing])
    loss = min(0.10, differing)
    shares = simulate(np.repeat([[-loss], *gains[:, None]], num_checks, 1), pairs, alpha, differing, num_trials=200)
    power = np.maximum.accumulate(shares.better[1:])
    if power[-1] < WANTED_POWER:
        gain = f"not even a true gain of {100 * gains[-1]:.0f} points is"
    else:
        gain = f"a true gain of {100 * np.interp(WANTED_POWER, power, gains):.0f} points or more is"
    checks = "one check" if num_checks == 1 else f"{num_checks} checks together"
    return (
        f"what the gate can tell, by simulation, of at most {pairs} pairs a check where {100 * differing:.0f} of 100 "
        f"differ: {gain} found by {checks} in {100 * WANTED_POWER:.0f} % of cases; a true loss of {100 * loss:.0f} "
        f"points is rolled back in {100 * shares.worse[0]:.0f} %; a policy that is no better is called better in at "
        f"most {100 * alpha:g} %"
    )
