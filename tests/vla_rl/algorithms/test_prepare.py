"""From episodes to batches: masks, lost episodes, groups, bootstrapping, controls."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from toy_problem import ToyPolicy, make_episode, roll_out

from vla_rl.algorithms.batch import gather_observations, valid_actions
from vla_rl.algorithms.grpo import GRPOConfig, RLOOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.reinforce_pp import ReinforcePPConfig
from vla_rl.methods.algo.mc_grpo import MCGRPOConfig
from vla_rl.rollout.success import rollout_metrics

WON = [[0, 0], [1, 0]]
NOT_WON = [[0, 0], [0, 0]]


def won(group: int, seed: int = 0, **more):
    """Succeeds at its third of four actions."""
    return make_episode(WON, [2, 1], group=group, seed=seed, **more)


def failed(group: int, seed: int = 0, **more):
    return make_episode(NOT_WON, [2, 2], truncated=True, group=group, seed=seed, **more)


def test_mask_after_success():
    np.testing.assert_array_equal(valid_actions(won(0)), [[True, True], [True, False]])
    np.testing.assert_array_equal(valid_actions(failed(0)), np.ones((2, 2), bool))


def test_mask_when_the_environment_goes_on_after_success():
    episode = make_episode([[0, 1], [0, 1], [0, 0]], [2, 2, 2])
    np.testing.assert_array_equal(valid_actions(episode), [[True, True], [False, False], [False, False]])


def test_gather_observations_takes_the_final_one_at_k():
    episodes = [won(0, seed=1), failed(0, seed=2)]
    obs = gather_observations(episodes, np.array([1, 0, 0]), np.array([2, 1, 2]))
    expected = [episodes[1].final_obs.state[0], episodes[0].obs.state[1], episodes[0].final_obs.state[0]]
    np.testing.assert_array_equal(obs.state, expected)


def test_gather_observations_takes_prepared_inputs_where_all_rows_have_them():
    prepared = [won(0, seed=1), failed(0, seed=2)]
    for episode in prepared:
        episode.inputs = replace(episode.obs, state=-episode.obs.state, is_prepared=True)
    raw = replace(prepared[1], inputs=None)
    rows = np.array([0, 1]), np.array([1, 0])
    obs = gather_observations(prepared, *rows)
    assert obs.is_prepared and obs.instruction == [prepared[0].obs.instruction[1], prepared[1].obs.instruction[0]]
    np.testing.assert_array_equal(obs.state, [-prepared[0].obs.state[1], -prepared[1].obs.state[0]])
    for episodes, chunk in (([prepared[0], raw], rows[1]), (prepared, np.array([1, 2]))):
        obs = gather_observations(episodes, rows[0], chunk)
        last = episodes[1].obs.state[0] if chunk[1] == 0 else episodes[1].final_obs.state[0]
        assert not obs.is_prepared
        np.testing.assert_array_equal(obs.state, [prepared[0].obs.state[1], last])


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig, MCGRPOConfig])
def test_groups_that_lost_all_but_one_episode_teach_nothing_and_end_no_run(config):
    """They were said to be of one."""
    learner = config().build(ToyPolicy())
    batch = learner.prepare([won(0, 1), failed(0, 2, lost=True), failed(1, 3), failed(1, 4, lost=True)])
    assert batch.size == 0
    assert learner.update(batch)["update/num_steps"] == 0 and learner.iteration == 1


def test_group_batch_by_hand():
    # Group 0: +-1/2 without normalization. Group 1 is all the same, group 2's failure was lost: both left out.
    episodes = [won(0, 1), failed(0, 2), failed(1, 3), failed(1, 4), won(2, 5), failed(2, 6, lost=True)]
    learner = GRPOConfig(normalize_std=False).build(ToyPolicy())
    batch = learner.prepare(episodes)
    np.testing.assert_array_equal(batch.episode, [0, 0, 1, 1])
    np.testing.assert_array_equal(batch.chunk, [0, 1, 0, 1])
    np.testing.assert_allclose(batch.advantage, [[0.5, 0.5], [0.5, 0], [-0.5, -0.5], [-0.5, -0.5]])
    np.testing.assert_array_equal(batch.observations(np.array([3])).state[0], episodes[1].obs.state[1])
    metrics = rollout_metrics(episodes)
    assert metrics["rollout/success_rate"] == pytest.approx(2 / 5)
    assert metrics["rollout/num_lost"] == 1
    assert metrics["rollout/informative_groups"] == pytest.approx(1 / 3)


def test_without_the_filter_every_group_counts():
    episodes = [won(0, 1), failed(0, 2), failed(1, 3), failed(1, 4)]
    batch = RLOOConfig(filter_groups=False).build(ToyPolicy()).prepare(episodes)
    assert batch.size == 8
    np.testing.assert_array_equal(batch.active, [True] * 4 + [False] * 4)


def test_mc_grpo_leaves_out_the_pivot_only():
    episodes = [won(0, 1), failed(0, 2), failed(0, 3), *(failed(1, s) for s in (4, 5, 6))]
    batch = MCGRPOConfig().build(ToyPolicy()).prepare(episodes)
    assert len(np.unique(batch.episode)) == 2
    assert batch.episode[0] == 0
    np.testing.assert_array_equal(batch.active, [True, True, False, False])
    assert MCGRPOConfig().rollouts_per_group(8) == 9


def test_reinforce_pp_batch_by_hand():
    # Three actions with reward 1 and twice four with 0: mean 3/11, variance (3 (8/11)^2 + 8 (3/11)^2) / 10 = 24/110.
    episodes = [won(0, 1), failed(1, 2), failed(2, 3), won(3, 4, lost=True)]
    batch = ReinforcePPConfig().build(ToyPolicy()).prepare(episodes)
    high, low = 8 / 11 / np.sqrt(24 / 110), -3 / 11 / np.sqrt(24 / 110)
    expected = [[high, high], [high, 0], *[[low, low]] * 4]
    np.testing.assert_allclose(batch.advantage, expected, rtol=1e-5)
    assert batch.advantage[batch.valid].mean() == pytest.approx(0, abs=1e-6)
    assert batch.old_value is None


def test_old_log_prob_is_the_trainers_and_equals_the_rollouts(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "skips_zero_advantage", False)
    policy = ToyPolicy()
    episodes = roll_out(policy, 6, 4, seed=0, temperature=1.3)
    batch = GRPOConfig().build(policy, temperature=1.3).prepare(episodes)
    assert batch.size > 0
    assert batch.chunks.log_prob is not None
    np.testing.assert_allclose(batch.old_log_prob, batch.chunks.log_prob, atol=1e-6)
    assert batch.metrics["rollout/log_prob_gap"] < 1e-6
    other = GRPOConfig().build(policy, temperature=1.0).prepare(episodes)
    assert other.metrics["rollout/log_prob_gap"] > 0.01  # The gap shows a wrong temperature.


def test_ppo_bootstraps_truncated_but_not_terminated():
    policy = ToyPolicy(critic=True)
    episodes = [won(0, seed=1), failed(1, seed=2)]
    config = PPOConfig(gamma=0.9, gae_lambda=1.0, normalize_std=False)
    batch = config.build(policy).prepare(episodes)
    final = policy.evaluate(episodes[1].final_obs, episodes[1].chunks.select([-1])).value
    assert final is not None
    last = 0.9 * final.item()
    np.testing.assert_allclose(batch.returns, [0.9, 1.0, 0.9 * last, last], rtol=1e-5)
    assert batch.old_value is not None and batch.returns is not None
    difference = batch.returns - batch.old_value
    np.testing.assert_allclose(batch.advantage[:, 0], difference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(batch.advantage[1], [difference[1], 0], rtol=1e-4, atol=1e-6)
    ended = config.model_copy(update={"bootstrap_truncated": False}).build(policy).prepare(episodes)
    np.testing.assert_allclose(ended.returns, [0.9, 1.0, 0.0, 0.0], rtol=1e-5, atol=1e-7)


def test_ppo_whitens_over_actions_that_count():
    policy = ToyPolicy(critic=True)
    batch = PPOConfig(advantage_level="action").build(policy).prepare(roll_out(policy, 8, 2, seed=0))
    counted = batch.advantage[batch.valid]
    assert abs(counted.mean()) < 1e-6
    assert counted.std(ddof=1) == pytest.approx(1.0, abs=1e-4)
    assert (batch.advantage[~batch.valid] == 0).all()


@pytest.mark.parametrize("config", [GRPOConfig(), MCGRPOConfig(), RLOOConfig()])
def test_shuffled_control_permutes_over_all_episodes(config):
    policy = ToyPolicy()
    episodes = roll_out(policy, 16, 5, seed=0)
    true = config.build(policy).prepare(episodes)
    shuffled = config.build(policy, control="shuffled_rewards").prepare(episodes)

    def by_episode(batch):
        return [batch.advantage[batch.episode == i][0, 0] for i in np.unique(batch.episode)]

    def successes(batch):
        return [batch.episodes[i].success for i in np.unique(batch.episode)]

    assert sorted(by_episode(true)) == sorted(by_episode(shuffled))
    correlation = np.corrcoef(successes(shuffled), by_episode(shuffled))[0, 1]
    assert abs(correlation) < 0.5 < np.corrcoef(successes(true), by_episode(true))[0, 1]
    assert set(shuffled.episode) != set(true.episode)


def test_shuffled_control_of_reinforce_pp_deals_the_rewards_before_they_are_normalized():
    policy = ToyPolicy()
    episodes = roll_out(policy, 40, 1, seed=0)
    batch = ReinforcePPConfig().build(policy, control="shuffled_rewards").prepare(episodes)
    advantage = np.array([batch.advantage[batch.episode == i][0, 0] for i in range(len(episodes))])
    success = np.array([e.success for e in episodes])
    assert (advantage > 0).sum() == success.sum()
    assert not np.array_equal(advantage > 0, success)
    assert batch.advantage[batch.valid].mean() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_shuffled_control_of_ppo_keeps_the_multiset_and_the_critics_targets(level):
    policy, config = ToyPolicy(critic=True), PPOConfig(advantage_level=level, normalize_std=False)
    episodes = roll_out(policy, 24, 1, seed=0)
    true = config.build(policy).prepare(episodes)
    shuffled = config.build(policy, control="shuffled_rewards").prepare(episodes)
    assert (~true.valid).any(), "some chunks are cut short"

    def dealt(batch):
        return batch.advantage[:, 0] if level == "chunk" else batch.advantage[batch.valid]

    np.testing.assert_allclose(np.sort(dealt(true)), np.sort(dealt(shuffled)))
    assert not np.array_equal(true.advantage, shuffled.advantage)
    np.testing.assert_array_equal(true.returns, shuffled.returns)


def test_shuffled_control_of_ppo_deals_an_advantage_to_a_whole_chunk():
    policy = ToyPolicy(critic=True)
    learner = PPOConfig().build(policy, control="shuffled_rewards")
    batch = learner.prepare(roll_out(policy, 24, 1, seed=0))
    np.testing.assert_array_equal(batch.advantage, np.where(batch.valid, batch.advantage[:, :1], 0))
    assert abs(batch.advantage[batch.valid].mean()) < 1e-6, "whitened over the actions that count, as without control"


def test_nothing_informative_gives_an_empty_batch_and_no_step():
    policy = ToyPolicy()
    learner = GRPOConfig(kl_coef=0.1).build(policy)
    batch = learner.prepare([failed(0, 1), failed(0, 2)])
    assert batch.size == learner.num_steps(batch) == 0
    metrics = learner.update(batch)
    assert metrics["update/num_steps"] == 0
    assert learner.iteration == 1


def test_errors_say_what_to_do():
    policy = ToyPolicy()
    with pytest.raises(ValueError, match=r"each of the 2 groups has one\. Set the rollout's group size"):
        GRPOConfig().build(policy).prepare([won(0), failed(1)])
    with pytest.raises(ValueError, match="all 1 of the rollout were lost"):
        GRPOConfig().build(policy).prepare([won(0, lost=True)])
    with pytest.raises(ValueError, match="Set the rollout's group size to at least 2"):
        RLOOConfig().build(policy).prepare([won(0), failed(1)])
    with pytest.raises(ValueError, match="no trainable 'value_head' parameters"):
        PPOConfig().build(policy)
    with pytest.raises(ValueError, match="temperature: got 0"):
        GRPOConfig().build(policy, temperature=0)
