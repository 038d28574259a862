"""The contract of `world_model.clip_source`: what the dynamics learns from in place of clips of real frames."""

from __future__ import annotations

from typing import Protocol

import torch

from vla_rl.config import Config
from world_model.data.clips import ClipDataset
from world_model.interfaces import Dynamics
from world_model.types import Clip, Frames


class ClipSource(Protocol):
    """Batches of clips for a step of the dynamics' fit."""

    def batch(self, size: int, step: int) -> tuple[Clip, Frames | None]:
        """Return clips, and what the dynamics is to see of them in place of their own frames; None: just those.

        What a step draws depends on its number, and on the weights at steps that `save_every` divides alone.
        """
        ...


class ClipSourceConfig(Config):
    """Base of the `world_model.clip_source` section."""

    kind: str

    def check(self, save_every: int) -> None:
        """Check that a fit with a checkpoint every so many steps could be resumed exactly.

        Raises:
            ConfigError: it could not.
        """

    def build(
        self, clips: ClipDataset, dynamics: Dynamics, num_steps: int, seed: int, device: torch.device | str
    ) -> ClipSource:
        """Return the source for a stage of `num_steps`."""
        raise NotImplementedError(f"{type(self).__name__} must implement build")
