"""What a reproduction must show: the interval beside Newcombe's own example, the bounds of the decision, its power."""

import numpy as np
import pytest

from vla_rl.evaluation.verdict import MARGIN, Claim


def test_the_interval_is_newcombes() -> None:
    """His example (a) of 1998, 56/70 against 48/80: 0.2000 [0.0524, 0.3339], by method 10."""
    low, high = Claim(rate=48 / 80, num_episodes=80).difference(56, 70)
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


@pytest.mark.parametrize(("rate", "published"), [(0.976, 500), (0.71, 100), (0.05, 100), (1.0, 50)])
@pytest.mark.parametrize("n", [1, 40, 150])
def test_the_bounds_are_where_the_decision_changes(rate: float, published: int, n: int) -> None:
    claim = Claim(rate=rate, num_episodes=published)
    reproduced, refuted = claim.bounds(n)
    assert -1 <= refuted < reproduced <= n + 1
    said = [claim.judge(successes, n) for successes in range(n + 1)]
    between = reproduced - refuted - 1
    expected = ["not reproduced"] * (refuted + 1) + ["undecided"] * between + ["reproduced"] * (n + 1 - reproduced)
    assert said == expected


def test_an_equal_policy_is_reproduced_as_often_as_the_power_says_and_a_worse_one_found() -> None:
    claim, n = Claim(rate=0.945, num_episodes=500), 500
    assert claim.power(n) == pytest.approx(0.97, abs=0.01)
    drop = claim.detectable_drop(n)
    assert drop is not None and drop < MARGIN
    dice = np.random.default_rng(0)
    bounds = claim.bounds(n)
    equal, worse = dice.binomial(n, 0.945, 20_000), dice.binomial(n, 0.945 - drop, 20_000)
    assert np.mean(equal >= bounds[0]) == pytest.approx(claim.power(n), abs=0.01)
    assert np.mean(worse <= bounds[1]) == pytest.approx(0.8, abs=0.02)


def test_few_episodes_tell_nothing() -> None:
    assert Claim(rate=0.05, num_episodes=100).detectable_drop(5) is None
    assert Claim(rate=0.95, num_episodes=100).power(5) == 0
