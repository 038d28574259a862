"""A world model whose dynamics is exact arithmetic on latents, so that what it imagines can be worked out by hand.

A latent image is one number per view, the position, which an image shows as its brightness: pixel = 8 * position (the
first pixel is white, so that no image is flat). A frame's position is the one before plus `GAIN` times the sum of its
executed actions' first dimension, plus `noise` times a standard normal draw. The state is the position. The success
head's logit is position - `GOAL`, the classifier's position - `GOAL` + 1.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe, Observation
from world_model.config import ImaginationConfig, WorldModelConfig
from world_model.env.env import WorldModelEnv
from world_model.interfaces import Autoencoder, Dynamics, SuccessHead
from world_model.metadata import WorldModelMetadata
from world_model.model.dynamics import TransformerConfig
from world_model.model.parts import Parts
from world_model.model.world_model import WorldModel
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, Frames

FRAME_STEPS = 4
GAIN, GOAL = 0.25, 6.0
SIZE = 8
SPLIT_START = {"train": 1.0, "validation": 1.25, "eval": 1.5}  # Position of index 0; index i starts i / 8 further.
METADATA = WorldModelMetadata(
    cameras=("agentview", "wrist"),
    image_size=(SIZE, SIZE),
    state_mean=(0.0, 0.0),
    state_std=(1.0, 1.0),
    action_low=(-1.0, -1.0, -1.0),
    action_high=(1.0, 1.0, 1.0),
    control_hz=10.0,
    tasks={"reach": "reach the goal", "reach_back": "reach the goal again"},
    horizon={"reach": 24, "reach_back": 16},
    success_probability=(2.0, 0.0),
)
CONFIG = WorldModelConfig.model_validate({"frame_steps": FRAME_STEPS})


class ToyAutoencoder(Autoencoder):
    latent_shape, image_size = (1, 1, 1), (SIZE, SIZE)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, -1, -1, :1].float()[:, :, None, None] / 8

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        brightness = (8 * latents).round().clamp(0, 255).to(torch.uint8)[:, 0, :, :, None]
        images = brightness.expand(-1, SIZE, SIZE, 3).clone()
        images[:, 0, 0] = 255
        return images


@dataclass(frozen=True)
class ToyContext:
    """`position`: float32 (B, 1), of the last frame."""

    position: torch.Tensor

    def select(self, rows: torch.Tensor) -> ToyContext:
        return ToyContext(self.position[rows])

    def put(self, rows: torch.Tensor, other: ToyContext) -> ToyContext:
        return ToyContext(self.position.index_copy(0, rows, other.position))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"position": self.position}

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor]) -> ToyContext:
        return ToyContext(tensors["position"])


class ToyDynamics(Dynamics):
    """`noise`: standard deviation of each frame's step, and `broken`: position above which it imagines NaN."""

    def __init__(self, num_views: int = 2, frame_steps: int = FRAME_STEPS, noise: float = 0.0) -> None:
        super().__init__()
        self.config = TransformerConfig()
        self.frame_steps, self.num_views, self.broken = frame_steps, num_views, math.inf
        self.gain, self.noise = nn.Parameter(torch.tensor(GAIN)), nn.Parameter(torch.tensor(noise))

    def loss(self, clip: Clip, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, Any]]:
        raise NotImplementedError

    def begin(self, reference: Frames, noise: NoiseStream) -> ToyContext:
        return ToyContext(reference.latents[:, -1, 0, 0, 0])

    def extend(self, context: ToyContext, frames: Frames, actions: Actions, noise: NoiseStream) -> ToyContext:
        return ToyContext(frames.latents[:, -1, 0, 0, 0])

    def imagine(
        self, context: ToyContext, actions: Actions, noise: NoiseStream, num_steps: int | None = None
    ) -> Frames:
        position, positions = context.position, []
        for i in range(actions.values.shape[1]):
            moved = (actions.values[:, i, :, :1] * actions.executed[:, i, :, None]).sum(1)
            position = position + self.gain * moved + self.noise * noise.normal(1)
            position = torch.where(position > self.broken, torch.nan, position)
            positions.append(position)
        path = torch.stack(positions, 1).detach()
        latents = path[:, :, None, None, None].expand(-1, -1, self.num_views, -1, -1, -1).contiguous()
        return Frames(latents, torch.cat([path, torch.zeros_like(path)], 2))


class ToyHead(SuccessHead):
    """Logit: the newest frame's position minus `goal`."""

    def __init__(self, goal: float, num_frames: int = 2) -> None:
        super().__init__()
        self.num_frames, self.goal = num_frames, nn.Parameter(torch.tensor(goal))

    def loss(
        self, frames: Frames, reference: Frames, instruction: list[str], success: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        raise NotImplementedError

    @torch.no_grad()
    def score(self, frames: Frames, reference: Frames, instruction: list[str]) -> torch.Tensor:
        return frames.latents[:, -1, 0, 0, 0, 0] - self.goal


class ToyValue(ToyHead):
    """Logit: the newest frame's position minus `goal`, plus the time left as `timed` scales it, -2 .. 2."""

    @torch.no_grad()
    def score(self, frames: Frames, reference: Frames, instruction: list[str]) -> torch.Tensor:
        return super().score(frames, reference, instruction) + frames.states[:, -1, -1]


def toy_parts(config: WorldModelConfig, metadata: WorldModelMetadata, noise: float = 0.0) -> Parts:
    dynamics = ToyDynamics(len(metadata.cameras), config.frame_steps, noise)
    return Parts(ToyAutoencoder(), dynamics, ToyHead(GOAL), ToyHead(GOAL - 1, num_frames=3))


def toy_world_model(noise: float = 0.0, metadata: WorldModelMetadata = METADATA) -> WorldModel:
    return WorldModel(CONFIG, metadata, toy_parts(CONFIG, metadata, noise))


def toy_valued(noise: float = 0.0) -> WorldModel:
    """With a value: sigmoid(2 (position - GOAL + 4 left - 2) + 0.5), left being the share of 24 steps."""
    world_model = toy_world_model(noise, METADATA.model_copy(update={"value_probability": (2.0, 0.5)}))
    world_model.value_head = ToyValue(GOAL)
    return world_model


def start_position(spec: EpisodeSpec) -> float:
    if spec.keyframe is not None:
        return float(spec.keyframe.arrays["position"])
    return SPLIT_START[spec.split] + spec.index / 8 + 4.0 * (spec.task == "reach_back")


class ToyInitialFrames:
    """Images of `start_position`; counts how often they are closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def observe(self, specs: Sequence[EpisodeSpec]) -> Observation:
        """See `InitialFrames`."""
        position = torch.tensor([start_position(spec) for spec in specs])
        images = ToyAutoencoder().decode(position[:, None, None, None]).numpy()
        images[:, 1, 1] = (np.array([spec.index for spec in specs]) % 250)[:, None]  # So that no two look alike.
        state = np.stack([position.numpy(), np.zeros(len(specs), np.float32)], 1)
        text = [spec.instruction or METADATA.tasks[spec.task] for spec in specs]
        return Observation({camera: images for camera in METADATA.cameras}, state, text)

    def close(self) -> None:
        self.num_closed += 1


def toy_env(
    num_envs: int = 2, record_frames: bool = False, noise: float = 0.0, seed: int = 0, **imagination: Any
) -> WorldModelEnv:
    config = ImaginationConfig.model_validate(imagination)
    return WorldModelEnv(
        toy_world_model(noise), ToyInitialFrames(), config, num_envs, seed=seed, record_frames=record_frames
    )


def toy_env_spec(**changes: Any) -> EnvSpec:
    """What the toy world model imitates."""
    spec = METADATA.env_spec()
    return EnvSpec(**{**vars(spec), "kind": "toy", **changes})


def push(size: float, num_envs: int, length: int) -> np.ndarray:
    """Actions float32 (num_envs, length, 3): the first dimension is `size`."""
    actions = np.zeros((num_envs, length, 3), np.float32)
    actions[..., 0] = size
    return actions


def through_a_file(keyframe: Keyframe) -> Keyframe:
    """Written and read back without pickle."""
    buffer = io.BytesIO()
    np.savez(buffer, **cast(Any, keyframe.arrays))
    buffer.seek(0)
    with np.load(buffer, allow_pickle=False) as stored:
        return replace(keyframe, arrays={name: stored[name] for name in stored.files})
