"""Data types of the world model: frames, actions, clips.

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
        values: float32 (B, F, G, A), clipped, in the environment's units; zeros where not executed. For a dynamics that
            `needs_body` S numbers follow an action's A: what it moves the robot's body alone, in the state's units.
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

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of its frames, int64 (B, T): their numbers in the episode; bool (B, T - 1): frames 1 .. T-1 that follow one.

        Frame 1 of a clip from an episode's middle has no frame before it in the clip.
        """
        number = self.first[:, None] - 1 + torch.arange(self.valid.shape[1], device=self.first.device)
        number[:, 0] = 0
        return number, self.valid[:, 1:] & (number[:, 1:] == number[:, :-1] + 1)

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
class LoggedEpisode:
    """One real episode of a policy, never used to fit the world model.

    Attributes:
        images: uint8 (T, V, height, width, 3), at least two frames.
        states: float32 (T, S), in the robot's units.
        actions: float32 (T, G, A), those that led to each frame; frame 0: zeros.
        executed: bool (T, G), which of them were executed; frame 0: none.
        success: bool (T,), the episode had succeeded when the frame was seen (latched).
        instruction: what the policy was told.
        start: name of the initial state ("pick_place/eval/12"). Episodes with the same name are resampled together.
        objects: float32 (T, M, 4), where the objects part's slots really were; None where not recorded.
    """

    images: np.ndarray
    states: np.ndarray
    actions: np.ndarray
    executed: np.ndarray
    success: np.ndarray
    instruction: str
    start: str
    objects: np.ndarray | None = None

    @property
    def num_frames(self) -> int:
        return len(self.states)

    @property
    def num_steps(self) -> int:
        """Control steps executed."""
        return int(self.executed.sum())

    @property
    def succeeded(self) -> bool:
        return bool(self.success[-1])


@dataclass(frozen=True)
class Batch:
    """B logged episodes, the shorter ones padded at the end by repeating their last frame, with no action executed.

    Attributes:
        images: uint8 (B, T, V, height, width, 3). states: float32 (B, T, S).
        actions: float32 (B, T, G, A). executed: bool (B, T, G).
        valid: bool (B, T), False for padding. success: bool (B, T), latched.
        instruction: B strings.
    """

    images: np.ndarray
    states: np.ndarray
    actions: np.ndarray
    executed: np.ndarray
    valid: np.ndarray
    success: np.ndarray
    instruction: list[str]


def collate(episodes: Sequence[LoggedEpisode], max_frames: int | None = None) -> Batch:
    """A padded batch of episodes, cut to their first `max_frames` frames where given."""
    length = max(e.num_frames for e in episodes)
    length = min(length, max_frames or length)
    rows = [np.minimum(np.arange(length), e.num_frames - 1) for e in episodes]
    inside = [np.arange(length) < e.num_frames for e in episodes]
    pairs = list(zip(episodes, rows, inside, strict=True))
    return Batch(
        images=np.stack([e.images[r] for e, r, _ in pairs]),
        states=np.stack([e.states[r] for e, r, _ in pairs]).astype(np.float32),
        actions=np.stack([e.actions[r] * i[:, None, None] for e, r, i in pairs]).astype(np.float32),
        executed=np.stack([e.executed[r] & i[:, None] for e, r, i in pairs]),
        valid=np.stack(inside),
        success=np.stack([e.success[r] for e, r, _ in pairs]),
        instruction=[e.instruction for e in episodes],
    )


@dataclass(frozen=True)
class DynamicsInputs:
    """What a dynamics is built for: the latents' shape, the robot and its cameras.

    Attributes:
        latent_shape: (C, h, w) of one view. cameras: names of the V views, in order.
        state_dim: S. action_dim: A. frame_steps: G. body_dim: S where actions are followed by what they move the body
            alone (`Actions.values`), else 0.
        state_mean, state_std: float32 (S,), what states are normalized with, in the robot's units.
    """

    latent_shape: tuple[int, int, int]
    cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    frame_steps: int
    state_mean: np.ndarray
    state_std: np.ndarray
    body_dim: int = 0
