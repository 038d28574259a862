"""Replay buffer of decisions on disk: the logged ones (the prior), and those added since.

    replay/segment-00000000/   decisions.safetensors, episodes.json: what one round of episodes added
    replay/segment-00000001/

A segment is written whole or not at all, and says which policy's features it holds. The oldest ones leave when there
are more decisions than the buffer may hold; of these `left-00000000/episodes.json` stays, which says what they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vla_rl.algorithms.offpolicy.transitions import Transitions, draw
from vla_rl.common.atomic import atomic_folder

FORMAT = 1
DECISIONS_FILE, FACTS_FILE = "decisions.safetensors", "episodes.json"
_SEGMENT, _LEFT = "segment", "left"


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


@dataclass(frozen=True)
class _Held:
    """A segment in memory. everyone, person: int64, the numbers of all its decisions, and of those of a person."""

    transitions: Transitions
    everyone: np.ndarray
    person: np.ndarray


class Replay:
    """Decisions of a prior and of segments; batches mix the two.

    Args:
        folder: of the segments; those that are there are not loaded before `restore`.
        prior: decisions that were logged before; None: there are none.
        prior_share: of each batch, as soon as there are fresh decisions.
        capacity: fresh decisions held; the oldest segments leave, the newest never does.
        fingerprint: of the policy and its options; a segment with another one is refused. What was drawn at its
            decisions is not in it.
        person_is_prior: what a person decided in a segment belongs to the prior as well.

    Attributes:
        notes: of each segment that was ever added and is known here, those that have left included.
    """

    def __init__(
        self,
        folder: Path,
        prior: Transitions | None,
        prior_share: float,
        capacity: int,
        fingerprint: str,
        person_is_prior: bool = False,
    ) -> None:
        self.folder, self.prior, self.prior_share = folder, prior, prior_share
        self.capacity, self.fingerprint, self.person_is_prior = capacity, fingerprint, person_is_prior
        self.notes: dict[int, Mapping[str, Any]] = {}
        self._segments: dict[int, _Held] = {}

    def __len__(self) -> int:
        """Fresh decisions held."""
        return sum(len(part.everyone) for part in self._segments.values())

    @property
    def num_episodes(self) -> int:
        """Fresh episodes held."""
        return sum(len(part.transitions.success) for part in self._segments.values())

    @property
    def num_prior(self) -> int:
        """Decisions that the prior's share is drawn from."""
        return sum(len(rows) for _, rows in self._prior_parts())

    @property
    def oldest(self) -> Transitions | None:
        """Of the segments held, the first one's decisions."""
        return self._segments[min(self._segments)].transitions if self._segments else None

    def has(self, number: int) -> bool:
        """Whether a segment was written, perhaps before a run was stopped."""
        return self._path(number).is_dir()

    def add(self, number: int, transitions: Transitions, notes: Mapping[str, Any] | None = None) -> None:
        """Write a segment, and hold it. `notes`: JSON-able; they stay when it leaves."""
        optional = {f.name: getattr(transitions, f.name) for f in fields(Transitions)}
        arrays = {name: np.ascontiguousarray(array) for name, array in optional.items() if array is not None}
        facts = {"format": FORMAT, "fingerprint": self.fingerprint, "episodes": len(transitions.success)}
        with atomic_folder(self._path(number), "replay segment") as partial:
            save_file(arrays, partial / DECISIONS_FILE)
            (partial / FACTS_FILE).write_text(json.dumps({**facts, "notes": dict(notes or {})}, indent=1) + "\n")
        self._hold(number, transitions, notes or {})

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
        self._hold(number, transitions, facts.get("notes", {}))
        return transitions

    def restore(self, count: int | None = None) -> None:
        """Hold what was held when segments 0 .. count - 1 had been added; None: all that there are.

        Raises:
            ReplayError: one is damaged, or another policy's.
        """
        self._segments.clear()
        self.notes.clear()
        for number in self._numbers(_LEFT):
            try:
                self.notes[number] = json.loads((self._path(number, _LEFT) / FACTS_FILE).read_text()).get("notes", {})
            except (OSError, ValueError) as error:
                raise ReplayError(
                    f"{self._path(number, _LEFT)}: not readable ({error}). Delete it; it is then not known which "
                    "episodes it held"
                ) from error
        for number in (n for n in self._numbers(_SEGMENT) if count is None or n < count):
            self.load(number)

    def draw(self, size: int, discount: float, rng: np.random.Generator) -> ReplayBatch:
        """A batch drawn with replacement: `prior_share` of it from the prior, the rest from what is fresh.

        Raises:
            ValueError: there is nothing to draw from.
        """
        fresh = [(part.transitions, part.everyone) for part in self._segments.values()]
        logged = self._prior_parts()
        if not logged and not fresh:
            raise ValueError("an empty replay buffer: no prior and no episodes; collect some before updates")
        share = 0.0 if not logged else self.prior_share if fresh else 1.0
        count = round(share * size)
        parts = _mixed(logged, count, discount, False, rng) + _mixed(fresh, size - count, discount, True, rng)
        return ReplayBatch(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _prior_parts(self) -> list[tuple[Transitions, np.ndarray]]:
        """What the prior's share is drawn from: parts, and the numbers of their decisions."""
        logged = [] if self.prior is None else [(self.prior, np.arange(len(self.prior)))]
        if not self.person_is_prior:
            return logged
        return logged + [(part.transitions, part.person) for part in self._segments.values() if len(part.person)]

    def _hold(self, number: int, transitions: Transitions, notes: Mapping[str, Any]) -> None:
        person = np.zeros(0, np.int64) if transitions.person is None else np.flatnonzero(transitions.person)
        self._segments[number] = _Held(transitions, np.arange(len(transitions)), person)
        self.notes[number] = notes
        for old in sorted(self._segments)[:-1]:
            if len(self) > self.capacity:
                del self._segments[old]
                if (path := self._path(old)).is_dir():
                    left = path.rename(self._path(old, _LEFT))  # First: a kill leaves no half of a segment.
                    (left / DECISIONS_FILE).unlink()

    def _numbers(self, kind: str) -> Sequence[int]:
        names = (re.fullmatch(rf"{kind}-(\d{{8,}})", path.name) for path in self.folder.glob(f"{kind}-*"))
        return sorted(int(name.group(1)) for name in names if name)

    def _path(self, number: int, kind: str = _SEGMENT) -> Path:
        return self.folder / f"{kind}-{number:08d}"


def _mixed(
    parts: Sequence[tuple[Transitions, np.ndarray]], size: int, discount: float, fresh: bool, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """`size` decisions, drawn with replacement from the numbered ones of all parts, by their weights."""
    if not size:
        return []
    starts = np.cumsum([0, *(len(rows) for _, rows in parts)])
    drawn = np.sort(draw(_weights(parts), starts[-1], size, rng))
    cuts = np.searchsorted(drawn, starts)
    return [
        _drawn(part, rows[drawn[a:b] - start], discount, fresh)
        for (part, rows), start, a, b in zip(parts, starts, cuts, cuts[1:], strict=False)
        if b > a
    ]


def _weights(parts: Sequence[tuple[Transitions, np.ndarray]]) -> np.ndarray | None:
    """Of the numbered decisions of all parts; None: all alike."""
    if all(part.weight is None for part, _ in parts):
        return None
    return np.concatenate([np.ones(len(rows)) if part.weight is None else part.weight[rows] for part, rows in parts])


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
