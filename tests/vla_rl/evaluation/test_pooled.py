"""Evidence pooled over checks: what it guarantees, by exact expectation and by simulation; what it finds; by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from vla_rl.evaluation.gate import GateConfig
from vla_rl.evaluation.pooled import MIN_PAIRS, PooledEvidence, PooledTest, power_text, simulate

ALPHA = 0.05


def test_the_first_bet_by_hand():
    """One check of 20 pairs: all of 1 aims at 24; z = -1.7317, phi(z) = 0.08908, variance 0.4 x 20."""
    for outcome, expected in ((1, [1.756, 0.244]), (-1, [0.244, 1.756]), (0, [1, 1])):
        evidence = PooledEvidence(ALPHA)
        evidence.begin(20, 1)
        evidence.update(outcome)
        assert evidence.evidence == pytest.approx(expected, abs=2e-3)


def test_a_check_before_the_last_risks_half_of_its_share():
    """Two checks: half looks far, a quarter belongs to this check, a quarter waits."""
    evidence = PooledEvidence(ALPHA)
    evidence.begin(10, 2)
    assert (evidence.far[0], evidence.near[0], evidence.reserve[0]) == (0.5, 0.25, 0.25)
    for _ in range(10):
        evidence.update(-1)
    assert 0.25 < evidence.evidence[0] < 0.3
    evidence.begin(10, 1)
    assert evidence.far[0] == evidence.evidence[0] and evidence.near[0] == evidence.reserve[0] == 0


def test_the_expected_evidence_is_unchanged_by_equal_policies_and_shrinks_under_the_null():
    rng = np.random.default_rng(0)
    for checks_left in (3, 2, 1):
        evidence = PooledEvidence(ALPHA)
        evidence.begin(30, checks_left)
        for outcome in rng.choice([-1, 0, 1], 25):
            after = {}
            for following in (1, 0, -1):
                other = PooledEvidence(ALPHA)
                other.__dict__.update({name: np.copy(value) for name, value in evidence.__dict__.items()})
                other.update(following)
                after[following] = other.evidence
            assert 0.2 * after[1] + 0.6 * after[0] + 0.2 * after[-1] == pytest.approx(evidence.evidence)
            expected = 0.1 * after[1] + 0.6 * after[0] + 0.3 * after[-1]
            assert expected[0] <= evidence.evidence[0] + 1e-12
            assert min(value.min() for value in after.values()) >= 0
            evidence.update(int(outcome))


@pytest.mark.parametrize(
    ("gains", "pairs", "differing"),
    [
        ([0.0], 200, 0.45),
        ([0.0, 0.0], 100, 0.25),
        ([0.0] * 4, 60, 0.45),
        ([0.0, -0.1, 0.0], 80, 0.45),
    ],
)
def test_no_better_policies_are_called_better_with_probability_alpha_over_the_whole_run(gains, pairs, differing):
    """And none that is no worse is called worse: the mirrored gains."""
    found = simulate([gains, [-gain for gain in gains]], pairs, ALPHA, differing, num_trials=3000)
    assert found.better[0] <= ALPHA and found.worse[1] <= ALPHA
    assert found.better[0] >= 0.01, "evidence that is never reached would have no power either"


def test_the_guarantee_holds_for_an_adversary_who_changes_policies_after_looking():
    """After a good check comes a much worse policy, after a bad one an equal one: none is better."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(300):
        test = None
        evidence, gain = PooledEvidence(ALPHA), 0.0
        for checks_left in (3, 2, 1):
            evidence.begin(40, checks_left)
            test = PooledTest(ALPHA, evidence=evidence)
            for draw in rng.random(40):
                test.update(draw >= (0.4 + gain) / 2 and draw < 0.4, draw < (0.4 + gain) / 2)
                if test.decision != "undecided":
                    break
            wrong += test.decision == "better"
            if test.decision != "undecided":
                break
            gain = -0.3 if test.gained > test.lost else 0.0
    assert wrong / 300 <= ALPHA


def test_the_power_that_the_docs_state():
    """True gains of 10 points at 45 and 35 differing pairs of 100, within the simulation's error."""
    one, two = (simulate([[0.1] * n, [-0.1] * n], 200, ALPHA, 0.45, num_trials=1000) for n in (1, 2))
    assert one.better[0] == pytest.approx(0.63, abs=0.06) and one.worse[1] == pytest.approx(0.63, abs=0.06)
    assert two.better[0] == pytest.approx(0.86, abs=0.05) and two.worse[1] == pytest.approx(0.88, abs=0.05)
    assert two.worse[0] < 0.01 and two.num_pairs[0] < 300
    fewer = simulate([[0.1]], 200, ALPHA, 0.35, num_trials=1000)
    assert fewer.better[0] == pytest.approx(0.75, abs=0.05)


def test_an_early_stretch_does_not_hide_what_the_newest_policy_is():
    found = simulate([[-0.05, 0.25], [0.05, -0.25]], 200, ALPHA, 0.45, num_trials=500)
    assert found.better[0] > 0.65 and found.worse[1] > 0.65


def test_a_verdict_needs_a_few_pairs_and_the_newest_policys_own_leaning():
    evidence = PooledEvidence(ALPHA)
    evidence.begin(10, 1)
    test = PooledTest(ALPHA, evidence=evidence)
    for _ in range(MIN_PAIRS - 1):
        test.update(False, True)
    assert evidence.evidence[0] > 20 and test.decision == "undecided"
    test.update(False, True)
    assert test.decision == "better" and test.interval.low > 0
    evidence.begin(100, 1)
    newest = PooledTest(ALPHA, evidence=evidence)
    for pair in range(MIN_PAIRS):
        newest.update(pair < 2, 2 <= pair < 4)
    assert newest.num_pairs == MIN_PAIRS and newest.gained == newest.lost == 2 and newest.decision == "undecided"
    newest.evidence.far = np.array([25.0, 0.1])
    assert newest.decision == "undecided", "the evidence is there, but not this policy's"


def test_evidence_goes_on_from_a_checkpoint():
    evidence, again = PooledEvidence(ALPHA), PooledEvidence(ALPHA)
    evidence.begin(30, 2)
    for outcome in (1, 0, 1, -1, 1):
        evidence.update(outcome)
    again.load_state(json.loads(json.dumps(evidence.state())))
    for each in (evidence, again):
        each.begin(30, 1)
        each.update(1)
    assert again.evidence.tolist() == evidence.evidence.tolist()


def test_power_is_told_before_a_run():
    text = power_text(200, 2, ALPHA)
    assert "at most 200 pairs a check where 35 of 100 differ" in text and "called better in at most 5 %" in text
    assert any(f"a true gain of {points} points or more is found by 2 checks together" in text for points in (7, 8, 9))
    assert "not even a true gain of 30 points is found by one check" in power_text(4, 1, ALPHA)
    config = GateConfig(every=6, pairs=20)
    assert [config.num_checks(14, done) for done in (0, 5, 6, 12, 13, 14)] == [3, 3, 2, 1, 1, 0]
    assert GateConfig().num_checks(14) == 0
    assert "by 3 checks together" in config.power(14)
