"""The vector runner: workers give what one process gives; broken ones are replaced; nothing is left behind."""

import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sim.dummy import DummyConfig, DummyEnv
from sim.single_env import SingleObservation
from vla_rl.types import EpisodeSpec, Observation, StepResult

NUM_ENVS = 5
NO_MOVE = np.zeros((1, 2, 7), np.float32)


class ProbeConfig(DummyConfig):
    """Tells what the process that holds the environment looks like, as its instruction."""

    def make(self, record_frames: bool = False) -> DummyEnv:
        return ProbeEnv(self, record_frames)


class ProbeEnv(DummyEnv):
    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        obs = super().reset(spec)
        heavy = sorted({"torch", "mujoco"} & set(sys.modules))
        facts = {"heavy": heavy, "pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}
        return SingleObservation(obs.images, obs.state, json.dumps(facts))


class FloatingEnv(DummyEnv):
    def observe(self) -> SingleObservation:
        obs = super().observe()
        return SingleObservation({name: image / 255 for name, image in obs.images.items()}, obs.state, obs.instruction)


class NamelessEnv(DummyEnv):
    def observe(self) -> SingleObservation:
        obs = super().observe()
        return SingleObservation({"front": obs.images["agentview"]}, obs.state, obs.instruction)


class ShortEnv(DummyEnv):
    def observe(self) -> SingleObservation:
        obs = super().observe()
        return SingleObservation(obs.images, obs.state[:3], obs.instruction)


class UncountedEnv(DummyEnv):
    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        obs = super().reset(spec)
        self.horizon = 0
        return obs


class SilentEnv(DummyEnv):
    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        super().reset(spec)  # The author forgot to return it.
        return None  # pyright: ignore[reportReturnType]


USERS = {env.__name__: env for env in (FloatingEnv, NamelessEnv, ShortEnv, UncountedEnv, SilentEnv)}


class UsersConfig(DummyConfig):
    """An environment of somebody's that does not keep to its spec."""

    mistake: str

    def make(self, record_frames: bool = False) -> DummyEnv:
        return USERS[self.mistake](self, record_frames)


def specs(count: int, task: str = "reach_red", start: int = 0) -> list[EpisodeSpec]:
    return [EpisodeSpec(task, "train", start + i) for i in range(count)]


def assert_same_obs(a: Observation, b: Observation) -> None:
    assert a.instruction == b.instruction
    np.testing.assert_array_equal(a.state, b.state)
    for camera in a.images:
        np.testing.assert_array_equal(a.images[camera], b.images[camera])


def assert_same_result(a: StepResult, b: StepResult) -> None:
    assert_same_obs(a.obs, b.obs)
    for name in ("reward", "terminated", "truncated", "num_steps", "success", "lost"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        assert getattr(a, name).dtype == getattr(b, name).dtype
    for key in ("frames", "states"):
        np.testing.assert_equal(a.info[key], b.info[key])


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} still run"
        time.sleep(0.05)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_remains_is_refused_where_the_simulator_does_not_say(num_workers: int) -> None:
    env = DummyConfig(num_workers=num_workers).build(1)
    try:
        env.reset(specs(1))
        with pytest.raises(NotImplementedError, match=r"rac\.person\.alarm=clock"):
            env.expert_remaining()  # type: ignore[attr-defined]
    finally:
        env.close()


def test_workers_give_exactly_what_one_process_gives() -> None:
    rng = np.random.default_rng(0)
    config = DummyConfig(cameras=("agentview", "wrist"), horizon=6)
    inline = config.build(NUM_ENVS, record_frames=True)
    workers = config.model_copy(update={"num_workers": 2}).build(NUM_ENVS, record_frames=True)
    try:
        everyone = specs(3) + specs(2, "reach_blue")
        assert_same_obs(inline.reset(everyone), workers.reset(everyone))
        ids = list(range(NUM_ENVS))
        for length in (2, 3, 5, 1, 4):  # frame memory grows, then is reused
            np.testing.assert_array_equal(inline.expert_action(ids), workers.expert_action(ids))
            actions = rng.uniform(-1, 1, (len(ids), length, 7)).astype(np.float32)
            ours, theirs = inline.step(actions, ids), workers.step(actions, ids)
            assert_same_result(ours, theirs)
            ended = [i for i, done in zip(ids, ours.done, strict=True) if done]
            if ended[:1]:
                again = specs(1, "reach_blue", start=length)
                assert_same_obs(inline.reset(again, ended[:1]), workers.reset(again, ended[:1]))
            ids = [i for i in reversed(range(NUM_ENVS)) if i not in ended[1:] and i in ids]
        first, second = inline.save_state(ids[:1])[0], workers.save_state(ids[:1])[0]
        assert (first.env, first.task, first.step) == (second.env, second.task, second.step)
        np.testing.assert_equal(first.arrays, second.arrays)
    finally:
        inline.close()
        workers.close()


def test_dead_worker_is_replaced_and_costs_only_its_own_episodes(caplog: pytest.LogCaptureFixture) -> None:
    env = DummyConfig(num_workers=2, fault="die", fault_step=1, fault_index=2).build(4)  # env 2 dies, so does 0
    try:
        env.reset(specs(4))
        with caplog.at_level(logging.WARNING):
            result = env.step(np.zeros((4, 2, 7), np.float32))
        assert result.lost.tolist() == [True, False, True, False]
        assert result.done.tolist() == [True, False, True, False]
        assert result.num_steps.tolist() == [0, 2, 0, 2]
        assert not result.success.any()
        assert "worker 0 (environments [0, 2]) died with exit code -9 (SIGKILL)" in caplog.text
        with pytest.raises(ValueError, match="episode of environment 2 has ended"):
            env.step(NO_MOVE, [2])
        env.reset(specs(2, start=10), [0, 2])
        assert not env.step(np.zeros((4, 2, 7), np.float32)).lost.any()
    finally:
        env.close()


def test_worker_killed_between_calls() -> None:
    env = DummyConfig(num_workers=1).build(3)
    try:
        env.reset(specs(3))
        os.kill(env.worker_pids[0], signal.SIGKILL)
        wait_until_dead(env.worker_pids)
        assert_same_obs(env.reset(specs(1, start=7), [0]), DummyConfig().build(1).reset(specs(1, start=7)))
        np.testing.assert_array_equal(env.expert_action([1]), np.zeros((1, 7)))  # lost, but its caller still learns it
        with pytest.raises(RuntimeError, match=re.escape("environments [2] broke")):
            env.save_state([2])
        result = env.step(np.zeros((3, 2, 7), np.float32))
        assert result.lost.tolist() == [False, True, True]
        assert result.obs.instruction == ["move to the red square"] * 3
    finally:
        env.close()


def test_hung_worker_is_replaced_and_says_where_it_hung(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DummyConfig, "step_timeout", 1.0)
    env = DummyConfig(num_workers=2, fault="hang", fault_index=1).build(2, record_frames=True)
    try:
        env.reset(specs(2))
        with caplog.at_level(logging.WARNING):
            result = env.step(np.zeros((2, 2, 7), np.float32))
        assert result.lost.tolist() == [False, True]
        assert [len(states) for states in result.info["states"]] == [2, 0]
        assert "gave no answer for 1 s" in caplog.text
        assert re.search(r"dummy\.py.* in _break", caplog.text), "the hung worker's stack is shown"
        env.reset(specs(1, start=5), [1])
        assert not env.step(np.zeros((2, 2, 7), np.float32)).lost.any()
    finally:
        env.close()


def test_worker_that_fails_again_and_again_ends_the_run() -> None:
    env = DummyConfig(num_workers=1, fault="die").build(1)
    try:
        for _ in range(2):
            env.reset(specs(1))
            assert env.step(NO_MOVE).lost.all()
        env.reset(specs(1))
        with pytest.raises(RuntimeError, match=r"SIGKILL[^$]*failed 3 times without completing a step"):
            env.step(NO_MOVE)
    finally:
        env.close()


def test_worker_that_cannot_start_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)worker 0 .*cannot start.*fault is 'start', so this environment"):
        DummyConfig(num_workers=2, fault="start").build(2)


def test_an_error_written_for_people_crosses_without_a_traceback() -> None:
    from sim.rendering.gl import RenderError
    from sim.vector.worker import reason

    assert reason(RenderError("no GL; install it")) == "no GL; install it"
    assert reason(AssertionError("an invariant")).startswith("AssertionError: an invariant")


def test_config_that_workers_cannot_import() -> None:
    class Local(DummyConfig):
        pass

    with pytest.raises(ValueError, match="move it to a module of its own"):
        Local(num_workers=1).build(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_the_environment_are_raised_and_it_goes_on(num_workers: int) -> None:
    env = DummyConfig(num_workers=num_workers, fault="raise").build(2)
    try:
        env.reset(specs(2))
        with pytest.raises(RuntimeError, match="fault is 'raise'"):
            env.step(np.zeros((2, 2, 7), np.float32))
        foreign = DummyConfig().build(1)
        foreign.reset(specs(1, "reach_blue"))
        keyframe = foreign.save_state()[0]
        with pytest.raises(ValueError, match="this keyframe is of dummy/reach_blue"):
            env.reset([EpisodeSpec("reach_red", keyframe=keyframe)], [0])
        env.reset(specs(2, start=1))
        assert env.step(np.zeros((2, 2, 7), np.float32)).num_steps.tolist() == [2, 2]
    finally:
        env.close()


def test_state_that_is_not_finite_loses_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    env = DummyConfig(fault="nan", fault_step=1).build(2)
    env.reset(specs(2))
    assert not env.step(np.zeros((2, 1, 7), np.float32)).lost.any()
    result = env.step(np.zeros((2, 1, 7), np.float32))
    assert result.lost.tolist() == [True, False]
    assert np.isfinite(result.obs.state).all()
    assert "environment 0: its state is no longer finite" in caplog.text


def test_workers_are_light() -> None:
    env = ProbeConfig(num_workers=2).build(3)
    try:
        facts = [json.loads(text) for text in env.reset(specs(3)).instruction]
    finally:
        env.close()
    assert [f["pid"] for f in facts] == [facts[0]["pid"], facts[1]["pid"], facts[0]["pid"]]
    assert {f["threads"] for f in facts} == {os.environ.get("OMP_NUM_THREADS", "1")}
    assert not any(f["heavy"] for f in facts)


@pytest.fixture(scope="module")
def opened_once() -> None:
    """Whatever Python opens once for workers is open."""
    DummyConfig(num_workers=1).build(1).close()


@pytest.mark.usefixtures("opened_once")
def test_close_twice_frees_processes_and_descriptors() -> None:
    before = set(os.listdir("/proc/self/fd"))
    env = DummyConfig(num_workers=2).build(4, record_frames=True)
    env.reset(specs(4))
    env.step(np.zeros((4, 3, 7), np.float32))
    pids = env.worker_pids
    env.close()
    env.close()
    assert not any(is_alive(pid) for pid in pids)
    del env
    assert not set(os.listdir("/proc/self/fd")) - before  # Others' may have been closed meanwhile.


@pytest.mark.usefixtures("opened_once")
def test_what_cannot_start_or_is_not_closed_keeps_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="cannot be made"):
        DummyConfig(num_workers=1, fault="start").build(1)
    env = DummyConfig(num_workers=1).build(1, record_frames=True)
    env.reset(specs(1))
    env.step(np.zeros((1, 3, 7), np.float32))
    del env
    gc.collect()
    assert not set(os.listdir("/proc/self/fd")) - before


RUN_FOREVER = """
import sys, numpy as np
from sim.dummy import DummyConfig
from vla_rl.types import EpisodeSpec
env = DummyConfig(num_workers=2, horizon=10**9).build(4, record_frames=True)
env.reset([EpisodeSpec("reach_red", "train", i) for i in range(4)])
print(*env.worker_pids, flush=True)
while True:
    result = env.step(np.zeros((4, 4, 7), np.float32))
    env.reset([EpisodeSpec("reach_red", "train", i) for i in range(4)])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_and_no_memory_outlives_the_run(how: signal.Signals) -> None:
    memory = set(os.listdir("/dev/shm"))
    run = subprocess.Popen(
        [sys.executable, "-c", RUN_FOREVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert run.stdout is not None and run.stderr is not None
    try:
        pids = [int(text) for text in run.stdout.readline().split()]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        if how == signal.SIGINT:
            os.killpg(run.pid, how)  # as a terminal's Ctrl-C does: the workers get it too
        else:
            run.send_signal(how)
        run.wait(timeout=20)
        wait_until_dead(pids)
        assert set(os.listdir("/dev/shm")) <= memory
        if how == signal.SIGINT:
            assert run.stderr.read().decode().strip().endswith("KeyboardInterrupt")
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
        run.stderr.close()


@pytest.mark.parametrize(
    ("actions", "ids", "message"),
    [
        (np.zeros((2, 7)), None, r"actions have shape \(2, 7\), expected \(2 environments, H >= 1, 7 dimensions\)"),
        (np.zeros((2, 0, 7)), None, "H >= 1"),
        (np.zeros((2, 1, 6)), None, "7 dimensions"),
        (np.zeros((1, 1, 7)), None, "expected .2 environments"),
        (np.full((2, 1, 7), np.nan), None, "NaN: environment 0, action 0 of the chunk, dimension 0"),
        (np.zeros((2, 1, 7)), [0, 0], "named once"),
        (np.zeros((1, 1, 7)), [2], "ids 0 to 1"),
        (np.zeros((0, 1, 7)), [], "env_ids is empty"),
    ],
)
def test_bad_steps_are_refused_before_anything_moves(actions: np.ndarray, ids: list[int] | None, message: str) -> None:
    env = DummyConfig().build(2)
    before = env.reset(specs(2))
    with pytest.raises(ValueError, match=message):
        env.step(actions, ids)
    np.testing.assert_array_equal(env.step(np.zeros((2, 1, 7))).obs.state, before.state)


def test_bad_resets_and_early_calls_are_refused() -> None:
    env = DummyConfig().build(2)
    with pytest.raises(ValueError, match="environment 0 has no episode yet"):
        env.step(np.zeros((2, 1, 7)))
    with pytest.raises(ValueError, match="environment 0 has no episode yet"):
        env.save_state()
    with pytest.raises(ValueError, match="got 1 specs for 2 environments"):
        env.reset(specs(1))
    with pytest.raises(ValueError, match=r"unknown task 'reach_rd. of dummy.* Did you mean .reach_red."):
        env.reset(specs(2, "reach_rd"))
    with pytest.raises(ValueError, match="unknown split 'test': splits are train, validation, eval"):
        env.reset([EpisodeSpec("reach_red", "test", 0)] * 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no initial state -1 of 'reach_red' in split 'train': allowed 0 and up"):
        env.reset([EpisodeSpec("reach_red", "train", -1)] * 2)
    with pytest.raises(ValueError, match="num_envs must be at least 1"):
        DummyConfig().build(-1)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("FloatingEnv", r"dummy: its reset shows agentview as float64 \(32, 32, 3\); its env_spec says .* uint8"),
        ("NamelessEnv", "shows no camera 'agentview', but front"),
        ("ShortEnv", r"shows a state of shape \(3,\); its env_spec says \(8,\)"),
        ("UncountedEnv", "left num_steps at 0 and horizon at 0; it must set"),
        ("SilentEnv", r"returned NoneType, not a SingleObservation; end it with self\.observe\(\)"),
    ],
)
def test_a_users_environment_that_does_not_keep_to_its_spec_is_told_so(mistake: str, message: str) -> None:
    for num_workers in range(2 if mistake == "FloatingEnv" else 1):  # A worker's error comes as any other of its own.
        env = UsersConfig(mistake=mistake, num_workers=num_workers).build(num_envs=1)
        try:
            with pytest.raises(ValueError, match=message):
                env.reset(specs(1))
        finally:
            env.close()
