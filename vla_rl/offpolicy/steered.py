"""A frozen policy steered by the noise that its chunks start from, as `run: online` with `method: noise` makes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vla_rl.interfaces import Policy
from vla_rl.offpolicy.networks import CriticNetworks
from vla_rl.offpolicy.noise import NoiseActor, NoiseSteeredPolicy
from vla_rl.offpolicy.value_guided import ValueGuidedPolicy
from vla_rl.types import ActionChunk, Observation


class SteeredPolicy(ValueGuidedPolicy):
    """At each observation an actor chooses the noise that the frozen policy's chunk starts from (DSRL).

    One pass of the policy a chunk. `ActionChunk.path` is the noise, float32 (B, 1, steps, D), and `value` what the
    critic says of the chunk, the smallest of its ensemble.

    Args:
        base: the frozen policy. critic: judges chunks. actor: chooses the noise.
    """

    def __init__(self, base: Policy, critic: CriticNetworks, actor: NoiseActor) -> None:
        super().__init__(base, critic, None, 1)
        self.actor = actor

    @torch.no_grad()
    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """The chunk of the chosen noise. At temperature 0 the likeliest noise: the same chunk each time."""
        assert isinstance(self.base, NoiseSteeredPolicy), "checked when it was made"
        chosen: list[torch.Tensor] = []

        def choose(features: torch.Tensor) -> torch.Tensor:
            place = self.critic.place_of(features)
            chosen.append(self.actor.choose(place, generator, temperature)[:, None])
            return chosen[0]

        features, chunks = self.base.steer(obs, choose)
        place = self.critic.place_of(features)
        value = self.critic.smallest(place, self.critic.normal_chunk(torch.from_numpy(chunks).to(place).flatten(2)))
        return ActionChunk(chunks[:, 0], path=chosen[0].cpu().numpy(), value=value[:, 0].cpu().numpy())

    @classmethod
    def _of(cls, base: Policy, critic: CriticNetworks, facts: dict[str, Any]) -> SteeredPolicy:
        return cls(base, critic, NoiseActor(**facts["noise"]))

    def _added(self) -> nn.ModuleDict:
        return nn.ModuleDict({"critic": self.critic, "actor": self.actor})

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"noise": self.actor.facts}
