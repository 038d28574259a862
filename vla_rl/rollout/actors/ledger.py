"""Ledger of ordered episodes: each spec is kept until its episode is stored, whatever dies meanwhile. Knows no Ray."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from vla_rl.types import EpisodeSpec, Keyframe

MAX_ATTEMPTS = 5  # of one episode that come to nothing, before the run ends: a spec that kills whatever runs it


@dataclass(frozen=True)
class Ticket:
    """One attempt at one episode.

    Attributes:
        group: number since the run's start. member: place in the group.
        attempt: from 1.
        num_lost: attempts before it that came to nothing, but for those that were too old.
        seed: of the episode's sampling: the same in every attempt.
    """

    group: int
    member: int
    attempt: int
    spec: EpisodeSpec
    seed: int
    num_lost: int = 0

    @property
    def is_last(self) -> bool:
        """Whether there is no other attempt after this one."""
        return self.num_lost + 1 >= MAX_ATTEMPTS


@dataclass
class _Place[P]:
    """What is known of one episode.

    Attributes:
        holder: who runs it; None: nobody.
        payload: the stored episode; None: not there yet.
        oldest: version of its oldest chunk.
        num_lost: attempts that came to nothing, but for those that were too old.
    """

    seed: int
    attempt: int = 1
    num_lost: int = 0
    holder: str | None = None
    payload: P | None = None
    oldest: int = 0


@dataclass
class _Group[P]:
    spec: EpisodeSpec
    places: list[_Place[P]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return all(place.payload is not None for place in self.places)

    @property
    def oldest(self) -> int:
        return min(place.oldest for place in self.places)


class Ledger[P]:
    """Every episode from its order to the moment when its whole group is taken; P: what an episode is stored as.

    Attributes:
        num_redone: episodes begun again: their runner died or hung, or what it had stored was lost.
        num_dropped: groups that were finished too late, and begun again.
        num_refused: results of attempts that had been given up, or that came twice.
    """

    def __init__(self) -> None:
        self.num_redone = self.num_dropped = self.num_refused = 0
        self._groups: dict[int, _Group[P]] = {}  # In the order in which they were added, by number.
        self._whole: list[int] = []  # In the order in which they became whole.
        self._num_added = 0

    @property
    def num_under_way(self) -> int:
        """Groups added and not yet taken."""
        return len(self._groups)

    def add(self, spec: EpisodeSpec, seeds: list[int]) -> int:
        """Order a group from this initial state, an episode for each seed; returns the group's number."""
        number = self._num_added
        self._groups[number] = _Group(spec, [_Place(seed) for seed in seeds])
        self._num_added += 1
        return number

    def waiting(self) -> list[Ticket]:
        """Return the episodes that nobody runs, the longest ordered first."""
        return [
            Ticket(number, member, place.attempt, group.spec.member(member), place.seed, place.num_lost)
            for number, group in self._groups.items()
            for member, place in enumerate(group.places)
            if place.holder is None and place.payload is None
        ]

    def hand_out(self, ticket: Ticket, holder: str) -> None:
        """Note who runs a waiting episode."""
        place = self._open_place(ticket)
        assert place is not None and place.holder is None, f"{ticket} does not wait"
        place.holder = holder

    def num_held(self, holder: str) -> int:
        """How many episodes this one runs."""
        return sum(place.holder == holder for group in self._groups.values() for place in group.places)

    def store(self, ticket: Ticket, payload: P, oldest: int) -> bool:
        """Keep a finished episode; False, and nothing kept, where it is of an attempt given up, or comes twice.

        Args:
            oldest: version of its oldest chunk.
        """
        place = self._open_place(ticket)
        if place is None or place.holder is None:
            self.num_refused += 1
            return False
        place.payload, place.oldest, place.holder = payload, oldest, None
        if self._groups[ticket.group].is_whole:
            self._whole.append(ticket.group)
        return True

    def give_back(self, ticket: Ticket, why: str) -> None:
        """Let an episode be run again; nothing where the attempt is not the one that is run.

        Raises:
            RuntimeError: it was lost `MAX_ATTEMPTS` times.
        """
        place = self._open_place(ticket)
        if place is not None and place.holder is not None:
            self._again(self._groups[ticket.group], place, why)

    def give_back_all(self, holder: str, why: str) -> int:
        """Let whatever this one runs be run again; returns how many episodes. Raises as `give_back`."""
        held = [(g, p) for g in self._groups.values() for p in g.places if p.holder == holder]
        for group, place in held:
            self._again(group, place, why)
        return len(held)

    def reopen(self, number: int, member: int, why: str) -> None:
        """Let a stored episode of a group not yet taken be run again: it cannot be read. Raises as `give_back`."""
        group = self._groups[number]
        self._again(group, group.places[member], why)
        self._whole = [whole for whole in self._whole if whole != number]

    def ready(self, not_before: int) -> list[tuple[int, list[P]]]:
        """Return the whole groups, number and episodes, the first finished first.

        Those with a chunk older than version `not_before` are begun again instead, and counted.
        """
        for number in [number for number in self._whole if self._groups[number].oldest < not_before]:
            self._whole.remove(number)
            self.num_dropped += 1
            for place in self._groups[number].places:
                place.payload, place.attempt = None, place.attempt + 1
        return [(n, [p.payload for p in self._groups[n].places if p.payload is not None]) for n in self._whole]

    def take(self, number: int) -> None:
        """Forget a whole group, whose episodes the caller has now."""
        self._whole.remove(number)
        del self._groups[number]

    def _open_place(self, ticket: Ticket) -> _Place[P] | None:
        """Where the ticket's attempt belongs, if it is the present one and nothing is stored yet."""
        group = self._groups.get(ticket.group)
        place = group.places[ticket.member] if group else None
        return place if place and place.payload is None and place.attempt == ticket.attempt else None

    def _again(self, group: _Group[P], place: _Place[P], why: str) -> None:
        self.num_redone += 1
        place.payload = place.holder = None
        place.attempt, place.num_lost = place.attempt + 1, place.num_lost + 1
        if place.num_lost >= MAX_ATTEMPTS:
            spec = group.spec
            raise RuntimeError(
                f"the episode of {spec.task!r}, {spec.split} {spec.index}, was lost {place.num_lost} times, the last "
                f"time because {why}"
            )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs, JSON-able: what was ordered and not yet taken. Finished ones run again."""
        groups = {n: [_spec_values(g.spec), [place.seed for place in g.places]] for n, g in self._groups.items()}
        return {"groups": groups, "num_added": self._num_added}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Undo `state`: whatever was under way waits."""
        self._num_added, self._whole = int(state["num_added"]), []
        self._groups = {
            int(number): _Group(_spec(spec), [_Place(seed) for seed in seeds])
            for number, (spec, seeds) in state["groups"].items()
        }


def _spec_values(spec: EpisodeSpec) -> dict[str, Any]:
    start = spec.keyframe
    arrays = {} if start is None else {n: (a.dtype.str, a.shape, _text(a)) for n, a in start.arrays.items()}
    keyframe = None if start is None else {"env": start.env, "task": start.task, "step": start.step, "arrays": arrays}
    values = {part.name: getattr(spec, part.name) for part in fields(EpisodeSpec)}
    return values | {"keyframe": keyframe}


def _spec(values: Mapping[str, Any]) -> EpisodeSpec:
    values = dict(values)
    if (start := values.pop("keyframe")) is None:
        return EpisodeSpec(**values)
    arrays = {
        name: np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        for name, (dtype, shape, text) in start["arrays"].items()
    }
    return EpisodeSpec(**values, keyframe=Keyframe(start["env"], start["task"], start["step"], arrays))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
