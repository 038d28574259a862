"""Classifier-free guidance of a policy between instructions: what RECAP asks of a family."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation


class GuidablePolicy(Policy):
    """A `Policy` that can be guided at each token or denoising step.

    Name it after a base that is a module, or FSDP cannot shard the policy; where that one acts, too, its
    `act` is to be this one.

    Attributes:
        no_guidance_reason: why an instruction cannot guide what it does, as it is set up; None where it can.
    """

    no_guidance_reason: str | None = None

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """Draw one chunk per environment. See `Policy.act`.

        Raises:
            ValueError: no statistics yet, a camera is missing, wrong state size, or temperature < 0.
        """
        return self.act_guided(obs, [], 1.0, generator, temperature)

    @abstractmethod
    def act_guided(
        self,
        obs: Observation,
        plain: Sequence[Observation],
        weight: float,
        generator: torch.Generator | None,
        temperature: float,
    ) -> ActionChunk:
        """Draw one chunk per environment from plain + weight (conditional - plain), of logits or velocities.

        Args:
            obs: the conditional observation. plain: the other one; none: no guidance.
        """
        ...
