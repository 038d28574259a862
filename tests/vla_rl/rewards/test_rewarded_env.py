"""Episodes paid by a reward: who ends them, what they are paid, the truth beside it, and who evaluates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checks import check_vec_env
from planted_reward import GripReward  # A recipe names its config.
from reach_policy import ReachPolicy
from tiny_run import make_recipe, metrics, save_policy

from sim.dummy import DummyConfig
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.config import ConfigError
from vla_rl.evaluation.results import Evaluation
from vla_rl.rewards.env import NEVER, RewardedEnv
from vla_rl.rollout.runner import collect
from vla_rl.rollout.success import TRUE_SUCCESS, reward_metrics
from vla_rl.training.train import train
from vla_rl.types import Episode, EpisodeSpec

TOLD = {"kind": "simulator"}
FOOLED = {"kind": "planted_reward:GripRewardConfig"}
SPECS = [EpisodeSpec("reach_red", "train", i) for i in range(12)]


def env(reward: dict | None, **options) -> DummyConfig:
    return DummyConfig(num_envs=4, horizon=11, reward=reward, **options)


def run(reward: dict | None, policy: ReachPolicy | None = None, **options) -> list[Episode]:
    built = env(reward, **options).build()
    try:
        return collect(policy or ReachPolicy(speed=0.45), built, SPECS, temperature=0.0)
    finally:
        built.close()


class Gripping(ReachPolicy):
    """Goes nowhere, and closes the gripper in its second chunk."""

    def act(self, obs, generator=None, temperature=1.0):
        chunk = super().act(obs, generator, temperature)
        chunk.actions[:, :, :2] = 0
        chunk.actions[:, :, 6] = 1.0
        return chunk


@pytest.mark.parametrize("num_workers", [0, 1])
def test_it_keeps_the_contract_of_an_environment(num_workers: int) -> None:
    config = DummyConfig(reward=TOLD, num_workers=num_workers)
    check_vec_env(lambda num_envs, record_frames=False: config.build(num_envs, record_frames))


def test_told_by_the_simulator_the_same_episodes_succeed_and_end_where_a_chunk_does() -> None:
    plain, judged = run(None), run(TOLD)
    assert [e.success for e in judged] == [e.success for e in plain]
    assert {e.success for e in plain} == {True, False}
    for before, after in zip(plain, judged, strict=True):
        assert after.total_reward == float(after.success)
        assert after.length == (before.num_chunks * 4 if before.length < 8 and before.success else after.length)
        assert after.num_chunks == before.num_chunks
        paid = np.argwhere(after.reward)
        if after.success:  # At the last executed step of the last chunk.
            assert paid.tolist() == [[after.num_chunks - 1, int(after.num_steps[-1]) - 1]]
            np.testing.assert_array_equal(after.terminated, after.reward > 0)
            assert not after.truncated.any()
        assert bool(after.info[TRUE_SUCCESS][-1]) == before.success


def test_a_reward_that_is_fooled_ends_the_episode_and_the_truth_is_kept() -> None:
    episodes = run(FOOLED, Gripping())
    assert all(e.success and e.num_chunks == 1 for e in episodes)
    truth = [bool(e.info[TRUE_SUCCESS][-1]) for e in episodes]
    assert not all(truth)
    found = reward_metrics(episodes)
    assert found["train/success_by_simulator"] == np.mean(truth)
    assert found["reward/false_success"] == 1.0
    assert reward_metrics(run(None)) == {}


def test_a_success_that_is_not_seen_does_not_end_the_episode() -> None:
    episodes = run(FOOLED, ReachPolicy())
    truth = np.array([bool(e.info[TRUE_SUCCESS][-1]) for e in episodes])
    assert truth.all() and not any(e.success for e in episodes)
    assert all(e.length == 11 and e.truncated.any() for e in episodes)
    assert reward_metrics(episodes)["reward/missed_success"] == 1.0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_is_asked_as_often_as_it_was_fitted_to_be(size: int) -> None:
    """However many actions are executed at a time; and where the episode ends, of 11 steps here."""
    reward = GripReward(every=4)
    built = RewardedEnv(env(None, steps_after_success=NEVER).build(), reward)
    built.reset([EpisodeSpec("reach_red", "train", i) for i in range(3)], [0, 1, 2])
    actions, asked, said = np.zeros((2, size, 7), np.float32), [], []
    for step in range(0, 11, size):
        actions[:, :, 6] = 1.0 if step >= 4 else -1.0  # The gripper closes at step 4.
        result = built.step(actions, [0, 2])
        asked.append(reward.asked[2])
        said.append((bool(result.success[1]), bool(result.done[1]), float(result.info["reward_probability"][1])))
    built.close()
    ends = [min(step + size, 11) for step in range(0, 11, size)]
    assert asked == [end // 4 + (end == 11) for end in ends] and reward.asked[1] == 0
    for end, (success, done, probability) in zip(ends, said, strict=True):
        assert success == done == (end in (8, 11)), "an episode that counts ends; between judgements none does"
        assert probability == float(end >= 8), "what was said last"


def test_an_interval_that_it_was_not_fitted_for_is_refused() -> None:
    built = RewardedEnv(env(None).build(), GripReward(every=4))
    built.reset(SPECS[:4])
    with pytest.raises(ValueError, match=r"every 4 control steps.*got 3 actions at a time.*reward\.every=3"):
        built.step(np.zeros((4, 3, 7), np.float32))
    with pytest.raises(ValueError, match="got 8 actions"):
        built.step(np.zeros((4, 8, 7), np.float32))
    built.close()


def test_policies_are_evaluated_by_the_simulator(tmp_path: Path) -> None:
    """RL is paid by a reward that is fooled; its evaluation is that of the same policy without it, to the number."""
    policy = save_policy(tmp_path / "policy")
    overrides = ["train.iterations=1", "train.evaluate=after", "eval.temperatures=[0.0, 1.0]"]
    results = {}
    for name, more in (("plain", []), ("fooled", ["env.reward={kind: 'planted_reward:GripRewardConfig'}"])):
        recipe = make_recipe(policy, *overrides, *more, "algo.optim.lr=1e-12")
        folder = open_run(recipe, tmp_path / name, resume=False)
        train(recipe, folder)
        results[name] = Evaluation.load(RunFolder(folder).evaluation("final"))
    for label in ("greedy", "sampled"):
        assert results["fooled"].rate(label).rate == results["plain"].rate(label).rate
    row = metrics(tmp_path / "fooled")[0]
    assert row["train/success"] > row["train/success_by_simulator"] and row["reward/false_success"] > 0
    assert "env/true_success" not in row
    assert "train/success_by_simulator" not in metrics(tmp_path / "plain")[0]


def test_nobody_evaluates_by_the_reward(tmp_path: Path) -> None:
    config = env(FOOLED)
    assert config.exact().reward is None and env(None).exact() == env(None)
    assert isinstance(config.build(), RewardedEnv)
    with pytest.raises(ConfigError, match=r"eval\.approximate: got true with env\.reward"):
        make_recipe(tmp_path, "env.reward={kind: simulator}", "eval.approximate=true")


def test_a_reward_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no env\.reward section"):
        env({"kind": "sim.dummy:DummyConfig"})
    with pytest.raises(ValueError, match=r"allowed: learned, simulator.*Did you mean 'simulator'"):
        env({"kind": "simulater"})
