"""Which message belongs to an observation: the three strategies, the two timelines, and what is refused."""

from __future__ import annotations

import pytest

from real_robot.bridge.alignment import MAX_LEAD, HeaderClock, Sample, Track
from real_robot.contract.channels import AlignConfig

WALL = 1_700_000_000_000_000_000  # ns, when the monotonic clock shows 100 s


class Clocks:
    """Both clocks of a machine; the wall clock can be moved by itself."""

    def __init__(self) -> None:
        self.now, self.jump = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> int:
        return WALL + round((self.now - 100.0 + self.jump) * 1e9)


class Bench:
    def __init__(self, max_age: float = 0.25, **align: object) -> None:
        self.clocks = Clocks()
        self.header_clock = HeaderClock(self.clocks.monotonic, self.clocks.wall)
        self.track = Track(AlignConfig(**align), max_age, self.header_clock)  # type: ignore[arg-type]

    def arrive(self, value: str, stamped: float, at: float) -> bool:
        """A message stamped and arriving at these times of the monotonic clock (the stamp by the wall clock)."""
        moment = self.track.time_of(WALL + round((stamped - 100.0) * 1e9), at)
        if moment is None:
            return False
        self.track.add(Sample(value, moment, at))
        return True

    def picked(self, reference: float) -> str | None:
        sample = self.track.pick(reference)
        return None if sample is None else str(sample.value)


def test_asof_takes_the_newest_that_is_not_later() -> None:
    bench = Bench(strategy="asof", tolerance=0.03)
    for i in range(5):
        bench.arrive(f"m{i}", 100 + 0.02 * i, 100 + 0.02 * i)
    assert bench.picked(100.045) == "m2"
    assert bench.picked(100.04) == "m2", "the same time belongs"
    assert bench.picked(100.1) == "m4"
    assert bench.picked(100.12) is None, "0.04 s old, 0.03 allowed"
    assert bench.picked(99.9) is None


def test_hold_takes_the_newest_however_old() -> None:
    bench = Bench(strategy="hold")
    assert bench.picked(100.0) is None
    bench.arrive("m", 100, 100)
    assert bench.picked(5000.0) == "m" and not bench.track.has_age


def test_drop_takes_each_message_once() -> None:
    bench = Bench(strategy="drop", tolerance=0.1)
    bench.arrive("m0", 100, 100)
    sample = bench.track.pick(100.05)
    assert sample is not None
    bench.track.use(sample)
    assert bench.picked(100.06) is None
    bench.arrive("m1", 100.06, 100.06)
    assert bench.picked(100.06) == "m1"


@pytest.mark.parametrize(
    ("stamped", "reason"),
    [(99.7, "stale"), (100 + MAX_LEAD + 0.01, "future"), (99.95, "out of order"), (99.97, "out of order")],
)
def test_messages_of_the_wrong_time_are_refused_and_counted(stamped: float, reason: str) -> None:
    bench = Bench()
    assert bench.arrive("first", 99.97, 100)
    assert not bench.arrive("second", stamped, 100)
    assert dict(bench.track.dropped) == {reason: 1}
    assert bench.picked(100) == "first"


def test_unstamped_messages_are_refused_on_the_header_timeline_alone() -> None:
    assert Bench().track.time_of(0, 100.0) is None
    assert Bench(timeline="receive").track.time_of(0, 100.0) == 100.0


def test_a_small_lead_of_the_other_clock_is_allowed() -> None:
    assert Bench().arrive("m", 100 + 0.9 * MAX_LEAD, 100)


@pytest.mark.parametrize(("jump", "reason"), [(3600.0, "future"), (-3600.0, "stale")])
def test_a_clock_jump_stops_the_flow_until_a_reset(jump: float, reason: str) -> None:
    """The robot's wall clock, which stamps the messages, and ours (the same machine) jump by an hour."""
    bench = Bench()
    assert bench.arrive("before", 100, 100)
    bench.clocks.jump, bench.clocks.now = jump, 100.1
    assert not bench.arrive("after", 100.1 + jump, 100.1)
    assert bench.track.dropped[reason] == 1
    bench.header_clock.reset()
    bench.track.clear()
    assert bench.arrive("again", 100.1 + jump, 100.1)
    sample = bench.track.newest()
    assert sample is not None and sample.time == pytest.approx(100.1, abs=1e-6)


def test_clear_keeps_what_is_newer() -> None:
    bench = Bench()
    for i in range(4):
        bench.arrive(f"m{i}", 100 + 0.01 * i, 100 + 0.01 * i)
    bench.track.clear(before=100.02 - 1e-6)
    assert bench.picked(100.015) is None and bench.picked(100.02) == "m2"
