"""What a fit starts from: a model whose options the environment completes, or a world model that must fit it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_rl.config import ConfigError
from vla_rl.types import EnvSpec
from world_model.config import WorldModelConfig
from world_model.fit.config import FitConfig
from world_model.model.world_model import WorldModel


def for_env(model: WorldModelConfig, spec: EnvSpec) -> WorldModelConfig:
    """Return the config with its dynamics' options completed by what the environment knows."""
    return model.model_copy(update={"dynamics": model.dynamics.for_env(spec)})


def check_start(start: WorldModel, spec: EnvSpec, config: FitConfig) -> None:
    """Check that a world model to start from is of the same environment, and of the model asked for.

    Raises:
        ConfigError: it is not; the message says how they differ.
    """
    added = {"objects": start.config.objects, "posterior": start.config.posterior}
    wanted = config.model and for_env(config.model, spec).model_copy(update=added)
    if wanted is not None and wanted != start.config:
        raise ConfigError(
            "world_model.model: differs from that of start_from, whose weights then do not fit; leave model out, or "
            "start from scratch"
        )
    metadata = start.metadata
    pairs: Sequence[tuple[str, Any, Any]] = (
        ("cameras", metadata.cameras, spec.cameras),
        ("image_size", metadata.image_size, spec.image_size),
        ("state_dim", metadata.state_dim, spec.state_dim),
        ("action_dim", metadata.action_dim, spec.action_dim),
        ("control_hz", metadata.control_hz, spec.control_hz),
        ("action_low", _floats(metadata.action_low), _floats(spec.action_low)),
        ("action_high", _floats(metadata.action_high), _floats(spec.action_high)),
    )
    for name, found, wanted in pairs:
        if found != wanted:
            raise ConfigError(
                f"world_model.start_from: {config.start_from} has {name} {found}, the environment {wanted}; start from "
                "one of the same robot, control mode and cameras, or from scratch"
            )


def _floats(values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float32).tolist())
