"""The world model as an environment: the contract, outcomes by hand, ends, keyframes, noise, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from toy import GAIN, GOAL, ToyDynamics, ToyInitialFrames, push, through_a_file, toy_env, toy_valued

from vla_rl.common.distributed.process_group import ALONE, ProcessGroup
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.interfaces import ImaginedEnv, Policy
from vla_rl.rollout.runner import collect, run_episodes
from vla_rl.types import ActionChunk, EpisodeSpec, Keyframe, Observation
from world_model.config import ImaginationConfig
from world_model.env.env import WorldModelEnv
from world_model.noise import RepeatCounter

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125; pushed by 1, it passes the goal, 6, in frame 5, at 6.125.


@pytest.mark.parametrize("options", [{}, {"ensemble": 3, "dual_noise": 2}, {"horizon": 10, "dual_noise": 0}])
def test_the_contract_is_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from checks import check_vec_env

    monkeypatch.setattr(RepeatCounter, "next", lambda *_: 0)  # An initial state always has the same noise.
    check_vec_env(lambda n, record_frames=False: toy_env(n, record_frames, noise=0.05, **options))


def test_recording_finds_how_often_there_is_a_new_image() -> None:
    env = toy_env(1)
    assert isinstance(env, ImaginedEnv) and env.observed_every == 4


# --- outcomes ---------------------------------------------------------------------------------


def test_an_episode_ends_with_the_frame_in_which_it_succeeds() -> None:
    env = toy_env(1)
    env.reset([SPEC])
    for _ in range(2):
        result = env.step(push(1, 1, 8))
        assert not result.done[0] and result.num_steps[0] == 8 and not result.reward.any()
    result = env.step(push(1, 1, 8))
    assert result.num_steps.tolist() == [4] and result.success.tolist() == [True]
    assert np.flatnonzero(result.reward[0]).tolist() == np.flatnonzero(result.terminated[0]).tolist() == [3]
    assert result.reward[0, 3] == 1 and not result.truncated.any()
    assert result.obs.state[0].tolist() == [6.125, 0]  # That of the success, not what the rest of the chunk would do.
    assert (result.obs.images["wrist"][0, 1:] == 8 * 6.125).all()
    with pytest.raises(ValueError, match="environment 0 has ended"):
        env.step(push(1, 1, 8))


@pytest.mark.parametrize("chunk", [3, 4, 6, 8, 10])
def test_any_chunk_length_leads_to_the_same_place(chunk: int) -> None:
    env = toy_env(1)
    env.reset([SPEC])
    states = [env.step(push(1, 1, chunk)).obs.state[0, 0] for _ in range(2)]
    np.testing.assert_allclose(states, [1.125 + GAIN * chunk, 1.125 + GAIN * 2 * chunk])


def test_a_frame_cut_short_by_the_chunk_can_succeed() -> None:
    env = toy_env(1)
    env.reset([EpisodeSpec("reach_back", "train", 4)])  # Starts at 5.5.
    result = env.step(push(1, 1, 3))
    assert result.success[0] and result.num_steps[0] == 3 and result.terminated[0].tolist() == [False, False, True]


def test_a_chunk_that_frames_do_not_divide_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    env = toy_env(1)
    env.reset([SPEC])
    with caplog.at_level(logging.WARNING):
        env.step(push(0, 1, 8))
        assert not caplog.records
        env.step(push(0, 1, 6))
        env.step(push(0, 1, 6))
    assert len(caplog.records) == 1 and "frame of 2" in caplog.text


class Wanderer(torch.nn.Module, Policy):
    """A policy that pushes ahead more or less."""

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        actions = torch.rand(obs.batch_size, 6, 3, generator=generator).numpy() * 1.4
        return ActionChunk(actions)


@pytest.mark.parametrize("options", [{}, {"dual_noise": 0}, {"ensemble": 2}])
def test_success_termination_and_return_always_agree(options: dict[str, Any]) -> None:
    env = toy_env(7, noise=0.5, **options)
    specs = [EpisodeSpec("reach", "train", i) for i in range(10) for _ in range(8)]
    episodes = collect(cast(Any, Wanderer()), env, specs)
    assert 10 < sum(e.success for e in episodes) < 70
    for episode in episodes:
        assert episode.success == episode.terminated.any() == (episode.total_reward == 1)
        assert episode.total_reward in (0, 1) and not episode.lost
        ends = episode.terminated | episode.truncated
        assert ends.sum() == 1 and ends[-1, episode.num_steps[-1] - 1]  # The very last step.
        assert not episode.reward[~episode.terminated].any()
        assert episode.success == (episode.final_obs.state[0, 0] > GOAL) or episode.truncated.any()
        assert episode.length <= 24


# --- ends -------------------------------------------------------------------------------------


def test_the_trust_horizon_truncates_inside_a_chunk() -> None:
    env = toy_env(2, horizon=10)
    assert env.spec.horizon == {"reach": 10, "reach_back": 10}
    env.reset([SPEC, EpisodeSpec("reach_back", "train", 0)])
    env.step(push(0, 2, 8))
    result = env.step(push(0, 2, 8))
    assert result.num_steps.tolist() == [2, 2] and result.truncated[:, 1].all() and result.truncated.sum() == 2


def test_the_tasks_horizon_truncates_where_it_comes_first() -> None:
    env = toy_env(1, horizon=100)
    env.reset([EpisodeSpec("reach_back", "train", 0)])
    result = env.step(push(0, 1, 20))
    assert result.num_steps[0] == 16 and result.truncated[0, 15] and not result.success[0]


def test_a_branchs_end_is_worth_its_value_and_a_success_there_one() -> None:
    env = WorldModelEnv(toy_valued(), ToyInitialFrames(), ImaginationConfig(branch_frames=2), 2)
    env.reset([EpisodeSpec("reach", "train", 33)] * 2)  # Starts at 5.125, in 24 steps.
    result = env.step(push(1, 2, 8) * [[[0.25]], [[0.5]]])  # To 5.625, with 16 steps left, and to 6.125.
    value = 1 / (1 + np.exp(-(2 * (5.625 - GOAL + 4 * 16 / 24 - 2) + 0.5)))
    np.testing.assert_allclose(result.reward[:, 7], [value, 1], rtol=1e-4)
    assert result.terminated[:, 7].tolist() == [False, True] and result.truncated[:, 7].tolist() == [True, False]


def test_without_a_gpu_compiling_records_no_chunks() -> None:
    for compiled in (False, True):
        env = toy_env(1, compile=compiled)
        env.reset([SPEC])
        assert env.step(push(1, 1, 8)).obs.state[0, 0] == 3.125


def test_a_discarded_success_goes_on() -> None:
    env = toy_env(64, noise=0.5)
    env.reset([EpisodeSpec("reach_back", "train", 7)] * 64)  # Just before the goal.
    result = env.step(push(0, 64, 4))
    discarded = result.info["discarded"]
    assert 5 < discarded.sum() < 40
    assert not (discarded & (result.success | result.done)).any()
    assert (result.obs.state[discarded, 0] <= GOAL).all()
    going = np.flatnonzero(~result.done).tolist()
    env.step(push(0, len(going), 4), going)


def test_what_is_not_finite_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    env = toy_env(2, record_frames=True)
    cast(ToyDynamics, env.world_model.dynamics).broken = 5.0
    env.reset([SPEC, EpisodeSpec("reach_back", "train", 1)])
    with caplog.at_level(logging.WARNING):
        result = env.step(push(1, 2, 4))
    assert result.lost.tolist() == [False, True] and "environment 1" in caplog.text
    assert result.num_steps.tolist() == [4, 0] and not result.success.any() and not result.truncated.any()
    assert np.isfinite(result.obs.state).all() and not result.obs.images["wrist"][1].any()
    assert result.info["states"][1].shape == (0, 2)
    with pytest.raises(ValueError, match="environment 1 has ended"):
        env.step(push(1, 1, 4), [1])
    env.reset([SPEC], [1])
    assert env.step(push(1, 1, 4), [1]).obs.state[0, 0] == 2.125


# --- noise ------------------------------------------------------------------------------------


def walk(env: WorldModelEnv, ids: list[int] | None = None, chunks: int = 3) -> np.ndarray:
    """Positions after each chunk, (B, chunks)."""
    num = env.num_envs if ids is None else len(ids)
    return np.stack([env.step(push(0.1, num, 8), ids).obs.state[:, 0] for _ in range(chunks)], 1)


def test_an_episodes_noise_does_not_depend_on_its_neighbors() -> None:
    specs = [EpisodeSpec("reach", "train", i) for i in range(4)]
    options = {"noise": 0.2, "ensemble": 2, "dual_noise": 2}
    together = toy_env(4, **options)
    together.reset(specs)
    expected = walk(together)
    alone = toy_env(1, **options)
    for row, spec in enumerate(specs):
        alone.reset([spec])
        np.testing.assert_array_equal(walk(alone)[0], expected[row])
    apart = toy_env(4, **options)
    apart.reset([specs[3], specs[0]], [2, 0])
    np.testing.assert_array_equal(walk(apart, [2, 0]), expected[[3, 0]])


def test_episodes_of_a_group_have_noise_of_their_own() -> None:
    env = toy_env(4, noise=0.2)
    env.reset([SPEC] * 4)
    found = walk(env)
    assert len(np.unique(found[:, 0])) == 4
    env.reset([SPEC] * 4)
    assert not np.isin(walk(env), found).any()
    again = toy_env(2, noise=0.2)  # The place in the group counts, not the environment.
    again.reset([SPEC], [1])
    np.testing.assert_array_equal(walk(again, [1]), found[:1])
    again.reset([SPEC, EpisodeSpec("reach", "train", 2)], [0, 1])
    np.testing.assert_array_equal(walk(again)[0], found[1])
    other = toy_env(1, noise=0.2, seed=1)
    other.reset([SPEC])
    assert not np.isin(walk(other), found).any()


def test_a_resumed_run_draws_on() -> None:
    env = toy_env(1, noise=0.2)
    env.reset([SPEC])
    state = env.state()
    env.reset([SPEC])
    expected = walk(env)
    resumed = toy_env(1, noise=0.2)
    resumed.load_state(state)
    resumed.reset([SPEC])
    np.testing.assert_array_equal(walk(resumed), expected)


def test_several_processes_share_episodes_as_one_would_run_them() -> None:
    """Two groups of the same state, the second of them and a third elsewhere; then each process has a part again."""
    groups, size, expected = [SPEC, SPEC, EpisodeSpec("reach", "train", 2)], 2, np.zeros(0)
    one, first, second = toy_env(6, noise=0.2), toy_env(2, noise=0.2), toy_env(4, noise=0.2)

    def episodes(dealt: list[EpisodeSpec]) -> list[EpisodeSpec]:
        return [spec.member(number) for spec in dealt for number in range(size)]

    for _ in range(2):
        one.reset(episodes(one.deal(groups, size)))
        expected = walk(one)
        for env, share in ((first, slice(0, 1)), (second, slice(1, 3))):
            env.reset(episodes(env.deal(groups, size)[share]))
            np.testing.assert_array_equal(walk(env), expected[share.start * size : share.stop * size])
    assert one.state() == first.state() == second.state()
    undealt, specs = toy_env(6, noise=0.2), episodes(groups)
    undealt.reset(specs)
    undealt.reset(specs)
    np.testing.assert_array_equal(walk(undealt), expected)
    assert undealt.state() == one.state()


class OneOfTwo(ProcessGroup):
    """A process that is told that the other found what it found itself."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size


class Pusher(torch.nn.Module, Policy):
    """A policy that always pushes ahead alike."""

    chunk_size = 8

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(push(0.1, obs.batch_size, 8))


def test_an_evaluation_by_several_processes_counts_and_draws_as_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EvalConfig(split="train", episodes_per_task=3, samples_per_state=4, temperatures=(1.0,))
    found, states = [], []

    def noted(*args: Any, **options: Any) -> Any:
        episodes, num_retried = run_episodes(*args, **options)
        ends.extend((e.spec.index, float(e.final_obs.state[0, 0])) for e in episodes)
        return episodes, num_retried

    monkeypatch.setattr("vla_rl.evaluation.evaluate.run_episodes", noted)
    for world in (ALONE, OneOfTwo(0, 2), OneOfTwo(1, 2)):
        env, ends = toy_env(3, noise=0.4), list[tuple[int, float]]()
        for _ in range(2):
            evaluate(cast(Any, Pusher()), env, config, world=world)
        found.append(ends)
        states.append(env.state())
    assert len(set(found[0])) == len(found[0]), "noise differs"
    assert sorted(found[1] + found[2]) == sorted(found[0])
    assert states[0] == states[1] == states[2]


def test_what_was_dealt_and_never_begun_is_forgotten_with_the_state() -> None:
    env, other = toy_env(1, noise=0.2), toy_env(1, noise=0.2)
    env.deal([SPEC], 3)  # The rollout broke off.
    env.load_state({})
    for each in (env, other):
        each.reset([SPEC])
        each.reset([SPEC])
    assert env.state() == other.state()
    np.testing.assert_array_equal(walk(env), walk(other))


# --- keyframes --------------------------------------------------------------------------------


def test_a_keyframe_leads_to_the_same_future() -> None:
    env = toy_env(2, noise=0.2, horizon=20)
    env.reset([replace(SPEC, instruction="go there")], [0])
    before = env.step(push(0.5, 1, 8), [0])
    keyframe = through_a_file(env.save_state([0])[0])
    assert (keyframe.env, keyframe.task, keyframe.step) == ("world_model", "reach", 8)
    expected = walk(env, [0], 1)
    other = toy_env(3, noise=0.2, horizon=20, seed=9)
    obs = other.reset([replace(SPEC, keyframe=keyframe)] * 2, [2, 0])
    np.testing.assert_array_equal(obs.state, before.obs.state[[0, 0]])
    np.testing.assert_array_equal(obs.images["wrist"], before.obs.images["wrist"][[0, 0]])
    assert obs.instruction == ["go there"] * 2
    found = walk(other, [2, 0], 1)
    assert found[0] == expected[0] and found[1] != expected[0]  # The second of the group has noise of its own.
    result = other.step(push(0, 2, 8), [2, 0])
    assert result.num_steps.tolist() == [4, 4] and result.truncated[:, 3].all()  # 8 of the 20 steps were over.


def test_keyframes_of_others_are_refused() -> None:
    env = toy_env(1)
    env.reset([SPEC])
    keyframe = env.save_state()[0]
    with pytest.raises(ValueError, match="is of task 'reach', the episode of 'reach_back'"):
        env.reset([EpisodeSpec("reach_back", keyframe=keyframe)])
    for name, array in (
        ("memory.reference.latents", np.zeros((1, 3, 1, 1, 1), np.float32)),
        ("memory.extra", np.ones(1)),
    ):
        damaged = replace(keyframe, arrays=keyframe.arrays | {name: array})
        with pytest.raises(ValueError, match="of another world model"):
            env.reset([replace(SPEC, keyframe=damaged)])
    with pytest.raises(ValueError, match="environment 0 has ended"):
        env.step(push(0, 1, 4))
    with pytest.raises(ValueError, match="environment 0 has ended"):
        env.save_state()


def test_a_simulators_keyframe_is_a_first_frame() -> None:
    env = toy_env(1, horizon=12)
    keyframe = Keyframe("tabletop", "reach", 16, {"position": np.array(3.0)})
    obs = env.reset([replace(SPEC, keyframe=keyframe)])
    assert obs.state[0, 0] == 3.0
    result = env.step(push(0, 1, 12))
    assert result.num_steps[0] == 8 and result.truncated[0, 7]  # The task's 24 steps count on.
    env.reset([replace(SPEC, keyframe=replace(keyframe, step=4))])
    assert env.step(push(0, 1, 20)).num_steps[0] == 12  # The world model is trusted for 12 steps of its own.


# --- recording --------------------------------------------------------------------------------


def test_recorded_frames_repeat_the_last_one_imagined() -> None:
    env = toy_env(1, record_frames=True)
    env.reset([SPEC])
    result = env.step(push(1, 1, 10))
    states, images = result.info["states"][0][:, 0], result.info["frames"][0]["wrist"]
    assert states.tolist() == [1.125] * 3 + [2.125] * 4 + [3.125] * 2 + [3.625]
    np.testing.assert_array_equal(images[:, -1, -1, 0], 8 * states)
    episodes = collect(cast(Any, Wanderer()), env, [SPEC])
    assert episodes[0].states is not None and len(episodes[0].states) == episodes[0].length


def test_closing_closes_the_first_frames() -> None:
    env = toy_env(1)
    env.reset([SPEC])
    env.close()
    env.close()
    assert cast(Any, env._first_frames).num_closed == 2
    with pytest.raises(ValueError, match="has ended"):
        env.step(push(0, 1, 4))
    with pytest.raises(NotImplementedError, match="no scripted expert"):
        env.expert_action()
