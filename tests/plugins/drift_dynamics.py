"""A dynamics from outside the packages: a frame is the one before it, plus what a linear layer reads of the actions.

In a recipe: `world_model.model.dynamics.kind=drift_dynamics:DriftConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import PositiveFloat
from torch import nn

from world_model.config import DynamicsConfig
from world_model.interfaces import Dynamics
from world_model.types import Actions, Clip, DynamicsInputs, Frames, NoiseStream


class DriftConfig(DynamicsConfig):
    """Options of `DriftDynamics`; `spread` is the standard deviation of what it draws."""

    spread: PositiveFloat = 0.01

    def build(self, inputs: DynamicsInputs) -> DriftDynamics:
        """See `DynamicsConfig.build`."""
        return DriftDynamics(self, inputs)


@dataclass(frozen=True)
class LastFrame:
    """Context: the last of B episodes' frames, B x 1."""

    frames: Frames

    def select(self, rows: torch.Tensor) -> LastFrame:
        return LastFrame(self.frames.select(rows))

    def put(self, rows: torch.Tensor, other: LastFrame) -> LastFrame:
        new = other.tensors()
        return self.from_tensors({name: old.index_copy(0, rows, new[name]) for name, old in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"latents": self.frames.latents, "states": self.frames.states}

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor]) -> LastFrame:
        return LastFrame(Frames(tensors["latents"], tensors["states"]))


class DriftDynamics(Dynamics):
    """See the module's text and `world_model.interfaces.Dynamics`."""

    def __init__(self, config: DriftConfig, inputs: DynamicsInputs) -> None:
        super().__init__()
        self.config, self.spread, self.frame_steps = config, config.spread, inputs.frame_steps
        self.shape = (len(inputs.cameras), *inputs.latent_shape)
        num_values = inputs.frame_steps * inputs.action_dim
        self.latents = nn.Linear(num_values, torch.Size(self.shape).numel())
        self.states = nn.Linear(num_values, inputs.state_dim)

    def _next(self, frames: Frames, actions: Actions) -> Frames:
        values = (actions.values * actions.executed[..., None]).flatten(2)
        return Frames(
            frames.latents + self.latents(values).unflatten(2, self.shape), frames.states + self.states(values)
        )

    def loss(
        self, clip: Clip, generator: torch.Generator, seen: Frames | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if seen is not None:
            raise ValueError("world_model.bootstrap.share: not for DriftDynamics; set it to 0")
        predicted = self._next(clip.frames.at(slice(0, -1)), clip.actions.at(slice(1, None)))
        wanted, counted = clip.frames.at(slice(1, None)), clip.valid[:, 1:]
        latent_error = (predicted.latents - wanted.latents).square().mean((2, 3, 4, 5))[counted].mean()
        state_error = (predicted.states - wanted.states).square().mean(2)[counted].mean()
        return latent_error + state_error, {"latent_error": float(latent_error.detach())}

    @torch.no_grad()
    def begin(self, reference: Frames, noise: NoiseStream) -> LastFrame:
        return LastFrame(reference)

    @torch.no_grad()
    def extend(self, context: LastFrame, frames: Frames, actions: Actions, noise: NoiseStream) -> LastFrame:
        return LastFrame(frames.at(slice(-1, None)))

    @torch.no_grad()
    def imagine(self, context: LastFrame, actions: Actions, noise: NoiseStream, num_steps: int | None = None) -> Frames:
        frames, found = context.frames, []
        for i in range(actions.values.shape[1]):
            frames = self._next(frames, actions.at(slice(i, i + 1)))
            drawn = noise.normal(1, *self.shape, device=frames.latents.device)
            frames = Frames(frames.latents + self.config.temperature * self.spread * drawn, frames.states)
            found.append(frames)
        return Frames(torch.cat([f.latents for f in found], 1), torch.cat([f.states for f in found], 1))
