"""The scripted person at a real hub, over its socket: two robots with real consoles, points that move as told.

What the person sees of them (`PointObserver`) is measured on the point; a sensor ends an episode at its goal.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from console_robot import ConsoleBench
from hub_robots import HubBench, hub_bench
from processes import until
from scripted_person import PersonOptions, ScriptedPerson, run_person
from sim_observer import SceneView

from real_robot.operator.hub.hub_log import read_log, shares
from real_robot.operator.sim_interventions import WHO
from vla_rl.types import EpisodeSpec

GOAL = np.array([0.1, 0.1, 0.1])
ALARM = "failure score 3 above its threshold 1"


class PointObserver:
    """What is seen of a point; it is solved at `GOAL`, and cannot be where the task is "hopeless"."""

    def __init__(self, bench: ConsoleBench) -> None:
        self.bench, self.episode, self.number = bench, 0, 0
        self.spec: EpisodeSpec | None = None

    def lay_out(self, number: int, spec: EpisodeSpec) -> None:
        self.bench.robot.position[:] = (0.1, 0.03, 0.1)  # in a circle of the policy's around the goal
        self.episode, self.spec = number, spec

    @property
    def sight(self) -> SceneView:
        if self.spec is None:
            return SceneView()
        self.number += 1
        way = GOAL - self.bench.robot.position
        remaining = np.inf if self.spec.task == "hopeless" else float(np.abs(way).max() * 100)
        is_over = self.bench.intervention.state not in ("idle", "ended") and remaining < 2
        if is_over and self.bench.intervention.state in ("recovery", "correction"):
            self.bench.intervention.success("sensor")
        twist = np.concatenate([np.clip(4 * way, -1, 1), np.zeros(3)])
        return SceneView(self.episode, is_over, twist, -1.0, remaining, self.number, time.monotonic())


def work(*tasks: str) -> list[EpisodeSpec]:
    return [EpisodeSpec(task, "eval", i) for i, task in enumerate(tasks)]


class Shift:
    """A person at work in a thread."""

    def __init__(self, bench: HubBench, specs: list[EpisodeSpec], **options: float) -> None:
        self.bench = bench
        observers = {name: PointObserver(robot) for name, robot in bench.robots.items()}
        told = {"hand_over": 0.2, "settle": 0.1, "patience": 2000, "operator_steps": 10_000, **options}
        self.person = ScriptedPerson(observers, specs, PersonOptions(**told))  # type: ignore[arg-type]
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(run_person(f"ws://127.0.0.1:{self.bench.port}/socket", self.person, 120))
        except BaseException as error:
            self.failure = error

    def ends(self, meanwhile: Callable[[ConsoleBench], object] = lambda robot: None) -> None:
        """Wait until the work is done; `meanwhile` is called for each robot again and again."""

        def is_over() -> bool:
            for robot in self.bench.robots.values():
                meanwhile(robot)
            return not self.thread.is_alive()

        until(is_over, "the end of the work", 150)
        assert self.failure is None, self.failure
        until(lambda: not self.bench.hub.person, "the person to be gone", 30)


def alarm(robot: ConsoleBench) -> None:
    """The detector: it raises an alarm as soon as the policy drives."""
    robot.intervention.alarm(ALARM)


class Still:
    """Observer before which every scene stands at once."""

    def __init__(self) -> None:
        self.sight = SceneView()

    def lay_out(self, number: int, spec: EpisodeSpec) -> None:
        self.sight = SceneView(number, False)


def test_an_overview_that_is_late_costs_no_episode() -> None:
    """The hub shows a robot as it was told of it last: for a while after the start as before it."""
    now, observers = [0.0], Still()
    person = ScriptedPerson({"left": observers}, work("reach", "reach"), PersonOptions(settle=0.0), lambda: now[0])

    def seen(phase: str) -> list[dict]:
        now[0] += 0.1
        state = "ready" if phase in ("idle", "ended") else "running"
        row = {"name": "left", "phase": phase, "mode": "running", "state": state, "ours": True, "event": ""}
        return person.hear({"in_control": True, "refused": [], "helping": None, "queue": [], "robots": [row]})

    start = [{"type": "press", "robot": "left", "button": "start"}]
    assert [seen("idle"), seen("idle"), seen("idle")] == [[], start, []]
    assert observers.sight.episode == 1001 and len(person.journal) == 1 and not person.is_done
    seen("autonomous")
    assert [seen("ended"), seen("ended"), seen("ended"), seen("ended")].count(start) == 0, "pressed a moment ago"
    now[0] += 1.0
    assert seen("ended") == start and observers.sight.episode == 1002 and len(person.journal) == 2
    assert seen("ended") == [] and observers.sight.episode == 1002 and len(person.journal) == 2
    seen("autonomous")
    assert not person.is_done
    seen("ended")
    assert person.is_done and len(person.journal) == 2


def test_the_person_starts_helps_gives_up_and_is_done(tmp_path: Path) -> None:
    outcomes: list[str] = []
    with hub_bench(tmp_path) as bench:
        for robot in bench.robots.values():
            robot.intervention._on_transition = lambda t: outcomes.append(t.event)
        shift = Shift(bench, work("reach", "reach", "hopeless", "reach"))
        shift.ends(alarm)
        assert sorted((e["task"], e["index"]) for e in shift.person.journal) == [
            ("hopeless", 2),
            ("reach", 0),
            ("reach", 1),
            ("reach", 3),
        ]
        assert {e["robot"] for e in shift.person.journal} == {"left", "right"}
        assert (outcomes.count("begin"), outcomes.count("success"), outcomes.count("failure")) == (4, 3, 1)
        assert outcomes.count("take_over") == 3, "what is hopeless is not driven"
        assert all(
            sources <= {"recovery", "correction", "policy"} for r in bench.robots.values() if (sources := r.sources())
        )
        assert not shift.person.interrupted
    events = read_log(bench.log)
    assert {e["who"] for e in events if e["event"] == "helping"} == {WHO}
    counted = shares(events)
    assert counted.requests == counted.served == 4 and 0 < counted.helped < counted.seconds


@pytest.mark.live
def test_a_policy_that_was_interrupted_goes_on_and_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    interrupted: set[str] = set()

    def interrupt(robot: ConsoleBench) -> None:
        if robot.intervention.state == "autonomous" and robot.url not in interrupted:
            interrupted.add(robot.url)
            robot.intervention.pause("console", "the line was lost")

    with hub_bench(tmp_path) as bench:
        shift = Shift(bench, work("reach", "reach"), horizon={"reach": 3.0})  # type: ignore[arg-type]
        shift.ends(interrupt)
        assert shift.person.interrupted == 2
        for robot in bench.robots.values():
            events = [t.event for t in robot.intervention.summary.transitions]
            assert events == ["begin", "pause", "resume", "failure"], events
