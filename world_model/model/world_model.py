"""The world model: autoencoder, dynamics, success head and clip classifier in one, and the folder it is kept in.

    world_model = load_world_model("pretrained:tabletop")
    memory = world_model.begin(world_model.encode(images, states), instruction, seeds=[0, 1])
    frames = world_model.dynamics.imagine(memory.context, actions, memory.noise)

`world_model.imagination.chunk` turns imagined frames into outcomes; `world_model.env` makes an environment of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.common.atomic import atomic_folder
from vla_rl.common.precision import Precision, wants_bf16
from vla_rl.config import ConfigError
from world_model.config import ObjectsConfig, WorldModelConfig
from world_model.interfaces import Autoencoder, Dynamics, SuccessHead
from world_model.metadata import WorldModelMetadata, read_metadata, resolve_path, write_metadata
from world_model.model.autoencoder import without_path
from world_model.model.inverse import InverseDynamics
from world_model.model.memory import Memory
from world_model.model.objects import ObjectModel
from world_model.model.parts import (
    NO_INVERSE,
    NO_OBJECTS,
    NO_PROBABILITY,
    NO_VALUE,
    BuildParts,
    Parts,
    build_parts,
    read_weights,
    write_weights,
)
from world_model.model.success import ValueHead, timed
from world_model.noise import NoiseStream
from world_model.types import Actions, Frames

IMAGES_AT_ONCE = 512  # Through the autoencoder, which bounds its memory.


class WorldModel(nn.Module):
    """The four networks together, in evaluation mode.

    Args:
        config: what they are. metadata: what they were fitted on, and the thresholds of success.

    Raises:
        ValueError: parts that do not fit each other or the metadata.
    """

    autoencoder: Autoencoder
    dynamics: Dynamics
    success: SuccessHead
    clip: SuccessHead
    value_head: SuccessHead | None
    objects: ObjectModel | None
    inverse: InverseDynamics | None

    def __init__(self, config: WorldModelConfig, metadata: WorldModelMetadata, parts: Parts) -> None:
        super().__init__()
        if tuple(parts.autoencoder.image_size) != metadata.image_size:
            raise ValueError(
                f"autoencoder: is for images of {parts.autoencoder.image_size} pixels, the world model's are "
                f"{metadata.image_size}"
            )
        if parts.dynamics.frame_steps != config.frame_steps:
            raise ValueError(
                f"dynamics: has frames of {parts.dynamics.frame_steps} control steps, the config says "
                f"frame_steps = {config.frame_steps}"
            )
        # What was pretrained is described in full: saved, it needs its folder no more.
        own = {"dynamics": parts.dynamics.config, "autoencoder": without_path(config.autoencoder)}
        self.config, self.metadata = config.model_copy(update=own), metadata
        for part in fields(parts):
            setattr(self, part.name, getattr(parts, part.name))
        self.register_buffer("state_mean", torch.tensor(metadata.state_mean), persistent=False)
        self.register_buffer("state_std", torch.tensor(metadata.state_std), persistent=False)
        self.eval()

    state_mean: torch.Tensor
    state_std: torch.Tensor

    @property
    def frame_steps(self) -> int:
        """G, control steps from one frame to the next."""
        return self.config.frame_steps

    @property
    def device(self) -> torch.device:
        return self.state_mean.device

    def set_dynamics_options(self, **options: Any) -> None:
        """Imagine with other options of the dynamics from now on, such as `temperature` or `sampling_steps`.

        Thresholds and probabilities of success hold for those at which they were chosen.

        Raises:
            ConfigError: the dynamics has no such option.
        """
        if missing := options.keys() - type(self.config.dynamics).model_fields.keys():
            raise ConfigError(
                f"world_model.{', '.join(sorted(missing))}: dynamics of kind {self.config.dynamics.kind!r} have no "
                "such option; set it to null"
            )
        dynamics = self.config.dynamics.model_copy(update=options)
        self.config = self.config.model_copy(update={"dynamics": dynamics})
        self.dynamics.config = dynamics

    # --- the robot's units and the model's ---------------------------------------------------

    @torch.no_grad()
    def encode(self, images: np.ndarray, states: np.ndarray) -> Frames:
        """uint8 (B, F, V, height, width, 3), float32 (B, F, S) -> B x F frames."""
        flat = torch.from_numpy(np.ascontiguousarray(images)).flatten(0, 2)
        parts = [self.autoencoder.encode(part.to(self.device)) for part in flat.split(IMAGES_AT_ONCE)]
        latents = torch.cat(parts).unflatten(0, images.shape[:3])
        raw = torch.from_numpy(np.ascontiguousarray(states, np.float32)).to(self.device)
        return Frames(latents, (raw - self.state_mean) / self.state_std)

    @torch.no_grad()
    def decode(self, frames: Frames) -> np.ndarray:
        """B x F frames -> uint8 (B, F, V, height, width, 3)."""
        return self.decoded(frames).cpu().numpy()

    @torch.no_grad()
    def decoded(self, frames: Frames) -> torch.Tensor:
        """The same, on the device."""
        parts = [self.autoencoder.decode(part) for part in frames.latents.flatten(0, 2).split(IMAGES_AT_ONCE)]
        return torch.cat(parts).unflatten(0, frames.latents.shape[:3])

    def states(self, frames: Frames) -> np.ndarray:
        """States of B x F frames in the robot's units, float32 (B, F, S)."""
        return self.raw_states(frames).cpu().numpy()

    def raw_states(self, frames: Frames) -> torch.Tensor:
        """The same, on the device."""
        return frames.states * self.state_std + self.state_mean

    def actions(self, actions: np.ndarray, num_steps: np.ndarray) -> Actions:
        """A chunk as the frames that it leads to: clipped, cut into frames of G, the last filled up with zeros.

        Args:
            actions: float32 (B, H, A), environment units; A + S numbers with what they move the body (`metadata.body`).
            num_steps: int64 (B,), how many of H are executed.

        Returns:
            F = H / G frames, rounded up, whatever is executed: an episode draws the same noise beside any others.
        """
        num_frames = -(-actions.shape[1] // self.frame_steps)
        padded = np.zeros((len(actions), num_frames * self.frame_steps, actions.shape[2]), np.float32)
        low, high = (np.array(bound, np.float32) for bound in (self.metadata.action_low, self.metadata.action_high))
        padded[:, : actions.shape[1]] = actions
        own = padded[..., : len(low)]
        np.clip(own, low, high, out=own)
        executed = np.arange(padded.shape[1]) < num_steps[:, None]
        padded *= executed[..., None]
        both = np.concatenate([padded, executed[..., None]], 2, dtype=np.float32)  # One copy to the device, not two.
        sent = torch.from_numpy(both).unflatten(1, (num_frames, self.frame_steps)).to(self.device, non_blocking=True)
        return Actions(sent[..., :-1], sent[..., -1] > 0)

    # --- imagining ---------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, first: Frames, instruction: Sequence[str], seeds: Sequence[int]) -> Memory:
        """Start B episodes at their first frame (F = 1).

        Args:
            seeds: of each episode's noise, of 64 bits.
        """
        noise = NoiseStream(seeds, self.device)
        repeats = max(self.success.num_frames, self.clip.num_frames)
        recent = Frames(first.latents.repeat_interleave(repeats, 1), first.states.repeat_interleave(repeats, 1))
        context = self.dynamics.begin(first, noise)
        objects = None
        if self.objects is not None:
            objects = self.objects.begin(first, self.raw_states(first)[:, 0, :3], instruction)
        return Memory(context, first, recent, list(instruction), noise, objects)

    @torch.no_grad()
    def extend(self, memory: Memory, frames: Frames, actions: Actions) -> Memory:
        """Remember F more frames, real or imagined, with the actions that led to them. `memory` is used no more."""
        context = self.dynamics.extend(memory.context, frames, actions, memory.noise)
        objects = memory.objects
        if self.objects is not None and objects is not None:
            objects = self.objects.roll(objects, actions)[0]
        return replace(memory.seeing(frames), context=context, objects=objects)

    @torch.no_grad()
    def scores(self, memory: Memory, frames: Frames) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of success at each of the F frames that follow `memory`: success head, clip classifier, (B, F)."""

        def score(head: SuccessHead) -> torch.Tensor:
            return head.score(*self._windows(memory, frames, head.num_frames)).unflatten(0, (memory.size, -1))

        return score(self.success), score(self.clip)

    @torch.no_grad()
    def value(self, memory: Memory, frames: Frames | None, steps_left: torch.Tensor | np.ndarray) -> torch.Tensor:
        """Probability that the episode will have succeeded by its end, for each of the F frames that follow `memory`.

        It is that of the policy whose episodes the value was fitted on; see world_model/fit/value.py. The frames may be
        real or imagined, and so may those in `memory`.

        Args:
            frames: B x F; None: the newest frame in `memory` itself, F = 1.
            steps_left: int (B, F), control steps from each frame to the task's horizon.

        Returns:
            float32 (B, F), in 0 .. 1.

        Raises:
            ConfigError: no value was fitted.
            ValueError: steps_left of another shape.
        """
        slope, intercept = self.check_value()
        return torch.sigmoid(slope * self.value_logits(memory, frames, steps_left) + intercept)

    @torch.no_grad()
    def value_logits(
        self, memory: Memory, frames: Frames | None, steps_left: torch.Tensor | np.ndarray
    ) -> torch.Tensor:
        """What `value` is a sigmoid of, not calibrated: float32 (B, F)."""
        if self.value_head is None:
            raise ConfigError(NO_VALUE)
        left = torch.as_tensor(steps_left, device=self.device)
        wanted = (memory.size, 1 if frames is None else frames.states.shape[1])
        if tuple(left.shape) != wanted:
            raise ValueError(f"steps_left: got shape {tuple(left.shape)}, must be {wanted}: one for each frame")
        share = (left.float() / max(self.metadata.horizon.values())).clamp(0, 1).flatten()
        windows, reference, instruction = self._windows(memory, frames, self.value_head.num_frames)
        logits = self.value_head.score(timed(windows, share), timed(reference, share), instruction)
        return logits.unflatten(0, wanted)

    def _windows(self, memory: Memory, frames: Frames | None, length: int) -> tuple[Frames, Frames, list[str]]:
        """For each of the frames that follow `memory` (None: its newest), with episodes' frames one after another: the
        last `length` frames up to it, the reference, the instruction."""
        together, num_frames = memory.recent, 1
        if frames is not None:
            num_frames = frames.states.shape[1]
            together = Frames(
                torch.cat([together.latents, frames.latents], 1), torch.cat([together.states, frames.states], 1)
            )
        all_frames = together.states.shape[1]
        last = torch.arange(all_frames - num_frames, all_frames, device=self.device)[:, None]
        window = last + torch.arange(1 - length, 1, device=self.device)
        windows = Frames(together.latents[:, window].flatten(0, 1), together.states[:, window].flatten(0, 1))
        each = torch.arange(memory.size, device=self.device).repeat_interleave(num_frames)
        instruction = [text for text in memory.instruction for _ in range(num_frames)]
        return windows, memory.reference.select(each), instruction

    def counts(self, success: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """Where logits of one shape count as a success, bool: above the head's threshold and the classifier's."""
        return (success > self.metadata.success_threshold) & (clip > self.metadata.clip_threshold)

    def check_probability(self) -> tuple[float, float]:
        """Return slope and intercept of the probability of success.

        Raises:
            ConfigError: it has none.
        """
        if self.metadata.success_probability is None:
            raise ConfigError(NO_PROBABILITY)
        return self.metadata.success_probability

    def probability(self, success: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
        """Calibrated probability that an episode succeeds whose highest logits these are, float32, of their shape.

        Raises:
            ConfigError: it has no calibrated probability.
        """
        slope, intercept = self.check_probability()
        return torch.sigmoid(slope * torch.minimum(success, clip).float() + intercept)

    @torch.no_grad()
    def objects_scores(self, memory: Memory, actions: Actions) -> torch.Tensor:
        """Logits of success by the objects part at each of the F frames that actions lead to: float32 (B, F).

        Raises:
            ConfigError: there is no such part.
        """
        if self.objects is None or memory.objects is None:
            raise ConfigError(NO_OBJECTS)
        return self.objects.roll(memory.objects, actions)[2]

    def check_objects(self) -> tuple[float, float]:
        """Return slope and intercept of the objects part's probability of success.

        Raises:
            ConfigError: there is no such part.
        """
        if self.objects is None or self.metadata.objects_probability is None:
            raise ConfigError(NO_OBJECTS)
        return self.metadata.objects_probability

    def objects_probability(self, score: torch.Tensor) -> torch.Tensor:
        """Calibrated probability that an episode succeeds whose highest `objects_scores` these are, float32.

        Raises:
            ConfigError: there is no such part.
        """
        slope, intercept = self.check_objects()
        return torch.sigmoid(slope * score.float() + intercept)

    def check_inverse(self) -> tuple[float, float]:
        """Return the inverse dynamics' errors at which the action penalty begins and is whole.

        Raises:
            ConfigError: there is no such part.
        """
        if self.inverse is None or self.metadata.inverse_errors is None:
            raise ConfigError(NO_INVERSE)
        return self.metadata.inverse_errors

    @torch.no_grad()
    def action_errors(self, memory: Memory, frames: Frames, actions: Actions) -> torch.Tensor:
        """How far each of the F frames that follow `memory` is from showing its actions: float32 (B, F) in 0 .. 1.

        0 is as real frames show theirs, 1 as if other actions had been executed; 0 where none were.

        Raises:
            ConfigError: there is no inverse dynamics.
        """
        begins, whole = self.check_inverse()
        assert self.inverse is not None, "check_inverse has seen it"
        latents = torch.cat([memory.recent.latents[:, -1:], frames.latents], 1).float()
        error = (self.inverse.errors(latents, actions) - begins) / (whole - begins)
        return error.clamp(0, 1).where(actions.executed.any(-1), 0.0)

    def check_value(self) -> tuple[float, float]:
        """Return slope and intercept of the value.

        Raises:
            ConfigError: none was fitted.
        """
        if self.value_head is None or self.metadata.value_probability is None:
            raise ConfigError(NO_VALUE)
        return self.metadata.value_probability

    def add_value_head(self) -> None:
        """Give it a fresh value head, if it has none; seed torch before."""
        if self.value_head is None:
            sizes = (self.autoencoder.latent_shape, len(self.metadata.cameras), self.metadata.state_dim)
            self.value_head = ValueHead(self.config.success, *sizes).to(self.device).eval()

    def add_inverse(self) -> None:
        """Give it a fresh inverse dynamics, if it has none; seed torch before."""
        if self.inverse is None:
            shape, num_views = self.autoencoder.latent_shape, len(self.metadata.cameras)
            self.inverse = InverseDynamics(shape, num_views, self.metadata.action_dim).to(self.device).eval()

    def set_objects(self, config: ObjectsConfig | None) -> None:
        """Give it a fresh objects part, in place of one that there is, or none; seed torch before.

        Raises:
            ValueError: states or actions that it cannot read.
        """
        self.objects = None
        if config is not None:
            sizes = (len(self.metadata.cameras), self.metadata.state_dim, self.metadata.action_dim)
            self.objects = ObjectModel(config, self.autoencoder.latent_shape, *sizes).to(self.device).eval()
        self.config = self.config.model_copy(update={"objects": config})

    def compute_in(self, precision: Precision) -> WorldModel:
        """Keep the networks' parameters in bfloat16 from here on, where `precision` says so; images, latents, states,
        the objects part, whose poses are millimeters, and the inverse dynamics stay what they are. Returns itself."""
        if wants_bf16(precision, self.device.type):
            for name, parameter in self.named_parameters():
                if not name.startswith(("objects.", "inverse.")):
                    parameter.data = parameter.data.bfloat16()
        return self

    # --- files -------------------------------------------------------------------------------

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a folder that `load_world_model` reads, whole or not at all; an older one there is replaced.

        Args:
            dtype: of the stored parameters (float16 halves the size); None stores them as they are.

        Raises:
            DiskFullError: the disk is full.
        """
        with atomic_folder(Path(folder), "world model", replace=True) as partial:
            write_metadata(partial, self.config, self.metadata)
            for part in fields(Parts):
                module: nn.Module | None = getattr(self, part.name)
                if module is not None:
                    write_weights(partial / f"{part.name}.safetensors", module, dtype)


def load_world_model(
    path: str | Path, device: str | torch.device = "cpu", build: BuildParts | None = None
) -> WorldModel:
    """The world model in a folder (or 'pretrained:NAME'), in float32, ready to imagine.

    Args:
        build: makes the networks that the weights go into; `build_parts` by default.

    Raises:
        ConfigError: no such folder or pretrained world model.
        ValueError: a file of it is missing or damaged, or holds NaN.
    """
    folder = resolve_path(path)
    config, metadata = read_metadata(folder)
    with torch.random.fork_rng(devices=[]):
        world_model = WorldModel(config, metadata, (build or build_parts)(config, metadata))
        if (folder / "value_head.safetensors").is_file():  # Older ones, and most, have none.
            world_model.add_value_head()
        if config.objects is not None:
            world_model.set_objects(config.objects)
        if (folder / "inverse.safetensors").is_file():
            world_model.add_inverse()
    for part in fields(Parts):
        if (module := getattr(world_model, part.name)) is not None:
            read_weights(folder / f"{part.name}.safetensors", module)
    return world_model.to(device).eval()
