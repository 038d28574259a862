"""A process that hangs: those that wait for it say which one it is, and where. Real processes, over gloo on the CPU."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from launching import launch
from tiny_run import save_policy

from vla_rl.common.distributed.process_watch import Watch

HERE = Path(__file__).resolve().parent
LIMIT = 6.0  # Seconds: enough for a busy machine between two meetings.
pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("watch") / "base")


def hang(policy: Path, ways: str) -> subprocess.CompletedProcess[str]:
    return launch(str(HERE / "hung_process.py"), str(policy), ways, str(LIMIT))


def test_work_with_signs_of_it_and_a_sleeper_that_is_named(policy):
    result = hang(policy, "work,main_first,sleep")
    assert result.stdout.splitlines() == ["work: all came", "main_first: all came"], result.stderr[-4000:]
    assert result.returncode != 0
    assert "HungProcessError: process 0 waited in vain for 1," in result.stderr, result.stderr[-4000:]
    assert "process 1 of 2 is alive" in result.stderr
    assert "at distributed/hung_process.py:" in result.stderr and "in hang_for_good" in result.stderr


def test_an_error_that_is_this_process_own_blames_no_other():
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    watches = [Watch(store, rank, 2, timedelta(minutes=1)) for rank in range(2)]
    try:
        with pytest.raises(RuntimeError, match=r"^the camera timed out$"), watches[0].explained():
            raise RuntimeError("the camera timed out")
    finally:
        for watch in watches:
            watch.close()


@pytest.mark.slow  # The launcher waits half a minute for a stopped process before it kills it.
@pytest.mark.parametrize("way", ["stop", "stop_in_exchange"])
def test_a_stopped_process_is_named(policy, way):
    result = hang(policy, way)
    assert result.returncode != 0
    assert "HungProcessError: process 0 waited in vain for 1," in result.stderr, result.stderr[-4000:]
    assert "process 1 of 2 has given no sign of life" in result.stderr
