"""Networks of a world model, and fresh ones of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from world_model.config import WorldModelConfig
from world_model.interfaces import Autoencoder, Dynamics, SuccessHead
from world_model.metadata import WorldModelMetadata
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
