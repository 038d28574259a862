"""Options of the environment that imagines, and what must hold before it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, SerializeAsAny, model_validator

from vla_rl.config import ConfigError, TaskName, component
from vla_rl.data.config import MaybeDatasets
from vla_rl.interfaces import Admission, EnvConfig, TrustError
from vla_rl.rollout.body import Body, EmbodiedConfig
from vla_rl.rollout.source import LaterEnv
from vla_rl.types import EnvSpec, EpisodeSpec
from world_model.config import ImaginationConfig
from world_model.data.initial_frames import InitialFrames, SimulatedInitialFrames, check_alike, open_recorded
from world_model.env.env import WorldModelEnv
from world_model.imagination.reward import steps_of_branches
from world_model.metadata import WorldModelMetadata, content_key, read_metadata, resolve_path, shortened
from world_model.model.world_model import load_world_model
from world_model.noise import RepeatCounter
from world_model.trust.config import TrustConfig
from world_model.trust.report import TRUST_FILE, admit


class WorldModelEnvConfig(EnvConfig):
    """Episodes imagined by a world model, from real first frames."""

    is_imagined: ClassVar[bool] = True  # Outcomes here are no evidence.

    kind: Literal["world_model"] = "world_model"
    path: str | Path = Field(description="The world model: a folder, or pretrained:NAME.")
    tasks: tuple[TaskName, ...] = Field(
        default=(), description="Task names; empty means all that the world model knows and first_frames has."
    )
    first_frames: Annotated[SerializeAsAny[EnvConfig] | None, component("env")] = Field(
        default=None,
        description="A real environment in which episodes begin: an env section. It is reset, but never stepped, so "
        "any initial state can be had.",
    )
    datasets: MaybeDatasets = Field(
        default=(), description="In place of first_frames: episodes begin as those of these LeRobotDatasets did."
    )
    body: Literal["learned", "simulated"] = Field(
        default="learned",
        description="What tells the robot's state. learned: the world model; simulated: the simulator of first_frames, "
        "with nothing movable in the robot's way, while all else is imagined (libero, tabletop).",
    )
    imagination: ImaginationConfig = Field(default_factory=ImaginationConfig)
    trust: TrustConfig = Field(default_factory=TrustConfig)
    num_envs: PositiveInt = Field(default=64, description="Environments stepped together.")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N.")
    seed: NonNegativeInt = Field(default=0, description="Of what the world model draws.")

    @model_validator(mode="before")
    @classmethod
    def _no_threshold_refuses(cls, values: Any) -> Any:
        """Paid by a probability, RL uses no threshold: what a threshold tells apart then warns, if nothing is said."""
        if not isinstance(values, dict):
            return values
        imagination, trust = values.get("imagination", {}), values.get("trust", {})
        if not isinstance(imagination, dict) or not isinstance(trust, dict):
            return values
        require = trust.get("require", {})
        if imagination.get("reward", "success") == "success" or not isinstance(require, dict):
            return values
        return {**values, "trust": {**trust, "require": {"informedness": {"otherwise": "warn"}, **require}}}

    @model_validator(mode="after")
    def _one_beginning(self) -> WorldModelEnvConfig:
        if (self.first_frames is None) == (not self.datasets):
            raise ConfigError(
                "env.first_frames: give either it (a simulator's env section) or env.datasets (recorded episodes); "
                f"got {'both' if self.datasets else 'neither'}"
            )
        if self.first_frames is not None and self.first_frames.is_imagined:
            raise ConfigError("env.first_frames: got a world model, must be a real environment")
        if self.body == "simulated" and not isinstance(self.first_frames, EmbodiedConfig):
            found = "none" if self.first_frames is None else f"kind {self.first_frames.kind!r}"
            raise ConfigError(
                "env.body: got 'simulated', for which env.first_frames must be a simulator that moves the robot alone "
                f"(libero, tabletop, or your own with build_body, see vla_rl/rollout/body.py), not {found}; "
                "set env.body=learned"
            )
        return self

    def build_body(self) -> Body | None:
        """The robot's simulated body; None where the world model alone moves it.

        Raises:
            ConfigError: first frames of no simulator, for a world model whose dynamics has kinematics=body.
        """
        section, (_, metadata) = self.first_frames, read_metadata(resolve_path(self.path))
        if self.body == "learned" and not metadata.body:
            return None
        if not isinstance(section, EmbodiedConfig):
            raise ConfigError(
                f"env.path: {self.path} was fitted with kinematics=body, for which env.first_frames must be a "
                "simulator that moves the robot alone (libero, tabletop), not "
                f"{'none' if section is None else repr(section.kind)}"
            )
        return section.build_body()

    def env_spec(self) -> EnvSpec:
        """Facts about the environment; loads no weights and starts no simulator.

        Raises:
            ConfigError: no such world model, an unknown task, or first frames of another robot or camera.
        """
        _, metadata = read_metadata(resolve_path(self.path))
        section = self.first_frames
        spec = self._task_spec(metadata, None if section is None else section.env_spec())
        return shortened(spec, self.imagination.horizon)

    def why_not_executed(self, real: EnvConfig) -> str:
        """See `EnvConfig.why_not_executed`."""
        first = self.first_frames
        if first is None:
            return "they begin as recorded episodes did (env.datasets)"
        if not (first.is_simulator and real.is_simulator):
            return f"{(real if first.is_simulator else first).kind} is not known as a simulator"
        if first.env_spec().title != real.env_spec().title:
            return f"they begin in {first.env_spec().title}, and real episodes in {real.env_spec().title}"
        return "" if self.imagination.branch_frames is None else "branches (branch_frames) end before their outcome"

    @property
    def most_flattery(self) -> float | None:
        """What `trust.require.acting_gap` refuses at; see `EnvConfig.most_flattery`."""
        bound = self.trust.require.get("acting_gap")
        return None if bound is None or bound.otherwise == "warn" or self.trust.ignore else bound.at_most

    def build_elsewhere(self) -> LaterWorldModelEnv:
        """Loads no weights.

        Raises:
            TrustError: as `build`.
        """
        return LaterWorldModelEnv(self)

    def admitted(self) -> tuple[Admission, int | None]:
        """What trust says of the world model, and the control steps of an imagined episode, if they are limited.

        Raises:
            TrustError: as `build`, and where no step holds, or fewer than a branch has, and no other limit is given.
            ConfigError: branches are longer than the horizon given, or the world model has no value to pay them.
        """
        folder, imagination = resolve_path(self.path), self.imagination
        config, metadata = read_metadata(folder)
        steps_of_branches(metadata, config.frame_steps, imagination)
        admission = admit(self.trust, folder / TRUST_FILE, content_key(folder))
        horizon = imagination.horizon
        if horizon is None and admission.trust_horizon == 0:
            raise TrustError(
                "env.imagination.horizon: got null, which ends imagined episodes at the measured trust horizon, and "
                f"that is 0 control steps ({admission.report}): not one imagined frame holds. Fit the world model on "
                "more of the policy's own episodes and measure again, or say how many control steps to imagine all the "
                "same (env.imagination.horizon=N)"
            )
        if horizon is None:
            horizon = admission.trust_horizon
            try:
                steps_of_branches(metadata, config.frame_steps, imagination.model_copy(update={"horizon": horizon}))
            except ConfigError as error:
                raise TrustError(str(error)) from None
        return admission, horizon

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> WorldModelEnv:
        """The environment, with its `admission`: what trust says of the world model.

        Raises:
            TrustError: trust is missing or fails, and `env.trust.ignore` is not set; or the measured horizon is 0, or
                shorter than branches.
            ConfigError: branches are longer than the horizon given, or the world model lacks what the reward or
                the penalty asks for.
            ValueError: the world model, the first frames and the config do not fit, or a file is damaged.
        """
        folder = resolve_path(self.path)
        _, metadata = read_metadata(folder)
        admission, horizon = self.admitted()
        first_frames, spec = self._first_frames(metadata)
        try:
            world_model = load_world_model(folder, self._torch_device()).compute_in(self.imagination.precision)
            if self.imagination.compile:
                world_model.dynamics.compile_imagining()
            return WorldModelEnv(
                world_model,
                first_frames,
                self.imagination.model_copy(update={"horizon": horizon}),
                num_envs or self.num_envs,
                spec=spec,
                seed=self.seed,
                record_frames=record_frames,
                admission=admission,
                body=self.build_body(),
                shows_body=self.body == "simulated",
            )
        except BaseException:
            first_frames.close()
            raise

    def _first_frames(self, metadata: WorldModelMetadata) -> tuple[InitialFrames, EnvSpec]:
        section = self.first_frames
        if section is None:
            spec = self._task_spec(metadata, None)
            return open_recorded(self.datasets, metadata, spec.tasks), spec
        env = section.build()
        try:
            return SimulatedInitialFrames(env), self._task_spec(metadata, env.spec)
        except ConfigError:
            env.close()
            raise

    def _task_spec(self, metadata: WorldModelMetadata, real: EnvSpec | None) -> EnvSpec:
        """Of the tasks, without the trust horizon; how long they take is as in the real environment if there is one."""
        both = () if real is None else tuple(task for task in metadata.tasks if task in real.tasks)
        spec = metadata.env_spec(self.tasks or both)
        if real is None:
            return spec
        check_alike(metadata, real, list(spec.tasks))
        return replace(
            spec,
            horizon={task: real.horizon[task] for task in spec.tasks},
            num_eval_states={task: n for task, n in real.num_eval_states.items() if task in spec.tasks},
            suite=real.suite,
            labels={task: label for task, label in real.labels.items() if task in spec.tasks},
        )

    def _torch_device(self) -> str:
        return self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


class LaterWorldModelEnv(LaterEnv):
    """A stand-in for `WorldModelEnv` where other processes imagine: the trust admission, and noise numbers of episodes.

    It loads no weights until it is asked to imagine itself.

    Raises:
        TrustError: trust is missing or fails, and `env.trust.ignore` is not set.
    """

    def __init__(self, config: WorldModelEnvConfig) -> None:
        super().__init__(config)
        self.admission, horizon = config.admitted()
        self.spec = shortened(self.spec, horizon)
        self._repeats = RepeatCounter()

    @property
    def observed_every(self) -> int:
        """See `ImaginedEnv`; starts the environment."""
        return cast(WorldModelEnv, self._built()).observed_every

    def deal(self, specs: Sequence[EpisodeSpec], size: int = 1) -> list[EpisodeSpec]:
        """See `ImaginedEnv.deal`."""
        return self._repeats.deal(specs, size)

    def state(self) -> dict[str, int]:
        """See `StatefulEnv.state`."""
        return self._repeats.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        """See `StatefulEnv.load_state`."""
        self._repeats.load_state(state)
