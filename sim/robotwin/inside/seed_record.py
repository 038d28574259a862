"""Record of the feasible seeds of a RoboTwin task, written once.

Runs in RoboTwin's Python (3.10).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Seeds that belong together: (train, validation) have blocks of their own above RoboTwin's seeds.
BLOCK = 16  # candidates for one initial state
FIRST = {"train": 2**29, "validation": 2 * 2**29}
MAX_INDEX = 2**29 // BLOCK
MAX_WALK = 10_000  # official seeds looked at before giving up


class SeedRecord:
    """A JSON file, seed -> {"feasible": bool, "why": text, "info": what the instruction's templates need}."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file, self.about = file, about
        self.seeds: dict[int, dict[str, Any]] = {}
        self._read()

    def _read(self) -> None:
        if self.file.is_file():
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if content["about"] != self.about:
                raise ValueError(
                    f"{self.file} was recorded with {content['about']}, this environment has {self.about}: "
                    "set env.seeds_folder to another folder"
                )
            self.seeds = {int(seed): entry for seed, entry in content["seeds"].items()} | self.seeds

    def add(self, seed: int, feasible: bool, why: str = "", info: dict[str, Any] | None = None) -> None:
        """Note a seed; other processes that write the same file lose nothing."""
        self.seeds[seed] = {"feasible": feasible, "why": why, "info": info or {}}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file.with_suffix(".lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            self._read()
            entries = {str(key): self.seeds[key] for key in sorted(self.seeds)}
            partial = self.file.with_suffix(".partial")  # Ours alone, by the lock.
            partial.write_text(json.dumps({"about": self.about, "seeds": entries}, indent=1), encoding="utf-8")
            os.replace(partial, self.file)

    def find(self, split: str, index: int, first_eval: int, check: Callable[[int], bool]) -> int:
        """The feasible seed of an initial state. Seeds not yet in the record are checked.

        eval: the `index`-th feasible seed from `first_eval` on, as RoboTwin's own evaluation counts. Others: the
        first feasible seed of the block that belongs to this initial state alone, so that any can be asked for.

        Raises:
            ValueError: an index out of range. RuntimeError: no feasible seed.
        """
        for seed in self._candidates(split, index, first_eval):
            entry = self.seeds.get(seed)
            if entry["feasible"] if entry is not None else check(seed):
                if split != "eval" or index == 0:
                    return seed
                index -= 1
        raise RuntimeError(f"no feasible seed for initial state {index} of {split}; see {self.file} for the reasons")

    def _candidates(self, split: str, index: int, first_eval: int) -> Iterator[int]:
        if split == "eval":
            return iter(range(first_eval, first_eval + MAX_WALK))
        if not 0 <= index < MAX_INDEX:
            raise ValueError(f"no initial state {index} in split {split!r}: indices are below {MAX_INDEX}")
        start = FIRST[split] + index * BLOCK
        return iter(range(start, start + BLOCK))
