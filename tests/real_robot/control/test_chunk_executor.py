"""The stream of actions from chunks: aligned, blended, never waiting for the policy, never jumping."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from virtual_time import VirtualTime

from real_robot.contract.sections import ExecutionConfig
from real_robot.control.chunk_executor import ChunkExecutor
from real_robot.types import RobotObservation

HZ = 50.0


def observation(value: float = 0.0) -> RobotObservation:
    return RobotObservation({}, np.array([value], np.float32), "do it", time.monotonic())


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.002)


class Policy:
    """Numbers its chunks' actions: action i of the chunk for an observation with state [x] is x + i (and -x - i).

    Answers only when told to, so that tests set when a chunk arrives.
    """

    def __init__(self, length: int = 8, slope: float = 1.0) -> None:
        self.length, self.slope = length, slope
        self.answer = threading.Semaphore(0)
        self.calls: list[dict[str, object]] = []
        self.fails = False

    def __call__(self, obs: RobotObservation, **extra: object) -> np.ndarray:
        self.calls.append(extra)
        assert self.answer.acquire(timeout=30)
        if self.fails:
            raise RuntimeError("no policy today")
        actions = float(obs.state[0]) + self.slope * np.arange(self.length)
        return np.stack([actions, -actions], 1).astype(np.float32)


def executor(policy: Callable[..., np.ndarray], **options: object) -> ChunkExecutor:
    return ChunkExecutor(policy, ExecutionConfig.model_validate({"control_hz": HZ, "max_age": 60.0, **options}))


def feed(run: ChunkExecutor, policy: Policy, value: float, step: int) -> None:
    """Let one whole inference happen."""
    before = run.statistics()
    run.submit(observation(value), step)
    policy.answer.release()
    wait_for(lambda: _count(run) > before.num_chunks + before.num_discarded + before.num_failed)


def _count(run: ChunkExecutor) -> int:
    now = run.statistics()
    return now.num_chunks + now.num_discarded + now.num_failed


def play(run: ChunkExecutor, step: int) -> float | None:
    command = run.next_action(step)
    return None if command is None else float(command.values[0])


def test_chunks_are_aligned_by_step() -> None:
    policy = Policy()
    run = executor(policy)
    assert run.next_action(0) is None
    feed(run, policy, 0, 0)
    assert [play(run, s) for s in range(4)] == [0, 1, 2, 3]
    # The policy agrees with itself: made before step 3, it says 3 for step 3, and so on. Steps that passed are skipped.
    run.submit(observation(3), 3)
    assert [play(run, s) for s in (4, 5)] == [4, 5]
    policy.answer.release()
    wait_for(lambda: run.statistics().num_chunks == 2)
    assert [play(run, s) for s in range(6, 11)] == [6, 7, 8, 9, 10]
    assert run.statistics().num_skipped == 3, "3 to 5 of the second"
    assert play(run, 11) is None, "no chunk says anything of step 11"
    run.close()


def test_a_change_of_source_fades() -> None:
    policy = Policy(slope=0.0)
    run = executor(policy, blend_steps=4, unblended=[1])
    feed(run, policy, 0, 0)
    assert play(run, 0) == 0
    feed(run, policy, 8, 1)
    assert [play(run, s) for s in range(1, 7)] == [2, 4, 6, 8, 8, 8]
    run.reset()
    feed(run, policy, 0, 0)
    play(run, 0)
    feed(run, policy, 8, 1)
    command = run.next_action(1)
    assert command is not None and command.values.tolist() == [2, -8], "the gripper does not fade"
    run.close()


@pytest.mark.parametrize(("kind", "first"), [("position", 3.0), ("velocity", 2.0)])
def test_after_a_pause_it_goes_on_from_where_the_robot_is(kind: str, first: float) -> None:
    policy = Policy(length=2, slope=0.0)
    run = executor(policy, blend_steps=4, kind=kind)
    feed(run, policy, 1.3333334, 0)
    assert [play(run, s) is None for s in range(4)] == [False, False, True, True]
    feed(run, policy, 8, 4)
    assert play(run, 4) == pytest.approx(first, abs=1e-6)
    assert run.statistics().num_starved == 2
    run.close()


def test_temporal_ensembling_weighs_as_act_does() -> None:
    policy = Policy(slope=0.0)
    run = executor(policy, ensemble=0.5, blend_steps=0)
    feed(run, policy, 1, 0)
    assert play(run, 0) == 1
    feed(run, policy, 3, 1)
    weights = np.exp(-0.5 * np.arange(2))
    assert play(run, 1) == pytest.approx((weights @ [1, 3]) / weights.sum())
    run.close()


def test_a_refill_waits_until_few_actions_are_left() -> None:
    policy = Policy()
    run = executor(policy, refill_at=3)
    feed(run, policy, 0, 0)
    run.submit(observation(0), 1)
    for step in range(5):
        play(run, step)
    assert len(policy.calls) == 1
    play(run, 5)
    wait_for(lambda: len(policy.calls) == 2)
    policy.answer.release()
    run.close()


def test_real_time_chunking_gives_what_is_under_way() -> None:
    policy = Policy()
    run = executor(policy, real_time_chunking=True)
    feed(run, policy, 0, 0)
    play(run, 0)
    run.submit(observation(2), 2)
    wait_for(lambda: len(policy.calls) == 2)
    assert policy.calls[0] == {}
    extra = policy.calls[1]
    assert np.asarray(extra["prefix"])[:, 0].tolist() == [2, 3, 4, 5, 6, 7]
    assert "guidance" not in extra, "the checkpoint's own options hold"
    took = run.statistics().latency[1]
    assert math.ceil(took * HZ) <= cast(int, extra["num_frozen"]) <= 6
    policy.answer.release()
    run.close()


def test_real_time_chunking_gives_what_is_played_while_a_difference_fades() -> None:
    """The second chunk is 8 above the first: half way up, the third begins from there."""
    policy = Policy(slope=0.0)
    options = {"execution_horizon": 5, "prefix_attention_schedule": "EXP"}
    run = executor(policy, blend_steps=4, unblended=[1], real_time_chunking=options)
    feed(run, policy, 0, 0)
    assert play(run, 0) == 0
    feed(run, policy, 8, 1)
    assert [play(run, s) for s in (1, 2)] == [2, 4]
    run.submit(observation(8), 3)
    wait_for(lambda: len(policy.calls) == 3)
    prefix = np.asarray(policy.calls[2]["prefix"])
    policy.answer.release()
    assert prefix[:, 0].tolist() == [6, 8, 8, 8, 8, 8] == [play(run, s) for s in range(3, 9)]
    assert (prefix[:, 1] == -8).all() and policy.calls[2]["guidance"] == options
    run.close()


def test_before_a_chunk_is_played_its_fade_is_known() -> None:
    """A chunk that has just arrived: what is played of it begins at the last action, not at its own."""
    policy = Policy(slope=0.0)
    run = executor(policy, blend_steps=4, real_time_chunking=True)
    feed(run, policy, 0, 0)
    assert [play(run, s) for s in (0, 1)] == [0, 0]
    feed(run, policy, 8, 1)
    run.submit(observation(8), 1)
    wait_for(lambda: len(policy.calls) == 3)
    policy.answer.release()
    assert np.asarray(policy.calls[2]["prefix"])[:5, 0].tolist() == [0, 2, 4, 6, 8]
    run.close()


def test_a_reset_drops_what_is_queued_and_what_is_computed() -> None:
    policy = Policy()
    run = executor(policy)
    feed(run, policy, 0, 0)
    run.submit(observation(50), 1)
    wait_for(lambda: len(policy.calls) == 2)
    run.reset()
    assert run.next_action(1) is None
    policy.answer.release()
    wait_for(lambda: run.statistics().num_discarded == 1)
    assert run.next_action(1) is None
    run.close()


def test_a_failure_drops_what_is_queued_and_is_told() -> None:
    policy = Policy()
    run = executor(policy)
    feed(run, policy, 0, 0)
    assert play(run, 0) == 0
    policy.fails = True
    feed(run, policy, 0, 1)
    assert run.next_action(1) is None
    assert run.statistics().error == "RuntimeError: no policy today"
    policy.fails = False
    feed(run, policy, 0, 1)
    assert play(run, 1) is not None and run.statistics().error == ""
    run.close()


@pytest.mark.parametrize("chunk", [np.zeros(3), np.full((2, 2), np.nan), np.zeros((0, 2))])
def test_a_chunk_that_is_none_is_a_failure(chunk: np.ndarray) -> None:
    run = executor(lambda _: chunk)
    run.submit(observation(), 0)
    wait_for(lambda: run.statistics().num_failed == 1)
    assert run.next_action(0) is None and "shape" in run.statistics().error
    run.close()


def test_a_chunk_for_an_old_observation_is_thrown_away() -> None:
    policy, now = Policy(), [1000.0]
    run = ChunkExecutor(policy, ExecutionConfig(control_hz=HZ, max_age=0.05), clock=lambda: now[0])
    for age, discarded in ((0.04, 0), (0.06, 1)):
        run.submit(RobotObservation({}, np.zeros(1, np.float32), "do it", now[0]), 0)
        wait_for(lambda: len(policy.calls) == discarded + 1)  # noqa: B023
        now[0] += age
        policy.answer.release()
        wait_for(lambda: _count(run) == discarded + 1)  # noqa: B023
        assert run.statistics().num_discarded == discarded
        assert (run.next_action(0) is None) == bool(discarded)
        run.reset()
    run.close()


def test_a_chunk_that_is_over_when_it_arrives_is_told() -> None:
    policy = Policy(length=2)
    run = executor(policy)
    run.submit(observation(), 0)
    wait_for(lambda: len(policy.calls) == 1)
    run.next_action(2)
    policy.answer.release()
    wait_for(lambda: run.statistics().num_discarded == 1)
    assert run.next_action(2) is None and "all 2 steps of its chunk had passed" in run.statistics().error
    run.close()


def test_the_step_that_waits_for_its_chunk_has_not_passed() -> None:
    """A policy of one action at a time: the loop asks for the same step until there is one."""
    policy = Policy(length=1)
    run = executor(policy, blend_steps=0)
    for step in range(3):
        assert run.next_action(step) is None and run.next_action(step) is None
        feed(run, policy, step, step)
        assert play(run, step) == step
    assert run.statistics().num_skipped == run.statistics().num_discarded == 0
    run.close()


def test_close_does_not_wait_for_a_policy_that_hangs() -> None:
    policy = Policy()
    run = executor(policy)
    run.submit(observation(), 0)
    wait_for(lambda: len(policy.calls) == 1)
    run.close()
    run.close()
    assert run.next_action(0) is None and run.statistics().waiting > 0
    policy.answer.release()


@pytest.mark.parametrize("virtual", range(3), indirect=True)
@pytest.mark.parametrize("delay", ["slow", "late", "hung"])
def test_the_stream_neither_waits_nor_jumps(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch, delay: str) -> None:
    """A noisy policy: slow (within its chunks), late (beyond them, in turns), or it hangs in the end."""
    virtual.install(monkeypatch, "real_robot.control.chunk_executor")
    rng = np.random.default_rng(0)
    seconds = {"slow": 0.06, "late": 0.3, "hung": 0.02}[delay]
    calls = 0
    noise, length, blend = 0.5, 10, 5

    def policy(obs: RobotObservation) -> np.ndarray:
        nonlocal calls
        calls += 1
        virtual.sleep(20 if delay == "hung" and calls == 5 else seconds if calls % 2 == 0 else 0.02)
        steps = float(obs.state[0]) + np.arange(length)
        return (np.sin(steps / 10)[:, None] + rng.uniform(-noise, noise)).astype(np.float32)

    run = executor(policy, blend_steps=blend)
    played: list[float | None] = []
    for step in range(100):
        start = virtual.now
        run.submit(RobotObservation({}, np.array([step], np.float32), "do it", start), step)
        played.append(play(run, step))
        assert virtual.now == start, "a tick waited for the policy"
        virtual.sleep(1 / HZ)
    run.close()
    first = next(i for i, value in enumerate(played) if value is not None)
    values = [value for value in played if value is not None]
    # Its own change in a step, and a fading difference: of the noises, and of the sine while it paused.
    bound = 0.1 + (2 * noise + 2.0 * (delay != "slow")) / blend
    assert np.abs(np.diff(values)).max() <= bound + 1e-6
    if delay == "slow":
        assert None not in played[first:]
    if delay == "late":
        assert None in played[first:], "chunks were late, so some steps had no action"
    if delay == "hung":
        assert played[-20:] == [None] * 20


@pytest.mark.parametrize(
    ("silence", "why"), [(0.31, "no sign of life from the policy server"), (float("inf"), "connection .* is lost")]
)
def test_a_chunk_ends_with_the_servers_last_sign_of_life(silence: float, why: str) -> None:
    policy, silent = Policy(), [0.0]
    config = ExecutionConfig(control_hz=HZ, max_age=60.0, refill_at=0, blend_steps=0, max_blind=0.3)
    run = ChunkExecutor(policy, config, silence=lambda: silent[0])
    feed(run, policy, 0, 0)
    assert play(run, 0) == 0
    silent[0] = 0.29
    assert play(run, 1) == 1
    silent[0] = silence
    assert play(run, 2) is None and re.search(why, run.trouble)
    silent[0] = 0.0
    assert play(run, 2) is None, "what was dropped does not come back"
    feed(run, policy, 50, 2)
    assert play(run, 2) == 50
