"""Base of the LeRobot policies that learn by RL: critic, precision, executed actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.config import ConfigError
from vla_rl.policies.lerobot.options import LeRobotOptions, image_name
from vla_rl.policies.lerobot.policy import STATE, LeRobotPolicy


class LearningPolicy(LeRobotPolicy):
    """Base of the LeRobot policies that learn here: by behavior cloning with LeRobot's own loss, and by RL.

    Attributes:
        demonstration_size: actions that cloning learns at once.
        value_head: the critic; None without one.
    """

    demonstration_size: int

    def __init__(self, config: LeRobotOptions, core: Any, preprocessor: Any, postprocessor: Any) -> None:
        super().__init__(config, core, preprocessor, postprocessor)
        for name in ("adapt_to_pi_aloha", "use_relative_actions"):
            if getattr(core.config, name, False):
                raise ConfigError(f"LeRobot option {name}=true: not supported here; use a checkpoint without it")
        self.demonstration_size = self.planned

    def _add_critic(self, feature_size: int) -> None:
        """Make `value_head`, where the config asks for it, on features (B, F) and the state."""
        self.value_head = ValueHead(feature_size + (self.state_dim or 0)) if self.config.value_head else None

    @property
    def planned(self) -> int:
        """Actions from the present on that the network gives at once."""
        return self.core.config.chunk_size

    def _num_actions(self) -> int:
        if self.config.num_actions is None:
            return self.core.config.n_action_steps
        return self._at_most(self.planned)

    def _needs_every_camera(self) -> None:
        missing = [image_name(key) for key in self.image_keys if key not in self.camera_of]
        if missing:
            raise ConfigError(f"policy.camera_map: {missing[0]}: null, but this policy reads every image it has")

    def _with_state(self, features: Tensor, batch: dict[str, Any]) -> Tensor:
        """Features (B, F) and the normalized state."""
        return torch.cat([features, batch[STATE].float()], 1) if self.uses_state else features

    def _value(self, features: Tensor, batch: dict[str, Any]) -> Tensor | None:
        if self.value_head is None:
            return None
        features = self._with_state(features, batch)
        return self.value_head(features.detach())  # The critic learns beside the network, and does not change it.

    def _padded(self, actions: np.ndarray, valid: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Actions float32 (B, C, A) of a whole chunk, the last one repeated, and which count, bool (B, C).

        Raises:
            ValueError: more are given than the policy learns at once.
        """
        size, given = self.demonstration_size, actions.shape[1]
        if given > size:
            raise ValueError(f"actions: got {given} a chunk, this policy denoises {size} at once")
        counted = np.zeros((len(actions), size), bool)
        counted[:, :given] = True if valid is None else valid
        return np.concatenate([actions, np.repeat(actions[:, -1:], size - given, 1)], 1), counted

    def _executed(self, x: Tensor) -> Tensor:
        """(B, C, D) -> (B, H, A): the steps that are executed, without padded dimensions."""
        return x[:, : self.chunk_size, : self.action_dim]

    def _autocast(self) -> torch.autocast:
        """In acting by CUDA graphs it keeps no copy of a weight, which a graph would read for ever."""
        asked, kind = self.config.precision, self.device.type
        keeps_copies = torch.is_grad_enabled() or not self.config.cuda_graphs
        bf16 = kind == "cuda" if asked == "auto" else asked == "bf16"
        return torch.autocast(kind, torch.bfloat16, bf16, keeps_copies)


class ValueHead(nn.Module):
    """V of what is seen, float32 (B,): a small network on features (B, F), normalized. Starts at 0."""

    def __init__(self, size: int, hidden: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Linear(size, hidden)
        self.out = nn.Linear(hidden, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.out(nn.functional.gelu(self.inner(self.norm(features)))).squeeze(-1)
