"""Rollouts: order, groups, who plays next, determinism, lost episodes, recorded frames; and where the time goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from reach_policy import ReachPolicy

from sim.dummy import DummyConfig
from vla_rl.common import progress
from vla_rl.common.progress import Stopwatch
from vla_rl.common.row_noise import by_row
from vla_rl.rollout.runner import collect, derived_seed, run_episodes
from vla_rl.types import ActionChunk, EpisodeSpec

ENV = DummyConfig(num_envs=3, tasks=("reach_red",))
SLOW = {"speed": 0.3}


def specs(num: int) -> list[EpisodeSpec]:
    return [EpisodeSpec("reach_red", "train", i) for i in range(num)]


def actions(episodes) -> list[list]:
    return [e.chunks.actions.tolist() for e in episodes]


class SpyEnv:
    """Notes which environments are reset, stepped and ended, in order."""

    def __init__(self, env) -> None:
        self.env, self.num_envs, self.spec = env, env.num_envs, env.spec
        self.calls: list[tuple[str, list]] = []

    def reset(self, specs, env_ids=None):
        self.calls.append(("reset", [(env_id, spec.index) for env_id, spec in zip(env_ids, specs, strict=True)]))
        return self.env.reset(specs, env_ids)

    def step(self, actions, env_ids=None):
        result = self.env.step(actions, env_ids)
        self.calls.append(("step", list(env_ids)))
        self.calls.append(("end", [i for i, done in zip(env_ids, result.done, strict=True) if done]))
        return result


def test_episodes_come_in_the_order_of_the_specs_each_as_if_run_alone():
    policy = ReachPolicy(**SLOW)
    episodes = collect(policy, ENV.build(), specs(7), temperature=0, groups=[0, 0, 1, 1, 2, 2, 5])
    assert [e.spec for e in episodes] == specs(7)
    assert [e.group for e in episodes] == [0, 0, 1, 1, 2, 2, 5]
    assert len({e.num_chunks for e in episodes}) > 1, "episodes of one length would not test the order"
    for episode in episodes:
        (alone,) = collect(policy, ENV.build(num_envs=1), [episode.spec], temperature=0)
        assert alone.group == 0
        for name in ("reward", "terminated", "truncated", "num_steps"):
            np.testing.assert_array_equal(getattr(episode, name), getattr(alone, name), err_msg=name)
        np.testing.assert_array_equal(episode.obs.images["agentview"], alone.obs.images["agentview"])
        np.testing.assert_array_equal(episode.final_obs.state, alone.final_obs.state)


def test_an_episode_holds_one_entry_per_decision():
    episodes = collect(ReachPolicy(speed=0.1), ENV.build(), specs(6), temperature=0)
    assert {e.success for e in episodes} == {True, False}
    for episode in episodes:
        num_chunks = episode.num_chunks
        assert episode.obs.batch_size == num_chunks and episode.final_obs.batch_size == 1
        assert episode.chunks.actions.shape == (num_chunks, 4, 7)
        assert episode.reward.shape == episode.terminated.shape == episode.truncated.shape == (num_chunks, 4)
        assert episode.success == episode.terminated.any() == (episode.total_reward == 1.0)
        assert episode.success != episode.truncated.any()
        assert episode.length == int(episode.num_steps.sum()) <= 16
        assert episode.frames is None and episode.states is None and not episode.lost


def test_an_environment_that_ends_takes_the_next_spec_and_then_rests():
    policy, env = ReachPolicy(**SLOW), SpyEnv(ENV.build())
    episodes = collect(policy, env, specs(6), temperature=0)
    assert env.calls[0] == ("reset", [(0, 0), (1, 1), (2, 2)])
    free, waiting, running = [], [3, 4, 5], {0, 1, 2}
    for kind, what in env.calls[1:]:
        if kind == "step":
            assert not (free and waiting), "an environment was left idle while specs waited"
            assert what == sorted(running)
        elif kind == "end":
            free = what
            running -= set(what)
        else:
            assert what == list(zip(free[: len(what)], waiting[: len(what)], strict=True))
            waiting, free = waiting[len(what) :], []
            running |= {env_id for env_id, _ in what}
    assert not waiting and not running
    assert policy.num_decisions == sum(e.num_chunks for e in episodes), "inference for environments at rest"


def test_fewer_specs_than_environments_and_none():
    assert len(collect(ReachPolicy(), ENV.build(), specs(2))) == 2
    assert collect(ReachPolicy(), ENV.build(), []) == []


def test_the_seed_decides_and_greedy_does_not_care():
    policy = ReachPolicy(speed=0.3, noise=0.5)

    def run(seed: int, temperature: float) -> list[list]:
        return actions(collect(policy, ENV.build(), specs(5), seed=seed, temperature=temperature))

    assert run(0, 1.0) == run(0, 1.0) != run(1, 1.0)
    assert run(0, 0.0) == run(1, 0.0) != run(0, 1.0)


class OwnNoise(ReachPolicy):
    """Each episode's actions are noise from its own generator."""

    def act(self, obs, generator=None, temperature=1.0):
        def draw(shape, own):
            return torch.randn(shape, generator=own)

        return ActionChunk(0.1 * by_row(draw, (obs.batch_size, 4, 7), generator).numpy())


def test_an_episode_with_a_seed_of_its_own_is_the_same_whatever_others_run():
    policy, seeds = OwnNoise(), [7, 8, 9, 10, 11]
    together = collect(policy, ENV.build(), specs(5), seed=seeds)
    alone = [collect(policy, ENV.build(num_envs=1), [s], seed=[n])[0] for s, n in zip(specs(5), seeds, strict=True)]
    assert actions(together) == actions(alone)


class BreakingOnce(SpyEnv):
    """Loses all episodes of the first step."""

    def step(self, actions, env_ids=None):
        is_first = len(self.calls) == 1
        result = super().step(actions, env_ids)
        return replace(result, lost=np.ones(len(result.lost), bool)) if is_first else result


def test_what_broke_is_run_again_with_the_episodes_own_seeds_or_else_other_noise():
    def run(seed):
        return run_episodes(OwnNoise(), BreakingOnce(ENV.build()), specs(4), temperature=1.0, seed=seed)

    episodes, num_retried = run([7, 8, 9, 10])
    assert num_retried == 3 and [e.group for e in episodes] == [0, 1, 2, 3] and not any(e.lost for e in episodes)
    assert actions(episodes) == actions(collect(OwnNoise(), ENV.build(), specs(4), seed=[7, 8, 9, 10]))
    episodes, num_retried = run(7)
    again = collect(OwnNoise(), ENV.build(), specs(3), seed=derived_seed(7, 1))
    assert num_retried == 3 and actions(episodes[:3]) == actions(again)


class TellingEnv(SpyEnv):
    """Tells how far each chunk moves."""

    def step(self, actions, env_ids=None):
        return replace(super().step(actions, env_ids), info={"moved": actions[:, :, 0].sum(1)})


def test_what_an_environment_tells_of_a_decision_stays_with_its_episode():
    for episode in collect(ReachPolicy(**SLOW), TellingEnv(ENV.build()), specs(4), temperature=0):
        np.testing.assert_array_equal(episode.info["moved"], episode.chunks.actions[:, :, 0].sum(1))


def test_a_broken_episode_is_marked_and_the_others_are_not():
    config = DummyConfig(num_envs=1, num_workers=1, tasks=("reach_red",), fault="die", fault_index=1)
    env = config.build(record_frames=True)
    try:
        first, lost, last = collect(ReachPolicy(), env, specs(3), temperature=0)
    finally:
        env.close()
    assert (first.lost, lost.lost, last.lost) == (False, True, False)
    assert first.success and last.success and not lost.success
    assert lost.frames is None and lost.length == 0 and lost.num_chunks == 1
    assert first.frames is not None


def test_recorded_frames_follow_the_episode():
    episodes = collect(ReachPolicy(**SLOW), ENV.build(record_frames=True), specs(4), temperature=0)
    for episode in episodes:
        assert episode.frames is not None and episode.states is not None
        frames = episode.frames["agentview"]
        assert frames.shape == (episode.length, 32, 32, 3) and frames.dtype == np.uint8
        assert episode.states.shape == (episode.length, 8)
        np.testing.assert_array_equal(frames[-1], episode.final_obs.images["agentview"][0])
        ends = np.cumsum(episode.num_steps)[:-1] - 1  # The frame before each later decision is what it saw.
        np.testing.assert_array_equal(frames[ends], episode.obs.images["agentview"][1:])
        np.testing.assert_array_equal(episode.states[ends], episode.obs.state[1:])


def test_progress_and_time_are_reported():
    seen, watch = [], Stopwatch()
    episodes = collect(ReachPolicy(**SLOW), ENV.build(), specs(5), stopwatch=watch, on_episode=seen.append)
    assert sorted(e.spec.index for e in seen) == [0, 1, 2, 3, 4] and set(map(id, seen)) == set(map(id, episodes))
    report = watch.report()
    assert report.keys() == {"simulation", "inference", "other", "total"} and min(report.values()) > 0


def test_stopwatch_by_hand(monkeypatch):
    clock = iter([100.0, 101.0, 103.0, 104.0, 104.5, 110.0, 112.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    watch = Stopwatch()
    with watch.measure("simulation"):
        pass
    with watch.measure("inference"):
        pass
    assert watch.report() == {"simulation": 2.0, "inference": 0.5, "other": 7.5, "total": 10.0}
    assert watch.report() == {"other": 2.0, "total": 2.0}
