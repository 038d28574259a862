"""Intervals and tests against published or hand-computed numbers, and their coverage by simulation."""

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm, t

from vla_rl.evaluation import statistics
from vla_rl.evaluation.statistics import Interval, pearson, spearman


def close(interval: Interval, low: float, high: float, tolerance: float = 5e-5) -> bool:
    return abs(interval.low - low) < tolerance and abs(interval.high - high) < tolerance


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe (1998), Stat. Med. 17:857-872, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (8, 10, 0.4902, 0.9433),
    ],
)
def test_wilson_interval_matches_published_numbers(successes, n, low, high):
    assert close(statistics.wilson_interval(successes, n), low, high)


def test_wilson_interval_by_hand():
    # 8 of 10: center (0.8 + z^2/20) / (1 + z^2/10), half width z sqrt(0.016 + z^2/400) / (1 + z^2/10).
    z = 1.959963984540054
    center = (0.8 + z**2 / 20) / (1 + z**2 / 10)
    half = z * math.sqrt(0.8 * 0.2 / 10 + z**2 / 400) / (1 + z**2 / 10)
    assert close(statistics.wilson_interval(8, 10), center - half, center + half, 1e-12)


def test_wilson_interval_edges():
    assert statistics.wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"0 \.\. n = 3, got 4"):
        statistics.wilson_interval(4, 3)


def test_clustered_wilson_interval_counts_states_where_samples_agree():
    state_outcome = np.array([1.0] * 8 + [0.0] * 12)
    plain = statistics.wilson_interval(8, 20)
    single = statistics.clustered_wilson_interval(state_outcome, np.arange(20))
    assert single == plain
    # Ten identical samples a state: design effect 10 * 20 / 19, so 19 effective episodes.
    repeated = statistics.clustered_wilson_interval(np.repeat(state_outcome, 10), np.repeat(np.arange(20), 10))
    z, n, p = 1.959963984540054, 19.0, 0.4
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    assert repeated.high - repeated.low == pytest.approx(2 * half)


def test_clustered_wilson_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    covered, naive = 0, 0
    for _ in range(400):
        rate = rng.beta(0.6, 0.9, 50)  # Mean 0.4, and states that differ a lot.
        outcome = (rng.random((50, 8)) < rate[:, None]).ravel()
        interval = statistics.clustered_wilson_interval(outcome, np.repeat(np.arange(50), 8))
        covered += interval.low <= 0.4 <= interval.high
        plain = statistics.wilson_interval(int(outcome.sum()), 400)
        naive += plain.low <= 0.4 <= plain.high
    assert covered / 400 >= 0.92 > naive / 400


@pytest.mark.parametrize("outcome", [0, 1])
def test_repeating_adds_no_evidence_where_all_outcomes_are_alike(outcome):
    states = np.repeat(np.arange(10), 8)
    interval = statistics.clustered_wilson_interval(np.full(80, outcome), states)
    assert interval == statistics.wilson_interval(10 * outcome, 10)
    same = statistics.clustered_wilson_interval(np.full(80, outcome), np.zeros(80))
    assert same == statistics.wilson_interval(outcome, 1), "one state, however often"


def test_a_task_of_one_state_does_not_say_how_its_states_differ():
    """Within a task its one state leaves no spread, which was taken for none: of 95 % two fifths were left."""
    rng = np.random.default_rng(0)
    tasks, covered = np.repeat(np.arange(10), 20), 0
    for _ in range(200):
        rate = rng.beta(0.5, 0.5, 10)  # Mean 0.5.
        outcome = (rng.random((10, 20)) < rate[:, None]).ravel()
        interval = statistics.clustered_wilson_interval(outcome, tasks, tasks)
        covered += interval.low <= 0.5 <= interval.high
        assert interval == statistics.clustered_wilson_interval(outcome, tasks)
    assert covered / 200 >= 0.9
    half = statistics.clustered_wilson_interval(np.arange(40) % 2, np.zeros(40), np.zeros(40))
    z = 1.959963984540054  # One state counts once: n = 1.
    width = z / (1 + z * z) * math.sqrt(0.25 + z * z / 4)
    assert close(half, 0.5 - width, 0.5 + width, tolerance=1e-9)


def test_the_only_task_of_one_state_counts_with_the_others():
    outcome, states = np.repeat([1, 0, 1, 0, 1, 0], 4), np.repeat(np.arange(6), 4)
    tasks = np.repeat(["one", "three", "two"], [4, 12, 8])
    joined = np.repeat(["three", "two"], [16, 8])  # The first by name.
    for interval in (statistics.clustered_wilson_interval, bootstrap):
        assert interval(outcome, states, tasks) == interval(outcome, states, joined)


def bootstrap(b: np.ndarray, states: np.ndarray, tasks: np.ndarray) -> statistics.Interval:
    return statistics.paired_bootstrap_interval(np.zeros(len(b)), b, clusters=states, strata=tasks)


def test_paired_bootstrap_over_tasks_of_one_state_has_a_width():
    gained, tasks = np.repeat([1, 0], 5), np.arange(10)
    interval = bootstrap(gained, tasks, tasks)
    assert interval == statistics.paired_bootstrap_interval(np.zeros(10), gained)
    assert close(interval, *resampled_means(10, 0.5), tolerance=1e-6)


def test_clustered_sign_test_is_mcnemar_for_single_pairs_and_exact_for_clusters():
    for gained, lost in ((9, 1), (4, 4), (30, 12), (0, 3)):
        differences = [1] * gained + [-1] * lost + [0] * 7
        mcnemar = binomtest(gained, gained + lost, 0.5).pvalue
        assert statistics.clustered_sign_test(differences) == pytest.approx(mcnemar)
    # Nine gained, one lost: 2 (C(10,0) + C(10,1)) / 2^10 = 22 / 1024.
    assert statistics.clustered_sign_test([1] * 9 + [-1]) == pytest.approx(22 / 1024)
    # Sums of +-3 +-2 +-1: 6 and -6 once each, 4 and -4 once each, of 8. Observed |3 + 2 - 1| = 4.
    assert statistics.clustered_sign_test([3, 2, -1]) == pytest.approx(4 / 8)
    assert statistics.clustered_sign_test([3, 2, 1]) == pytest.approx(2 / 8)
    assert statistics.clustered_sign_test([0, 0]) == 1.0


def test_clustered_sign_test_does_not_count_copies_as_evidence():
    # Twenty identical samples of each of three states are still three states.
    assert statistics.clustered_sign_test([1] * 60) < 1e-15
    assert statistics.clustered_sign_test([20, 20, 20]) == pytest.approx(2 / 8)


def successes(count: int, n: int) -> np.ndarray:
    return np.arange(n) < count


def test_unpaired_difference_interval_matches_published_numbers():
    # Newcombe (1998), Stat. Med. 17:873-890, table II, cases (a), (b) and (h), method 10.
    assert close(statistics.unpaired_difference_interval(successes(48, 80), successes(56, 70)), 0.0524, 0.3339)
    assert close(statistics.unpaired_difference_interval(successes(3, 10), successes(9, 10)), 0.1705, 0.8090)
    assert close(statistics.unpaired_difference_interval(successes(0, 10), successes(10, 10)), 0.6075, 1.0)
    assert statistics.unpaired_difference_interval(successes(0, 0), successes(1, 2)) == (-1.0, 1.0)


def test_unpaired_difference_interval_does_not_count_a_state_twice():
    a, b = successes(20, 50), successes(21, 30)
    once = statistics.unpaired_difference_interval(a, b)
    copies = [np.tile(np.arange(len(x)), 4) for x in (a, b)]
    again = statistics.unpaired_difference_interval(np.tile(a, 4), np.tile(b, 4), *copies)
    assert close(again, once.low, once.high, tolerance=0.01)


def test_paired_bootstrap_matches_the_exact_distribution():
    # 40 pairs, 10 gained, none lost: the resampled mean is Binomial(40, 1/4) / 40.
    a, b = np.zeros(40), np.r_[np.ones(10), np.zeros(30)]
    interval = statistics.paired_bootstrap_interval(a, b, num_resamples=40_000)
    assert interval == pytest.approx(resampled_means(40, 0.25))


def resampled_means(n: int, rate: float) -> tuple[float, float]:
    """The percentiles of the mean of n resampled 0s and 1s, by which t(n - 1) is reached, stretched about the rate."""
    tail = norm.sf(t.ppf(0.975, n - 1))
    ends = (binom.ppf(q, n, rate) / n for q in (tail, 1 - tail))
    return tuple(rate + math.sqrt(n / (n - 1)) * (end - rate) for end in ends)


def test_paired_bootstrap_is_seeded_and_signed():
    rng = np.random.default_rng(3)
    a, b = rng.random(50) < 0.3, rng.random(50) < 0.6
    first = statistics.paired_bootstrap_interval(a, b, seed=5)
    assert first == statistics.paired_bootstrap_interval(a, b, seed=5)
    mirrored = statistics.paired_bootstrap_interval(b, a, seed=5)
    assert close(mirrored, -first.high, -first.low, 1e-12)
    with pytest.raises(ValueError, match="non-empty"):
        statistics.paired_bootstrap_interval([], [])


def test_paired_bootstrap_resamples_states_not_samples():
    # Ten states, each sampled 20 times with the same outcome: as wide as ten pairs, not as 200.
    state_difference = np.array([1, 1, 1, 0, 0, 0, 0, 0, -1, -1], float)
    single = statistics.paired_bootstrap_interval(np.zeros(10), state_difference)
    repeated, clusters = np.repeat(state_difference, 20), np.repeat(np.arange(10), 20)
    clustered = statistics.paired_bootstrap_interval(np.zeros(200), repeated, clusters=clusters)
    naive = statistics.paired_bootstrap_interval(np.zeros(200), repeated)
    assert close(clustered, *single, tolerance=1e-12)
    assert naive.high - naive.low < 0.4 * (clustered.high - clustered.low)


def test_paired_bootstrap_keeps_the_share_of_each_task():
    # One task always gains and one never does: the mean over fixed tasks is known, whatever is drawn.
    b, strata = np.r_[np.ones(20), np.zeros(20)], np.array(["easy"] * 20 + ["hard"] * 20)
    assert statistics.paired_bootstrap_interval(np.zeros(40), b, strata=strata) == (0.5, 0.5)
    assert statistics.paired_bootstrap_interval(np.zeros(40), b).low < 0.45


def test_paired_bootstrap_covers_the_truth_with_clusters():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(300):
        # 60 states of differing difficulty; policy b gains 0.1 on average, more on some states.
        rate = rng.uniform(0.1, 0.7, 60)
        gain = rng.uniform(-0.1, 0.3, 60)
        a = (rng.random((60, 4)) < rate[:, None]).ravel()
        b = (rng.random((60, 4)) < (rate + gain)[:, None]).ravel()
        interval = statistics.paired_bootstrap_interval(
            a, b, clusters=np.repeat(np.arange(60), 4), num_resamples=500, seed=trial
        )
        covered += interval.low <= 0.1 <= interval.high
    assert 0.91 <= covered / 300 <= 0.985


def test_summarize_seeds_by_hand():
    # Per seed .1, .2, .3: t(2) = 4.30265 times .1 / sqrt 3 = .248. All seeds have -.1 and +.1 around their mean on the
    # two states: a covariance of .02, so t(1) = 12.7062 times sqrt(.02 / 2) = 1.27. No difference is above 1.
    summary = statistics.summarize_seeds(np.array([[0.0, 0.2], [0.1, 0.3], [0.2, 0.4]]))
    assert summary.mean == pytest.approx(0.2)
    assert summary.per_seed == pytest.approx((0.1, 0.2, 0.3))
    assert summary.interval == pytest.approx((max(0.2 - math.hypot(0.248414, 1.270620), -1), 1.0))
    assert (summary.num_seeds, summary.num_states) == (3, 2)
    # States that have nothing in common between seeds (covariance below zero): the t interval of the seeds alone.
    opposed = statistics.summarize_seeds(np.array([[0.3, -0.1, 0.1], [0.1, 0.2, 0.3], [0.2, 0.5, 0.2]]))
    assert opposed.interval == pytest.approx((0.2 - 0.248414, 0.2 + 0.248414), abs=1e-6)


def test_summarize_seeds_needs_seeds_and_tolerates_missing_states():
    one = statistics.summarize_seeds(np.array([[0.5, 0.5, np.nan]]))
    assert one.mean == 0.5 and math.isnan(one.interval.low)
    three = statistics.summarize_seeds(np.array([[0.5, np.nan, 0.5], [0.5, 0.5, 0.5], [0.5, 0.5, np.nan]]))
    assert three.interval == pytest.approx((0.5, 0.5))
    with pytest.raises(ValueError, match="every seed"):
        statistics.summarize_seeds(np.array([[np.nan], [1.0]]))


def test_a_few_lost_episodes_hardly_move_the_interval():
    rng = np.random.default_rng(2)
    table = (rng.random((3, 500)) < 0.5).astype(float) - (rng.random(500) < 0.4)
    whole = statistics.summarize_seeds(table)
    table[rng.random(table.shape) < 0.01] = np.nan
    assert statistics.summarize_seeds(table).interval == pytest.approx(whole.interval, abs=0.01)


@pytest.mark.parametrize(("num_seeds", "spread"), [(3, 0.0), (3, 0.06), (3, 0.1), (5, 0.06)])
def test_three_seeds_keep_their_confidence_whatever_the_spread_between_them(num_seeds, spread):
    """One base evaluation for all seeds; 2,000 trials, so that .945 would fail at a true coverage of .93."""
    rng = np.random.default_rng(0)
    states, seeds, trials = 100, num_seeds, 2000
    covered = 0
    for _ in range(trials):
        rate = rng.uniform(0.2, 0.5, states)
        of_seed = np.clip(rng.normal(0, 1, (seeds, 1)), -2.5, 2.5) * spread
        after = rng.random((seeds, states)) < rate + 0.15 + of_seed
        low, high = statistics.summarize_seeds(after - (rng.random(states) < rate).astype(float)).interval
        covered += low <= 0.15 <= high
    assert covered / trials >= 0.945


def test_the_choice_of_states_counts_where_seeds_agree():
    # Three seeds with the same gain on each state: the t interval of the seeds alone would have no width.
    difference = np.tile(np.r_[np.ones(30), np.zeros(60), -np.ones(10)], (3, 1))
    low, high = statistics.summarize_seeds(difference).interval
    one = difference[0].std(ddof=1) / 10
    assert (low, high) == pytest.approx((0.2 - 1.98422 * one, 0.2 + 1.98422 * one), abs=1e-5)


def test_correlations_by_hand():
    assert pearson(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0])) == pytest.approx(0)
    assert pearson(np.array([0.0, 1.0]), np.array([0.3, 0.5])) == pytest.approx(1)
    assert spearman(np.array([0.1, 0.1, 0.4]), np.array([1.0, 2.0, 3.0])) == pytest.approx(3**0.5 / 2), "ties share"
    assert spearman(np.array([1.0, 2.0, 9.0]), np.array([0.3, 0.2, 0.1])) == pytest.approx(-1)
    for correlation in (pearson, spearman):
        assert math.isnan(correlation(np.array([0.0, 1.0]), np.array([0.3, 0.3])))
