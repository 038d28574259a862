"""Simulators that break: what the user reads, that the others go on, and that no process is left behind."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sim.remote import RemoteConfig, client
from sim.remote.env import RemoteVecEnv
from sim.vector.pool import PoolVecEnv
from vla_rl.types import EpisodeSpec, StepResult

HERE = str(Path(__file__).parent)


def faulty(fault: str, **options: object) -> RemoteConfig:
    values = {"python_path": (HERE,), "kwargs": {"fault": fault}, "step_timeout": 20.0, **options}
    return RemoteConfig(env="faulty_sim:FaultySim", **values)  # type: ignore[arg-type]


def group_of(pid: int) -> list[int]:
    """Living processes in the process group that a host leads."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, group = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group) == pid and state != "Z":
            found.append(int(name))
    return found


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for leader in pids for pid in group_of(leader)]:
        assert time.monotonic() < deadline, f"processes {alive} still run"
        time.sleep(0.05)


@pytest.fixture
def envs() -> Iterator[list[PoolVecEnv]]:
    """Environments to close, whose processes must be gone then."""
    opened: list[PoolVecEnv] = []
    yield opened
    pids = [pid for env in opened for pid in env.worker_pids]  # type: ignore[attr-defined]
    for env in opened:
        env.close()
    wait_until_gone(pids)


def run_with_fault(envs: list[PoolVecEnv], fault: str, num_hosts: int = 2, **options: object) -> StepResult:
    """Two environments; the second one's episode has the fault in its third step."""
    env = faulty(fault, num_hosts=num_hosts, **options).build(2)
    assert isinstance(env, RemoteVecEnv)
    envs.append(env)
    env.reset([EpisodeSpec("go", "train", 0), EpisodeSpec("stay", "train", 7)])
    actions = np.full((2, 4, 2), 0.3, np.float32)
    result = env.step(actions)
    np.testing.assert_array_equal(result.num_steps[:1], [4])
    assert not result.lost[0]
    assert env.step(actions[:1], [0]).num_steps[0] == 4, "the other environment goes on"
    env.reset([EpisodeSpec("go", "train", 1)], [1])
    assert not env.step(actions[1:], [1]).lost[0], "the broken one starts anew"
    return result


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("die", r"host 1 .*died with exit code -9 \(SIGKILL\).*out of memory"),
        ("die with child", r"host 1 .*died with exit code -9 \(SIGKILL\).*out of memory"),
        ("hang", r"gave no answer for 2 s \(env.step_timeout\) and was killed.*in _hang"),
        ("stop", r"gave no answer for 2 s \(env.step_timeout\) and was killed"),
        ("raise", r"environment 1 \(host 1\) failed in a step.*ArithmeticError: the solver diverged"),
        pytest.param(
            "exit", r"environment 1 \(host 1\) failed in a step.*SystemExit: no license", marks=pytest.mark.slow
        ),
        ("nan", r"environment 1 \(host 1\) failed in a step.*the reward or the state is not finite.*nan"),
    ],
)
def test_an_episode_that_breaks_is_lost_and_says_why(
    envs: list[PoolVecEnv], caplog: pytest.LogCaptureFixture, fault: str, message: str
) -> None:
    with caplog.at_level(logging.WARNING):
        result = run_with_fault(envs, fault, step_timeout=2.0 if fault in ("hang", "stop") else 20.0)
    assert result.lost.tolist() == [False, True] and not result.success[1]
    assert re.search(message, caplog.text, re.DOTALL), caplog.text


@pytest.mark.parametrize("fault", ["raise", "reward"])
def test_environments_in_the_same_process_go_on(envs: list[PoolVecEnv], fault: str) -> None:
    assert run_with_fault(envs, fault, num_hosts=1).lost.tolist() == [False, True]


@pytest.mark.parametrize("fault", ["print", "child"])
def test_what_it_prints_and_starts_does_no_harm(envs: list[PoolVecEnv], fault: str) -> None:
    assert not run_with_fault(envs, fault).lost.any()


def test_answers_of_a_slow_environment_arrive(envs: list[PoolVecEnv]) -> None:
    env = faulty("slow", step_timeout=5.0).build(3)
    assert isinstance(env, RemoteVecEnv)
    envs.append(env)
    env.reset([EpisodeSpec("go", "train", 7)] * 3)
    env.reset([EpisodeSpec("go", "train", 0)], [2])  # the last one is quick
    assert not env.step(np.zeros((3, 4, 2), np.float32)).lost.any()


def test_an_image_of_another_shape_ends_the_run(envs: list[PoolVecEnv]) -> None:
    message = re.escape(
        "image.agentview: the environment gave uint8 (17, 17, 3), at its start it was uint8 (16, 16, 3)"
    )
    with pytest.raises(RuntimeError, match=message):
        run_with_fault(envs, "shape")


def test_a_reset_that_raises_ends_the_run(envs: list[PoolVecEnv]) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)environment 1 \(host 1\) failed:.*KeyError: 'no such scene'"):
        run_with_fault(envs, "reset")


@pytest.mark.parametrize(("fault", "message"), [("raise", "solver diverged"), ("nan", "state is not finite")])
def test_the_same_fault_three_times_ends_the_run(envs: list[PoolVecEnv], fault: str, message: str) -> None:
    env = faulty(fault).build(1)
    assert isinstance(env, RemoteVecEnv)
    envs.append(env)
    actions = np.zeros((1, 4, 2), np.float32)
    for _ in range(2):
        env.reset([EpisodeSpec("go", "train", 7)])
        assert env.step(actions).lost[0]
    env.reset([EpisodeSpec("go", "train", 7)])
    with pytest.raises(RuntimeError, match=f"(?s){message}.*failed 3 times without completing a step; giving up"):
        env.step(actions)


def test_a_host_that_is_killed_between_calls(envs: list[PoolVecEnv], caplog: pytest.LogCaptureFixture) -> None:
    env = faulty("none", num_hosts=2).build(2)
    assert isinstance(env, RemoteVecEnv)
    envs.append(env)
    env.reset([EpisodeSpec("go", "train", 0), EpisodeSpec("go", "train", 1)])
    os.kill(env.worker_pids[0], signal.SIGKILL)
    assert env.step(np.zeros((2, 2, 2), np.float32)).lost.tolist() == [True, False]
    assert "host 0 (environments [0]) died with exit code -9 (SIGKILL)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kwargs": {"fault": "init"}}, r"RuntimeError: fault is 'init'.*the license server does not answer"),
        ({"kwargs": {"color": 1}}, r"unexpected keyword argument 'color'"),
        ({"env": "no_such_module:Env"}, r"No module named 'no_such_module'"),
        ({"env": "faulty_sim:NoSuchClass"}, r"has no attribute 'NoSuchClass'"),
        ({"facts": {"cameras": {"front": "camera.back"}}}, r"there is no 'camera.back'.*at 'back' found front, wrist"),
        ({"facts": {"horizon": {"go": 5}}}, r"facts.horizon: got .*for each of the tasks go, stay"),
        ({"facts": {"action_low": [-1, -1, -1]}}, r"facts.action_low, facts.action_high: got .*as many numbers each"),
        ({"facts": {"action_low": [2, 2]}}, r"facts.action_low, facts.action_high: got \[2.0, 2.0\] and \[1.0, 1.0\]"),
        ({"python": "/bin/true"}, r"died with exit code 0"),
        ({"python": "/no/python"}, r"env.python: there is no '/no/python'"),
        ({"working_dir": "/no/folder"}, r"env.working_dir: there is no '/no/folder'"),
    ],
)
def test_what_cannot_start_says_why(options: dict[str, object], message: str) -> None:
    config = RemoteConfig.model_validate({"env": "faulty_sim:FaultySim", "python_path": [HERE], **options})
    with pytest.raises((RuntimeError, ValueError), match=f"(?s){message}"):
        config.build(1)


def other_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Start a changed copy of host.py from now on."""
    text = client.HOST_FILE.read_text()
    assert text.count(old) == 1
    changed = tmp_path / "host.py"
    changed.write_text(text.replace(old, new))
    monkeypatch.setattr(client, "HOST_FILE", changed)


def test_a_host_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_host(tmp_path, monkeypatch, "\nPROTOCOL = 1\n", "\nPROTOCOL = 99\n")
    with pytest.raises(RuntimeError, match=r"speaks version 99 of the protocol, this vla-rl speaks 1: copy host\.py"):
        faulty("none").build(1)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('self.sock.sendall(b"garbage!!!")', "above the limit"),
        (r'self.sock.sendall(b"\0\0\0\2\xc1\xc1")', "bytes that are no message"),
        (r'self.sock.sendall(b"\0\0\0\1\x01")', "something that is no answer"),
        ('ready.append(pack([message["serial"], 55, status, answer]))', "answered for environment 55, unasked"),
        ('send_message(self.sock, {"__array__": ["O", [1], b"12345678"]})', "arrays of 'O' are not allowed"),
    ],
)
def test_a_host_that_speaks_nonsense_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: str, message: str
) -> None:
    other_host(tmp_path, monkeypatch, 'ready.append(pack([message["serial"], env_id, status, answer]))', new)
    env = faulty("none").build(1)
    with pytest.raises(RuntimeError, match=f"(?s){message}.*giving up"):
        env.reset([EpisodeSpec("go")])
    env.close()


RUN = """
import sys, time, numpy as np
from sim.remote import RemoteConfig
from vla_rl.types import EpisodeSpec
env = RemoteConfig(env="faulty_sim:FaultySim", python_path=(sys.argv[1],), num_hosts=2, kwargs={"fault": sys.argv[2]},
                   step_timeout=1000).build(2)
env.reset([EpisodeSpec("go", "train", 7)] * 2)
print(*env.worker_pids, flush=True)
env.step(np.zeros((2, 4, 2), np.float32))
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("fault", "how"),
    [
        ("child", signal.SIGINT),
        ("child", signal.SIGTERM),
        ("child", signal.SIGKILL),
        pytest.param("hang", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("stop", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_no_process_outlives_the_run(fault: str, how: signal.Signals) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, HERE, fault], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout is not None
    try:
        pids = [int(text) for text in run.stdout.readline().split()]
        assert len(pids) == 2 and all(len(group_of(pid)) >= 2 for pid in pids)
        time.sleep(0.3)
        run.send_signal(how)
        run.wait(timeout=20)
        wait_until_gone(pids)
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
