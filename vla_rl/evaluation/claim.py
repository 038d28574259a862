"""A published success rate, and the rule by which a reproduction is judged, fixed before its first episode.

claim = Claim(rate=0.945, num_episodes=500)
claim.judge(471, 500)       # "reproduced", "not reproduced" or "undecided"
claim.bounds(500)           # from how many successes, and up to how many
claim.detectable_drop(500)  # the difference that so many episodes tell
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import numpy as np
import scipy  # Its `stats`, which are slow to import, come with the first use.
from pydantic import Field, PositiveInt

from vla_rl.config import Config
from vla_rl.evaluation.statistics import Interval, unpaired_difference_interval, wilson_interval
from vla_rl.evaluation.verdict import MARGIN

POWER = 0.8
TEST = (
    "Newcombe's 95 % interval of the difference of two success rates, ours minus the published one, each of episodes "
    "of its own (Stat. Med. 17:873-890, method 10)"
)
Finding = Literal["reproduced", "not reproduced", "undecided"]


class Claim(Config):
    """A published success rate of so many episodes.

    Attributes:
        rate: a fraction. num_episodes: what it rests on, as published.
    """

    rate: float = Field(ge=0, le=1)
    num_episodes: PositiveInt

    @property
    def interval(self) -> Interval:
        """95 % Wilson interval of the published rate."""
        return wilson_interval(self._successes, self.num_episodes)

    @property
    def _successes(self) -> int:
        return round(self.rate * self.num_episodes)

    def difference(self, successes: int, n: int) -> Interval:
        """The interval of `TEST`."""
        return unpaired_difference_interval(_outcomes(self._successes, self.num_episodes), _outcomes(successes, n))

    def judge(self, successes: int, n: int) -> Finding:
        """The decision by `rule`."""
        low, high = self.difference(successes, n)
        return "reproduced" if low > -MARGIN else "not reproduced" if high < 0 else "undecided"

    @property
    def rule(self) -> str:
        """How it is decided, in words."""
        return (
            f"reproduced: the interval excludes a drop of {100 * MARGIN:g} points; else not reproduced: it lies below "
            "0; else undecided"
        )

    def bounds(self, n: int) -> tuple[int, int]:
        """(reproduced from so many successes of n, not reproduced up to so many); n + 1 and -1: it cannot be said."""
        every = range(n + 1)
        reproduced = bisect_left(every, True, key=lambda x: self.judge(x, n) == "reproduced")
        refuted = bisect_left(every, True, key=lambda x: self.judge(x, n) != "not reproduced") - 1
        return reproduced, refuted

    def power(self, n: int) -> float:
        """Probability that n episodes say "reproduced" where the true rate is the published one."""
        return float(scipy.stats.binom.sf(self.bounds(n)[0] - 1, n, self.rate))

    def detectable_drop(self, n: int) -> float | None:
        """The smallest drop below the published rate that n episodes call "not reproduced" with a power of 80 %.

        Returns:
            A fraction, to .001; None: not even a policy that always fails.
        """
        refuted = self.bounds(n)[1]
        rates = np.arange(0, self.rate + 1e-9, 0.001)
        found = rates[scipy.stats.binom.cdf(refuted, n, rates) >= POWER]
        return round(float(self.rate - found.max()), 3) if found.size else None


def _outcomes(successes: int, n: int) -> np.ndarray:
    return np.arange(n) < successes
