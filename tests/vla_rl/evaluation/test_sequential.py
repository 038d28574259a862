"""The sequential test: values by hand, errors under continuous looking, power, coverage; policies compared by it."""

import numpy as np
import pytest
from reach_policy import ReachPolicy

from sim.dummy import DummyConfig
from vla_rl.common.distributed.process_group import ALONE
from vla_rl.evaluation.results import EpisodeJournal, EvaluationError
from vla_rl.evaluation.sequential_compare import (
    PairedSequentialTest,
    SequentialConfig,
    compare_sequential,
    difference_confidence_sequence,
    difference_e_value,
    discordant_e_value,
)


def test_e_value_by_hand():
    # Uniform prior: 2^n gained! lost! / (n + 1)!.
    assert discordant_e_value(0, 0) == pytest.approx(1.0)
    assert discordant_e_value(1, 0) == pytest.approx(1.0)
    assert discordant_e_value(2, 0) == pytest.approx(4 / 3)
    assert discordant_e_value(9, 1) == pytest.approx(1024 / 110)
    assert discordant_e_value(1, 9) == pytest.approx(1024 / 110)


def test_e_value_is_a_martingale_under_the_null():
    for gained in range(6):
        for lost in range(6):
            after = 0.5 * discordant_e_value(gained + 1, lost) + 0.5 * discordant_e_value(gained, lost + 1)
            assert after == pytest.approx(discordant_e_value(gained, lost))


def test_difference_e_value_is_the_discordant_one_at_zero():
    for gained, lost, tied in ((0, 0, 4), (9, 1, 0), (60, 30, 310), (3, 20, 7)):
        expected = discordant_e_value(gained, lost)
        assert difference_e_value(gained, lost, tied, 0.0) == pytest.approx(expected)


def test_difference_e_value_by_hand():
    # Difference 0.5 allows lambda in [-2, 2/3]. One gain: mean of 1 + lambda / 2 = 1 - 1/3.
    assert difference_e_value(1, 0, 0, 0.5) == pytest.approx(2 / 3)
    # One loss: mean of 1 - 3 lambda / 2 = 2. One tie: mean of 1 - lambda / 2 = 4/3.
    assert difference_e_value(0, 1, 0, 0.5) == pytest.approx(2.0)
    assert difference_e_value(0, 0, 1, 0.5) == pytest.approx(4 / 3)


def test_difference_e_value_is_a_martingale_at_the_true_difference():
    gain, loss, tie = 0.3, 0.1, 0.6
    for counts in ((0, 0, 0), (3, 1, 5), (10, 0, 2)):
        g, l, t = counts
        after = (
            gain * difference_e_value(g + 1, l, t, gain - loss)
            + loss * difference_e_value(g, l + 1, t, gain - loss)
            + tie * difference_e_value(g, l, t + 1, gain - loss)
        )
        assert after == pytest.approx(difference_e_value(g, l, t, gain - loss))


def test_confidence_sequence_is_what_the_e_value_leaves():
    low, high = difference_confidence_sequence(16, 2, 22)
    for difference in np.linspace(-0.95, 0.95, 77):
        inside = difference_e_value(16, 2, 22, difference) < 20
        assert inside == (low < difference < high), difference
    assert low > 0 and discordant_e_value(16, 2) > 20
    assert difference_confidence_sequence(12, 4, 24).low < 0 and discordant_e_value(12, 4) < 20


def test_confidence_sequence_edges_and_symmetry():
    assert difference_confidence_sequence(0, 0, 0) == (-1.0, 1.0)
    assert difference_confidence_sequence(8, 0, 0).high == 1.0
    assert difference_confidence_sequence(0, 8, 0).low == -1.0
    low, high = difference_confidence_sequence(30, 10, 60)
    assert difference_confidence_sequence(10, 30, 60) == pytest.approx((-high, -low), abs=1e-5)
    assert low < 0.2 < high
    narrow = difference_confidence_sequence(300, 100, 600)
    assert narrow.high - narrow.low < 0.5 * (high - low)


def run(rng, rate_a, rate_b, budget, **kwargs) -> PairedSequentialTest:
    test = PairedSequentialTest(**kwargs)
    for a, b in zip(rng.random(budget) < rate_a, rng.random(budget) < rate_b, strict=True):
        test.update(bool(a), bool(b))
        if test.decision != "undecided":
            break
    return test


def test_a_clear_difference_stops_early_in_the_right_direction():
    rng = np.random.default_rng(1)
    tests = [run(rng, 0.3, 0.6, 400) for _ in range(100)]
    assert sum(t.decision == "better" for t in tests) >= 99
    assert np.mean([t.num_pairs for t in tests]) < 130
    assert run(rng, 0.7, 0.3, 400).decision == "worse"


def test_no_gain_stops_a_hopeless_comparison():
    rng = np.random.default_rng(2)
    tests = [run(rng, 0.6, 0.5, 1000, min_gain=0.1) for _ in range(10)]
    assert all(t.decision in ("no_gain", "worse") for t in tests)
    assert any(t.decision == "no_gain" and t.num_pairs < 1000 for t in tests)
    assert run(rng, 0.5, 0.5, 60).decision == "undecided"


def test_confidence_sequence_covers_the_truth_at_all_times_at_once():
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(200):
        outcome = rng.choice(3, size=300, p=[0.3, 0.1, 0.6])
        counts = np.cumsum(np.eye(3, dtype=int)[outcome], axis=0)[::5]
        missed += any(difference_e_value(*row, 0.2) >= 20 for row in counts.tolist())
    assert missed <= 10


def test_p_value_is_the_inverse_e_value():
    test = PairedSequentialTest(gained=9, lost=1, tied=5)
    assert test.p_value == pytest.approx(110 / 1024) and test.num_pairs == 15
    assert PairedSequentialTest(gained=1, lost=1).p_value == 1.0


def test_it_decides_once_the_e_value_reaches_one_over_alpha():
    counts = {"gained": 9, "lost": 1}  # 1024 / 110 = 9.3
    assert PairedSequentialTest(alpha=1 / 9, **counts).decision == "better"
    assert PairedSequentialTest(alpha=1 / 10, **counts).decision == "undecided"
    assert PairedSequentialTest(alpha=1 / 9, gained=1, lost=9).decision == "worse"


# --- policies compared ------------------------------------------------------------------------


def test_sequential_stops_early_on_a_clear_difference():
    env = DummyConfig(num_envs=8).build()
    seen = []
    result = compare_sequential(
        ReachPolicy(speed=0.1),
        ReachPolicy(),
        env,
        SequentialConfig(max_pairs=200, temperature=0.0),
        on_batch=lambda n, p: seen.append((n, p)),
    )
    assert result.decision == "better" and result.num_pairs < 40 and result.rate_b == 1.0
    assert result.p_value <= 0.05 and result.interval.low > 0
    assert seen[-1] == (result.num_pairs, result.p_value)
    assert result.gained + result.lost + result.tied == result.num_pairs
    assert result.text().startswith("b is better than a after")
    worse = compare_sequential(ReachPolicy(), ReachPolicy(speed=0.1), env, SequentialConfig(temperature=0.0))
    assert worse.decision == "worse" and worse.num_pairs == result.num_pairs


def test_a_sequential_comparison_goes_on_where_it_was_stopped(tmp_path):
    env, config = DummyConfig(num_envs=4).build(), SequentialConfig(max_pairs=24)
    policies = ReachPolicy(speed=0.2), ReachPolicy(speed=0.22)
    whole = compare_sequential(*policies, env, config)
    assert whole.num_pairs > 12

    def stop(num_pairs: int, _: float) -> None:
        if num_pairs == 8:
            raise KeyboardInterrupt

    subject, file = {"num_episodes": 48}, tmp_path / "pairs.json"
    with EpisodeJournal(file, subject, ALONE) as journal, pytest.raises(KeyboardInterrupt):
        compare_sequential(*policies, env, config, stop, journal=journal)
    with EpisodeJournal(file, subject, ALONE) as journal:
        told: list[int] = []
        rest = compare_sequential(
            *policies, env, config, journal=journal, on_episodes=lambda a, b: told.append(len(a) + len(b))
        )
    assert sum(told) == rest.num_episodes, "batches that were kept are not told of"
    assert rest.num_episodes == whole.num_episodes - 16
    assert rest == whole.model_copy(update={"num_episodes": rest.num_episodes})
    with pytest.raises(EvaluationError, match="holds episodes of other weights or eval options"):
        EpisodeJournal(file, {"num_episodes": 2}, ALONE)


def test_sequential_spends_its_budget_on_equal_policies_or_stops_for_no_gain():
    env = DummyConfig(num_envs=8).build()
    policy = ReachPolicy(speed=0.2)
    result = compare_sequential(policy, policy, env, SequentialConfig(max_pairs=20, temperature=0.0))
    assert (result.decision, result.num_pairs, result.gained, result.p_value) == ("undecided", 20, 0, 1.0)
    stopped = compare_sequential(policy, policy, env, SequentialConfig(max_pairs=200, min_gain=0.2))
    assert stopped.decision == "no_gain" and stopped.num_pairs < 60
    with pytest.raises(EvaluationError, match="unknown task 'fly'"):
        compare_sequential(policy, policy, env, SequentialConfig(tasks=("fly",)))


def test_sequential_counts_no_state_twice():
    """With a task named twice each pair was run, and counted as evidence, twice."""
    with pytest.raises(ValueError, match="name each task once"):
        SequentialConfig(tasks=("reach_red", "reach_red"))
