"""Folder of an unfinished recording: which process is at it, what it says of itself, how it ends."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import PREFERENCES, RECORDING_SETTINGS, read_shards, staging_folder

Choice = dict[str, Any]  # "better", "worse": two episodes, by the numbers of their shards. "by": who said so.
_ENDS = ("better", "worse")


class RecordingError(ValueError):
    """A recording that cannot be begun or finished; the message says what to do."""


class RecordingLock:
    """A lock on a recording that is not finished, held until `close` or the end of the process, however that ends.

    It keeps other processes out, and not a second recording of this one. Its file is beside the folder, and is deleted
    after it. Nothing is locked where the system or the file system has no such locks.

    Args:
        staging: the folder, see `staging_folder`.

    Raises:
        RecordingError: another process has it, or has just finished it. OSError: nothing can be written there.
    """

    def __init__(self, staging: Path) -> None:
        self._staging, self._path = staging, staging.with_name(f"{staging.name}.lock")
        self._file = -1
        if os.name != "posix":
            return
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            who = os.pread(self._file, 500, 0).decode(errors="replace") or "another process"
            os.close(self._file)
            self._file = -1
            raise RecordingError(
                f"{staging} is recorded into already, by {who}. End that first, or give another folder: two would "
                "spoil each other's episodes"
            ) from error
        except OSError:
            return
        if not self._path.exists() or not os.path.samestat(os.fstat(self._file), self._path.stat()):
            self.close()
            raise RecordingError(f"{staging}: another process has just finished or deleted it; try again")
        os.ftruncate(self._file, 0)
        who = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
        os.pwrite(self._file, who.encode(), 0)

    def close(self) -> None:
        """Free the recording. May be called twice."""
        if self._file < 0:
            return
        if not self._staging.exists():
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> RecordingLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_settings(staging: Path) -> dict[str, Any]:
    """What a recording says of itself: `rate`, `robot` and, once it has an episode, `features`.

    Raises:
        RecordingError: they are torn.
    """
    file = staging / RECORDING_SETTINGS
    try:
        settings = json.loads(file.read_text())
        if not isinstance(settings, dict):
            raise ValueError("not a map")
    except ValueError as error:
        raise RecordingError(
            f"{file}: damaged ({error}). Copy it from another recording of this robot with the same cameras, or move "
            f"{staging} away"
        ) from error
    return settings


def finish(folder: Path) -> dict[str, int]:
    """Make the dataset of a recording's whole episodes, after a crash too. Returns {"episodes", "frames"}.

    Raises:
        RecordingError: there is no unfinished recording, another process is at it, it holds no whole episode, or its
            settings, or its choices between episodes, are torn.
        DatasetError: an episode of it is torn.
    """
    staging = staging_folder(Path(folder))
    if not (staging / RECORDING_SETTINGS).is_file():
        raise RecordingError(f"{folder}: there is no unfinished recording ({staging.name}) beside it")
    with RecordingLock(staging):
        settings = read_settings(staging)
        if not any(rows for rows, _, _ in read_shards(staging)) or not settings.get("features"):
            raise RecordingError(f"{staging} holds no whole episode; delete it")
        features = {name: {**f, "shape": tuple(f["shape"])} for name, f in settings["features"].items()}
        rate, robot = settings["rate"], settings["robot"]
        notes = {"source": "recording", "robot": robot, "rate": rate}
        choices = {PREFERENCES: text} if (text := _choices_of_dataset(staging)) else {}
        totals = assemble(staging, Path(folder), fps=rate, features=features, robot=robot, notes=notes, files=choices)
        shutil.rmtree(staging)
    return totals


def read_choices(file: Path) -> list[Choice]:
    """Which episodes a person found better; none where there is no file.

    Raises:
        RecordingError: it is damaged.
    """
    lines = file.read_text().splitlines() if file.is_file() else []
    try:
        choices = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(one, dict) and type(one.get(key)) is int for one in choices for key in _ENDS):
            raise ValueError('a line has no "better" and "worse"')
    except ValueError as error:
        raise RecordingError(f"{file}: {error}. Mend that line, or move the file away") from error
    return choices


def choices_text(choices: Sequence[Choice]) -> str:
    """A line for each, as a file has them."""
    return "".join(json.dumps(choice) + "\n" for choice in choices)


def _choices_of_dataset(staging: Path) -> str:
    """The choices by the episodes' numbers in the dataset, in place of their shards'; empty where there are none."""
    if not (choices := read_choices(staging / PREFERENCES)):
        return ""
    shards = [int(shard.name.removeprefix("shard_")) for rows, _, shard in read_shards(staging) for _ in rows]
    episodes = {shard: episode for episode, shard in enumerate(shards)}
    whole = [choice for choice in choices if all(choice[key] in episodes for key in _ENDS)]
    return choices_text([{**choice, **{key: episodes[choice[key]] for key in _ENDS}} for choice in whole])


def discard(folder: Path) -> None:
    """Delete an unfinished recording, if there is one.

    Raises:
        RecordingError: another process is at it.
    """
    staging = staging_folder(Path(folder))
    if (staging / RECORDING_SETTINGS).is_file():
        with RecordingLock(staging):
            shutil.rmtree(staging)
