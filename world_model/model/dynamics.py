"""The dynamics: a factorized causal video transformer that predicts the next latent frame by rectified flow.

Each frame is a row of tokens: one for each square of latent pixels of each view, one for the state. A block attends
among the tokens of a frame, then along time at each token's place (to the episode's first frame, the last `memory`
frames and the frame itself), then has an MLP; all modulated by the frame's own noise level and its own actions
(AdaLN, Peebles & Xie, arXiv 2212.09748; modulation shared by the blocks as in arXiv 2310.00426).

Training runs two streams through the same weights: the clip's frames lightly noised, which are the context, and the
same frames at noise levels drawn for each (diffusion forcing, arXiv 2407.01392), each of which sees the context before
it. So imagining frame by frame over cached keys and values computes what training did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, Self, cast

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import nn
from torch.nn import functional as F

from vla_rl.types import EnvSpec
from world_model.interfaces import Dynamics, DynamicsConfig
from world_model.model.action_conditioning import ActionConditioning, Condition
from world_model.model.flow import Noisy, mix, noised, sample, sampling_levels, shifted
from world_model.model.transformer_block import (
    NUM_MODULATIONS,
    Remembered,
    TransformerBlock,
    VideoContext,
    level_features,
)
from world_model.noise import NoiseStream
from world_model.types import Actions, Clip, DynamicsInputs, Frames

# preset -> (width, depth, heads)
PRESETS = {"tiny": (160, 6, 5), "small": (384, 8, 6), "base": (768, 16, 12), "large": (1280, 23, 20)}
MIN_LEVEL = 0.1  # The loss weighs the error of a frame at noise level t by 1 / max(t, this).
CONTEXT_SPAN = 5.0  # Remembered frames have up to this many times the noise in training that they have in imagination.
STATE_BETA = 0.05  # Standard deviations; beyond it the error of a state counts linearly: collisions are rare and large.
STATE_WEIGHT = 0.1  # Of the states' error beside the latents'.
PURE_NOISE = 0.25  # Share of frames that are predicted from noise alone, as imagining begins with them.


class TransformerConfig(DynamicsConfig):
    """The factorized causal video transformer (see the module's text)."""

    learns_from_own_frames: ClassVar[bool] = True

    kind: str = Field(default="transformer", description="The dynamics: this transformer.")
    preset: Literal["tiny", "small", "base", "large"] = Field(
        default="tiny", description="3 M, 20 M, 150 M or 600 M parameters; the sizes below override it."
    )
    width: PositiveInt | None = Field(default=None, description="Of a token.")
    depth: PositiveInt | None = Field(default=None, description="Blocks of spatial attention, temporal attention, MLP.")
    heads: PositiveInt | None = Field(default=None, description="Attention heads.")
    patch: PositiveInt = Field(default=2, description="Side of the square of latent pixels that makes a token.")
    memory: PositiveInt = Field(
        default=4, description="Last frames that a frame attends to, besides the episode's first."
    )
    reference: bool = Field(
        default=True, description="Every frame attends to the episode's first; false: only while it is remembered."
    )
    context_noise: float = Field(
        default=0.02, ge=0, lt=0.2, description="Noise level of remembered pictures, 1 is all; more while fitting."
    )
    sampling_steps: PositiveInt = Field(default=2, le=50, description="Of the flow, when imagining.")
    kinematics: Literal["none", "delta_pose", "body"] = Field(
        default="none",
        description="delta_pose: the first three action dimensions move the end effector, whose position is state[:3]; "
        "the dynamics then also sees where each action leads (World-Env's action maps). body: a simulator of the robot "
        "alone tells where (env: libero, tabletop); what contact changes is learned.",
    )
    meters_per_action: PositiveFloat = Field(default=0.05, description="With delta_pose: meters at action 1.")
    projections: dict[str, tuple[tuple[float, float, float, float], ...]] = Field(
        default={},
        description="Camera -> 3 x 4 matrix from meters to homogeneous image coordinates in [0, 1] (x right, y down): "
        "then the end effector's path is also drawn into that camera's tokens.",
    )

    @property
    def needs_body(self) -> bool:
        return self.kinematics == "body"

    def build(self, inputs: DynamicsInputs) -> Dynamics:
        """See `DynamicsConfig.build`."""
        return VideoDynamics(self, inputs)

    def for_env(self, spec: EnvSpec) -> Self:
        """See `DynamicsConfig.for_env`: the environment's projections, where kinematics are given and none of these."""
        if self.kinematics == "none" or self.projections:
            return self
        projections = {name: matrix.tolist() for name, matrix in spec.projections.items() if name in spec.cameras}
        return type(self).model_validate(self.model_dump() | {"projections": projections})


class VideoDynamics(Dynamics[TransformerConfig]):
    """See the module's text and `world_model.interfaces.Dynamics`."""

    def __init__(self, config: TransformerConfig, inputs: DynamicsInputs) -> None:
        super().__init__()
        width, depth, heads = (
            given or preset
            for given, preset in zip((config.width, config.depth, config.heads), PRESETS[config.preset], strict=True)
        )
        channels, height, columns = inputs.latent_shape
        if height % config.patch or columns % config.patch:
            raise ValueError(
                f"dynamics.patch: latents of {height} x {columns} pixels cannot be cut into squares of {config.patch}"
            )
        if config.needs_body != (inputs.body_dim > 0):
            raise ValueError("dynamics.kinematics: body, and only body, needs to know what moves the robot's body")
        if width % heads or (width // heads) % 2:
            raise ValueError(f"dynamics: width {width} must be an even multiple of {heads} heads")
        self.config, self.frame_steps, self.heads = config, inputs.frame_steps, heads
        self.latent_shape, self.num_views, state_dim = inputs.latent_shape, len(inputs.cameras), inputs.state_dim
        self.grid = (height // config.patch, columns // config.patch)
        patch_values = channels * config.patch**2
        num_tokens = self.num_views * self.grid[0] * self.grid[1] + 1
        self.embed_patch = nn.Linear(2 * patch_values, width)
        self.embed_state = nn.Linear(2 * state_dim, width)
        self.place = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.is_context = nn.Parameter(torch.zeros(width))
        self.is_reference = nn.Parameter(torch.zeros(width))
        # Called action maps in the weights of world models that are already saved.
        scale = config.meters_per_action if config.kinematics == "delta_pose" else None
        self.action_maps = ActionConditioning(inputs, self.grid, width, scale, config.projections)
        self.embed_level = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.modulation = nn.Linear(width, NUM_MODULATIONS * width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head_patch = nn.Linear(width, patch_values)
        self.head_state = nn.Linear(width, state_dim)
        for layer in (self.modulation, self.head_patch, self.head_state):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters, in which it computes; latents and states go in and come out as float32."""
        return self.place.dtype

    # --- training ---------------------------------------------------------------------------

    def loss(
        self, clip: Clip, generator: torch.Generator, seen: Frames | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Rectified-flow loss of every frame that follows a frame of the clip; `seen`: these in the clip's place.

        The network predicts the clean frame; its squared error at noise level t is weighed by 1 / t (t at least 0.1).
        The error of the velocity would be weighed by 1 / t^2, and levels are often drawn around the middle: then most
        of the loss is what little noise hides, and where a block went is learned slowly. `latent_error` is the mean
        squared error of the frames predicted from noise alone, `copy_error` that of repeating the frame before.
        """
        clean, batch, length = clip.frames, clip.size, clip.valid.shape[1]
        shown = seen or clean
        context = noised(shown, self._context_levels(batch, length, generator), generator).with_states(shown)
        number, counted = clip.numbers()
        levels = self._target_levels(batch, length - 1, generator).to(clip.valid.device)
        target = clean.at(slice(1, None))
        noisy = noised(target, levels, generator)
        before = context.frames.at(slice(0, -1))
        predicted = self._two_streams(context, noisy, before, clip.actions, number, clip.valid)
        weight = counted / levels.clamp_min(MIN_LEVEL)
        weight = weight / counted.sum().clamp_min(1)
        latent_error, state_error = _errors(predicted, target)
        loss = (weight * (latent_error + STATE_WEIGHT * state_error)).sum()
        with torch.no_grad():
            copied = (clean.latents[:, :-1] - target.latents).square().mean((2, 3, 4, 5))
            share = counted & (levels == 1)
            share = share / share.sum().clamp_min(1)
            metrics = {
                "latent_error": (share * latent_error).sum(),
                "copy_error": (share * copied).sum(),
                "state_error": (share * state_error).sum(),
            }
        return loss, metrics

    def _context_levels(self, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Noise of remembered frames, float32 (B, T): uniform up to CONTEXT_SPAN times what imagination uses."""
        return CONTEXT_SPAN * self.config.context_noise * _uniform(batch, length, generator)

    def _target_levels(self, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Noise of frames to be predicted, float32 (B, T): spread as imagining asks for them, and all noise."""
        levels = shifted(_uniform(batch, length, generator))
        return torch.where(_uniform(batch, length, generator) < PURE_NOISE, 1.0, levels)

    def _two_streams(
        self,
        context: Noisy,
        noisy: Noisy,
        before: Frames,
        actions: Actions,
        number: torch.Tensor,
        valid: torch.Tensor,
    ) -> Frames:
        """Predictions for frames 1 .. T-1, each from the context stream before it."""
        length = number.shape[1]
        condition = self.action_maps(actions, self.action_maps.starts(context.frames, actions, number))
        remembered = self._tokens(context, None, condition, number)
        wanted = self._tokens(noisy, before, condition.at(slice(1, None)), number[:, 1:])
        tokens = torch.cat([remembered, wanted], 1)
        predicting = self._modulation(noisy.levels, condition.at(slice(1, None)))
        modulation = torch.cat([self._modulation(context.levels, condition), predicting], 1)
        order = torch.cat([number, number[:, 1:]], 1)
        in_context = torch.arange(2 * length - 1, device=number.device) < length
        age = order[:, :, None] - order[:, None, :]
        kept = (order[:, None, :] == 0) & self.config.reference
        seen = in_context[None, None, :] & (age > 0) & ((age <= self.config.memory) | kept)
        seen = seen | torch.eye(2 * length - 1, dtype=torch.bool, device=number.device)
        seen = seen & (torch.cat([valid, valid[:, 1:]], 1)[:, None, :] | (age == 0))
        for block in self.blocks:
            tokens = block(tokens, modulation, order, seen)
        return self._predict(tokens[:, length:], before, actions.at(slice(1, None)))

    # --- imagination ------------------------------------------------------------------------

    def compile_imagining(self, backend: str = "inductor") -> None:
        """See `Dynamics.compile_imagining`: a frame imagined, and a frame remembered, are a function each."""
        self._imagine_one = torch.compile(self._imagine_one, backend=backend)
        self._remember = torch.compile(self._remember, backend=backend)

    @torch.no_grad()
    def begin(self, reference: Frames, noise: NoiseStream) -> VideoContext:
        """See `Dynamics.begin`."""
        batch, device = reference.latents.shape[0], reference.latents.device
        slots, depth = 1 + self.config.memory, len(self.blocks)
        tokens, width = self.place.shape
        empty = torch.zeros(
            batch, depth, slots, tokens, self.heads, width // self.heads, device=device, dtype=self.dtype
        )
        start = VideoContext(
            empty,
            empty.clone(),
            torch.zeros(batch, slots, dtype=torch.bool, device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
            reference,
        )
        shape = (self.frame_steps, self.action_maps.num_values)
        nothing = Actions(
            torch.zeros(batch, 1, *shape, device=device),
            torch.zeros(batch, 1, shape[0], dtype=torch.bool, device=device),
        )
        return self.extend(start, reference, nothing, noise)

    @torch.no_grad()
    def extend(self, context: VideoContext, frames: Frames, actions: Actions, noise: NoiseStream) -> VideoContext:
        """See `Dynamics.extend`."""
        num_frames = frames.states.shape[1]
        drawn = noise.frames(frames, num_frames)
        for i in range(num_frames):
            here = slice(i, i + 1)
            context = context.with_frame(self._remember(context, frames.at(here), actions.at(here), drawn.at(here)))
        return context

    @torch.no_grad()
    def to_remember(
        self, context: VideoContext, frames: Frames, actions: Actions, noise: NoiseStream
    ) -> tuple[VideoContext, list[tuple[Remembered, tuple[torch.Tensor, torch.Tensor]]]]:
        """What `extend` gives, and what it writes where, unwritten; `context` stays as it is."""
        num_frames, written = frames.states.shape[1], []
        drawn = noise.frames(frames, num_frames)
        for i in range(num_frames):
            here = slice(i, i + 1)
            new, place = (
                self._remember(context, frames.at(here), actions.at(here), drawn.at(here)),
                context.next_place(),
            )
            written.append((new, place))
            if i == 0 and num_frames > 1:
                context = context.copy()
            if i < num_frames - 1:
                context.write(new, place)
            context = context.counting(new, place)
        return context, written

    def _remember(self, context: VideoContext, frame: Frames, actions: Actions, noise: Frames) -> Remembered:
        levels = torch.full_like(frame.states[..., 0], self.config.context_noise)
        noisy = mix(frame, noise, levels).with_states(frame)
        first = context.num_frames == 0
        start = torch.where(first[:, None, None], noisy.frames.states, context.latest.states)
        condition = self.action_maps(actions, start)
        number = context.num_frames[:, None]
        tokens = self._tokens(noisy, None, condition, number)
        _, keys, values = self._run(context, tokens, self._modulation(levels, condition), number)
        return Remembered(keys, values, noisy.frames)

    @torch.no_grad()
    def imagine(
        self, context: VideoContext, actions: Actions, noise: NoiseStream, num_steps: int | None = None
    ) -> Frames:
        """See `Dynamics.imagine`. Frames come one after another, each remembered for the next."""
        num_frames = actions.values.shape[1]
        levels = sampling_levels(num_steps or self.config.sampling_steps)
        drawn = noise.frames(context.latest, 2 * num_frames - 1)  # To imagine with, to remember with, by turns.
        imagined: list[Frames] = []
        for i in range(num_frames):
            here, start, after = (slice(first, first + 1) for first in (i, 2 * i, 2 * i + 1))
            imagined.append(self._imagine_one(context, actions.at(here), drawn.at(start), levels))
            if i < num_frames - 1:
                if i == 0:  # The context that was given stays as it is.
                    context = context.copy()
                context = context.with_frame(self._remember(context, imagined[-1], actions.at(here), drawn.at(after)))
        return Frames.joined(imagined, 1)

    def _imagine_one(self, context: VideoContext, actions: Actions, start: Frames, levels: tuple[float, ...]) -> Frames:
        before, number = context.latest, context.num_frames[:, None]
        condition = self.action_maps(actions, before.states)

        def predict(noisy: Frames, level: float) -> Frames:
            levels = torch.full_like(before.states[..., 0], level)
            tokens = self._tokens(Noisy(noisy, levels), before, condition, number)
            tokens, _, _ = self._run(context, tokens, self._modulation(levels, condition), number)
            return self._predict(tokens, before, actions)

        return sample(predict, start, levels, self.config.temperature)

    def _run(
        self, context: VideoContext, tokens: torch.Tensor, modulation: torch.Tensor, number: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One frame over the remembered ones. Returns tokens (B, 1, N, W) and its keys, values (B, depth, N, h, D)."""
        keys, values, filled = [], [], context.filled
        if not self.config.reference:  # It is in the first slot.
            filled = torch.cat([filled[:, :1] & (number <= self.config.memory), filled[:, 1:]], 1)
        for i, block in enumerate(cast(Iterable[TransformerBlock], self.blocks)):
            past = (context.keys[:, i], context.values[:, i], filled)
            tokens, key, value = block.step(tokens, modulation, number, past)
            keys.append(key)
            values.append(value)
        return tokens, torch.stack(keys, 1), torch.stack(values, 1)

    # --- in and out -------------------------------------------------------------------------

    def _tokens(self, noisy: Noisy, before: Frames | None, condition: Condition, number: torch.Tensor) -> torch.Tensor:
        """Tokens (B, T, N, width). `before` is the frame that each one follows; None for the context stream."""
        frames = noisy.frames
        earlier = frames if before is None else before
        patches = torch.cat([self._patches(frames.latents), self._patches(earlier.latents)], -1)
        patches = self.embed_patch(patches.to(self.dtype)) + condition.patches
        state = self.embed_state(torch.cat([frames.states, earlier.states], -1).to(self.dtype))
        tokens = torch.cat([patches, state[:, :, None]], 2) + self.place
        if before is None:
            tokens = tokens + self.is_context
            tokens = tokens + self.is_reference * (number == 0)[..., None, None]
        return tokens

    def _predict(self, tokens: torch.Tensor, before: Frames, actions: Actions) -> Frames:
        """The clean frame: the one before it, moved as the kinematics say, plus what the network says has changed.

        Free motion is known to a tenth of a millimeter, and what is grasped depends on millimeters; the network adds
        what contact does.
        """
        tokens = self.norm(tokens)
        latents = self._unpatched(self.head_patch(tokens[:, :, :-1]).float())
        states = before.states + self.action_maps.moved(actions, before.states)
        return Frames(before.latents + latents, states + self.head_state(tokens[:, :, -1]).float())

    def _modulation(self, levels: torch.Tensor, condition: Condition) -> torch.Tensor:
        """From each frame's noise level and actions: (B, T, 9, width), the blocks' in common."""
        features = F.silu(self.embed_level(level_features(levels).to(self.dtype)) + condition.frame)
        return torch.unflatten(self.modulation(features), -1, (NUM_MODULATIONS, -1))

    def _patches(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, T, V, C, h, w) -> (B, T, V * rows * columns, C * patch^2)."""
        batch, length, views, channels = latents.shape[:4]
        (rows, columns), side = self.grid, self.config.patch
        cut = latents.reshape(batch, length, views, channels, rows, side, columns, side)
        return cut.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(batch, length, views * rows * columns, -1)

    def _unpatched(self, patches: torch.Tensor) -> torch.Tensor:
        batch, length = patches.shape[:2]
        (channels, height, width), (rows, columns), side = self.latent_shape, self.grid, self.config.patch
        cut = patches.reshape(batch, length, self.num_views, rows, columns, channels, side, side)
        return cut.permute(0, 1, 2, 5, 3, 6, 4, 7).reshape(batch, length, self.num_views, channels, height, width)


def _uniform(batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(batch, length, generator=generator, device=generator.device)


def _errors(predicted: Frames, target: Frames) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the latents, squared, and of the states, float32 (B, T) each."""
    states = F.smooth_l1_loss(predicted.states, target.states, reduction="none", beta=STATE_BETA).mean(2)
    return (predicted.latents - target.latents).square().mean((2, 3, 4, 5)), states
