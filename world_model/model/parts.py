"""Networks of a world model: fresh ones of a config, their weight files, messages for those that it does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from world_model.config import WorldModelConfig
from world_model.interfaces import Autoencoder, Dynamics, SuccessHead
from world_model.metadata import METADATA_FILE, WorldModelMetadata
from world_model.model.autoencoder import build_autoencoder
from world_model.model.inverse import InverseDynamics
from world_model.model.objects import ObjectModel
from world_model.model.success import ClipSuccessClassifier, LatentSuccessHead
from world_model.types import DynamicsInputs


@dataclass(frozen=True)
class Parts:
    """The four networks, and the value head, the objects part and the inverse dynamics where they were fitted."""

    autoencoder: Autoencoder
    dynamics: Dynamics
    success: SuccessHead
    clip: SuccessHead
    value_head: SuccessHead | None = None
    objects: ObjectModel | None = None
    inverse: InverseDynamics | None = None


BuildParts = Callable[[WorldModelConfig, WorldModelMetadata], Parts]


def build_parts(config: WorldModelConfig, metadata: WorldModelMetadata) -> Parts:
    """Fresh networks of a config, for the robot and the cameras that the metadata name; seed torch before.

    Raises:
        ValueError: sizes that do not fit each other, or an autoencoder folder that cannot be read.
    """
    autoencoder = build_autoencoder(config.autoencoder, metadata.image_size)
    shape, num_views = autoencoder.latent_shape, len(metadata.cameras)
    mean, std = (np.array(values, np.float32) for values in (metadata.state_mean, metadata.state_std))
    sizes = (metadata.state_dim, metadata.action_dim, config.frame_steps)
    dynamics = config.dynamics.build(DynamicsInputs(shape, metadata.cameras, *sizes, mean, std, metadata.body_dim))
    success = LatentSuccessHead(config.success, shape, num_views, metadata.state_dim)
    return Parts(autoencoder, dynamics, success, ClipSuccessClassifier(config.success, shape, num_views))


NO_PROBABILITY = (
    "env.imagination.reward: got 'probability', but the world model has no calibrated probability of success: it was "
    "fitted before there were any, or a higher score means no more success on its held-out episodes. Fit it again "
    "(vla-rl world-model fit), or set env.imagination.reward=success."
)
NO_VALUE = (
    "world model: has no value, which says whether an episode will succeed. Fit one on the policy's own episodes, from "
    "this world model on: vla-rl world-model fit ... world_model.start_from=FOLDER world_model.value.steps=400, with "
    "steps=0 in the other stages to keep them as they are."
)
NO_OBJECTS = (
    "env.imagination.reward: got 'objects', but the world model has no objects part with a calibrated probability. "
    "Fit one on the policy's own episodes, collected with collect.objects=true, from this world model on: vla-rl "
    "world-model fit ... world_model.start_from=FOLDER world_model.objects.steps=1600, with steps=0 in the other "
    "stages to keep them as they are; or set env.imagination.reward=probability."
)
NO_INVERSE = (
    "env.imagination.action_penalty: got above 0, but the world model has no inverse dynamics, which reads actions off "
    "frames. Fit one, from this world model on: vla-rl world-model fit ... world_model.start_from=FOLDER "
    "world_model.inverse.steps=600, with steps=0 in the other stages to keep them as they are; or set "
    "env.imagination.action_penalty=0."
)


def write_weights(file: Path, module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Write a module's state; `dtype`: of the stored parameters, None stores them as they are."""
    parameters = {name for name, _ in module.named_parameters()}
    tensors = {
        name: tensor.detach().to("cpu", (dtype if name in parameters else None) or tensor.dtype)
        for name, tensor in module.state_dict().items()
    }
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, file)


def read_weights(file: Path, module: nn.Module) -> None:
    """Read what `write_weights` wrote.

    Raises:
        ValueError: missing, damaged, of another network, or not finite.
    """
    if not file.is_file():
        raise ValueError(f"{file}: not found. Copy the world model's folder again, with all of its files.")
    try:
        found = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not a safetensors file ({error}). Copy it again.") from error
    expected = module.state_dict()
    problems = [f"{name}: missing" for name in expected if name not in found]
    problems += [f"{name}: not part of it" for name in found if name not in expected]
    problems += [
        f"{name}: found shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
        for name, tensor in found.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if problems:
        raise ValueError(
            f"{file}: does not fit the networks that {METADATA_FILE} describes: {_some(problems)}. "
            f"Use the {METADATA_FILE} that was saved with these weights."
        )
    if broken := [name for name, tensor in found.items() if not bool(torch.isfinite(tensor).all())]:
        raise ValueError(
            f"{file}: NaN or infinity in {_some(broken)}. Fit the world model again, or use an earlier one."
        )
    module.load_state_dict(found)


def _some(items: list[str], limit: int = 6) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more
