"""Start of a fit: options completed from the environment, or an earlier world model that must match it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.interfaces import EnvConfig
from vla_rl.types import EnvSpec
from world_model.config import WorldModelConfig
from world_model.data.body_moves import body_section
from world_model.data.episodes import MAX_SCORE, EpisodeFrames, distances, state_statistics
from world_model.fit.config import FitConfig
from world_model.metadata import WorldModelMetadata
from world_model.model.action_conditioning import ActionConditioning
from world_model.model.autoencoder import without_path
from world_model.model.dynamics import TransformerConfig
from world_model.model.world_model import WorldModel

log = logging.getLogger(__name__)


def for_env(model: WorldModelConfig, spec: EnvSpec) -> WorldModelConfig:
    """Return the config with its dynamics' options completed by what the environment knows."""
    return model.model_copy(update={"dynamics": model.dynamics.for_env(spec)})


def check_start(start: WorldModel, spec: EnvSpec, config: FitConfig) -> None:
    """Check that a world model to start from is of the same environment, and of the model asked for.

    Raises:
        ConfigError: it is not; the message says how they differ.
    """
    wanted = config.model and for_env(config.model, spec)
    if wanted is not None:
        own = {"objects": start.config.objects, "autoencoder": without_path(wanted.autoencoder)}
        wanted = wanted.model_copy(update=own)
    if wanted is not None and _without_projections(wanted) != _without_projections(start.config):
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


def body_in(
    start: WorldModel | None, model: WorldModelConfig, spec: EnvSpec, env: EnvConfig | None
) -> dict[str, Any] | None:
    """The section of the environment that moves the robot's body: that of `start`, unless the scene is another.

    Raises:
        ConfigError: the dynamics needs one, and `env` moves no body.
    """
    if start is not None and not _moved_cameras(start.metadata, spec):
        return start.metadata.body
    return body_section(env) if model.dynamics.needs_body else None


def continue_in(
    start: WorldModel, spec: EnvSpec, fitted: Sequence[EpisodeFrames], body: dict[str, Any] | None, folder: str | None
) -> WorldModelMetadata:
    """Return the metadata of a world model that is fitted further in an environment.

    In the scene that it knows, the environment's tasks, and how long they take, come beside its own; numbers of the
    state that a new task takes far from where it knows them are then normalized by both. In another, where a camera
    stands elsewhere, they take their place; states are then normalized by the episodes fitted on, the body is moved by
    that environment, and paths are drawn through the cameras as they stand there (all are changed in `start`).

    Args:
        fitted: the episodes that are fitted on. body: see `body_in`. folder: of `start`, for the log.
    """
    known = start.metadata
    moved = _moved_cameras(known, spec)
    if not moved:
        both = known.model_copy(update={"tasks": known.tasks | spec.tasks, "horizon": known.horizon | spec.horizon})
        return both if spec.tasks.keys() <= known.tasks.keys() else _normalized_by_both(start, both, fitted, folder)
    log.warning(
        "world_model.start_from: %s is of another scene (camera %s stands elsewhere); its %d tasks are left behind, "
        "and it goes on with %s",
        folder,
        ", ".join(moved),
        len(known.tasks),
        ", ".join(spec.tasks),
    )
    there = WorldModelMetadata.of(spec, *state_statistics(fitted), body=body)
    changed = ("tasks", "horizon", "projections", "state_mean", "state_std", "body")
    metadata = known.model_copy(update={name: getattr(there, name) for name in changed})
    _move_to(start, metadata)
    return metadata


def _normalized_by_both(
    start: WorldModel, metadata: WorldModelMetadata, fitted: Sequence[EpisodeFrames], folder: str | None
) -> WorldModelMetadata:
    """The metadata, with the numbers of the state normalized by both tasks that a new one takes far from the known."""
    mean, std = np.array(metadata.state_mean), np.array(metadata.state_std)
    states = [part.states(np.arange(part.num_frames)) for part in fitted]
    far = np.max([distances(one, mean, std) for one in states], axis=0) > MAX_SCORE
    if not far.any():
        return metadata
    log.warning(
        "world_model.start_from: %s knows dimension %s of the state only far from where the new task takes it; it is "
        "normalized by both from now on, so see that the units are the same, and give the dynamics updates enough",
        folder,
        ", ".join(map(str, np.flatnonzero(far))),
    )
    there, spread = state_statistics(fitted)
    std = np.where(far, np.sqrt((std**2 + spread**2) / 2 + (there - mean) ** 2 / 4), std)  # Of both in equal parts.
    mean = np.where(far, (mean + there) / 2, mean)
    metadata = metadata.model_copy(update={"state_mean": _floats(mean), "state_std": _floats(std)})
    _move_to(start, metadata)
    return metadata


def _move_to(start: WorldModel, metadata: WorldModelMetadata) -> None:
    """Normalize states, and draw paths through the cameras, as a world model's new metadata say."""
    start.state_mean.copy_(torch.tensor(metadata.state_mean))
    start.state_std.copy_(torch.tensor(metadata.state_std))
    dynamics = start.config.dynamics
    drawn: dict[str, Any] = {}
    if isinstance(dynamics, TransformerConfig):  # Other kinds draw no paths.
        drawn = {name: metadata.projections.get(name, matrix) for name, matrix in dynamics.projections.items()}
    for module in start.modules():
        if isinstance(module, ActionConditioning):
            module.set_scene(metadata.state_mean, metadata.state_std, drawn)
    if drawn:
        start.set_dynamics_options(projections=drawn)


def _moved_cameras(known: WorldModelMetadata, spec: EnvSpec) -> list[str]:
    """Those of which both know how they show space, and which stand elsewhere."""
    return [
        name
        for name, matrix in known.projections.items()
        if name in spec.projections and not np.allclose(matrix, spec.projections[name], atol=1e-4)
    ]


def _without_projections(model: WorldModelConfig) -> WorldModelConfig:
    """To compare models by what their weights' sizes depend on; where cameras stand, weights can learn anew."""
    if not isinstance(model.dynamics, TransformerConfig):
        return model
    dynamics = model.dynamics.model_copy(update={"projections": sorted(model.dynamics.projections)})
    return model.model_copy(update={"dynamics": dynamics})


def _floats(values: Sequence[float] | np.ndarray) -> tuple[float, ...]:
    return tuple(np.asarray(values, np.float32).tolist())
