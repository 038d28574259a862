"""A scripted person beside a policy in a simulator: alarms, recoveries, corrections and demonstrations, recorded.

Works on a `VecEnv` directly, fast and without ROS, through the same `Intervention` and `Recorder` as on a robot. The
environment's scripted expert plays the person; its actions come from privileged state, so this says how well data
from a good operator works, not how well people operate.

- Alarm `progress`: what the expert would still have to do (`VecEnv.expert_remaining`, privileged) has not become less
  for `patience` control steps, or the policy's horizon has passed. Alarm `clock`: a share of the horizon has passed
  (`alarm_fraction`); it knows nothing of the failure, so it also interrupts episodes that were going well.
- Beyond help: where the expert cannot finish (what remains is infinite: a block out of reach), the person does not take
  over, and ends the episode as failed; likewise if there is no progress while the person drives. What a person does who
  cannot help would be learned from like the rest. With `clock` nobody can tell.
- Recovery: the expert drives until its first action that lowers the hand where it is, above or behind what it wants
  to handle. It is empty where the policy has left the hand there.
- Correction: from there until the task is solved, or the episode runs out of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.supervisor import HOLDING, RUNNING, SentCommand
from real_robot.operator.intervention import Intervention, Kind
from real_robot.operator.recorder import Recorder, Recording
from real_robot.types import Command, RobotObservation
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.rollout.runner import EpisodeRunner, RunningEpisode, draw_chunk
from vla_rl.types import EpisodeSpec, Observation, StepResult

LOWERING = -0.1  # third action component below which the hand goes down
SIDEWAYS = 0.5  # first two components up to which it goes down where it is
WHO = "scripted expert"
PROGRESS = 1.0  # control steps by which what remains must have become less to count as progress
SETBACK = 4.0  # by which it must have become more for something to be lost: a block dropped or pushed aside


@dataclass(frozen=True)
class OperatorOptions:
    """How the scripted person works.

    Attributes:
        alarm: what interrupts the policy, `progress` or `clock`; see the module.
        patience: control steps without progress that are an alarm.
        alarm_fraction: of the policy's horizon, after which `clock` interrupts an episode that is not solved.
        rewind_steps: steps driven back along the executed path before the person takes over.
        demonstrate: the person drives whole episodes, and the policy none.
        temperature: of the policy's sampling; 0 is greedy.
        budget: takeovers that the person has time for, after which it cannot help; None: all.
    """

    alarm: Literal["progress", "clock"] = "progress"
    patience: int = 10
    alarm_fraction: float = 0.8
    rewind_steps: int = 0
    demonstrate: bool = False
    temperature: float = 0.0
    budget: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.alarm_fraction <= 1:
            raise ValueError(f"alarm_fraction: got {self.alarm_fraction}; allowed: above 0, to 1")
        if self.patience < 1:
            raise ValueError(f"patience: got {self.patience}; allowed: 1 control step or more")


@runtime_checkable
class WatchedEnv(VecEnv, Protocol):
    """A `VecEnv` that says how far its tasks are from being solved; the alarm `progress` needs one."""

    def expert_remaining(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """About how many control steps the scripted expert would need from here, float64 (B,); infinite: it cannot."""
        ...


@dataclass
class ProgressAlarm:
    """Whether what remains to be done has stopped becoming less.

    After a setback it is measured from there: a policy that tries again at once is left to it.

    Attributes:
        patience: control steps without progress that are an alarm.
        least: what remained at best since the last setback, control steps. stalled: control steps without progress.
    """

    patience: int
    least: float = np.inf
    stalled: int = 0

    def update(self, remaining: float) -> bool:
        """Call once per control step, with what remains before it."""
        self.stalled += 1
        if remaining > self.least + SETBACK:
            self.least = remaining
        elif np.isfinite(remaining) and remaining <= self.least - PROGRESS:
            self.least, self.stalled = remaining, 0
        return self.stalled >= self.patience


@dataclass(frozen=True)
class InterventionOutcome:
    """What came of an episode. Frames are control steps.

    Attributes:
        intervened: the person took over. given_up: the person was called and could not help, or no longer.
        lost: the simulator broke, nothing is recorded.
    """

    task: str
    index: int
    success: bool
    intervened: bool
    recoveries: int
    policy_frames: int
    recovery_frames: int
    correction_frames: int
    given_up: bool = False
    lost: bool = False


class EnvSlot:
    """One environment with its intervention and its recorder, if any, and what they know of the episode under way."""

    def __init__(
        self, recording: Recording | None, action_dim: int, options: OperatorOptions, policy_version: str, round: int
    ) -> None:
        self.options, self.now = options, 0.0
        # All numbers of an action are changes per step, the last, the gripper, is a command that stays.
        moves: list[Kind] = ["velocity"]
        kinds: list[Kind] = [*moves * (action_dim - 1), "position"]
        self.intervention = Intervention(kinds, clock=lambda: self.now, max_rewind=max(1, options.rewind_steps))
        self.recorder: Recorder | None = None
        if recording is not None:
            self.recorder = Recorder(recording, self.intervention, policy_version, round, wait=True)

    def begin(self, spec: EpisodeSpec, obs: Observation) -> None:
        """Start an episode."""
        self.spec = spec
        if self.recorder is not None:
            self.recorder.spec = spec
        self.obs, self.progress = self._of_robot(obs), ProgressAlarm(self.options.patience)
        self.chunk: list[np.ndarray] = []  # The policy's actions still to come.
        self.steps, self.given_up = 0, False
        self.frames: dict[str, int] = {}  # Who drove -> control steps.
        (self.intervention.demonstrate if self.options.demonstrate else self.intervention.begin)(WHO)

    def observe(self, operator: OperatorCommand, command: Command, sent: np.ndarray, seconds: float) -> None:
        """Record a control step of so many seconds."""
        mode = HOLDING if command.source == "hold" else RUNNING
        result = SentCommand(sent, command.values, (), mode, sent)
        tick = Tick(self.steps, self.now, self.obs, True, command, result, 0.0, 0.0, operator)
        self.intervention(tick)
        if self.recorder is not None:
            self.recorder(tick)
        self.frames[command.source] = self.frames.get(command.source, 0) + 1
        self.steps += 1
        self.now += seconds

    def see(self, obs: Observation) -> None:
        """Take what is seen after a step, one row."""
        self.obs = self._of_robot(obs)

    def finish(self, success: bool, lost: bool) -> InterventionOutcome:
        """End the episode and record it, unless it is lost."""
        (self.intervention.success if success else self.intervention.failure)("simulator")
        if self.recorder is not None:
            if lost:
                self.recorder.discard()
            else:
                self.recorder.finalize(self.obs)
        summary, frames = self.intervention.summary, self.frames
        return InterventionOutcome(
            task=self.spec.task,
            index=self.spec.index,
            success=summary.outcome == "success",
            intervened=summary.intervened,
            recoveries=summary.recoveries,
            policy_frames=frames.get("policy", 0),
            recovery_frames=frames.get("recovery", 0),
            correction_frames=frames.get("correction", 0),
            given_up=self.given_up,
            lost=lost,
        )

    def _of_robot(self, obs: Observation) -> RobotObservation:
        images = {camera: image[0] for camera, image in obs.images.items()}
        return RobotObservation(images, obs.state[0], obs.instruction[0], self.now)


def run_interventions(
    policy: Policy | None,
    env: VecEnv,
    specs: Iterable[EpisodeSpec | None],
    recording: Recording,
    *,
    horizons: dict[str, int],
    options: OperatorOptions,
    policy_version: str = "",
    round: int = 0,
    seed: int = 0,
    on_episode: Callable[[RunningEpisode, InterventionOutcome], None] = lambda *_: None,
) -> list[InterventionOutcome]:
    """Run an episode for each spec, and record it.

    Args:
        policy: None with `options.demonstrate`.
        env: with room for the person after the policy: its own horizons are longer than `horizons`.
        specs: see `EpisodeRunner`.
        horizons: task -> control steps that the policy has, for each of the environment's tasks.
        on_episode: called with each episode where it has ended, before another begins in its environment.

    Returns:
        outcomes in the order of `specs`.

    Raises:
        ValueError: a policy is missing, the environment's horizons leave no room, or it has nothing for the alarm
            `progress` to watch.
    """
    if (policy is None) != options.demonstrate:
        raise ValueError("a policy is needed, except with demonstrate, which takes none")
    if options.alarm == "progress" and not options.demonstrate and not isinstance(env, WatchedEnv):
        raise ValueError(f"{env.spec.kind} does not say how far its tasks are from done; use rac.person.alarm=clock")
    for task in env.spec.tasks:
        if not options.demonstrate and env.spec.horizon[task] <= horizons[task]:
            raise ValueError(f"{task}: the environment's horizon {env.spec.horizon[task]} leaves the person no step")
    operators = ScriptedPersons(policy, env, recording, horizons, options, policy_version, round, seed, on_episode)
    try:
        EpisodeRunner(
            env,
            specs,
            operators.act,
            operators.on_step,
            policy=policy,
            on_start=operators.on_start,
            before_step=operators.before_step,
        ).run()
    finally:
        operators.close()
    return [operators.outcomes[number] for number in sorted(operators.outcomes)]


@dataclass(frozen=True)
class _Decision:
    """What each person wants, and what drives each environment; `actions`: float32 (B, 1, A)."""

    operators: list[OperatorCommand]
    commands: list[Command]
    actions: np.ndarray


class ScriptedPersons:
    """The persons, one beside each environment, as the hooks of an `EpisodeRunner`.

    Args:
        recording: None records nothing.
    """

    def __init__(
        self,
        policy: Policy | None,
        env: VecEnv,
        recording: Recording | None,
        horizons: dict[str, int],
        options: OperatorOptions,
        policy_version: str = "",
        round: int = 0,
        seed: int = 0,
        on_episode: Callable[[RunningEpisode, InterventionOutcome], None] = lambda *_: None,
    ) -> None:
        self.policy, self.env, self.horizons, self.options = policy, env, horizons, options
        self.low, self.high = env.spec.action_low, env.spec.action_high
        self.on_episode = on_episode
        self.outcomes: dict[int, InterventionOutcome] = {}
        self._takeovers = 0
        self.slots = [
            EnvSlot(recording, env.spec.action_dim, options, policy_version, round) for _ in range(env.num_envs)
        ]
        self.generator: torch.Generator | None = None
        if policy is not None:
            self.generator = torch.Generator().manual_seed(seed)

    def close(self) -> None:
        """End the recorders. Of an episode that was interrupted nothing is known: it is not recorded."""
        for slot in self.slots:
            if slot.recorder is not None:
                slot.recorder.discard()
                slot.recorder.close()

    def on_start(self, episode: RunningEpisode) -> None:
        self.slots[episode.env_id].begin(episode.spec, episode.obs)

    def before_step(self, episodes: list[RunningEpisode]) -> None:
        """What the persons do before this step: hear alarms, rewind, take over, give up."""
        remaining = np.zeros(len(episodes))
        if self.options.alarm == "progress" and not self.options.demonstrate and isinstance(self.env, WatchedEnv):
            remaining = self.env.expert_remaining([episode.env_id for episode in episodes])
        for episode, left in zip(episodes, remaining.tolist(), strict=True):
            slot = self.slots[episode.env_id]
            it = slot.intervention
            driving = it.state in ("recovery", "correction")
            alarm = self._alarm(slot, left) if driving or it.state == "autonomous" else ""
            if alarm and not driving:
                it.alarm(alarm, self.options.alarm)
            is_spent = self.options.budget is not None and self._takeovers >= self.options.budget
            if alarm and (driving or np.isinf(left) or is_spent):
                slot.given_up = episode.ended = True
                self.finish(episode, False, False)
                continue
            if alarm and self.options.rewind_steps and it.path_length:
                it.rewind(WHO)
            if it.state == "paused":
                it.take_over(WHO)
                self._takeovers += 1
                slot.progress = ProgressAlarm(self.options.patience)  # From here the person's.
                slot.progress.update(left)

    def _alarm(self, slot: EnvSlot, left: float) -> str:
        """Why the episode should not go on as it does, where about `left` control steps remain; "" if it should."""
        options, horizon = self.options, self.horizons[slot.spec.task]
        if options.alarm == "progress" and slot.progress.update(left):
            return f"no progress in {options.patience} steps; about {left:.0f} remain"
        limit = horizon if options.alarm == "progress" else round(options.alarm_fraction * horizon)
        if slot.intervention.state == "autonomous" and slot.steps >= limit:
            return f"not solved after {slot.steps} of {horizon} steps"
        return ""

    def act(self, episodes: list[RunningEpisode]) -> _Decision:
        """One control step's command for each environment, of the person who drives it or of the policy."""
        slots = [self.slots[episode.env_id] for episode in episodes]
        states = ("recovery", "correction", "demo")
        driven = [episode.env_id for episode in episodes if self.slots[episode.env_id].intervention.state in states]
        if driven:
            for env_id, action in zip(driven, self.env.expert_action(driven), strict=True):
                self._drive(self.slots[env_id].intervention, np.clip(action, self.low, self.high))
        operators = [slot.intervention.poll(slot.obs) for slot in slots]
        self.infer([e for e, operator in zip(episodes, operators, strict=True) if operator.command is None])
        commands = [
            operator.command or Command(slot.chunk.pop(0), "policy", slot.now)
            for slot, operator in zip(slots, operators, strict=True)
        ]
        sent = np.stack([np.clip(command.values, self.low, self.high) for command in commands]).astype(np.float32)
        return _Decision(operators, commands, sent[:, None])

    def _drive(self, it: Intervention, action: np.ndarray) -> None:
        if it.state == "recovery" and action[2] < LOWERING and np.abs(action[:2]).max() <= SIDEWAYS:
            it.recovery_done(WHO)
        it.give(action)

    def infer(self, episodes: list[RunningEpisode]) -> None:
        """A fresh chunk where the last one is played to its end."""
        episodes = [episode for episode in episodes if not self.slots[episode.env_id].chunk]
        if not episodes:
            return
        assert self.policy is not None, "there are no autonomous episodes without one"
        chunk = draw_chunk(self.policy, episodes, self.generator, self.options.temperature)
        for episode, actions in zip(episodes, chunk.actions, strict=True):
            self.slots[episode.env_id].chunk = list(actions)

    def on_step(self, episode: RunningEpisode, row: int, decision: _Decision, result: StepResult) -> None:
        slot = self.slots[episode.env_id]
        sent = decision.actions[row, 0]
        slot.observe(decision.operators[row], decision.commands[row], sent, 1 / self.env.spec.control_hz)
        slot.see(result.obs)
        if result.done[0]:
            self.finish(episode, bool(result.success[0]), bool(result.lost[0]))

    def finish(self, episode: RunningEpisode, success: bool, lost: bool) -> None:
        self.outcomes[episode.number] = outcome = self.slots[episode.env_id].finish(success, lost)
        self.on_episode(episode, outcome)
