"""A recording that is not finished belongs to one process, until that one ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT

from real_robot.operator.recorder import Recording
from real_robot.operator.recording_folder import RecordingError, discard, finish

HOLD = """
import sys
from pathlib import Path
from real_robot.operator.recorder import Recording
recording = Recording(Path(sys.argv[1]), 10, "toy")
print("held", flush=True)
sys.stdin.read()
"""


def record(folder: Path) -> Recording:
    return Recording(folder, 10, "toy")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that records into the folder `set`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "set")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_what_a_living_process_records_is_not_touched(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    message = rf"\.set\.recording is recorded into already, by process {other.pid} on .*, since .*give another folder"
    for act in (record, finish, discard):
        with pytest.raises(RecordingError, match=message):
            act(tmp_path / "set")
        assert (tmp_path / ".set.recording").is_dir()


def test_a_killed_process_leaves_its_recording_free(other: subprocess.Popen[bytes], tmp_path: Path) -> None:
    other.kill()
    other.wait(timeout=10)
    record(tmp_path / "set")
    discard(tmp_path / "set")
    assert not list(tmp_path.iterdir())


def test_a_recording_that_failed_is_free_for_other_processes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="arm"), record(tmp_path / "set"):
        raise OSError("the arm is gone")
    command = [sys.executable, "-c", HOLD, str(tmp_path / "set")]
    assert subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
