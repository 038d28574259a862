"""What the parts of the world model hand to each other: frames, actions, clips to learn from.

Shape legend, beside `vla_rl.types`':
    B clips or environments, T frames of a clip, F new frames, G control steps from one frame to the next,
    V views (cameras), C latent channels, h x w latent pixels, S state, A action dimensions.

A frame is what is seen every G control steps (`frame_steps`); a policy's chunk of H actions makes F = H / G frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch


@dataclass(frozen=True)
class Frames:
    """Frames as the dynamics predicts them: scaled latents and normalized states.

    Attributes:
        latents: float32 (B, F, V, C, h, w), about zero mean and unit variance per channel.
        states: float32 (B, F, S), likewise.
    """

    latents: torch.Tensor
    states: torch.Tensor

    def select(self, rows: torch.Tensor | Sequence[int] | slice) -> Frames:
        """The clips at `rows`, in that order."""
        return Frames(self.latents[rows], self.states[rows])

    def at(self, frames: slice) -> Frames:
        """The frames in a slice of time."""
        return Frames(self.latents[:, frames], self.states[:, frames])

    @staticmethod
    def joined(parts: Sequence[Frames], dim: int = 0) -> Frames:
        """Clips under one another (dim 0), or frames one after another (dim 1)."""
        return Frames(torch.cat([part.latents for part in parts], dim), torch.cat([part.states for part in parts], dim))


@dataclass(frozen=True)
class Actions:
    """What was done before each frame.

    Attributes:
        values: float32 (B, F, G, A), clipped, in the environment's units; zeros where not executed.
        executed: bool (B, F, G). The episode's first frame has none executed; its last may have fewer than G.
    """

    values: torch.Tensor
    executed: torch.Tensor

    def select(self, rows: torch.Tensor | Sequence[int] | slice) -> Actions:
        """The clips at `rows`, in that order."""
        return Actions(self.values[rows], self.executed[rows])

    def at(self, frames: slice) -> Actions:
        """The actions of the frames in a slice of time."""
        return Actions(self.values[:, frames], self.executed[:, frames])


@dataclass(frozen=True)
class Clip:
    """B pieces of episodes, T frames each: frame 0 is the episode's first (the reference), the others follow on.

    Frames 1 .. T-1 are consecutive, from any place of the episode on. Short episodes are padded at the end.

    Attributes:
        frames: B x T frames. actions: B x T, those that led to each frame (frame 0: none).
        first: int64 (B,), number in its episode of frame 1 (1 where the clip is an episode's beginning).
        valid: bool (B, T), False for padding.
        success: bool (B, T), the episode had succeeded when the frame was seen (latched).
        instruction: B strings.
    """

    frames: Frames
    actions: Actions
    first: torch.Tensor
    valid: torch.Tensor
    success: torch.Tensor
    instruction: list[str]

    @property
    def size(self) -> int:
        return len(self.instruction)

    def to(self, device: torch.device | str) -> Self:
        """The same on another device."""
        return replace(
            self,
            frames=Frames(self.frames.latents.to(device), self.frames.states.to(device)),
            actions=Actions(self.actions.values.to(device), self.actions.executed.to(device)),
            first=self.first.to(device),
            valid=self.valid.to(device),
            success=self.success.to(device),
        )


@dataclass(frozen=True)
class DynamicsInputs:
    """What a dynamics is built for: the latents' shape, the robot and its cameras.

    Attributes:
        latent_shape: (C, h, w) of one view. cameras: names of the V views, in order.
        state_dim: S. action_dim: A. frame_steps: G.
        state_mean, state_std: float32 (S,), what states are normalized with, in the robot's units.
    """

    latent_shape: tuple[int, int, int]
    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    frame_steps: int
    state_mean: np.ndarray
    state_std: np.ndarray
