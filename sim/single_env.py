"""One simulated environment, as the vector runners drive it: plain Python, one episode at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe


@dataclass
class SingleObservation:
    """What one environment shows: images camera -> uint8 (height, width, 3), state float32 (S,)."""

    images: dict[str, np.ndarray]
    state: np.ndarray
    instruction: str


@dataclass
class ChunkResult:
    """What one environment answers to a chunk of H actions.

    Attributes:
        obs: after the last executed action.
        reward: float32 (H,), zero where not executed. terminated, truncated: bool (H,).
        num_steps: actions executed. success: the task is solved.
        objects: float32 (num_steps + 1, K, 4), poses of `EnvSpec.objects` before each executed action and after the
            last; None where they are not told.
        frames: with frame recording, camera -> uint8 (num_steps, height, width, 3); else empty.
        states: with frame recording, float32 (num_steps, S); else None.
    """

    obs: SingleObservation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_steps: int
    success: bool
    objects: np.ndarray | None = None
    frames: dict[str, np.ndarray] = field(default_factory=dict)
    states: np.ndarray | None = None


class SingleEnv(ABC):
    """One episode at a time in one simulator instance."""

    spec: EnvSpec
    record_frames: bool = False

    @abstractmethod
    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode that `spec` names (or its keyframe). Same spec, same state."""

    @abstractmethod
    def apply(self, action: np.ndarray) -> bool:
        """Advance one control step with a clipped action, float32 (A,). Returns success."""

    @abstractmethod
    def observe(self) -> SingleObservation:
        """Render the configured cameras and read the state."""

    @abstractmethod
    def save_state(self) -> Keyframe:
        """Full state, enough for an exact restore through `EpisodeSpec.keyframe`."""

    @abstractmethod
    def close(self) -> None:
        """Release the simulator and its renderer."""

    def expert_action(self) -> np.ndarray:
        """The scripted expert's next action, float32 (A,), from privileged state."""
        raise NotImplementedError(
            f"{self.spec.kind} has no scripted expert for the current task: its class {type(self).__name__} does not "
            "implement expert_action. Write it, or record a policy's episodes: collect.source=policy policy.path=FOLDER"
        )

    def expert_remaining(self) -> float:
        """About how many control steps the scripted expert would need from here, whoever has driven so far.

        Infinite where it could not finish.
        """
        raise NotImplementedError(
            f"{self.spec.kind} does not say how far its tasks are from done; rac.person.alarm=clock does without"
        )

    def object_poses(self) -> np.ndarray:
        """Poses of `EnvSpec.objects` now, float32 (K, 4): x, y, z (meters), yaw (radians); NaN where there is none."""
        raise NotImplementedError(f"{self.spec.kind} does not tell its objects' poses; leave env.objects off")

    def drive_home(self) -> Keyframe | None:
        """End the episode: let go, and drive by itself to where episodes begin. Renders and records nothing.

        Returns:
            The scene as it is then: a keyframe of step 0, in which an episode of this task can begin, and of those
            that share its scene (`EnvConfig.reset_tasks`). None where only a person could go on: what the tasks handle
            is out of reach, or the physics is broken.
        """
        raise NotImplementedError(f"{self.spec.kind} knows no way home; hil.practice needs one")

    # The number of control steps taken and the horizon of the current episode; `run_chunk` keeps them.
    num_steps: int = 0
    horizon: int = 0
    # See `SimConfig.steps_after_success`; and at which control step the current episode succeeded, None: not yet.
    steps_after_success: int = 0
    succeeded_at: int | None = None
    # `apply` sets it where the simulator itself has ended the episode, so that nothing follows: after a fall, say.
    is_over: bool = False

    def run_chunk(self, actions: np.ndarray) -> ChunkResult:
        """Execute actions, float32 (H, A), until the chunk or the episode ends; render once, at the end."""
        num_actions = actions.shape[0]
        reward = np.zeros(num_actions, np.float32)
        terminated = np.zeros(num_actions, bool)
        truncated = np.zeros(num_actions, bool)
        recorded: list[SingleObservation] = []
        objects = [self.object_poses()] if self.spec.objects else []
        executed = 0
        low, high = self.spec.action_low, self.spec.action_high
        for i in range(num_actions):
            solved = self.apply(np.clip(actions[i], low, high))
            self.num_steps += 1
            executed += 1
            if objects:
                objects.append(self.object_poses())
            if solved and self.succeeded_at is None:
                reward[i], self.succeeded_at = 1.0, self.num_steps
            since = None if self.succeeded_at is None else self.num_steps - self.succeeded_at
            if self.is_over or (since is not None and since >= self.steps_after_success):
                terminated[i] = True
            elif self.num_steps >= self.horizon:
                truncated[i] = True
            if self.record_frames:
                recorded.append(self.observe())
            if terminated[i] or truncated[i]:
                break
        success = self.succeeded_at is not None
        if terminated.any() or truncated.any():
            self.succeeded_at, self.is_over = None, False
        obs = recorded[-1] if recorded else self.observe()
        frames = {c: np.stack([o.images[c] for o in recorded]) for c in obs.images} if recorded else {}
        states = np.stack([o.state for o in recorded]) if recorded else None
        poses = np.stack(objects) if objects else None
        return ChunkResult(obs, reward, terminated, truncated, executed, success, poses, frames, states)
