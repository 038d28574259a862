"""The ledger of episodes: whatever dies, joins, hangs or answers twice, every group comes out whole, once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vla_rl.rollout.actors.ledger import MAX_ATTEMPTS, Ledger, Ticket
from vla_rl.types import EpisodeSpec, Keyframe


class Schedules(RuleBasedStateMachine):
    """Runners that take, finish, die, hang, come back and answer late or twice, in any order."""

    @initialize()
    def begin(self) -> None:
        self.ledger: Ledger[tuple[int, int, int]] = Ledger()
        self.sizes: dict[int, int] = {}
        self.running: list[tuple[str, Ticket]] = []  # Also what runs on in those set aside.
        self.taken: dict[int, list[tuple[int, int, int]]] = {}
        self.version = 0
        self.losses = Counter[tuple[int, int]]()  # Of each place, since the last resumption.
        self.is_over = False

    def lose(self, what: Callable[[], object], places: list[tuple[int, int]]) -> None:
        """Lose what these places had: the run ends where one was lost `MAX_ATTEMPTS` times, and only there."""
        self.losses.update(places)
        try:
            what()
        except RuntimeError:
            self.is_over = True
        assert self.is_over == any(num >= MAX_ATTEMPTS for num in self.losses.values())

    @precondition(lambda self: not self.is_over)
    @rule(size=st.integers(1, 3))
    def order(self, size: int) -> None:
        number = self.ledger.add(
            EpisodeSpec("t", "train", len(self.sizes)), [len(self.sizes) * 10 + i for i in range(size)]
        )
        self.sizes[number] = size

    def holders(self) -> dict[tuple[int, int], str | None]:
        groups = self.ledger._groups.items()
        return {(number, member): p.holder for number, group in groups for member, p in enumerate(group.places)}

    @precondition(lambda self: not self.is_over)
    @rule(data=st.data(), holder=st.sampled_from("abc"))
    def hand_out(self, data: st.DataObject, holder: str) -> None:
        if waiting := self.ledger.waiting():
            ticket = data.draw(st.sampled_from(waiting))
            self.ledger.hand_out(ticket, holder)
            self.running.append((holder, ticket))

    @precondition(lambda self: self.running and not self.is_over)
    @rule(data=st.data(), again=st.booleans(), age=st.integers(0, 2))
    def finish(self, data: st.DataObject, again: bool, age: int) -> None:
        holder, ticket = data.draw(st.sampled_from(self.running))
        self.ledger.store(ticket, (ticket.group, ticket.member, ticket.seed), self.version - age)
        if not again:  # Else its answer comes a second time.
            self.running.remove((holder, ticket))

    @precondition(lambda self: not self.is_over)
    @rule(holder=st.sampled_from("abc"), silent=st.booleans())
    def die(self, holder: str, silent: bool) -> None:
        held = [place for place, holders in self.holders().items() if holder == holders]
        self.lose(lambda: self.ledger.give_back_all(holder, "it died"), held)
        if not silent:  # Else it was set aside for its silence, and answers late.
            self.running = [(who, ticket) for who, ticket in self.running if who != holder]

    @precondition(lambda self: not self.is_over)
    @rule(data=st.data())
    def lose_what_was_stored(self, data: st.DataObject) -> None:
        if ready := self.ledger.ready(not_before=-9):
            number, _ = data.draw(st.sampled_from(ready))
            self.lose(lambda: self.ledger.reopen(number, 0, "its object is gone"), [(number, 0)])

    @precondition(lambda self: not self.is_over)
    @rule()
    def resume(self) -> None:
        state = json.loads(json.dumps(self.ledger.state()))
        self.ledger, self.running = Ledger(), []
        self.losses.clear()
        self.ledger.load_state(state)

    @precondition(lambda self: not self.is_over)
    @rule()
    def update(self) -> None:
        self.version += 1
        for number, episodes in self.ledger.ready(self.version - 1):
            assert number not in self.taken
            self.taken[number] = episodes
            self.ledger.take(number)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.ledger.num_under_way + len(self.taken) == len(self.sizes)
        for number, episodes in self.taken.items():
            assert [(group, member) for group, member, _ in episodes] == [
                (number, i) for i in range(self.sizes[number])
            ]
            assert len({seed for *_, seed in episodes}) == self.sizes[number]

    def teardown(self) -> None:
        """Whoever still runs is gone, and one runner that lives does what is left: then all of it is there."""
        if not hasattr(self, "ledger") or self.is_over:
            return
        if any(num >= MAX_ATTEMPTS - 1 for num in self.losses.values()):
            self.resume()  # Else the end could be one loss too many.
        for holder in "abc":
            self.ledger.give_back_all(holder, "the end")
        for ticket in self.ledger.waiting():
            self.ledger.hand_out(ticket, "last")
            assert self.ledger.store(ticket, (ticket.group, ticket.member, ticket.seed), self.version)
        self.version -= 1  # Nothing is too old any more.
        for number, episodes in self.ledger.ready(-9):
            self.taken[number] = episodes
            self.ledger.take(number)
        self.nothing_is_lost()
        assert len(self.taken) == len(self.sizes)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def whole(ledger: Ledger[str], oldest: int) -> None:
    for ticket in ledger.waiting():
        ledger.hand_out(ticket, "a")
        ledger.store(ticket, "episode", oldest)


def test_a_group_too_old_is_begun_again_with_the_same_seeds() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.add(EpisodeSpec("t"), [5, 6])
    whole(ledger, oldest=3)
    assert not ledger.ready(not_before=4)
    assert ledger.num_dropped == 1
    assert [(t.seed, t.attempt) for t in ledger.waiting()] == [(5, 2), (6, 2)]
    whole(ledger, oldest=4)
    assert [episodes for _, episodes in ledger.ready(not_before=4)] == [["episode", "episode"]]


def test_late_and_double_answers_are_refused() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.add(EpisodeSpec("t"), [5])
    (first,) = ledger.waiting()
    ledger.hand_out(first, "a")
    ledger.give_back_all("a", "it hung")
    assert not ledger.store(first, "late", 0)
    (second,) = ledger.waiting()
    ledger.hand_out(second, "b")
    assert ledger.store(second, "right", 0)
    assert not ledger.store(second, "twice", 0)
    assert ledger.num_refused == 2
    assert ledger.ready(0) == [(0, ["right"])]


def test_an_episode_that_kills_whatever_runs_it_ends_the_run() -> None:
    ledger: Ledger[str] = Ledger()
    ledger.add(EpisodeSpec("pick", "train", 7), [5])
    with pytest.raises(RuntimeError, match=r"'pick', train 7, was lost 5 times.*because its host died"):
        for _ in range(MAX_ATTEMPTS):
            (ticket,) = ledger.waiting()
            ledger.hand_out(ticket, "a")
            ledger.give_back(ticket, "its host died")


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=5, deadline=None)
def test_keyframes_survive_the_checkpoint(seed: int) -> None:
    arrays = {"qpos": np.random.default_rng(seed).normal(size=(2, 3)), "flag": np.array(True)}
    ledger: Ledger[str] = Ledger()
    ledger.add(EpisodeSpec("t", "train", 4, "say", Keyframe("dummy", "t", 9, arrays)), [seed])
    again: Ledger[str] = Ledger()
    again.load_state(json.loads(json.dumps(ledger.state())))
    (ticket,) = again.waiting()
    assert (ticket.spec.instruction, ticket.seed) == ("say", seed)
    assert ticket.spec.keyframe is not None and ticket.spec.keyframe.step == 9
    for name, array in arrays.items():
        np.testing.assert_array_equal(ticket.spec.keyframe.arrays[name], array)


def test_every_field_of_a_spec_survives_the_checkpoint() -> None:
    spec = EpisodeSpec("stack", "validation", 7, "another wording", perturbation="camera-2", place=3, group=3)
    defaults = EpisodeSpec("reach")
    for part in fields(EpisodeSpec):
        if part.name != "keyframe":
            assert getattr(spec, part.name) != getattr(defaults, part.name), f"{part.name}: give it a value here"
    ledger: Ledger[str] = Ledger()
    ledger.add(spec, [1, 2])
    again: Ledger[str] = Ledger()
    again.load_state(json.loads(json.dumps(ledger.state())))
    assert [ticket.spec for ticket in again.waiting()] == [spec, spec]
    assert [ticket.spec.place for ticket in again.waiting()] == [3, 4], "a member each"
    assert [ticket.spec.group for ticket in again.waiting()] == [3, 3], "of one group"
