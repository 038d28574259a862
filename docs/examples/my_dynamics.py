"""Dynamics of your own for the world model, named as `world_model.model.dynamics.kind=my_dynamics:DriftConfig`."""

from dataclasses import asdict, dataclass

import torch

from world_model.interfaces import Dynamics, DynamicsConfig
from world_model.types import Frames


class DriftConfig(DynamicsConfig):
    spread: float = 0.01  # Standard deviation of what it draws.

    def build(self, inputs):
        return DriftDynamics(self, inputs)


@dataclass(frozen=True)
class LastFrame(Frames):  # What is remembered of B episodes: the last frame of each, B x 1.
    tensors = asdict
    from_tensors = staticmethod(lambda tensors: LastFrame(**tensors))

    def put(self, rows, other):
        return LastFrame(self.latents.index_copy(0, rows, other.latents), self.states.index_copy(0, rows, other.states))


class DriftDynamics(
    Dynamics
):  # A frame is the one before it, plus what a linear layer reads of the actions, plus noise.
    def __init__(self, config, inputs):
        super().__init__()
        self.config, self.frame_steps = config, inputs.frame_steps
        self.shape = (len(inputs.cameras), *inputs.latent_shape)
        self.latents = torch.nn.Linear(inputs.frame_steps * inputs.action_dim, torch.Size(self.shape).numel())
        self.states = torch.nn.Linear(inputs.frame_steps * inputs.action_dim, inputs.state_dim)

    def drift(self, actions):
        values = (actions.values * actions.executed[..., None]).flatten(2)  # (B, F, G * A)
        return self.latents(values).unflatten(2, self.shape), self.states(values)

    def loss(self, clip, generator, seen=None):
        if seen is not None:
            raise ValueError("world_model.clip_source: not for DriftDynamics; set it to null")
        latents, states = self.drift(clip.actions.at(slice(1, None)))
        errors = (latents - clip.frames.latents.diff(dim=1)).square().flatten(2).mean(2)
        errors = errors + (states - clip.frames.states.diff(dim=1)).square().mean(2)
        return errors[clip.valid[:, 1:]].mean(), {"latent_error": float(errors.mean().detach())}

    def begin(self, reference, noise):
        return LastFrame(reference.latents, reference.states)

    def extend(self, context, frames, actions, noise):
        return LastFrame(frames.latents[:, -1:], frames.states[:, -1:])

    @torch.no_grad()
    def imagine(self, context, actions, noise, num_steps=None):
        latents, states = self.drift(actions)
        drawn = self.config.temperature * self.config.spread * noise.normal(latents.shape[1], *self.shape)
        return Frames(context.latents + (latents + drawn).cumsum(1), context.states + states.cumsum(1))
