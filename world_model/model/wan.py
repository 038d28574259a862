"""Wan as the dynamics: next frames of Wan's latents from actions, by rectified flow, frame after frame.

A frame is one image in the latents of Wan's autoencoder, every G = 4 control steps as Wan's own latents cover four
images. The network (world_model/model/wan_network.py) is causal from frame to frame, so all
F frames of a call are denoised together, and none depends on a later one or its actions.

Training takes clips apart at a place drawn for each: the frames before it are the context, lightly noised; those from
it on get noise levels drawn for each frame (diffusion forcing, arXiv 2407.01392) and make the loss. Clips of
T = 1 + memory + F frames see what imagination of F frames sees.

A context holds the remembered frames themselves. Every call encodes them again, with new noise; no keys and values
are kept, as the F frames of a call share one pass for each of a few sampling steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vla_rl.config import ConfigError
from world_model.interfaces import Dynamics, DynamicsConfig
from world_model.model.flow import mix, sample, sampling_levels, shifted
from world_model.model.wan_network import ActionWan, build_transformer, transformer_sizes
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, DynamicsInputs, Frames

STATE_WEIGHT = 0.1  # In the loss, of the clean state's squared error beside the velocity's.


class WanConfig(DynamicsConfig):
    """Wan's video transformer as the dynamics (see docs/wan.md)."""

    kind: str = Field(default="wan", description="The dynamics: Wan's transformer.")
    path: Path | None = Field(
        default=None,
        description="Folder of a diffusers pipeline with a WanTransformer3DModel in transformer/ (Wan-2.2-TI2V-5B), "
        "or of the transformer itself.",
    )
    transformer: dict[str, Any] | None = Field(
        default=None,
        description="In place of path: arguments of WanTransformer3DModel, which starts from random weights. A fitted "
        "world model names them, so that its folder holds all it needs.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Of the transformer's weights; what is added to it starts in float32."
    )
    memory: PositiveInt = Field(default=4, description="Last frames that are remembered besides the episode's first.")
    context_noise: float = Field(default=0.05, ge=0, lt=0.5, description="Noise level of remembered frames, 1 is all.")
    sampling_steps: PositiveInt = Field(default=5, le=50, description="Of the flow, when imagining.")
    gradient_checkpointing: bool = Field(
        default=True, description="Compute each block again in the backward pass: slower, far less memory."
    )
    lora_rank: NonNegativeInt = Field(
        default=0, description="Train adapters of this rank, not the pretrained weights; 0 trains the weights."
    )

    @model_validator(mode="after")
    def _one_source(self) -> WanConfig:
        if (self.path is None) == (self.transformer is None):
            raise ConfigError(
                "world_model.model.dynamics: give either path (pretrained weights) or transformer (sizes of a random "
                "one)"
            )
        return self

    def build(self, inputs: DynamicsInputs) -> Dynamics:
        """See `DynamicsConfig.build`."""
        sizes = (inputs.state_dim, inputs.action_dim, inputs.frame_steps)
        return WanDynamics(self, inputs.latent_shape, len(inputs.cameras), *sizes)


@dataclass(frozen=True)
class WanContext:
    """What B episodes remember, in W = 1 + memory slots, the newest last; the reference is the first filled one.

    Attributes:
        frames: B x W frames as they were given, without noise; what a video autoencoder needs to decode new ones.
        actions: B x W, those that led to each.
        filled: bool (B, W), False for slots before the reference.
    """

    frames: Frames
    actions: Actions
    filled: torch.Tensor

    def select(self, rows: torch.Tensor) -> WanContext:
        """Of the episodes at `rows`, int64, in that order."""
        return WanContext(self.frames.select(rows), self.actions.select(rows), self.filled[rows])

    def put(self, rows: torch.Tensor, other: WanContext) -> WanContext:
        """With the episodes at `rows` replaced by those of `other`."""
        new = other.tensors()
        return self.from_tensors({name: old.index_copy(0, rows, new[name]) for name, old in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """For a keyframe."""
        return {
            "latents": self.frames.latents,
            "states": self.frames.states,
            "actions": self.actions.values,
            "executed": self.actions.executed,
            "filled": self.filled,
        }

    @staticmethod
    def from_tensors(tensors: dict[str, torch.Tensor]) -> WanContext:
        """What `tensors` gave."""
        return WanContext(
            Frames(tensors["latents"], tensors["states"]),
            Actions(tensors["actions"], tensors["executed"]),
            tensors["filled"],
        )


class WanDynamics(Dynamics[WanConfig]):
    """See the module's text and `world_model.interfaces.Dynamics`.

    The state is predicted beside the image: its noisy value is an input, and a small head predicts the clean one from
    the mean of its frame's tokens, so that it runs through the same flow.

    `config` becomes one that names sizes where it named a folder: with the state dict, which holds all weights (LoRA's
    adapters too), that is all it takes to make the same again.

    Args:
        latent_shape: (C, h, w) of one view.
        num_views: V. state_dim: S. action_dim: A. frame_steps: G.

    Raises:
        ValueError: no transformer at `config.path`, a damaged one, or one for latents of another shape.
    """

    def __init__(
        self,
        config: WanConfig,
        latent_shape: tuple[int, int, int],
        num_views: int,
        state_dim: int,
        action_dim: int,
        frame_steps: int,
    ) -> None:
        super().__init__()
        transformer = build_transformer(config.path, config.transformer, config.dtype, config.lora_rank)
        if config.path is not None:
            config = config.model_copy(update={"path": None, "transformer": transformer_sizes(transformer)})
        self.config, self.frame_steps, self.action_dim = config, frame_steps, action_dim
        self.network = ActionWan(
            transformer,
            latent_shape,
            num_views,
            state_dim,
            action_dim,
            frame_steps,
            config.gradient_checkpointing,
        )

    # --- training ---------------------------------------------------------------------------

    def loss(
        self, clip: Clip, generator: torch.Generator, seen: Frames | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Squared error of the velocity of the frames to be predicted, plus that of their clean states.

        `latent_error` is the mean squared error of the clean latents expected; `copy_error` that of repeating the
        frame before.

        Raises:
            ValueError: `seen` is given.
        """
        if seen is not None:
            raise ValueError("world_model.clip_source: not for dynamics of kind wan; set it to null")
        clean, device = clip.frames, clip.valid.device
        levels, counted = self._drawn_levels(clip, generator)
        drawn_on = generator.device
        noise = (torch.randn(x.shape, generator=generator, device=drawn_on) for x in (clean.latents, clean.states))
        noise = Frames(*(values.to(device) for values in noise))
        noisy = mix(clean, noise, levels)
        velocity, states = self.network(noisy.frames.latents, noisy.frames.states, levels, clip.actions, clip.valid)
        share = counted / counted.sum().clamp_min(1)
        velocity_error = (share * (velocity - (noise.latents - clean.latents)).square().mean((2, 3, 4, 5))).sum()
        state_error = (share * (states - clean.states).square().mean(2)).sum()
        with torch.no_grad():
            expected = noisy.frames.latents - levels[:, :, None, None, None, None] * velocity
            copied = torch.cat([clean.latents[:, :1], clean.latents[:, :-1]], 1)
            metrics = {
                "velocity_error": velocity_error.detach(),
                "latent_error": (share * (expected - clean.latents).square().mean((2, 3, 4, 5))).sum(),
                "copy_error": (share * (copied - clean.latents).square().mean((2, 3, 4, 5))).sum(),
                "state_error": state_error.detach(),
            }
        return velocity_error + STATE_WEIGHT * state_error, metrics

    def _drawn_levels(self, clip: Clip, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise levels float32 (B, T), and bool (B, T), the frames to be predicted.

        They begin at a place drawn evenly for each clip, after at most 1 + memory frames of context. Frame 1 of a clip
        from an episode's middle is always context, as the frame before it is not in the clip.
        """
        batch, length = clip.valid.shape
        lowest = torch.where(clip.first == 1, 1, 2).cpu()
        highest = (clip.valid.sum(1).cpu() - 1).clamp_max(1 + self.config.memory)
        choices = (highest - lowest + 1).clamp_min(1)
        drawn_on = generator.device
        start = lowest + (torch.rand(batch, generator=generator, device=drawn_on).cpu() * choices).long()
        remembered = torch.rand(batch, length, generator=generator, device=drawn_on).cpu()
        remembered = 2 * self.config.context_noise * remembered
        wanted = shifted(torch.rand(batch, length, generator=generator, device=drawn_on).cpu())
        is_new = torch.arange(length) >= start[:, None]
        levels = torch.where(is_new, wanted, remembered).to(clip.valid.device)
        return levels, is_new.to(clip.valid.device) & clip.valid

    # --- imagination ------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, reference: Frames, noise: NoiseStream) -> WanContext:
        """See `Dynamics.begin`. Draws nothing: the noise of remembered frames is drawn by `imagine`."""
        batch, device = reference.states.shape[0], reference.states.device
        slots, steps = 1 + self.config.memory, (self.frame_steps, self.action_dim)

        def in_last_slot(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x.new_zeros(batch, slots - 1, *x.shape[2:]), x], 1)

        filled = in_last_slot(torch.ones(batch, 1, dtype=torch.bool, device=device))
        actions = Actions(
            torch.zeros(batch, slots, *steps, device=device),
            torch.zeros(batch, slots, steps[0], dtype=torch.bool, device=device),
        )
        return WanContext(Frames(in_last_slot(reference.latents), in_last_slot(reference.states)), actions, filled)

    @torch.no_grad()
    def extend(self, context: WanContext, frames: Frames, actions: Actions, noise: NoiseStream) -> WanContext:
        """See `Dynamics.extend`. Draws nothing, as `begin`."""
        for i in range(frames.states.shape[1]):
            here = slice(i, i + 1)
            new = WanContext(frames.at(here), actions.at(here), torch.ones_like(context.filled[:, :1])).tensors()
            full = context.filled.all(1)

            def appended(old: torch.Tensor, newest: torch.Tensor, full: torch.Tensor = full) -> torch.Tensor:
                """Without the first slot where that is empty, else without the one after it, which is the oldest."""
                first = torch.where(full.view(-1, *[1] * (old.ndim - 1)), old[:, :1], old[:, 1:2])
                return torch.cat([first, old[:, 2:], newest], 1)

            context = WanContext.from_tensors(
                {name: appended(old, new[name]) for name, old in context.tensors().items()}
            )
        return context

    @torch.no_grad()
    def imagine(
        self, context: WanContext, actions: Actions, noise: NoiseStream, num_steps: int | None = None
    ) -> Frames:
        """See `Dynamics.imagine`."""
        slots, num_new = context.filled.shape[1], actions.values.shape[1]
        drawn = noise.frames(context.frames, slots + num_new)
        past_noise, start = drawn.at(slice(0, slots)), drawn.at(slice(slots, None))
        levels = torch.full_like(context.frames.states[..., 0], self.config.context_noise)
        past = mix(context.frames, past_noise, levels)
        every = Actions(
            torch.cat([context.actions.values, actions.values], 1),
            torch.cat([context.actions.executed, actions.executed], 1),
        )
        filled = torch.cat([context.filled, context.filled.new_ones(len(context.filled), num_new)], 1)

        def predict(noisy: Frames, level: float) -> Frames:
            velocity, states = self.network(
                torch.cat([past.frames.latents, noisy.latents], 1),
                torch.cat([past.frames.states, noisy.states], 1),
                torch.cat([past.levels, torch.full_like(noisy.states[..., 0], level)], 1),
                every,
                filled,
            )
            return Frames(noisy.latents - level * velocity[:, slots:], states[:, slots:])

        levels = sampling_levels(num_steps or self.config.sampling_steps)
        return sample(predict, start, levels, self.config.temperature)
