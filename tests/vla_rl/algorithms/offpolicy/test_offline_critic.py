"""The critic finds known values, and what is cloned follows from them as the formulas say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from vla_rl.algorithms.offpolicy.config import CriticConfig
from vla_rl.algorithms.offpolicy.critic import FOLDS, Critic, Judged, fit_critic
from vla_rl.algorithms.offpolicy.logged import AdvantageWeightedConfig, advantage_weights
from vla_rl.algorithms.offpolicy.transitions import Transitions

RIGHT, WRONG = 0.9, 0.2  # How likely an episode succeeds after the right first chunk, and after a wrong one.


def two_decisions(num_episodes: int = 600, seed: int = 0) -> Transitions:
    """Episodes of two decisions of 2 steps; whether the first chunk has the sign of the state decides who succeeds.

    The embedding holds the state's sign, and at the second decision whether the first one was right.
    """
    rng = np.random.default_rng(seed)
    sign = rng.choice([-1.0, 1.0], num_episodes)
    chunk = rng.choice([-1.0, 1.0], (num_episodes, 2))
    right = chunk[:, 0] == sign
    success = rng.random(num_episodes) < np.where(right, RIGHT, WRONG)
    episode = np.repeat(np.arange(num_episodes), 2)
    second = np.tile([False, True], num_episodes)
    embedding = np.stack([sign[episode], np.where(second, np.where(right, 1, -1)[episode], 0)], 1)
    return Transitions(
        embedding=embedding.astype(np.float32),
        chunk=chunk.reshape(-1, 1, 1).repeat(2, 1).astype(np.float32),
        num_steps=np.full(2 * num_episodes, 2),
        following=np.where(second, -1, np.arange(2 * num_episodes) + 1),
        elapsed=2 * second.astype(np.int64),
        remaining=4 - 2 * second.astype(np.int64),
        episode=episode,
        success=success,
        task=np.zeros(num_episodes, np.int64),
        initial_state=np.arange(num_episodes) // 2,
    )


CONFIG = CriticConfig(steps=160, hidden=16, batch_size=128, optim={"lr": 1e-2}, discount=0.9, members=2)


@pytest.fixture(scope="module")
def fitted() -> Critic:
    """On `two_decisions`, with targets from V at the next decision."""
    return fit_critic(two_decisions(), CONFIG, seed=1)


@pytest.mark.parametrize("targets", ["td", "monte_carlo"])
def test_it_finds_the_values_of_a_problem_whose_values_are_known(targets: str, fitted: Critic) -> None:
    data = two_decisions()
    if targets == "monte_carlo":
        fitted = fit_critic(data, CONFIG.model_copy(update={"targets": targets}), seed=1)
    judged = fitted.judge()
    first, right = data.elapsed == 0, data.chunk[:, 0, 0] == data.embedding[:, 0]
    for kind, rate in ((right, RIGHT), (~right, WRONG)):
        assert judged.q[first & kind].mean() == pytest.approx(rate * 0.9**4, abs=0.06)
    assert judged.v[first].mean() == pytest.approx((RIGHT + WRONG) / 2 * 0.9**4, abs=0.06)
    last = ~first & (data.embedding[:, 1] > 0)
    assert judged.q[last].mean() == pytest.approx(RIGHT * 0.9**2, abs=0.06)
    figures = judged.figures(data, 0.9)
    assert figures["critic/auc"] > 0.8 and abs(figures["critic/over_estimation"]) < 0.05
    assert figures["critic/calibration_error"] < 0.1


def test_decisions_count_as_their_weights_say() -> None:
    data = two_decisions()
    weight = np.where(data.success, 3.0, 1.0)[data.episode]
    config = CONFIG.model_copy(update={"targets": "monte_carlo"})
    judged = fit_critic(replace(data, weight=weight), config, seed=1).judge()
    first, right = data.elapsed == 0, data.chunk[:, 0, 0] == data.embedding[:, 0]
    for kind, rate in ((right, RIGHT), (~right, WRONG)):
        expected = 3 * rate / (3 * rate + 1 - rate) * 0.9**4
        assert judged.q[first & kind].mean() == pytest.approx(expected, abs=0.06)


def test_other_chunks_are_judged_by_the_critic_that_has_not_seen_the_state(fitted: Critic) -> None:
    data, critic = two_decisions(), fitted
    rows = np.flatnonzero(data.elapsed == 0)[:50]
    both = np.broadcast_to(np.array([1.0, -1.0], np.float32)[None, :, None, None], (50, 2, 2, 1))
    value = critic.values(rows, np.ascontiguousarray(both)).mean(0)
    assert (value.argmax(1) == np.where(data.embedding[rows, 0] > 0, 0, 1)).mean() > 0.95
    fold = critic.fold
    for state in np.unique(data.initial_state):
        assert len(np.unique(fold[data.initial_state[data.episode] == state])) == 1
    assert set(fold) == set(range(FOLDS))


def test_an_upper_expectile_lies_above_the_mean(fitted: Critic) -> None:
    data = two_decisions()
    mean, upper = (
        c.judge().v for c in (fitted, fit_critic(data, CONFIG.model_copy(update={"expectile": 0.9}), seed=1))
    )
    first = data.elapsed == 0
    assert upper[first].mean() > mean[first].mean() + 0.1


def test_of_shuffled_outcomes_nothing_is_learned() -> None:
    data = two_decisions()
    shuffled = data.with_shuffled_outcomes(3)
    assert shuffled.success.sum() == data.success.sum() and (shuffled.success != data.success).any()
    figures = fit_critic(shuffled, CONFIG, seed=1).judge().figures(shuffled, 0.9)
    assert figures["critic/auc"] == pytest.approx(0.5, abs=0.08)


def test_shuffling_keeps_each_tasks_successes() -> None:
    data = two_decisions(40)
    task = np.arange(40) % 4
    data = Transitions(**{**vars(data), "task": task})
    shuffled = data.with_shuffled_outcomes(0)
    for number in range(4):
        assert shuffled.success[task == number].sum() == data.success[task == number].sum()


def test_weights_are_the_exponential_of_the_advantage_and_capped() -> None:
    data = two_decisions(3)
    v = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], np.float32)
    judged = Judged(q=v + 0.1, spread=np.zeros(6, np.float32), v=v)
    config = AdvantageWeightedConfig(temperature=0.5, critic=CriticConfig(discount=0.9))
    outcome = np.where(data.success[data.episode], 0.9 ** np.array([4, 2, 4, 2, 4, 2]), 0)
    expected = np.minimum(np.exp((outcome - v) / 0.5), 20)
    np.testing.assert_allclose(advantage_weights(config, data, judged), expected, rtol=1e-5)
    by_critic = advantage_weights(config.model_copy(update={"advantage": "critic"}), data, judged)
    np.testing.assert_allclose(by_critic, np.exp(0.2), rtol=1e-5)
    capped = advantage_weights(config.model_copy(update={"temperature": 0.01}), data, judged)
    np.testing.assert_allclose(capped, np.minimum(np.exp(np.minimum((outcome - v) / 0.01, 10)), 20.0), rtol=1e-4)


def test_episodes_that_all_ended_alike_are_refused() -> None:
    data = two_decisions(8)
    for outcome, word in ((True, "succeeded"), (False, "failed")):
        alike = Transitions(**{**vars(data), "success": np.full(8, outcome)})
        with pytest.raises(ValueError, match=f"all 8 logged episodes {word}"):
            alike.check_outcomes_differ()
    with pytest.raises(ValueError, match=r"4 initial states; 5 folds need"):
        data.folds(5, 0)


def test_episodes_without_a_decision_to_learn_from_count_nowhere() -> None:
    """Of a dataset opened with only_successes or episodes_per_task; every 3rd episode's decisions are left."""
    data = two_decisions(60)
    rows = np.flatnonzero(data.episode % 3 == 0)
    columns = ("embedding", "chunk", "num_steps", "elapsed", "remaining", "episode")
    part = replace(data, following=np.full(len(rows), -1), **{name: getattr(data, name)[rows] for name in columns})
    shuffled, learned = part.with_shuffled_outcomes(1), np.arange(0, 60, 3)
    assert shuffled.success[learned].sum() == data.success[learned].sum()
    others = np.delete(np.arange(60), learned)
    np.testing.assert_array_equal(shuffled.success[others], data.success[others])
    with pytest.raises(ValueError, match="episodes of 20 initial states; 21 folds"):
        replace(part, initial_state=np.arange(60)).folds(21, 0)
    assert (np.bincount(part.folds(5, 0)) > 0).all()
    alike = replace(part, success=np.arange(60) % 3 == 0)
    with pytest.raises(ValueError, match=r"all 20 logged episodes succeeded.*only_successes=false"):
        alike.check_outcomes_differ()
