"""One simulated environment, as the vector runner drives it.

A simulator implements `SingleEnv` (plain Python, one episode at a time) and a config with
`make(worker_index)`; `sim.vector.runner` turns N of them into a `vla_rl.interfaces.VecEnv`.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator, model_validator

from vla_rl.config import ConfigError
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.interfaces import EnvConfig, VecEnv
from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe


def check_known(what: str, value: str, known: Iterable[str], list_name: str = "Tasks") -> None:
    """Refuse a name that is not known, with the nearest one and the list.

    Raises:
        ValueError: `value` is not among `known`.
    """
    if value not in (names := list(known)):
        nearest = difflib.get_close_matches(value, names, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"unknown {what} {value!r}.{hint} {list_name}: {', '.join(names)}.")


def check_horizons(what: str, horizons: Mapping[str, int], known: Iterable[str]) -> None:
    """Refuse horizons, task -> control steps, of tasks that are not known, or without a step.

    Raises:
        ValueError: naming the task.
    """
    for task, steps in horizons.items():
        check_known(what, task, known)
        if steps < 1:
            raise ValueError(f"the horizon of {task!r} must be at least 1 control step, got {steps}")


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
        frames: with frame recording, camera -> uint8 (num_steps, height, width, 3); else empty.
        states: with frame recording, float32 (num_steps, S); else None.
    """

    obs: SingleObservation
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    num_steps: int
    success: bool
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
        raise NotImplementedError(f"{self.spec.kind} has no scripted expert for the current task")

    def expert_remaining(self) -> float:
        """About how many control steps the scripted expert would need from here, whoever has driven so far.

        Infinite where it could not finish.
        """
        raise NotImplementedError(
            f"{self.spec.kind} does not say how far its tasks are from being solved; rac.alarm=clock does without"
        )

    # The number of control steps taken and the horizon of the current episode; `run_chunk` keeps them.
    num_steps: int = 0
    horizon: int = 0
    # See `SimConfig.steps_after_success`; and at which control step the current episode succeeded, None: not yet.
    steps_after_success: int = 0
    succeeded_at: int | None = None

    def run_chunk(self, actions: np.ndarray) -> ChunkResult:
        """Execute actions, float32 (H, A), until the chunk or the episode ends; render once, at the end."""
        num_actions = actions.shape[0]
        reward = np.zeros(num_actions, np.float32)
        terminated = np.zeros(num_actions, bool)
        truncated = np.zeros(num_actions, bool)
        recorded: list[SingleObservation] = []
        executed = 0
        low, high = self.spec.action_low, self.spec.action_high
        for i in range(num_actions):
            solved = self.apply(np.clip(actions[i], low, high))
            self.num_steps += 1
            executed += 1
            if solved and self.succeeded_at is None:
                reward[i], self.succeeded_at = 1.0, self.num_steps
            if self.succeeded_at is not None and self.num_steps - self.succeeded_at >= self.steps_after_success:
                terminated[i] = True
            elif self.num_steps >= self.horizon:
                truncated[i] = True
            if self.record_frames:
                recorded.append(self.observe())
            if terminated[i] or truncated[i]:
                break
        success = self.succeeded_at is not None
        if terminated.any() or truncated.any():
            self.succeeded_at = None
        obs = recorded[-1] if recorded else self.observe()
        frames = {c: np.stack([o.images[c] for o in recorded]) for c in obs.images} if recorded else {}
        states = np.stack([o.state for o in recorded]) if recorded else None
        return ChunkResult(obs, reward, terminated, truncated, executed, success, frames, states)


@dataclass(frozen=True)
class FixedCamera:
    """A camera that stands still, with square images.

    Attributes:
        position: meters. right, up: the camera's axes in the world, any length. fovy: field of view, degrees.
        mirrored: the image's left is the camera's right.
    """

    position: tuple[float, float, float]
    right: tuple[float, float, float]
    up: tuple[float, float, float]
    fovy: float
    mirrored: bool = False

    def projection(self) -> np.ndarray:
        """The matrix of `EnvSpec.projections`, float64 (3, 4)."""
        x, y = (np.asarray(axis) / np.linalg.norm(axis) for axis in (self.right, self.up))
        forward = np.cross(y, x)
        focal = 0.5 / np.tan(np.radians(self.fovy) / 2)
        x = -x if self.mirrored else x
        rows = np.stack([focal * x + 0.5 * forward, -focal * y + 0.5 * forward, forward])
        return np.concatenate([rows, -rows @ np.asarray(self.position)[:, None]], 1)


class SimConfig(EnvConfig):
    """Options common to every simulator; each simulator's config extends it with `kind` and its own."""

    tasks: tuple[str, ...] = Field(default=(), description="Task names; empty means all of the simulator's tasks.")
    cameras: tuple[str, ...] = Field(
        default=("agentview",), description="Cameras to render: only those the policy reads."
    )
    image_size: PositiveInt = Field(default=64, description="Height and width of the rendered images, pixels.")
    num_workers: int = Field(
        default=0, ge=0, description="Processes that hold them; 0 runs all environments in this process."
    )
    render_devices: tuple[int, ...] = Field(
        default=(), description="EGL device ids, dealt to the workers in turn; empty: default."
    )
    step_timeout: float = Field(default=120.0, gt=0, description="Seconds after which a silent worker counts as hung.")
    on_gpu: Literal["auto", "never"] = Field(default="auto", description="Whether rendering may use a GPU.")
    steps_after_success: int = Field(
        default=0,
        ge=0,
        description="Control steps for which an episode goes on after it has succeeded: a world model must have seen "
        "what the rest of a chunk does.",
    )

    structure: bool = Field(
        default=False,
        description="Show what each pixel is part of, and its depth, as further cameras; collect.structure sets it.",
    )

    known_cameras: ClassVar[tuple[str, ...]] = ()  # Those that the simulator has; empty allows any.

    @field_validator("cameras")
    @classmethod
    def _check_cameras(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = set(cls.known_cameras or value)
        if not value or len(set(value)) < len(value) or not set(value) <= known:
            names = ", ".join(cls.known_cameras) or "the simulator's"
            raise ValueError(f"cameras are some of {names}, each once; got {', '.join(value) or 'none'}")
        return value

    @model_validator(mode="after")
    def _check_structure(self) -> SimConfig:
        if self.structure and not self.shows_structure:
            raise ConfigError(f"env.structure: {type(self).__name__} draws no segmentation; leave it off")
        return self

    def make(self, record_frames: bool = False) -> SingleEnv:
        """One environment. Called in the worker's process."""
        raise NotImplementedError

    def start(self, record_frames: bool = False) -> SingleEnv:
        """`make`, with the options that every simulator shares."""
        env = self.make(record_frames)
        env.steps_after_success = self.steps_after_success
        return env

    def _arm_spec(self, kind: str, tasks: dict[str, str], horizon: dict[str, int], control_hz: float) -> EnvSpec:
        """The spec of an arm with LIBERO's conventions: 8-D state, 7-D action in [-1, 1]."""
        return EnvSpec(
            kind=kind,
            tasks=tasks,
            horizon=horizon,
            cameras=(*self.cameras, *(CAMERA_PREFIX + name for name in self.cameras if self.structure)),
            image_size=(self.image_size, self.image_size),
            state_dim=8,
            action_dim=7,
            action_low=-np.ones(7, np.float32),
            action_high=np.ones(7, np.float32),
            control_hz=control_hz,
        )

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> VecEnv:
        """The vector environment: `num_envs` of these, in `num_workers` processes."""
        from sim.vector.runner import make_vec_env

        return make_vec_env(self, num_envs or self.num_envs, record_frames)
