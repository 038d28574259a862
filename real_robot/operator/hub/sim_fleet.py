"""Several simulated robots and one scripted person between them: the hub's queue, in a simulator's own time.

Each environment is a robot. Its policy drives until something asks for help: a failure detector on the policy's
embeddings, or no progress towards the goal (privileged, as in `sim_interventions`). It then holds, and waits in a
`HelpQueue`, the hub's own. The person goes to the first in the queue, needs `hand_over` seconds to get there, drives
with the simulator's expert until the task is solved or gets nowhere for `patience` steps, and goes to the next. All
robots take their control steps together, those that hold too, so nothing here depends on the machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from real_robot.failure.detector import FailureDetector
from real_robot.operator.hub.help_queue import HEAD_START, HelpQueue
from real_robot.operator.hub.hub_log import Shares, shares
from real_robot.operator.sim_interventions import (
    WHO,
    InterventionOutcome,
    OperatorOptions,
    ProgressAlarm,
    ScriptedPersons,
    WatchedEnv,
)
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.rollout.runner import EpisodeRunner, RunningEpisode
from vla_rl.types import EpisodeSpec, Observation

WAITING_ROOM = 72_000  # control steps beyond a task's horizon: an hour at 20 Hz in which to wait and be helped


@dataclass(frozen=True)
class FleetOptions:
    """How robots ask, and how the person works.

    Attributes:
        alarm: what asks for help, `detector` or `progress`; see the module. patience: control steps without progress.
        operator_steps: control steps that the person drives in an episode, at most.
        hand_over: seconds from when the person turns to a robot until it moves. head_start: of the queue.
        temperature: of the policy's sampling; 0 is greedy.
        helped: False: there is no person; alarms are counted, and the policy goes on.
    """

    alarm: Literal["detector", "progress"] = "progress"
    patience: int = 20
    operator_steps: int = 96
    hand_over: float = 3.0
    head_start: float = HEAD_START
    temperature: float = 0.0
    helped: bool = True

    def __post_init__(self) -> None:
        if not np.isfinite(self.hand_over) or self.hand_over < 0:
            raise ValueError(f"hand_over: got {self.hand_over}; allowed: 0 seconds or more")


@dataclass(frozen=True)
class FleetEpisode:
    """An episode of a robot of the fleet.

    Attributes:
        requests: times that it asked for help. outcome: as of one robot with a person of its own.
    """

    robot: str
    requests: int
    outcome: InterventionOutcome


@dataclass(frozen=True)
class FleetResult:
    """What came of it. `episodes`: in the order of the specs; `seconds` and `shares`: of the simulators' own time."""

    episodes: list[FleetEpisode]
    seconds: float
    shares: Shares


def run_fleet(
    policy: Policy,
    env: VecEnv,
    specs: Sequence[EpisodeSpec],
    *,
    horizons: dict[str, int],
    options: FleetOptions,
    make_detector: Callable[[], FailureDetector] | None = None,
    seed: int = 0,
    on_event: Callable[..., None] = lambda event, **fields: None,
) -> FleetResult:
    """Run an episode for each spec on as many robots as `env` has environments, with one person between them.

    Args:
        env: one that says what remains (`WatchedEnv`), with horizons `WAITING_ROOM` longer than `horizons`.
        horizons: task -> control steps that the policy has.
        make_detector: a detector for each robot, with alarm `detector`.
        on_event: called with each event of the queue, and its time `at` in seconds.

    Raises:
        ValueError: the environment does not say what remains, or leaves no room to wait; or a detector is missing.
    """
    if not isinstance(env, WatchedEnv):
        raise ValueError(f"{env.spec.kind} does not say how far its tasks are from being solved; the person needs it")
    if (make_detector is None) != (options.alarm == "progress"):
        raise ValueError(f"a detector belongs to alarm=detector, and is needed there; alarm is {options.alarm}")
    for task in {spec.task for spec in specs}:
        if env.spec.horizon[task] < horizons[task] + WAITING_ROOM:
            raise ValueError(f"{task}: the environment's horizon {env.spec.horizon[task]} leaves no room to wait")
    detectors = [make_detector() for _ in range(env.num_envs)] if make_detector is not None else None
    fleet = _Fleet(policy, env, horizons, options, detectors, seed, on_event)
    EpisodeRunner(
        env, specs, fleet.act, fleet.on_step, policy=policy, on_start=fleet.on_start, before_step=fleet.before_step
    ).run()
    fleet.note("end")
    episodes = [fleet.episodes[number] for number in range(len(specs))]
    return FleetResult(episodes, fleet.now, shares(fleet.events))


class _Fleet(ScriptedPersons):
    """One person beside all environments, as the hooks of an `EpisodeRunner`."""

    def __init__(
        self,
        policy: Policy,
        env: VecEnv,
        horizons: dict[str, int],
        options: FleetOptions,
        detectors: list[FailureDetector] | None,
        seed: int,
        on_event: Callable[..., None],
    ) -> None:
        person = OperatorOptions(patience=options.patience, temperature=options.temperature)
        super().__init__(policy, env, None, horizons, person, seed=seed)
        self.fleet, self.detectors, self.on_event = options, detectors, on_event
        self.now = 0.0  # seconds of the simulators' time; each control step of all robots adds one
        self.arrives = 0.0  # when the person has reached the robot that was turned to
        self.events: list[dict[str, Any]] = []
        self.requests = [0] * env.num_envs
        self.alarms: list[tuple[str, float | None, float | None]] = [("", None, None)] * env.num_envs
        self.episodes: dict[int, FleetEpisode] = {}
        self.queue = HelpQueue(options.head_start, lambda: self.now, self.note)
        self.note("begin")

    def note(self, event: str, **fields: Any) -> None:
        """Keep an event and tell of it."""
        self.events.append({"at": self.now, "event": event, **fields})
        self.on_event(event, at=self.now, **fields)

    def name(self, env_id: int) -> str:
        """Of an environment's robot."""
        return f"robot {env_id + 1}"

    def on_start(self, episode: RunningEpisode) -> None:
        """Begin, and let the detector forget the last episode."""
        super().on_start(episode)
        env_id = episode.env_id
        self.requests[env_id], self.alarms[env_id] = 0, ("", None, None)
        if self.detectors is not None:
            self.detectors[env_id].reset(episode.obs.instruction[0])

    def before_step(self, episodes: list[RunningEpisode]) -> None:
        """Robots ask, the person comes and goes."""
        assert isinstance(self.env, WatchedEnv), "checked by run_fleet"
        self.now += 1 / self.env.spec.control_hz
        remaining = dict(
            zip([e.env_id for e in episodes], self.env.expert_remaining([e.env_id for e in episodes]), strict=True)
        )
        for episode in episodes:
            slot = self.slots[episode.env_id]
            left = float(remaining[episode.env_id])
            if slot.intervention.state == "autonomous":
                self._watch(episode, left)
            elif slot.intervention.control_source != "hold":
                driven = slot.frames.get("recovery", 0) + slot.frames.get("correction", 0)
                if slot.progress.update(left) or driven >= self.fleet.operator_steps:
                    self._end(episode)  # The person gets nowhere.
        if self.fleet.helped:
            self._help(episodes, remaining)

    def _watch(self, episode: RunningEpisode, left: float) -> None:
        """Let a robot ask for help where it must, or end its episode where the policy's time is over."""
        slot, env_id = self.slots[episode.env_id], episode.env_id
        why, score, threshold = self.alarms[env_id]
        if self.detectors is None and slot.progress.update(left):
            why = f"no progress in {self.fleet.patience} steps"
        if why and (self.fleet.helped or not self.requests[env_id]):
            self.requests[env_id] += 1
            if self.fleet.helped:
                slot.intervention.alarm(why, self.fleet.alarm)
                self.queue.ask(self.name(env_id), why, score, threshold)
                return
        if slot.frames.get("policy", 0) >= self.horizons[slot.spec.task]:
            self._end(episode)

    def _help(self, episodes: list[RunningEpisode], remaining: dict[int, float]) -> None:
        """Turn to the next robot when free; take over when there."""
        if self.queue.help is None and self.queue.help_next(WHO) is not None:
            self.arrives = self.now + self.fleet.hand_over
        help = self.queue.help
        if help is None or self.now < self.arrives:
            return
        episode = next(e for e in episodes if self.name(e.env_id) == help.robot)
        slot, left = self.slots[episode.env_id], float(remaining[episode.env_id])
        if slot.intervention.state != "paused":
            return
        if np.isinf(left):  # Who cannot help does not drive.
            self._end(episode)
            return
        slot.intervention.take_over(WHO)
        slot.chunk, slot.progress = [], ProgressAlarm(self.fleet.patience)
        slot.progress.update(left)

    def infer(self, episodes: list[RunningEpisode]) -> None:
        """A fresh chunk where the last one is played to its end, and the detector's score of what it is drawn from."""
        fresh = [episode for episode in episodes if not self.slots[episode.env_id].chunk]
        super().infer(episodes)
        if self.detectors is None or not fresh:
            return
        assert self.policy is not None, "run_fleet has one"
        features = self.policy.embed(Observation.concatenate([episode.obs for episode in fresh]))
        embeddings = features.float().cpu().numpy()
        for episode, embedding in zip(fresh, embeddings, strict=True):
            score = self.detectors[episode.env_id].update(embedding)
            if score.alarm:
                why = score.reason or f"failure score {score.value:.3g} above its threshold {score.threshold:.3g}"
                self.alarms[episode.env_id] = (why, score.value, score.threshold)

    def _end(self, episode: RunningEpisode) -> None:
        """End an episode that was not solved."""
        slot = self.slots[episode.env_id]
        slot.given_up = slot.intervention.state != "autonomous"
        episode.ended = True
        self.finish(episode, False, False)

    def finish(self, episode: RunningEpisode, success: bool, lost: bool) -> None:
        """The episode is over: the person is free again, and nobody waits for it."""
        super().finish(episode, success, lost)
        name = self.name(episode.env_id)
        if self.queue.help is not None and self.queue.help.robot == name:
            self.queue.hand_back("solved" if success else "lost" if lost else "given up")
        self.queue.withdraw(name, "the episode has ended")
        self.note("episode", robot=name, success=success, requests=self.requests[episode.env_id])
        outcome = self.outcomes[episode.number]
        self.episodes[episode.number] = FleetEpisode(name, self.requests[episode.env_id], outcome)
