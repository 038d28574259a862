"""Scripted evaluation episodes on `vla-rl robot sim`: solved, failed, or void, which says nothing about the policy."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from real_robot.bridge.robot import LATCHED, TopicRobot
from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.supervisor import RUNNING
from real_robot.operator.intervention import EpisodeSummary
from real_robot.operator.recorder import Recorder
from real_robot.transports.base import QosConfig, Transport
from real_robot.transports.messages import Message, String
from real_robot.types import RobotObservation
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.types import EpisodeSpec

Outcome = Literal["solved", "failed", "void", "not run"]


class EpisodesIncomplete(RuntimeError):
    """Episodes that were asked for have no outcome; the message says why, and what to do."""


@dataclass(frozen=True)
class EpisodeResult:
    """One attempt at a simulated episode.

    Attributes:
        outcome: solved or failed by the policy; void, it could not act as itself; not run, the run ended before.
        reason: why it is void, or was not run.
        attempt: 1, and one more for each time that it was void and run again.
        without_action: share of the ticks at which the policy had no action in time.
        policy: the one that acted, as its server names it.
        alarm: the simulator's step at the failure detector's first alarm; None without one.
    """

    task: str
    split: str
    index: int
    outcome: Outcome
    steps: int = 0
    reason: str = ""
    attempt: int = 1
    without_action: float = 0.0
    policy: str = ""
    alarm: int | None = None

    @property
    def success(self) -> bool:
        return self.outcome == "solved"

    @property
    def counts(self) -> bool:
        """It says something about the policy."""
        return self.outcome in ("solved", "failed")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "success": self.success}


def final(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """The last attempt at each episode."""
    return list({(r.task, r.split, r.index): r for r in results}.values())


def report(results: Sequence[EpisodeResult], with_alarms: bool) -> Iterator[str]:
    """Lines for a person. A rate and its interval only where every episode has an outcome, of one policy.

    Which episodes are void may go with how they would have ended (a policy that is late when it sees much, say), so
    that the rate of the others is a selection, and no interval covers it.
    """
    for task in dict.fromkeys(r.task for r in results):
        attempts = [r for r in results if r.task == task]
        last = final(attempts)
        count = Counter(r.outcome for r in last)
        again = sum(r.outcome == "void" for r in attempts) - count["void"]
        told = f"{task}: {count['solved']} solved, {count['failed']} failed, {count['void']} void"
        told += f", {count['not run']} not run" if count["not run"] else ""
        yield told + (f" ({again} were void and run again)" if again else "")
        for (outcome, reason), number in Counter((r.outcome, r.reason) for r in last if not r.counts).items():
            yield f"{task}: {number} {outcome}: {reason}"
        late = [r.without_action for r in last if r.outcome != "not run"]
        if late:
            yield f"{task}: no action in time at {100 * sum(late) / len(late):.1f} % of the ticks"
        counted = [r for r in last if r.counts]
        policies = list(dict.fromkeys(r.policy for r in counted))
        if len(counted) < len(last):
            yield f"{task}: no rate and no interval: the other {len(counted)} of {len(last)} episodes are a selection"
            continue
        for policy in policies:
            who = f" by {policy}" if len(policies) > 1 else ""
            yield f"{task}{who}: {_rate([r for r in counted if r.policy == policy])}"
        if with_alarms:
            yield f"{task}: {_alarms(counted)}"


def _rate(counted: Sequence[EpisodeResult]) -> str:
    solved = sum(r.success for r in counted)
    return f"{100 * solved / len(counted):.1f} % {wilson_interval(solved, len(counted)).percent()}, n = {len(counted)}"


def _alarms(counted: Sequence[EpisodeResult]) -> str:
    told = []
    for success, what in ((True, "successes"), (False, "failures")):
        alarms = [r.alarm is not None for r in counted if r.success == success]
        told.append(f"{sum(alarms)} of {len(alarms)} {what}")
    return "alarms in " + ", ".join(told)


def check_complete(results: Sequence[EpisodeResult]) -> None:
    """
    Raises:
        EpisodesIncomplete: an episode is void, or was not run.
    """
    last = final(results)
    missing = [r for r in last if not r.counts]
    if missing:
        raise EpisodesIncomplete(
            f"{len(missing)} of {len(last)} episodes have no outcome ({missing[-1].reason}); mend that, then run all "
            "of them anew"
        )


@dataclass(frozen=True)
class VoidRules:
    """When an episode says nothing about the policy, and what then.

    Attributes:
        max_without_action: share of an episode's ticks at which the policy may have no action in time.
        reruns: how often a void episode is run again, after the others.
    """

    max_without_action: float = 0.5
    reruns: int = 1


@dataclass(frozen=True)
class RunFacts:
    """What a script asks of the rest of deploy.

    Attributes:
        policy: the name of the policy in force.
        why_no_action: why it has no action; empty where nothing is wrong.
        stopped: why the supervisor has stopped the robot; empty where it has not.
        silence: seconds without an action, from one episode to the next, after which the policy counts as gone.
        warms_up: whether it still computes its very first actions.
    """

    policy: Callable[[], str] = lambda: ""
    why_no_action: Callable[[], str] = lambda: ""
    stopped: Callable[[], str] = lambda: ""
    silence: float = math.inf
    warms_up: Callable[[], bool] = lambda: False


class SimEpisodes:
    """See the module. An operator of the control loop, and an observer of its ticks.

    Nobody is there to ask: alarms are written down, and the policy goes on. An episode is void, however it ended, where
    the policy could not act: `RunFacts` and `VoidRules` say so, or the simulator fell silent. A stop ends the run,
    since only a person may reset.

    Args:
        silence: seconds without word from the simulator after which an episode is void.
    """

    def __init__(
        self,
        transport: Transport,
        robot: TopicRobot,
        specs: Sequence[EpisodeSpec],
        silence: float = 10.0,
        rules: VoidRules | None = None,
        facts: RunFacts | None = None,
    ) -> None:
        self.results: list[EpisodeResult] = []
        self._robot, self._silence = robot, silence
        self._rules, self._facts = rules or VoidRules(), facts or RunFacts()
        self._waiting = deque((spec, 1) for spec in specs)  # with the number of the attempt
        self._id = time.time_ns() // 1000 % 10**12
        self._state: dict[str, Any] = {}
        self._heard = self._asked = time.monotonic()
        self._running = False
        self._over = ""  # why the run ends before its last episode
        self._missed = self._ticked = 0.0  # seconds of episodes since the policy last acted; the time of the last tick
        self._publish = transport.advertise("/episode/start", String, QosConfig(depth=10))
        transport.subscribe("/episode/state", String, LATCHED, self._on_state)
        self._clear()

    def _clear(self) -> None:
        self._alarm: int | None = None
        self._void = self._why = ""
        self._due = self._without = 0  # ticks at which the policy should have acted; at which it did not

    def _on_state(self, message: Message) -> None:
        assert isinstance(message, String)
        state = json.loads(message.data)
        self._heard, self._state = time.monotonic(), state

    # --- for recorders and detectors --------------------------------------------------------------

    @property
    def state(self) -> str:
        """ "autonomous" while an episode runs, "idle" between two of them."""
        return "autonomous" if self._running else "idle"

    @property
    def summary(self) -> EpisodeSummary:
        """Of the present episode, else of the last one; without an outcome while it runs, and where it is void."""
        return self.summary_of(len(self.results) + self._running)

    def summary_of(self, number: int) -> EpisodeSummary:
        """Of an attempt, counted from 1."""
        last = self.results[number - 1] if 0 < number <= len(self.results) else None
        alarm = self._alarm if last is None else last.alarm
        outcome = None if last is None or not last.counts else "success" if last.success else "failure"
        return EpisodeSummary(outcome, 0, 0, int(alarm is not None), 0, (), number)

    def recorded(self, recorder: Recorder) -> Callable[[Tick], None]:
        """An observer of the loop: the recorder, told the initial state of each episode; void ones are not kept."""

        def observe(tick: Tick) -> None:
            recorder(tick)
            if tick.operator_command.begin:
                recorder.spec = self._waiting[0][0]
            elif not self._running and self.results and not self.results[-1].counts:
                recorder.discard()

        return observe

    def leave(self, recorder: Recorder) -> None:
        """The run is over. An episode under way is not kept: how it would have ended is not known."""
        if self._running:
            recorder.discard()

    def alarm(self, reason: str) -> bool:
        """Write a failure detector's alarm down. False between episodes."""
        if self._running and self._alarm is None:
            self._alarm = int(self._state["step"])
        return self._running

    def all_clear(self) -> bool:
        """There is nothing that this would end."""
        return False

    # --- what makes an episode void ---------------------------------------------------------------

    def void(self, reason: str, ends: bool) -> bool:
        """The present episode says nothing about the policy. `ends`: nor would any more of the run."""
        if ends:
            self._over = self._over or reason
        self._void = self._void or reason
        return True

    def __call__(self, tick: Tick) -> None:
        """Note whether the policy had an action in time, and how long it has had none, over episodes."""
        since, self._ticked = self._ticked, tick.time
        if not self._running or tick.sent is None or tick.operator_command.begin or self._facts.warms_up():
            return
        if tick.requested is None and tick.observation is not None:
            return  # Nothing new was to be asked.
        self._due += 1
        if tick.requested is None or tick.requested.source != "policy" or tick.sent.mode != RUNNING:
            self._without += 1
            self._why = self._facts.why_no_action() or self._why
            self._missed += tick.time - since
            if self._missed > self._facts.silence:
                why = f": {self._why}" if self._why else ""
                self.void(f"no action for {self._facts.silence:g} s{why}", ends=True)
        else:
            self._missed = 0.0

    # --- the operator -----------------------------------------------------------------------------

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        if not self._over and (stopped := self._facts.stopped()):
            self.void(f"stopped: {stopped}", ends=True)
        state, now = self._state, time.monotonic()
        is_ours = state.get("id") == self._id
        if self._running and (self._void or not is_ours or state["done"] or now - self._heard > self._silence):
            if not self._void and not (is_ours and state["done"]):
                self._void = "the simulator fell silent" if is_ours else "the simulator started anew"
            self._finish(state)
            return OperatorCommand(active=False)
        if self._over or not self._waiting:
            return OperatorCommand(active=False, finished=True)
        if self._running:
            return OperatorCommand()
        if is_ours and not state["done"]:
            self._running, self._heard = True, now
            self._clear()
            self._robot.flush(before=self._robot.monotonic(state["stamp"]))
            return OperatorCommand(active=False, begin=True)
        if (
            now - self._asked > 0.5 and not self._robot.unheard()
        ):  # Repeated: its other topics may not be connected yet.
            self._asked = now
            spec, _ = self._waiting[0]
            fields = {"task": spec.task, "split": spec.split, "index": spec.index}
            self._publish(String(data=json.dumps({"id": self._id, **fields})))
        return OperatorCommand(active=False)

    def _finish(self, state: dict[str, Any]) -> None:
        spec, attempt = self._waiting.popleft()
        share = self._without / self._due if self._due else 1.0
        reason = self._void
        if not reason and share > self._rules.max_without_action:
            reason = f"no action at more than {100 * self._rules.max_without_action:g} % of the ticks"
            reason += f": {self._why}" if self._why else ": too late"
        outcome: Outcome = "void" if reason else "solved" if state["success"] else "failed"
        self.results.append(
            EpisodeResult(
                *(spec.task, spec.split, spec.index, outcome, int(state["step"]), reason, attempt),
                without_action=round(share, 4),
                policy=self._facts.policy(),
                alarm=self._alarm,
            )
        )
        if outcome == "void" and attempt <= self._rules.reruns:
            self._waiting.append((spec, attempt + 1))
        self._running = False
        self._id += 1
        self._asked = 0.0

    def all_results(self) -> list[EpisodeResult]:
        """Those there are, and one for each episode that was never run."""
        tried = {(r.task, r.split, r.index) for r in self.results}
        never = [spec for spec, _ in self._waiting if (spec.task, spec.split, spec.index) not in tried]
        why = self._over or "the run was interrupted"
        return [*self.results, *(EpisodeResult(s.task, s.split, s.index, "not run", reason=why) for s in never)]
