"""Base of every simulator's config: shared options, checks of names, fixed cameras, state by replay.

A simulator implements `sim.single_env.SingleEnv` and a config with `make()`; `SimConfig.build` turns N of them into a
`vla_rl.interfaces.VecEnv`.
"""

from __future__ import annotations

import difflib
import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, SerializeAsAny, field_validator, model_validator

from sim.perturb import PerturbConfig
from sim.single_env import SingleEnv, SingleObservation
from sim.vector.processes import ProcessVecEnv
from sim.vector.runner import InlineVecEnv
from vla_rl.config import ConfigError, TaskName, component
from vla_rl.data.segmentation import CAMERA_PREFIX
from vla_rl.interfaces import EnvConfig, VecEnv
from vla_rl.rewards.base import RewardConfig
from vla_rl.rewards.env import NEVER, RewardedEnv
from vla_rl.types import SPLITS, EnvSpec, EpisodeSpec, Keyframe

if TYPE_CHECKING:
    from typing import Self  # Not in the Python 3.10 of some simulators, in which this is read too.

SEEDS_PER_SPLIT = 2**29  # The seed is (the split's place + 1) times this, plus the index: no two splits share one.


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


def _numbers(value: Any) -> Any:
    """One number as a list of it."""
    return (value,) if isinstance(value, int) else value


class SimConfig(EnvConfig):
    """Options common to every simulator; each simulator's config extends it with `kind` and its own."""

    is_simulator: ClassVar[bool] = True
    bound_to_kind: ClassVar[tuple[str, ...]] = ("tasks",)

    tasks: tuple[TaskName, ...] = Field(default=(), description="Task names; empty means all of the simulator's tasks.")
    cameras: tuple[str, ...] = Field(
        default=("agentview",), description="Cameras to render: only those the policy reads."
    )
    image_size: PositiveInt = Field(default=64, description="Height and width of the rendered images, pixels.")
    num_workers: int = Field(
        default=0, ge=0, description="Processes that hold them; 0 runs all environments in this process."
    )
    render_devices: Literal["auto", "cpu"] | tuple[int, ...] = Field(
        default="auto",
        description="Where images are rendered. auto: on the GPU of the process's own rank, or over the visible GPUs "
        "in turn; cpu: in software; or EGL device numbers, assigned to the workers of all ranks in turn.",
    )
    steps_after_success: int = Field(
        default=0,
        ge=0,
        description="Control steps for which an episode goes on after it has succeeded: a world model must have seen "
        "what the rest of a chunk does. What `train` and `eval` count ends at success all the same.",
    )

    reward: Annotated[SerializeAsAny[RewardConfig] | None, component("env.reward")] = Field(
        default=None,
        description="What pays and ends the episodes that RL learns from (docs/rewards.md): {kind: learned, path: "
        "FOLDER}, {kind: simulator}, or package.module:Class; null: the simulator, at the very step of success. "
        "Policies are evaluated, and datasets collected, by the simulator's success all the same.",
    )

    known_cameras: ClassVar[tuple[str, ...]] = ()  # Those that the simulator has; empty allows any.
    # Seconds after which a silent worker counts as hung; no simulator here takes a tenth of it for a chunk.
    step_timeout: ClassVar[float] = 120.0

    @field_validator("render_devices", mode="before")
    @classmethod
    def _read_devices(cls, value: Any) -> Any:
        return value if isinstance(value, str) else _numbers(value) or "auto"

    @field_validator("cameras")
    @classmethod
    def _check_cameras(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = set(cls.known_cameras or value)
        if not value or len(set(value)) < len(value) or not set(value) <= known:
            names = ", ".join(cls.known_cameras) or "the simulator's"
            raise ValueError(f"cameras are some of {names}, each once; got {', '.join(value) or 'none'}")
        return value

    def exact(self) -> Self:
        """See `EnvConfig.exact`: success as the simulator says."""
        judged = self.reward is not None and not self.reward.of_poses
        return self.model_copy(update={"reward": None}) if judged else self

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
            cameras=self.cameras,
            image_size=(self.image_size, self.image_size),
            state_dim=8,
            action_dim=7,
            action_low=-np.ones(7, np.float32),
            action_high=np.ones(7, np.float32),
            control_hz=control_hz,
        )

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> VecEnv:
        """Start `num_envs` of these, in this process or in `num_workers` others (see `EnvConfig.build`).

        Raises:
            RuntimeError: a worker process cannot start; with its own error text.
            ValueError: `reward` is missing, damaged, or reads what is not shown.
        """
        count, kind = num_envs or self.num_envs, InlineVecEnv if self.num_workers == 0 else ProcessVecEnv
        if self.reward is None:
            return kind(self, count, record_frames)
        told = {"objects": True} if self.reward.of_poses else {}
        config = self.model_copy(update={"reward": None, "steps_after_success": NEVER, **told})
        reward = self.reward.build(config.env_spec())
        env = kind(config, count, record_frames)
        rewarded = RewardedEnv(env, reward)
        rewarded.spec = env.spec if self.reward.of_poses else rewarded.spec
        return rewarded


class SegmentedConfig(SimConfig):
    """A simulator that draws a segmentation and depth beside its pictures."""

    shows_structure: ClassVar[bool] = True

    structure: bool = Field(
        default=False,
        description="Show what each pixel is part of, and its depth, as further cameras; collect.structure sets it.",
    )

    def _arm_spec(self, kind: str, tasks: dict[str, str], horizon: dict[str, int], control_hz: float) -> EnvSpec:
        spec = super()._arm_spec(kind, tasks, horizon, control_hz)
        more = tuple(CAMERA_PREFIX + name for name in self.cameras if self.structure)
        return replace(spec, cameras=(*spec.cameras, *more))


def pose_of(part: Any) -> np.ndarray:
    """x, y, z in meters and the turn about the vertical in radians, (4,), of a body or site of MuJoCo's data."""
    turn = part.xmat.reshape(3, 3)
    return np.array([*part.xpos, np.arctan2(turn[1, 0] - turn[0, 1], turn[0, 0] + turn[1, 1])])


class ObjectPosesConfig(SimConfig):
    """A simulator that tells the poses of its `object_names`."""

    objects: bool = Field(
        default=False,
        description="Tell where the task's objects are at every control step; collect.objects sets it.",
    )

    def _arm_spec(self, kind: str, tasks: dict[str, str], horizon: dict[str, int], control_hz: float) -> EnvSpec:
        spec = super()._arm_spec(kind, tasks, horizon, control_hz)
        return replace(spec, objects=self.object_names if self.objects else ())


class PerturbableConfig(SimConfig):
    """A simulator whose episodes can differ from the usual one along an axis of `sim.perturb`."""

    perturb: PerturbConfig | None = Field(
        default=None,
        description="Make every episode differ from the usual one along an axis, {axis: camera, level: 2} "
        "(docs/robustness.md); null: not.",
    )

    @model_validator(mode="after")
    def _check_perturb(self) -> Self:
        if self.perturb is not None and self.perturb.axis not in self.perturb_axes:
            axes = ", ".join(self.perturb_axes)
            raise ConfigError(f"env.perturb.axis: got {self.perturb.axis!r}; {type(self).__name__} has: {axes}")
        return self

    def perturbed(self, axis: str, level: int) -> Self:
        """See `EnvConfig.perturbed`."""
        return type(self).model_validate(self.model_dump() | {"perturb": {"axis": axis, "level": level}})

    @property
    def perturbation_name(self) -> str:
        """ "camera-2"; empty without one."""
        return f"{self.perturb.axis}-{self.perturb.level}" if self.perturb else ""


class OwnRandomness:
    """Python's and numpy's global generators as one environment has them; some simulators draw from these."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def __call__(self, seed: int | None = None) -> Iterator[None]:
        """Within, the global generators go on where this environment left them, or begin at `seed`."""
        outside = random.getstate(), np.random.get_state()
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            elif self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


class ReplayedEnv(SingleEnv):
    """A `SingleEnv` that begins at a seed; a stored state is that seed's place and the actions so far, done again."""

    def __init__(self) -> None:
        self._task = ""
        self._start = (0, 0)
        self._actions: list[np.ndarray] = []
        self._instruction = ""

    @abstractmethod
    def _begin(self, task: str, seed: int) -> None:
        """Put the simulator in the initial state of this seed."""

    @abstractmethod
    def _advance(self, action: np.ndarray) -> bool:
        """One control step with an action, float32 (A,), within the bounds. Returns success."""

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode.

        Raises:
            ValueError: an unknown task or split, an index out of range, or a keyframe of another environment or task.
        """
        check_known(f"{self.spec.kind} task", spec.task, self.spec.tasks)
        split, index, actions = spec.split, spec.index, np.zeros((0, self.spec.action_dim), np.float32)
        if (keyframe := spec.keyframe) is not None:
            if (keyframe.env, keyframe.task) != (self.spec.kind, spec.task):
                found, asked = f"{keyframe.env}/{keyframe.task}", f"{self.spec.kind}/{spec.task}"
                raise ValueError(f"this keyframe is of {found}, the episode asked for is of {asked}")
            split, index = SPLITS[int(keyframe.arrays["split"])], int(keyframe.arrays["index"])
            actions = keyframe.arrays["actions"]
        if split not in SPLITS or not 0 <= index < SEEDS_PER_SPLIT:
            raise ValueError(f"no initial state {index} in split {split!r}: indices are below {SEEDS_PER_SPLIT}")
        self._task, self._start, self._actions = spec.task, (SPLITS.index(split), index), []
        self.horizon, self.num_steps = self.spec.horizon[spec.task], 0
        self._begin(spec.task, (self._start[0] + 1) * SEEDS_PER_SPLIT + index)
        for action in actions:
            self.apply(action)
            self.num_steps += 1
        self._instruction = spec.instruction or self.spec.tasks[spec.task]
        return self.observe()

    def apply(self, action: np.ndarray) -> bool:
        """One control step, without rendering where the simulator can do without. Returns success."""
        self._actions.append(np.array(action, np.float32))
        return self._advance(self._actions[-1])

    def save_state(self) -> Keyframe:
        """The initial state's place and the actions so far."""
        arrays = {"split": np.array(self._start[0]), "index": np.array(self._start[1])}
        arrays["actions"] = np.array(self._actions, np.float32).reshape(-1, self.spec.action_dim)
        return Keyframe(self.spec.kind, self._task, self.num_steps, arrays)
