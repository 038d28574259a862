"""A process that hangs: those that wait for it say which one it is, and where. Real processes, over gloo on the CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launching import launch
from tiny_run import save_policy

HERE = Path(__file__).resolve().parent
LIMIT = 4.0  # Seconds: enough for a busy machine between two meetings.


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("watch") / "base")


def hang(policy: Path, ways: str) -> subprocess.CompletedProcess[str]:
    return launch(str(HERE / "hung_process.py"), str(policy), ways, str(LIMIT))


def test_work_with_signs_of_it_and_a_sleeper_that_is_named(policy):
    result = hang(policy, "work,main_first,sleep")
    assert result.stdout.splitlines() == ["work: all came", "main_first: all came"]
    assert result.returncode != 0
    assert "HungProcessError: process 0 waited in vain for 1," in result.stderr, result.stderr[-4000:]
    assert "process 1 of 2 is alive" in result.stderr
    assert "at distributed/hung_process.py:" in result.stderr and "in hang_for_good" in result.stderr


@pytest.mark.slow  # The launcher waits half a minute for a stopped process before it kills it.
@pytest.mark.parametrize("way", ["stop", "stop_in_exchange"])
def test_a_stopped_process_is_named(policy, way):
    result = hang(policy, way)
    assert result.returncode != 0
    assert "HungProcessError: process 0 waited in vain for 1," in result.stderr, result.stderr[-4000:]
    assert "process 1 of 2 has given no sign of life" in result.stderr
