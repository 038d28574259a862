"""Distillation: the dynamics learns to imagine a frame in one step of the flow, as it does in several.

With one step, a flow that was not distilled gives the mean of what may come, blurred where that is open. Here a frozen
copy of the dynamics, the teacher, imagines in several steps from noise of the strength that imagination uses; the
dynamics regresses on its frames from the same noise, so that it learns where the flow leads (as in Luhman & Luhman,
arXiv 2101.02388, here on latents and frame by frame). What it lost by that is measured by the guard
(world_model/fit/guard.py), and undone where it is clearly too much.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.training.trainer import Loss
from world_model.data.clips import ClipDataset
from world_model.interfaces import DynamicsConfig
from world_model.model.world_model import WorldModel
from world_model.stage_config import DistillationConfig

_STREAM = 5  # Of random numbers: not those that the dynamics learned from.


def check_distillation(dynamics: DynamicsConfig) -> None:
    """Check that a dynamics with these options can be distilled.

    Raises:
        ConfigError: it cannot, or it imagines in one step already.
    """
    if not dynamics.can_be_distilled:
        raise ConfigError(f"world_model.distillation.steps: not for dynamics of kind {dynamics.kind!r}; set it to 0")
    if dynamics.model_dump().get("sampling_steps") == 1:
        raise ConfigError(
            "world_model.sampling_steps: got 1 with distillation, which learns from imagining in several steps of the "
            "flow; set it to their number, such as 4, or world_model.distillation.steps to 0"
        )


class Distillation:
    """Distillation of the dynamics: the teacher, a copy of it as it is now, and the loss of a step."""

    def __init__(self, world_model: WorldModel, stage: DistillationConfig, seed: int) -> None:
        self.world_model, self.stage, self.seed = world_model, stage, seed
        self.options = world_model.config.dynamics.model_dump(include={"sampling_steps"})
        self.teacher = copy.deepcopy(world_model.dynamics).requires_grad_(False).eval()

    def loss(self, clips: ClipDataset) -> Loss:
        """Of a step, on clips that depend on its number alone."""
        network, stage = self.world_model.dynamics, self.stage

        def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
            state = int(np.random.SeedSequence([self.seed, step, _STREAM]).generate_state(1)[0])
            clip = clips.batch(stage.batch_size, self.seed + _STREAM, step).to(self.world_model.device)
            generator = torch.Generator().manual_seed(state)
            return network.distillation_loss(self.teacher, clip, generator)

        return loss

    def undo(self) -> None:
        """Put the teacher back, with as many steps of the flow as it had."""
        self.world_model.dynamics.load_state_dict(self.teacher.state_dict())
        self.world_model.set_dynamics_options(**self.options)
