"""The dummy environment, which breaks something once, in the middle of an episode, when a file in a folder says so.

The file `fault.json` is a JSON object: `signal` to send to the process `pid` (0: its own, -1: its parent), or `hang` in
seconds.
The environment that reads it removes it first.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Literal

import numpy as np

from sim.dummy import DummyConfig, DummyEnv


class FaultyConfig(DummyConfig):
    kind: Literal["faulty_env:FaultyConfig"] = "faulty_env:FaultyConfig"
    folder: str

    def make(self, record_frames: bool = False) -> DummyEnv:
        return FaultyEnv(self, record_frames)


class FaultyEnv(DummyEnv):
    config: FaultyConfig

    def apply(self, action: np.ndarray) -> bool:
        if self.num_steps == 5:
            fault, mine = Path(self.config.folder) / "fault.json", Path(self.config.folder) / f"taken_{os.getpid()}"
            try:
                os.rename(fault, mine)  # One of all environments gets it.
            except FileNotFoundError:
                pass
            else:
                what = json.loads(mine.read_text())
                if "signal" in what:
                    os.kill({0: os.getpid(), -1: os.getppid()}.get(what["pid"], what["pid"]), what["signal"])
                time.sleep(what.get("hang", 0))
        return super().apply(action)


def plant(folder: Path, **fault: float) -> None:
    """Let the next environment in the middle of an episode break."""
    (folder / "fault.tmp").write_text(json.dumps(fault))
    os.rename(folder / "fault.tmp", folder / "fault.json")


def wait_until_taken(folder: Path, seconds: float = 60) -> None:
    """Wait until an environment has met what was planted."""
    end = time.monotonic() + seconds
    while (folder / "fault.json").exists():
        assert time.monotonic() < end, "no environment met the fault: none ran"
        time.sleep(0.05)
