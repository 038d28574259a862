"""A replay buffer of decisions: what was logged before (the prior), and what has been added since, on disk.

    replay/segment-00000000/   decisions.safetensors, episodes.json: what one round of episodes added
    replay/segment-00000001/

A segment is written whole or not at all, and says which policy's features it holds. The oldest ones leave when there
are more decisions than the buffer may hold.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vla_rl.common.atomic import atomic_folder
from vla_rl.offpolicy.transitions import Transitions

FORMAT = 1
DECISIONS_FILE, FACTS_FILE = "decisions.safetensors", "episodes.json"
_SEGMENT = re.compile(r"segment-(\d{8,})")


class ReplayError(ValueError):
    """A replay buffer that is damaged or another run's; the message says which part, and what to do."""


@dataclass(frozen=True)
class ReplayBatch:
    """B decisions to learn from.

    Attributes:
        place: float32 (B, D), the policy's embedding. chunk: float32 (B, H * A).
        outcome: float32 (B,), discounted, from here on.
        goes_on: bool (B,), another decision follows. discount: float32 (B,), of its value, for the chunk's steps.
        next_place: float32 (B, D); zeros where none follows.
        candidates, next_candidates: float32 (B, C, H * A), the frozen policy's chunks; C is 0 where none were drawn.
        noise: float32 (B, C, K), what the candidates were made of; K is 0 where that is not known.
        fresh: bool (B,), not of the prior.
    """

    place: np.ndarray
    chunk: np.ndarray
    outcome: np.ndarray
    goes_on: np.ndarray
    discount: np.ndarray
    next_place: np.ndarray
    candidates: np.ndarray
    next_candidates: np.ndarray
    noise: np.ndarray
    fresh: np.ndarray


class Replay:
    """Decisions of a prior and of segments; batches mix the two.

    Args:
        folder: of the segments; those that are there are not loaded before `restore`.
        prior: decisions that were logged before; None: there are none.
        prior_share: of each batch, as soon as there are fresh decisions.
        capacity: fresh decisions held; the oldest segments leave, the newest never does.
        fingerprint: of the policy and of what was drawn; a segment with another one is refused.
    """

    def __init__(
        self, folder: Path, prior: Transitions | None, prior_share: float, capacity: int, fingerprint: str
    ) -> None:
        self.folder, self.prior, self.prior_share = folder, prior, prior_share
        self.capacity, self.fingerprint = capacity, fingerprint
        self._segments: dict[int, Transitions] = {}

    def __len__(self) -> int:
        """Fresh decisions held."""
        return sum(len(part) for part in self._segments.values())

    @property
    def num_episodes(self) -> int:
        """Fresh episodes held."""
        return sum(len(part.success) for part in self._segments.values())

    def has(self, number: int) -> bool:
        """Whether a segment was written, perhaps before a run was stopped."""
        return self._path(number).is_dir()

    def add(self, number: int, transitions: Transitions) -> None:
        """Write a segment, and hold it."""
        optional = {f.name: getattr(transitions, f.name) for f in fields(Transitions)}
        arrays = {name: np.ascontiguousarray(array) for name, array in optional.items() if array is not None}
        facts = {"format": FORMAT, "fingerprint": self.fingerprint, "episodes": len(transitions.success)}
        with atomic_folder(self._path(number), "replay segment") as partial:
            save_file(arrays, partial / DECISIONS_FILE)
            (partial / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n")
        self._hold(number, transitions)

    def load(self, number: int) -> Transitions:
        """Hold a segment that was written before; returns it.

        Raises:
            ReplayError: damaged, or another policy's.
        """
        path = self._path(number)
        try:
            facts = json.loads((path / FACTS_FILE).read_text())
            arrays = load_file(path / DECISIONS_FILE)
            found = facts["format"], facts["fingerprint"]
            transitions = Transitions(**arrays)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ReplayError(f"{path}: not a readable segment ({error}). Delete it; its episodes are lost") from error
        if found != (FORMAT, self.fingerprint):
            raise ReplayError(
                f"{path}: holds what another policy, or another version, made of its episodes "
                f"(format {found[0]}, {str(found[1])[:12]}; needed {FORMAT}, {self.fingerprint[:12]}). "
                "Choose another --output"
            )
        self._hold(number, transitions)
        return transitions

    def restore(self, count: int) -> None:
        """Hold what was held when segments 0 .. count - 1 had been added."""
        self._segments.clear()
        for number in sorted(n for n in self._numbers() if n < count):
            self.load(number)

    def draw(self, size: int, discount: float, rng: np.random.Generator) -> ReplayBatch:
        """A batch drawn with replacement: `prior_share` of it from the prior, the rest from what is fresh.

        Raises:
            ValueError: there is nothing to draw from.
        """
        fresh = list(self._segments.values())
        if self.prior is None and not fresh:
            raise ValueError("an empty replay buffer: no prior and no episodes; collect some before updates")
        share = 0.0 if self.prior is None else self.prior_share if fresh else 1.0
        logged = round(share * size)
        parts = [_drawn(self.prior, rng.integers(len(self.prior), size=logged), discount, False)] if logged else []  # type: ignore[arg-type]
        if size > logged:
            starts = np.cumsum([0, *(len(part) for part in fresh)])
            rows = np.sort(rng.integers(starts[-1], size=size - logged))
            for part, first, end in zip(fresh, starts, starts[1:], strict=False):
                inside = rows[(rows >= first) & (rows < end)] - first
                if len(inside):
                    parts.append(_drawn(part, inside, discount, True))
        return ReplayBatch(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _hold(self, number: int, transitions: Transitions) -> None:
        self._segments[number] = transitions
        for old in sorted(self._segments)[:-1]:
            if len(self) > self.capacity:
                del self._segments[old]
                leaving = self.folder / f".leaving-{old:08d}"  # Renamed first: a kill leaves no half of a segment.
                if self._path(old).is_dir():
                    self._path(old).rename(leaving)
                shutil.rmtree(leaving, ignore_errors=True)

    def _numbers(self) -> Sequence[int]:
        names = (_SEGMENT.fullmatch(path.name) for path in self.folder.glob("segment-*"))
        return [int(name.group(1)) for name in names if name]

    def _path(self, number: int) -> Path:
        return self.folder / f"segment-{number:08d}"


def _drawn(part: Transitions, rows: np.ndarray, discount: float, fresh: bool) -> dict[str, Any]:
    """Rows of one part as the fields of a batch."""
    following = part.following[rows]
    goes_on = following >= 0
    count = len(rows)
    none = np.zeros((count, 0, part.chunk[0].size), np.float32)
    candidates = none if part.candidates is None else part.candidates[rows].reshape(count, -1, none.shape[2])
    later = none if part.candidates is None else part.candidates[following].reshape(count, -1, none.shape[2])
    noise = candidates[..., :0] if part.noise is None else part.noise[rows].reshape(*candidates.shape[:2], -1)
    returns = part.success[part.episode[rows]] * discount ** part.remaining[rows].astype(np.float64)
    return {
        "place": part.embedding[rows],
        "chunk": part.chunk[rows].reshape(count, -1),
        "outcome": returns.astype(np.float32),
        "goes_on": goes_on,
        "discount": (discount ** part.num_steps[rows].astype(np.float64)).astype(np.float32),
        "next_place": np.where(goes_on[:, None], part.embedding[following], np.float32(0)),
        "candidates": candidates,
        "next_candidates": np.where(goes_on[:, None, None], later, np.float32(0)),
        "noise": noise,
        "fresh": np.full(count, fresh),
    }
