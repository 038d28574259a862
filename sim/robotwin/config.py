"""Options of RoboTwin's environments; they run behind `sim.remote`, in RoboTwin's own Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from sim.remote.env import RemoteConfig, RemoteVecEnv
from vla_rl.config import ConfigError
from vla_rl.interfaces import EnvConfig
from vla_rl.types import EnvSpec

STEP_SECONDS = 300.0  # After which a silent process counts as hung.
INSIDE = Path(__file__).with_name("inside")  # what runs in RoboTwin's Python


class _SlowRemoteConfig(RemoteConfig):
    """A simulator that takes minutes to start."""

    start_timeout: ClassVar[float] = 600.0


class RoboTwinConfig(EnvConfig):
    """RoboTwin 2.0's bimanual tasks. One environment per process, as its simulator wants it."""

    is_simulator: ClassVar[bool] = True
    known_cameras: ClassVar[tuple[str, ...]] = ("head", "left_wrist", "right_wrist", "front")
    kind: Literal["robotwin"] = "robotwin"
    root: str = Field(default="$ROBOTWIN_ROOT", description="The RoboTwin checkout, with its assets.")
    python: str = Field(default="$ROBOTWIN_PYTHON", description="The interpreter of RoboTwin's environment.")
    tasks: tuple[str, ...] = Field(default=(), description="RoboTwin's task names; empty means all.")
    setting: str = Field(
        default="demo_clean", description="RoboTwin's config: demo_clean, demo_randomized, or another."
    )
    cameras: tuple[str, ...] = Field(
        default=("head", "left_wrist", "right_wrist"), description="Cameras: head, left_wrist, right_wrist, front."
    )
    image_size: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="(height, width) that images are resized to; none: as RoboTwin renders them."
    )
    action: Literal["joint", "end_effector"] = Field(
        default="joint", description="14 joint and gripper targets, or 16 of end-effector poses (needs the planner)."
    )
    instructions: Literal["auto", "seen", "unseen"] = Field(
        default="auto",
        description="RoboTwin's templates: seen, and in eval those that the setting names; or always one.",
    )
    expert_check: bool = Field(
        default=False,
        description="Skip seeds whose expert fails, as RoboTwin's own evaluation does; needs the planner.",
    )
    horizons: dict[str, PositiveInt] = Field(default={}, description="Control steps, for tasks that differ.")
    seeds_folder: str = Field(
        default="~/.cache/vla-rl/robotwin_seeds",
        description="Where feasible and skipped seeds are written down; share it to evaluate the same ones.",
    )
    num_envs: PositiveInt = Field(default=4, description="Environments stepped together, each in a process.")
    devices: tuple[int, ...] = Field(default=(), description="GPUs assigned to the processes in turn; empty: default.")
    python_path: tuple[str, ...] = Field(default=(), description="Folders they import from, besides the checkout.")
    first_imports: tuple[str, ...] = Field(
        default=(),
        description="Modules imported before RoboTwin's, whose install() is called: to adapt it to a machine.",
    )

    @field_validator("cameras")
    @classmethod
    def _check_cameras(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value) or not set(value) <= set(cls.known_cameras):
            raise ValueError(f"cameras are some of {', '.join(cls.known_cameras)}, each once; got {', '.join(value)}")
        return value

    def remote(self, num_envs: int | None = None) -> RemoteConfig:
        """The same as a remote environment.

        Raises:
            ConfigError: there is no RoboTwin where the options say.
        """
        root, python = (os.path.expandvars(os.path.expanduser(text)) for text in (self.root, self.python))
        if not (Path(root) / "envs" / "_base_task.py").is_file():
            raise ConfigError(f"env.root: {root!r} is no RoboTwin checkout (no envs/_base_task.py); set ROBOTWIN_ROOT")
        if not Path(python).is_file():
            raise ConfigError(
                f"env.python: there is no {python!r}; set ROBOTWIN_PYTHON to the interpreter of RoboTwin's environment"
            )
        names = (
            *("tasks", "setting", "cameras", "image_size", "action", "instructions", "expert_check"),
            *("horizons", "seeds_folder", "first_imports"),
        )
        values = self.model_dump(mode="json")
        count = num_envs or self.num_envs
        return _SlowRemoteConfig(
            env="robotwin_env:RoboTwinEnv",
            kwargs={name: values[name] for name in names},
            python=python,
            working_dir=root,
            python_path=(str(INSIDE), *self.python_path),
            devices=self.devices,
            num_envs=count,
            num_hosts=count,
            step_timeout=STEP_SECONDS,
        )

    def env_spec(self) -> EnvSpec:
        """Facts about the environment; starts a process the first time.

        Raises:
            ConfigError: there is no RoboTwin here. RuntimeError: it cannot start; with the end of its log.
        """
        return self.remote().env_spec()

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> RemoteVecEnv:
        """The vector environment.

        Raises:
            ConfigError: there is no RoboTwin here. RuntimeError: it cannot start; with the end of its log.
        """
        return self.remote(num_envs).build(record_frames=record_frames)
