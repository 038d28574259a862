"""The episode runner: who runs which spec, specs that wait, stops, lost episodes, and the policy's mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from reach_policy import ReachPolicy

from sim.dummy import DummyConfig
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.options import LoraOptions
from vla_rl.rollout.runner import EpisodeRunner, RunningEpisode, collect, evaluation_mode
from vla_rl.types import EpisodeSpec, Observation

TASK = "reach_red"
ENV = DummyConfig(num_envs=2, tasks=(TASK,), horizon=4)


@dataclass
class Idle:
    actions: np.ndarray

    @classmethod
    def act(cls, episodes: list[RunningEpisode]) -> Idle:
        return cls(np.zeros((len(episodes), 2, 7), np.float32))


def specs(num: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(TASK, "train", i) for i in range(num)]


def test_specs_are_asked_for_again_when_an_episode_ends():
    first, second, third, never = specs(4)
    waiting = iter([first, None, second, third, None, None, never])
    ended, started = [], []

    def on_step(episode, row, acted, result):
        assert acted.actions.shape == (len(acted.actions), 2, 7) and result.reward.shape == (1, 2)
        if result.done[0]:
            ended.append((episode.spec.index, episode.env_id, episode.num_chunks))

    def on_start(episode):
        started.append((episode.spec.index, episode.env_id, episode.number, list(ended)))

    EpisodeRunner(ENV.build(), waiting, Idle.act, on_step, policy=None, on_start=on_start).run()
    # Nothing is needed beside the first, then two at once, then nothing: all have ended, so nobody asks again.
    assert started == [(0, 0, 0, []), (1, 0, 2, [(0, 0, 1)]), (2, 1, 3, [(0, 0, 1)])]
    assert ended == [(0, 0, 1), (1, 0, 1), (2, 1, 1)] and list(waiting) == [None, never]


def test_a_stopped_episode_ends_without_a_step_and_frees_its_environment():
    stepped, started = [], []

    def before_step(episodes):
        for episode in episodes:
            episode.ended = episode.spec.index in (0, 1, 3)

    EpisodeRunner(
        ENV.build(),
        specs(5),
        Idle.act,
        lambda episode, row, acted, result: stepped.append((episode.spec.index, row)),
        policy=None,
        on_start=lambda episode: started.append((episode.spec.index, episode.env_id)),
        before_step=before_step,
    ).run()
    assert started == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 1)]
    assert stepped == [(2, 0), (2, 0), (4, 1), (4, 0)]


@pytest.mark.parametrize(("max_attempts", "attempts"), [(1, [1]), (3, [1, 2, 3])])
def test_a_lost_episode_is_run_again_before_any_other(max_attempts, attempts):
    config = DummyConfig(num_envs=1, num_workers=1, tasks=(TASK,), horizon=4, fault="die", fault_index=1, fault_step=3)
    ended = []

    def on_step(episode, row, acted, result):
        if result.done[0]:
            ended.append((episode.spec.index, episode.number, episode.attempt, bool(result.lost[0])))

    env = config.build()
    try:
        EpisodeRunner(env, specs(3), Idle.act, on_step, policy=None, max_attempts=max_attempts).run()
    finally:
        env.close()
    lost = [(1, 1, attempt, True) for attempt in attempts]
    assert ended == [(0, 0, 1, False), *lost, (2, 2, 1, False)]


class GivingEnv:
    """An environment that keeps what it gave."""

    def __init__(self, config):
        self.env = config.build()
        self.spec, self.num_envs, self.given = self.env.spec, self.env.num_envs, []

    def reset(self, specs, env_ids=None):
        self.given.append(self.env.reset(specs, env_ids))
        return self.given[-1]

    def step(self, actions, env_ids=None):
        result = self.env.step(actions, env_ids)
        self.given.append(result.obs)
        return result


class SeeingPolicy(ReachPolicy):
    """A policy that keeps what it saw; too slow to solve anything."""

    def __init__(self):
        super().__init__(speed=0.01)
        self.seen: list[Observation] = []

    def act(self, obs, generator=None, temperature=1.0):
        self.seen.append(obs)
        return super().act(obs, generator, temperature)


def test_observations_are_copied_once_when_their_episode_ends():
    env = GivingEnv(ENV.model_copy(update={"horizon": 12}))
    policy = SeeingPolicy()  # type: ignore[abstract]
    episodes = collect(policy, env, specs(3), temperature=0)  # type: ignore[arg-type]
    copied = [obs for obs in policy.seen if not any(obs is given for given in env.given)]
    assert not copied and len(policy.seen) == 2 * 3, "two run side by side, then one alone"
    for episode in episodes:
        for image in (episode.obs.images["agentview"], episode.final_obs.images["agentview"]):
            assert image.base is None, "an episode keeps its own rows alone, not those of all environments"


def test_every_module_is_put_back_in_its_own_mode():
    network = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    network[1].eval()
    with evaluation_mode(network):  # type: ignore[arg-type]
        assert not any(module.training for module in network.modules())
    assert network.training and network[0].training and not network[1].training
    with pytest.raises(KeyError), evaluation_mode(network):  # type: ignore[arg-type]
        raise KeyError
    assert network[0].training
    with evaluation_mode(None), evaluation_mode(ReachPolicy()):  # type: ignore[arg-type]
        pass


@pytest.fixture(scope="module")
def dropping_out():
    """A fresh OpenVLA policy with dropout and trained adapters, as it is built; its environment; 4 specs."""
    env = DummyConfig(num_envs=4, tasks=(TASK,), horizon=4).build()
    config = OpenVLAConfig(
        image_size=32,
        action_bins=5,
        chunk_size=2,
        precision="fp32",
        lora=LoraOptions(rank=4, dropout=0.5),
        trainable="lora",
    )
    policy = config.build(env.spec)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert policy.training
    yield policy, env, specs(4)
    env.close()


def test_dropout_does_not_part_the_rollout_from_the_trainer(dropping_out):
    policy, env, wanted = dropping_out
    episodes = collect(policy, env, wanted, groups=[0, 0, 1, 1])
    assert policy.training, "its mode is put back"
    for number, episode in enumerate(episodes):  # Outcomes are made up, so that every group has both.
        episode.success = number % 2 == 0
        episode.reward[-1, 0] = float(episode.success)
    batch = GRPOConfig().build(policy, temperature=1.0).prepare(episodes)
    assert batch.metrics["rollout/log_prob_gap"] < 1e-4
    assert batch.chunks.log_prob is not None
    np.testing.assert_allclose(batch.old_log_prob, batch.chunks.log_prob, atol=2e-4)
    policy.train()


def test_a_resumed_run_rolls_out_as_the_run_that_went_on(dropping_out, tmp_path):
    policy, env, wanted = dropping_out
    policy.eval()  # As after an update.
    on = collect(policy, env, wanted)
    policy.save(tmp_path / "policy")
    policy.train()
    resumed = collect(load_policy(tmp_path / "policy"), env, wanted)  # type: ignore[arg-type]
    for first, second in zip(on, resumed, strict=True):
        assert first.chunks.log_prob is not None and second.chunks.log_prob is not None
        np.testing.assert_array_equal(first.chunks.actions, second.chunks.actions)
        np.testing.assert_allclose(first.chunks.log_prob, second.chunks.log_prob, atol=1e-5)
