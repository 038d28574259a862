"""World model metadata: robot, cameras, tasks, thresholds. Imports no torch."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, FiniteFloat, PositiveFloat, PositiveInt, model_validator

from vla_rl.common.pretrained import how_to_make, pretrained_entry
from vla_rl.config import Config, ConfigError, validate
from vla_rl.types import EnvSpec
from world_model.config import WorldModelConfig

METADATA_FILE = "world_model.json"
FORMAT = 1

Row = tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]


class WorldModelMetadata(Config):
    """What a world model was fitted on, and what it takes for a success. Sizes and units are those of `EnvSpec`."""

    cameras: tuple[str, ...] = Field(min_length=1, description="Views, in order.")
    image_size: tuple[PositiveInt, PositiveInt] = Field(description="(height, width), pixels.")
    state_mean: tuple[FiniteFloat, ...] = Field(description="S numbers; states are normalized with these.")
    state_std: tuple[PositiveFloat, ...] = Field(description="S numbers.")
    action_low: tuple[FiniteFloat, ...] = Field(min_length=1, description="A numbers; actions are clipped to these.")
    action_high: tuple[FiniteFloat, ...] = Field(description="A numbers.")
    control_hz: PositiveFloat = Field(description="Control steps per second.")
    tasks: dict[str, str] = Field(min_length=1, description="Task -> instruction.")
    horizon: dict[str, PositiveInt] = Field(description="Task -> control steps before truncation.")
    projections: dict[str, tuple[Row, Row, Row]] = Field(default={}, description="See `EnvSpec.projections`.")
    body: dict[str, Any] | None = Field(
        default=None,
        description="The env section of the simulator that moves the robot alone, which the dynamics is conditioned on "
        "(`kinematics: body`); null: it is not.",
    )
    success_threshold: FiniteFloat = Field(default=0.0, description="Logit of the success head above which it counts.")
    clip_threshold: FiniteFloat = Field(default=0.0, description="Logit of the clip classifier, likewise.")
    no_threshold: str = Field(
        default="",
        description="Why no threshold was chosen; the two above then stand where the probability is a half. Empty: one "
        "was.",
    )
    success_probability: tuple[PositiveFloat, FiniteFloat] | None = Field(
        default=None, description="Slope and intercept of P(success) over the lower logit; null where not fitted."
    )
    value_probability: tuple[PositiveFloat, FiniteFloat] | None = Field(
        default=None, description="Slope and intercept of the value over the value head's logit; null where not fitted."
    )
    value_calibration: dict[str, Any] = Field(default={}, description="What the value is worth on held-out episodes.")
    objects_probability: tuple[PositiveFloat, FiniteFloat] | None = Field(
        default=None,
        description="Slope and intercept of P(success) over the objects part's logit; null where not fitted.",
    )
    objects_calibration: dict[str, Any] = Field(
        default={}, description="What the objects part is worth on held-out episodes."
    )
    inverse_errors: tuple[FiniteFloat, FiniteFloat] | None = Field(
        default=None,
        description="Errors of the inverse dynamics at which the action penalty begins and is whole: on real frames, "
        "three of four lie below the first, and with other actions below the second; null where not fitted.",
    )
    calibration: dict[str, Any] = Field(default={}, description="How the thresholds were found, and what they give.")
    refits: dict[str, Any] = Field(
        default={},
        description="Part -> what fitting it did to the order of successes and failures, and if it was put back.",
    )
    datasets: tuple[str, ...] = Field(default=(), description="Content keys of the datasets it was fitted on.")
    calibrated_on: tuple[str, ...] = Field(
        default=(), description="Of those that the thresholds were chosen on; empty where that was not kept."
    )

    @model_validator(mode="after")
    def _parts_agree(self) -> WorldModelMetadata:
        if len(self.state_mean) != len(self.state_std):
            raise ConfigError(f"state_std: {len(self.state_std)} numbers, state_mean has {len(self.state_mean)}")
        if len(self.action_low) != len(self.action_high) or any(
            low >= high for low, high in zip(self.action_low, self.action_high, strict=True)
        ):
            raise ConfigError(f"action_high: got {self.action_high}, must be above action_low {self.action_low}")
        if set(self.horizon) != set(self.tasks):
            raise ConfigError(f"horizon: of tasks {sorted(self.horizon)}, must be of {sorted(self.tasks)}")
        return self

    @property
    def state_dim(self) -> int:
        return len(self.state_mean)

    @property
    def action_dim(self) -> int:
        return len(self.action_low)

    @property
    def body_dim(self) -> int:
        """Numbers that follow an action's where the dynamics is conditioned on the body (`Actions.values`): S, or 0."""
        return self.state_dim if self.body else 0

    @classmethod
    def of(cls, spec: EnvSpec, state_mean: np.ndarray, state_std: np.ndarray, **more: Any) -> WorldModelMetadata:
        """Facts of a world model that imitates an environment. `more`: thresholds, calibration, datasets."""
        return cls(
            cameras=spec.cameras,
            image_size=spec.image_size,
            state_mean=tuple(map(float, state_mean)),
            state_std=tuple(map(float, state_std)),
            action_low=tuple(map(float, spec.action_low)),
            action_high=tuple(map(float, spec.action_high)),
            control_hz=spec.control_hz,
            tasks=spec.tasks,
            horizon=spec.horizon,
            projections={name: _rows(matrix) for name, matrix in spec.projections.items() if name in spec.cameras},
            **more,
        )

    def env_spec(self, tasks: Sequence[str] = ()) -> EnvSpec:
        """The metadata of an environment that imagines with it.

        Args:
            tasks: some of its tasks; empty means all.

        Raises:
            ConfigError: an unknown task.
        """
        for task in tasks:
            if task not in self.tasks:
                nearest = difflib.get_close_matches(task, self.tasks, n=1)
                hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
                raise ConfigError(
                    f"env.tasks: the world model knows no {task!r}.{hint} It has: {', '.join(self.tasks)}."
                )
        chosen = tuple(tasks) or tuple(self.tasks)
        return EnvSpec(
            kind="world_model",
            tasks={task: self.tasks[task] for task in chosen},
            horizon={task: self.horizon[task] for task in chosen},
            cameras=self.cameras,
            image_size=self.image_size,
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            action_low=np.array(self.action_low, np.float32),
            action_high=np.array(self.action_high, np.float32),
            control_hz=self.control_hz,
            projections={name: np.array(matrix) for name, matrix in self.projections.items()},
        )


def shortened(spec: EnvSpec, max_steps: int | None) -> EnvSpec:
    """The same environment with episodes of at most `max_steps` control steps; None leaves them."""
    most = max_steps or max(spec.horizon.values())
    return replace(spec, horizon={task: min(steps, most) for task, steps in spec.horizon.items()})


def pretrained_folder() -> Path:
    """Where the world models that ship with the package lie."""
    return Path(__file__).resolve().parent / "pretrained"


def resolve_path(path: str | Path) -> Path:
    """A world model's folder from a path or 'pretrained:NAME'.

    Raises:
        ConfigError: no such pretrained world model (lists those there are), or no such folder.
    """
    shipped = pretrained_entry(path, pretrained_folder(), METADATA_FILE, option="world model", kind="world model")
    if shipped is not None:
        return shipped
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"world model {str(path)!r}: no such folder. Give one written by `vla-rl world-model fit`, or "
            f"'pretrained:NAME'.{how_to_make(folder)}"
        )
    return folder


def read_metadata(folder: Path) -> tuple[WorldModelConfig, WorldModelMetadata]:
    """What is written in a world model's folder beside the weights.

    Raises:
        ValueError: the file is missing, is not JSON, is of another format, or names wrong values.
    """
    file = Path(folder) / METADATA_FILE
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy the world model's folder again, with all of its files.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error}). Copy the world model's folder again.") from error
    if not isinstance(values, dict) or not {"format", "config", "facts"} <= set(values):
        raise ValueError(f"{file}: needs 'format', 'config' and 'facts', so it is no world model of this package.")
    if values["format"] != FORMAT:
        raise ValueError(
            f"{file}: is of format {values['format']!r}, this version reads {FORMAT}. Use the version that wrote it."
        )
    config = validate(WorldModelConfig, values["config"], prefix=f"{file}: config")
    return config, validate(WorldModelMetadata, values["facts"], prefix=f"{file}: facts")


def write_metadata(folder: Path, config: WorldModelConfig, metadata: WorldModelMetadata) -> None:
    """Write what `read_metadata` reads, into a folder that exists."""
    values = {"format": FORMAT, "config": config.model_dump(mode="json"), "facts": metadata.model_dump(mode="json")}
    (Path(folder) / METADATA_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def content_key(folder: Path) -> str:
    """A hash of a world model's metadata and weights; a trust report says with it what it is about."""
    digest = hashlib.blake2b(digest_size=12)
    for file in (folder / METADATA_FILE, *sorted(folder.glob("*.safetensors"))):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest())
    return digest.hexdigest()


def _rows(matrix: np.ndarray) -> Any:
    return tuple(tuple(map(float, row)) for row in matrix)
