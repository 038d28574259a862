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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.control.safety import HOLDING, RUNNING, SentCommand
from real_robot.operator.intervention import Intervention, Kind
from real_robot.operator.recorder import Recorder, Recording
from real_robot.types import Command, RobotObservation
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.types import EpisodeSpec, Observation

if TYPE_CHECKING:
    import torch

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
    """

    alarm: Literal["progress", "clock"] = "progress"
    patience: int = 10
    alarm_fraction: float = 0.8
    rewind_steps: int = 0
    demonstrate: bool = False
    temperature: float = 0.0

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


@dataclass
class EnvSlot:
    """One environment with its intervention, its recorder, and the episode under way."""

    intervention: Intervention
    recorder: Recorder
    now: float = 0.0
    spec: EpisodeSpec | None = None
    number: int = 0
    obs: RobotObservation | None = None
    progress: ProgressAlarm | None = None
    chunk: list[np.ndarray] = field(default_factory=list)
    steps: int = 0
    given_up: bool = False
    frames: dict[str, int] = field(default_factory=dict)


def run_interventions(
    policy: Policy | None,
    env: VecEnv,
    specs: Sequence[EpisodeSpec],
    recording: Recording,
    *,
    horizons: dict[str, int],
    options: OperatorOptions,
    policy_version: str = "",
    round: int = 0,
    seed: int = 0,
    on_episode: Callable[[InterventionOutcome], None] | None = None,
) -> list[InterventionOutcome]:
    """Run an episode for each spec, and record it.

    Args:
        policy: None with `options.demonstrate`.
        env: with room for the person after the policy: its own horizons are longer than `horizons`.
        horizons: task -> control steps that the policy has.

    Returns:
        outcomes in the order of `specs`.

    Raises:
        ValueError: a policy is missing, the environment's horizons leave no room, or it has nothing for the alarm
            `progress` to watch.
    """
    if (policy is None) != options.demonstrate:
        raise ValueError("a policy is needed, except with demonstrate, which takes none")
    if options.alarm == "progress" and not options.demonstrate and not isinstance(env, WatchedEnv):
        raise ValueError(f"{env.spec.kind} does not say how far its tasks are from being solved; use rac.alarm=clock")
    for task in {spec.task for spec in specs}:
        if not options.demonstrate and env.spec.horizon[task] <= horizons[task]:
            raise ValueError(f"{task}: the environment's horizon {env.spec.horizon[task]} leaves the person no step")
    runner = _Runner(policy, env, recording, horizons, options, policy_version, round, seed)
    try:
        return runner.run(specs, on_episode)
    finally:
        runner.close()


class _Runner:
    def __init__(
        self,
        policy: Policy | None,
        env: VecEnv,
        recording: Recording,
        horizons: dict[str, int],
        options: OperatorOptions,
        policy_version: str,
        round: int,
        seed: int,
    ) -> None:
        self.policy, self.env, self.horizons, self.options = policy, env, horizons, options
        self.low, self.high = env.spec.action_low, env.spec.action_high
        # All numbers of an action are changes per step, the last, the gripper, is a command that stays.
        moves: list[Kind] = ["velocity"]
        kinds: list[Kind] = [*moves * (env.spec.action_dim - 1), "position"]
        self.seats: list[EnvSlot] = []
        for _ in range(env.num_envs):
            seat = EnvSlot(None, None)  # type: ignore[arg-type]
            seat.intervention = Intervention(kinds, clock=lambda s=seat: s.now, max_rewind=max(1, options.rewind_steps))
            seat.recorder = Recorder(recording, seat.intervention, policy_version, round, wait=True)
            self.seats.append(seat)
        self.generator: torch.Generator | None = None
        if policy is not None:
            import torch

            self.generator = torch.Generator().manual_seed(seed)

    def run(
        self, specs: Sequence[EpisodeSpec], on_episode: Callable[[InterventionOutcome], None] | None
    ) -> list[InterventionOutcome]:
        outcomes: dict[int, InterventionOutcome] = {}
        waiting = list(enumerate(specs))
        running: list[int] = []
        while waiting or running:
            free = [i for i in range(self.env.num_envs) if i not in running][: len(waiting)]
            if free:
                self._start(free, [waiting.pop(0) for _ in free])
                running = sorted([*running, *free])
            for env_id in self._step(running):
                seat = self.seats[env_id]
                outcomes[seat.number] = outcome = self._outcome(seat)
                running.remove(env_id)
                if on_episode is not None:
                    on_episode(outcome)
        return [outcomes[i] for i in range(len(specs))]

    def close(self) -> None:
        for seat in self.seats:
            seat.recorder.close()

    def _start(self, env_ids: list[int], specs: list[tuple[int, EpisodeSpec]]) -> None:
        obs = self.env.reset([spec for _, spec in specs], env_ids)
        for row, (env_id, (number, spec)) in enumerate(zip(env_ids, specs, strict=True)):
            seat = self.seats[env_id]
            seat.spec, seat.number, seat.chunk, seat.steps, seat.frames = spec, number, [], 0, {}
            seat.recorder.spec = spec
            seat.given_up = False
            seat.obs, seat.progress = _of_robot(obs, row, seat.now), ProgressAlarm(self.options.patience)
            (seat.intervention.demonstrate if self.options.demonstrate else seat.intervention.begin)(WHO)

    def _step(self, env_ids: list[int]) -> list[int]:
        """One control step in each environment. Returns those whose episode has ended."""
        ended = self._watch(env_ids)
        env_ids = [i for i in env_ids if i not in ended]
        if not env_ids:
            return ended
        driven = [i for i in env_ids if self.seats[i].intervention.state in ("recovery", "correction", "demo")]
        if driven:
            for env_id, action in zip(driven, self.env.expert_action(driven), strict=True):
                self._drive(self.seats[env_id].intervention, np.clip(action, self.low, self.high))
        wishes = [self.seats[i].intervention.poll(self.seats[i].obs) for i in env_ids]
        self._infer([i for i, wish in zip(env_ids, wishes, strict=True) if wish.command is None])
        commands = [wish.command or self._policy_command(i) for i, wish in zip(env_ids, wishes, strict=True)]
        sent = np.stack([np.clip(command.values, self.low, self.high) for command in commands]).astype(np.float32)
        result = self.env.step(sent[:, None], env_ids)
        for row, env_id in enumerate(env_ids):
            seat = self.seats[env_id]
            self._observe(seat, wishes[row], commands[row], sent[row])
            seat.obs = _of_robot(result.obs, row, seat.now)
            if result.done[row]:
                self._finish(seat, bool(result.success[row]), bool(result.lost[row]))
                ended.append(env_id)
        return ended

    def _watch(self, env_ids: list[int]) -> list[int]:
        """What the persons do before this step: hear alarms, rewind, take over, give up. Returns who has given up."""
        remaining = np.zeros(len(env_ids))
        if self.options.alarm == "progress" and not self.options.demonstrate and isinstance(self.env, WatchedEnv):
            remaining = self.env.expert_remaining(env_ids)
        given_up = []
        for env_id, left in zip(env_ids, remaining.tolist(), strict=True):
            seat = self.seats[env_id]
            it = seat.intervention
            driving = it.state in ("recovery", "correction")
            alarm = self._alarm(seat, left) if driving or it.state == "autonomous" else ""
            if alarm and not driving:
                it.alarm(alarm, self.options.alarm)
            if alarm and (driving or np.isinf(left)):
                seat.given_up = True
                self._finish(seat, False, False)
                given_up.append(env_id)
                continue
            if alarm and self.options.rewind_steps and it.path_length:
                it.rewind(WHO)
            if it.state == "paused":
                it.take_over(WHO)
                seat.progress = ProgressAlarm(self.options.patience)  # From here the person's.
                seat.progress.update(left)
        return given_up

    def _alarm(self, seat: EnvSlot, left: float) -> str:
        """Why the episode should not go on as it does, where about `left` control steps remain; "" if it should."""
        assert seat.spec is not None and seat.progress is not None, "started"
        options, horizon = self.options, self.horizons[seat.spec.task]
        if options.alarm == "progress" and seat.progress.update(left):
            return f"no progress in {options.patience} steps; about {left:.0f} remain"
        limit = horizon if options.alarm == "progress" else round(options.alarm_fraction * horizon)
        if seat.intervention.state == "autonomous" and seat.steps >= limit:
            return f"not solved after {seat.steps} of {horizon} steps"
        return ""

    def _drive(self, it: Intervention, action: np.ndarray) -> None:
        if it.state == "recovery" and action[2] < LOWERING and np.abs(action[:2]).max() <= SIDEWAYS:
            it.recovery_done(WHO)
        it.give(action)

    def _infer(self, env_ids: list[int]) -> None:
        """A fresh chunk where the last one is played to its end."""
        env_ids = [i for i in env_ids if not self.seats[i].chunk]
        if not env_ids:
            return
        assert self.policy is not None, "there are no autonomous episodes without one"
        seen = [self.seats[i].obs for i in env_ids]
        obs = Observation(
            images={c: np.stack([o.images[c] for o in seen if o is not None]) for c in self.env.spec.cameras},
            state=np.stack([o.state for o in seen if o is not None]),
            instruction=[o.instruction for o in seen if o is not None],
        )
        chunk = self.policy.act(obs, self.generator, self.options.temperature)
        for row, env_id in enumerate(env_ids):
            self.seats[env_id].chunk = list(chunk.actions[row])

    def _policy_command(self, env_id: int) -> Command:
        seat = self.seats[env_id]
        return Command(seat.chunk.pop(0), "policy", seat.now)

    def _observe(self, seat: EnvSlot, wish: OperatorCommand, command: Command, sent: np.ndarray) -> None:
        mode = HOLDING if command.source == "hold" else RUNNING
        result = SentCommand(sent, command.values, (), mode, sent)
        tick = Tick(seat.steps, seat.now, seat.obs, True, command, result, 0.0, 0.0, wish)
        seat.intervention(tick)
        seat.recorder(tick)
        seat.frames[command.source] = seat.frames.get(command.source, 0) + 1
        seat.steps += 1
        seat.now += 1 / self.env.spec.control_hz

    def _finish(self, seat: EnvSlot, success: bool, lost: bool) -> None:
        assert seat.obs is not None, "started"
        (seat.intervention.success if success else seat.intervention.failure)("simulator")
        if lost:
            seat.recorder.discard()
            seat.frames["lost"] = 1
        else:
            seat.recorder.finalize(seat.obs)

    def _outcome(self, seat: EnvSlot) -> InterventionOutcome:
        assert seat.spec is not None, "started"
        summary, frames = seat.intervention.summary, seat.frames
        return InterventionOutcome(
            task=seat.spec.task,
            index=seat.spec.index,
            success=summary.outcome == "success",
            intervened=summary.intervened,
            recoveries=summary.recoveries,
            policy_frames=frames.get("policy", 0),
            recovery_frames=frames.get("recovery", 0),
            correction_frames=frames.get("correction", 0),
            given_up=seat.given_up,
            lost="lost" in frames,
        )


def _of_robot(obs: Observation, row: int, stamp: float) -> RobotObservation:
    images = {camera: image[row] for camera, image in obs.images.items()}
    return RobotObservation(images, obs.state[row], obs.instruction[row], stamp)
