"""LIBERO that says, from its worker processes, how long it stepped and how long it rendered. Imports no torch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np

from sim.libero.env import LiberoConfig, LiberoEnv
from sim.single_env import SingleObservation
from vla_rl.types import EpisodeSpec


class TimedLiberoConfig(LiberoConfig):
    """LIBERO, each environment of which keeps its seconds in a file of `clock_folder`."""

    kind: Literal["vla_rl.workflows.gpu_bench.timed_libero:TimedLiberoConfig"] = (
        "vla_rl.workflows.gpu_bench.timed_libero:TimedLiberoConfig"
    )
    clock_folder: Path

    def make(self, record_frames: bool = False) -> LiberoEnv:
        """See `LiberoConfig.make`."""
        return _TimedLibero(self, self.clock_folder, record_frames)


class _TimedLibero(LiberoEnv):
    def __init__(self, config: LiberoConfig, folder: Path, record_frames: bool) -> None:
        super().__init__(config, record_frames)
        self._seconds = {"simulation": 0.0, "rendering": 0.0}
        self._file = folder / f"{os.getpid()}_{id(self)}.json"

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[stage] += time.perf_counter() - started

    def begin(self, spec: EpisodeSpec) -> None:
        with self._timed("simulation"):
            super().begin(spec)

    def apply(self, action: np.ndarray) -> bool:
        with self._timed("simulation"):
            return super().apply(action)

    def observe(self) -> SingleObservation:
        with self._timed("rendering"):
            shown = super().observe()
        self._file.write_text(json.dumps(self._seconds))  # At once, as a worker ends without a word.
        return shown


def share_of_rendering(folder: Path) -> float:
    """Of the time that all environments took together; NaN where they kept none."""
    kept = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    total = sum(sum(each.values()) for each in kept)
    return sum(each["rendering"] for each in kept) / total if total else float("nan")
