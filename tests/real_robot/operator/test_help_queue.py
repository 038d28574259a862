"""Whom the person helps next: order, nobody starves, one robot at a time, and times that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from real_robot.operator.hub.help_queue import HelpError, HelpQueue, Request
from real_robot.operator.hub.hub_log import HubLog, read_log, shares
from vla_rl.config import ConfigError

HEAD_START = 30.0


class Bench:
    """A queue with a clock of ours, and all its events."""

    def __init__(self, head_start: float = HEAD_START) -> None:
        self.now = 0.0
        self.events: list[dict[str, Any]] = []
        self.queue = HelpQueue(head_start, lambda: self.now, self.note)

    def note(self, event: str, **fields: Any) -> None:
        self.events.append({"at": self.now, "event": event, **fields})

    def order(self) -> list[str]:
        return [request.robot for request in self.queue.waiting()]


def test_who_waits_longest_comes_first_and_a_high_score_counts_as_waiting() -> None:
    bench = Bench()
    for now, robot, score in [(0, "a", None), (10, "b", 1.5), (20, "c", 9.0), (45, "d", 9.0)]:
        bench.now = now
        bench.queue.ask(robot, "", score, None if score is None else 1.0)
    # Half above the threshold is 15 s, twice and more 30 s: c at -10, b at -5, a at 0, d at 15.
    assert bench.order() == ["c", "b", "a", "d"]
    assert [round(r.urgency, 2) for r in bench.queue.waiting()] == [1, 0.5, 0, 1]


@pytest.mark.parametrize(
    ("score", "threshold", "urgency"),
    [(None, None, 0), (0.9, 1.0, 0), (float("nan"), 1.0, 0), (1.1, 1.0, 0.1), (float("inf"), 1.0, 1), (-1, -2, 1)],
)
def test_urgency_is_a_share_whatever_the_score(score: float | None, threshold: float | None, urgency: float) -> None:
    assert Request("a", 0, 0, "", score, threshold).urgency == pytest.approx(urgency)


def test_one_robot_at_a_time() -> None:
    bench = Bench()
    bench.queue.ask("a")
    bench.queue.ask("b")
    assert bench.queue.help_next("anna") is not None
    with pytest.raises(HelpError, match="anna is with a: hand it back first"):
        bench.queue.help_next("ben")
    assert bench.queue.ask("a") is None and bench.order() == ["b"]  # It is being helped: it does not wait.
    bench.queue.hand_back()
    assert bench.queue.help_next("anna").robot == "b"  # type: ignore[union-attr]


def test_a_robot_whose_person_is_lost_keeps_what_it_has_waited() -> None:
    bench = Bench()
    bench.queue.ask("a")
    bench.now = 10
    bench.queue.help_next("anna")
    bench.queue.ask("b")
    bench.now = 100
    bench.queue.hand_back("the link is lost", asks_again=True)  # 10 s count, from 90.
    assert bench.order() == ["b", "a"]
    bench.now = 101
    bench.queue.help_robot("a", "anna")
    assert bench.events[-1]["waited"] == 1
    bench.now = 105
    bench.note("end")
    found = shares(bench.events)
    assert (found.helped, found.mean_wait, found.requests) == (94, 5.5, 3)  # 90 s, and 4 s that still last.


ASKS = st.lists(
    st.tuples(st.floats(0, 40), st.one_of(st.none(), st.floats(0.0, 5.0)), st.floats(0, 60)), min_size=1, max_size=30
)


@given(asks=ASKS, head_start=st.floats(0, 60))
@settings(max_examples=200, deadline=None)
def test_nobody_starves(asks: list[tuple[float, float | None, float]], head_start: float) -> None:
    """Whatever the scores: before a robot come only those that asked within `head_start` of it, and all are helped."""
    bench = Bench(head_start)
    times, at = [], 0.0
    for wait, score, helped in asks:
        at += wait
        times.append((at, score, helped))
    served: list[Request] = []
    index, busy_until = 0, 0.0
    while index < len(times) or bench.queue.waiting() or bench.queue.help:
        coming = times[index][0] if index < len(times) else float("inf")
        if bench.queue.help is None and bench.queue.waiting():
            order = bench.order()
            help = bench.queue.help_next("anna")
            assert help is not None and help.request is not None and help.robot == order[0]
            served.append(help.request)
            busy_until = bench.now + times[int(help.robot)][2]
        elif bench.queue.help is not None and busy_until <= coming:
            bench.now = busy_until
            bench.queue.hand_back()
        else:
            bench.now = coming
            bench.queue.ask(str(index), "", times[index][1], 1.0)
            index += 1
    assert sorted(r.robot for r in served) == sorted(str(i) for i in range(len(times)))
    for place, later in enumerate(served):
        for earlier in served[:place]:
            assert earlier.since <= later.since + head_start
    found = shares([*bench.events, {"at": bench.now, "event": "end"}])
    assert found.served == found.requests == len(times)
    assert found.helped == pytest.approx(sum(t[2] for t in times)) and found.person <= 1 + 1e-9


def test_the_log_gives_the_shares_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path, now = tmp_path / "log" / "hub.jsonl", [0.0]
    with HubLog(path, lambda: now[0]) as log:
        queue = HelpQueue(clock=lambda: now[0], on_event=log)
        log("begin")
        queue.ask("a", "score", 2.0, 1.0)
        queue.ask("b")
        now[0] = 4.0
        queue.help_next("anna")
        now[0] = 10.0
        queue.hand_back("handed back")
        queue.withdraw("b", "resumed")
        now[0] = 20.0
        log("end")
    found = shares(read_log(path))
    assert (found.seconds, found.helped, found.person, found.requests, found.served) == (20, 6, 0.3, 2, 1)
    assert (found.mean_wait, found.waited, found.by_robot) == (4, 14, {"a": 6})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [
        "begin",
        "asked",
        "asked",
        "helping",
        "handed_back",
        "withdrawn",
        "end",
    ]
    assert lines[3]["who"] == "anna" and lines[3]["waited"] == 4 and lines[4]["helped"] == 6
    whole = path.read_text()
    path.write_text(whole + '{"at": 30, "ev')
    assert shares(read_log(path)) == found
    path.write_text(whole + "rubbish\n")
    with pytest.raises(ConfigError, match="line 8: not a line of a hub's log"):
        read_log(path)


def test_a_log_goes_on_after_a_kill_and_the_time_between_is_nobodys(tmp_path: Path) -> None:
    path, now = tmp_path / "hub.jsonl", [100.0]
    log = HubLog(path, lambda: now[0])
    log("begin")
    queue = HelpQueue(clock=lambda: now[0], on_event=log)
    queue.ask("a")
    queue.help_next("anna")
    now[0] = 105.0
    queue.ask("b")
    log.close()  # Killed, in the middle of a line.
    with path.open("a") as file:
        file.write('{"time": 106, "ev')
    now[0] = 3.0  # The machine was started again: its clock, too.
    with HubLog(path, lambda: now[0]) as log:
        log("begin")
        now[0] = 13.0
        log("end")
    found = shares(read_log(path))
    assert (found.seconds, found.helped, found.by_robot) == (15, 5, {"a": 5})
