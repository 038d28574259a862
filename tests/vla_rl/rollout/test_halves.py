"""Rollouts in two halves: the same episodes as in lockstep, both halves under way at once, and what breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from reach_policy import ReachPolicy

from sim.dummy import DummyConfig
from sim.vector.processes import ProcessVecEnv
from vla_rl.interfaces import VecEnv
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.runner import HalvesRunner, collect, run_episodes
from vla_rl.rollout.source import LaterEnv
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation

TASK = "reach_red"
ENV = DummyConfig(num_envs=4, num_workers=2, tasks=(TASK,), horizon=12, in_halves=True)


def specs(num: int) -> list[EpisodeSpec]:
    return [EpisodeSpec(TASK, "train", i) for i in range(num)]


def openvla(decoder: Any):
    config = OpenVLAConfig(image_size=32, action_bins=5, chunk_size=2, decoder=decoder, precision="fp32")
    policy = config.build(ENV.env_spec())
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    return policy


class RandomReach(ReachPolicy):
    """A policy whose noise comes row by row, one number after the other."""

    def __init__(self, on_act=lambda obs: None):
        super().__init__()
        self.on_act = on_act

    def act(self, obs, generator=None, temperature=1.0):
        self.on_act(obs)
        actions = super().act(obs).actions
        return ActionChunk(actions + torch.rand(actions.shape, generator=generator).numpy() - 0.5)


def random_reach(*on_act: Any) -> Any:
    return RandomReach(*on_act)  # type: ignore[abstract]


@pytest.fixture(scope="module")
def halves() -> Iterator[ProcessVecEnv]:
    """The workers of most tests: rolling out begins anew whatever was done before."""
    with closing(ENV.build()) as env:
        assert isinstance(env, ProcessVecEnv) and env.runner is HalvesRunner
        yield env


def run(policy, num: int, env: VecEnv | None = None, temperature: float = 1.0, **changed) -> list[Episode]:
    """Episodes of an environment; None: of one of its own."""
    own = nullcontext(env) if env is not None else closing(ENV.model_copy(update=changed).build())
    with own as used:
        return collect(policy, used, specs(num), seed=3, temperature=temperature)


def in_lockstep(policy, num: int, temperature: float = 1.0, **changed) -> list[Episode]:
    """Without workers."""
    return run(policy, num, None, temperature, num_workers=0, in_halves=False, **changed)


def assert_equal(ours: list[Episode], theirs: list[Episode], atol: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.spec, one.success, one.lost) == (other.spec, other.success, other.lost)
        np.testing.assert_array_equal(one.chunks.actions, other.chunks.actions)
        np.testing.assert_array_equal(one.obs.state, other.obs.state)
        np.testing.assert_array_equal(one.obs.images["agentview"], other.obs.images["agentview"])
        np.testing.assert_array_equal(one.reward, other.reward)
        if one.chunks.log_prob is not None and other.chunks.log_prob is not None:
            np.testing.assert_allclose(one.chunks.log_prob, other.chunks.log_prob, rtol=0, atol=atol)


def test_halves_without_workers_are_refused():
    with pytest.raises(ValueError, match=r"env.in_halves: got true with env.num_workers=0"):
        DummyConfig(num_envs=4, in_halves=True)


def test_halves_are_equal_to_lockstep_to_the_bit_where_noise_comes_row_by_row(halves):
    lockstep = in_lockstep(random_reach(), 11)
    assert len({e.length for e in lockstep}) > 1, "episodes end at different times"
    assert_equal(run(random_reach(), 11, halves), lockstep)
    assert_equal(run(random_reach(), 11, num_workers=1), lockstep)


@pytest.mark.parametrize(("decoder", "temperature"), [("parallel", 0.0), ("parallel", 1.0), ("autoregressive", 0.0)])
def test_openvla_does_what_it_does_in_lockstep(halves, decoder, temperature):
    """Sampled autoregressive tokens differ: their noise comes token by token for the whole batch, not row by row."""
    policy = openvla(decoder)
    lockstep = in_lockstep(policy, 6, temperature)
    assert_equal(run(policy, 6, halves, temperature), lockstep, atol=1e-5)


def test_both_halves_are_under_way_at_once(halves, monkeypatch):
    events = []
    begin = ProcessVecEnv.begin_step

    def noted(self, actions, env_ids=None):
        assert env_ids is not None
        events.append(("begin", tuple(env_ids)))
        wait = begin(self, actions, env_ids)

        def waited():
            events.append(("wait", tuple(env_ids)))
            return wait()

        return waited

    monkeypatch.setattr(ProcessVecEnv, "begin_step", noted)
    run(random_reach(lambda obs: events.append(("act", obs.batch_size))), 4, halves)
    low, high = (0, 1), (2, 3)
    cycle = [("act", 2), ("begin", low), ("act", 2), ("begin", high), ("wait", low), ("act", 2), ("begin", low)]
    assert events[:9] == [*cycle, ("wait", high), ("act", 2)], "a policy acts while the other half steps"


def test_an_odd_number_of_environments_and_one_alone():
    for num_envs in (1, 3):
        assert_equal(run(random_reach(), 5, num_envs=num_envs), in_lockstep(random_reach(), 5, num_envs=num_envs))


def test_an_environment_that_starts_when_it_is_first_used_steps_by_halves_too():
    """Validation with rollouts by Ray has one; it ended with an assertion."""
    with closing(LaterEnv(ENV)) as later:
        assert_equal(run(random_reach(), 6, later), in_lockstep(random_reach(), 6))


def test_a_worker_that_dies_loses_its_episodes_and_evaluation_runs_them_again(caplog):
    faulty = {"fault": "die", "fault_index": 2, "fault_step": 2}
    episodes = run(random_reach(), 8, **faulty)
    assert episodes[2].lost and sum(e.lost for e in episodes) <= 2, "it holds two environments"
    assert "started again" in caplog.text
    with closing(ENV.model_copy(update=faulty).build()) as env:
        again, retried = run_episodes(random_reach(), env, specs(8), temperature=1.0, seed=0, max_retries=1)
    assert again[2].lost and sum(e.lost for e in again) == 1 and retried >= 1


def test_a_hung_worker_loses_its_episodes(caplog):
    episodes = run(random_reach(), 6, fault="hang", fault_index=1, step_timeout=1.0)
    assert episodes[1].lost and sum(e.lost for e in episodes) <= 2 and "gave no answer" in caplog.text


def test_frames_are_recorded_in_halves():
    with closing(ENV.build(record_frames=True)) as env:
        for episode in collect(random_reach(), env, specs(6)):
            assert episode.frames is not None
            assert episode.frames["agentview"].shape == (episode.length, 32, 32, 3)
            np.testing.assert_array_equal(episode.frames["agentview"][-1], episode.final_obs.images["agentview"][0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_exception_the_environment_rolls_out_as_if_it_had_not_been(halves, error):
    calls = 0

    def raising(obs: Observation) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise error

    with pytest.raises(error):
        collect(random_reach(raising), halves, specs(8), seed=3)
    with pytest.raises(ValueError, match="environment 0"):  # Its step is under way.
        halves.step(np.zeros((1, 2, 7), np.float32), [0])
    assert_equal(run(random_reach(), 8, halves), in_lockstep(random_reach(), 8))
    assert not halves._calls


def test_closing_with_steps_under_way_ends_the_workers():
    env = ENV.build()
    assert isinstance(env, ProcessVecEnv)
    env.reset(specs(4))
    env.begin_step(np.zeros((2, 2, 7), np.float32), [0, 1])
    env.close()
    env.close()
