"""Noise steering of a frozen flow policy (DSRL, arXiv 2506.15799): the actor, and the policies that it can steer.

A flow or diffusion policy turns noise into a chunk; with the steps between deterministic, the noise decides the chunk.
So an actor over the policy's embedding chooses it, and no weight of the policy changes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from vla_rl.algorithms.offpolicy.config import ENTROPY_WEIGHT, TARGET_DECAY, ConstantRateConfig, OnlineConfig
from vla_rl.algorithms.offpolicy.networks import LOG_SPREAD, CriticNetworks, mlp, q_logits, squashed
from vla_rl.algorithms.offpolicy.value_guided import ValueGuidedPolicy
from vla_rl.common.row_noise import by_row
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.training.trainer import Trainer
from vla_rl.types import ActionChunk, Observation


@runtime_checkable
class NoiseSteeredPolicy(Protocol):
    """A policy whose chunk is a fixed function of what it sees and of the noise that it starts from.

    Attributes:
        noise_shape: (C, D), of the noise: the steps that are denoised at once, and their dimensions.
    """

    @property
    def noise_shape(self) -> tuple[int, int]:
        """See `noise_shape` above.

        Raises:
            ConfigError: as it is set up, noise enters later too.
        """
        ...

    def steer(
        self, obs: Observation, choose: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Embed B observations once, have noise chosen, and make it chunks.

        Args:
            choose: features (B, F), as `embed` gives them -> noise float32 (B, N, C or 1, D) in units of N(0, I);
                1: the same noise for every step of the chunk.

        Returns:
            The features, and chunks float32 (B, N, H, A) in the environment's units.
        """
        ...


def noise_shape(policy: Policy) -> tuple[int, int]:
    """The shape (steps, D) of what an actor chooses for this policy.

    Raises:
        ConfigError: its chunks do not start from noise.
    """
    if not isinstance(policy, NoiseSteeredPolicy):
        raise ConfigError(
            "online.method: got 'noise', which chooses the noise that a flow policy's chunk starts from, and this "
            "policy's chunks start from none. Use online.method=best_of_n or edits"
        )
    return policy.noise_shape


def embed_and_steer(
    policy: Policy, obs: Observation, count: int, shape: tuple[int, int], generator: torch.Generator | None
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Embed observations, and make chunks of `count` noises each: the first one 0, the others N(0, I).

    Returns:
        Features (B, F), noise float32 (B, count, *shape), and chunks float32 (B, count, H, A).
    """
    assert isinstance(policy, NoiseSteeredPolicy), "checked by noise_shape"
    noise = by_row(_normal, (obs.batch_size, count, *shape), generator).float()
    noise[:, 0] = 0
    features, chunks = policy.steer(obs, lambda _: noise)
    return features, noise.cpu().numpy(), chunks


class NoiseActor(nn.Module):
    """scale * tanh(u), u Gaussian, its mean and spread from the place: the noise that a chunk starts from.

    At first its mean is 0 and its spread about 1, as the policy's own noise is.

    Args:
        place: size of what stands for the place, normalized. shape: (steps, D) of the noise. scale: its bound.
    """

    def __init__(self, place: int, shape: tuple[int, int], hidden: int, scale: float):
        super().__init__()
        self.shape, self.scale = tuple(shape), scale
        size = self.shape[0] * self.shape[1]
        self.network = mlp(place, hidden, 2 * size)
        last = self.network[-1]
        assert isinstance(last, nn.Linear), "mlp ends in a linear layer"
        nn.init.zeros_(last.weight)
        share = (-math.log(max(scale, 1.0)) - LOG_SPREAD[0]) / (LOG_SPREAD[1] - LOG_SPREAD[0])
        nn.init.constant_(last.bias[:size], 0.0)
        nn.init.constant_(last.bias[size:], math.log(share / (1 - share)))
        self.facts: dict[str, Any] = {"place": place, "shape": list(self.shape), "hidden": hidden, "scale": scale}

    def forward(self, place: torch.Tensor, noise: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose noise at places (B, D).

        Args:
            noise: standard Gaussian (B, steps * D); None: none, so that the choice is the likeliest.

        Returns:
            The choice (B, steps * D), and the log-density (B,) of tanh(u).
        """
        found, log_density = squashed(self.network(place), noise)
        return self.scale * found, log_density

    def choose(
        self, place: torch.Tensor, generator: torch.Generator | None = None, temperature: float = 1.0
    ) -> torch.Tensor:
        """One noise for each place, (B, steps, D), its spread scaled by the temperature; 0: the likeliest."""
        size = self.shape[0] * self.shape[1]
        drawn = by_row(_normal, (len(place), size), generator).to(place) * temperature if temperature else None
        return self(place, drawn)[0].reshape(len(place), *self.shape)


def _normal(shape: tuple[int, ...], generator: torch.Generator | None) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=None if generator is None else generator.device)


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


class NoiseLearner:
    """A critic of noises, and the actor that raises it.

    The critic of chunks learns from episodes, logged ones too, of which nobody knows the noise. The critic of noises
    says of a noise what that one says of the chunk that the frozen policy makes of it, member by member (DSRL's noise
    aliasing): from the chunks that were made of known noises at each decision once. So learning runs no policy.

    Attributes:
        actor: chooses the noise.
    """

    def __init__(self, config: OnlineConfig, networks: CriticNetworks, shape: tuple[int, int], seed: int) -> None:
        self.config, self.networks = config, networks
        place, hidden, size = networks.facts["place"], config.critic.hidden, shape[0] * shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = NoiseActor(place, shape, hidden, config.noise.scale)
            self.q = nn.ModuleList(mlp(place + size, config.critic.hidden) for _ in range(config.critic.members))
        self.slow_q = copy.deepcopy(self.q).requires_grad_(False)
        self.modules: dict[str, nn.Module] = {"actor": self.actor, "noise_q": self.q, "slow_noise_q": self.slow_q}
        noise, critic = (ConstantRateConfig(optim=of.optim) for of in (config.noise, config.critic))
        self.trainers = {
            "actor": Trainer(dict(self.actor.named_parameters()), noise, "online.noise"),
            "noise_q": Trainer(dict(self.q.named_parameters()), critic, "online.critic"),
        }

    def update(
        self, place: torch.Tensor, noise: torch.Tensor, chunk: torch.Tensor, generator: torch.Generator
    ) -> dict[str, float]:
        """One update of each, at places (B, D) where noises (B, C, K) made chunks (B, C, H * A), both normalized."""
        where = place[:, None].expand(-1, chunk.shape[1], -1)
        with torch.no_grad():
            target = self.networks.q_logits(where, chunk).sigmoid()

        def distill(_: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logits = q_logits(self.q, where, noise)
            gap = (logits.detach().sigmoid() - target).abs().mean()
            return nn.functional.binary_cross_entropy_with_logits(logits, target), {"gap": gap}

        def improve(_: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            drawn = torch.randn(len(place), noise.shape[2], generator=generator)
            chosen, log_density = self.actor(place, drawn)
            value = q_logits(self.q, place, chosen).min(0).values.sigmoid()
            with torch.no_grad():
                before = q_logits(self.q, where, noise).min(0).values.sigmoid().mean()
            loss = ENTROPY_WEIGHT * log_density.mean() - value.mean()
            return loss, {"entropy": -log_density.detach().mean(), "gain": value.detach().mean() - before}

        found = {f"noise_q/{name}": value for name, value in self.trainers["noise_q"].step(distill).items()}
        with torch.no_grad():
            for slow, fast in zip(self.slow_q.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, 1 - TARGET_DECAY)
        return found | {f"noise/{name}": value for name, value in self.trainers["actor"].step(improve).items()}

    @torch.no_grad()
    def value(self, place: torch.Tensor, members: list[int], generator: torch.Generator) -> torch.Tensor:
        """What the actor's choice is worth at places (B, D), (B,): the smallest slow Q of these members (SAC)."""
        size = self.actor.shape[0] * self.actor.shape[1]
        chosen, _ = self.actor(place, torch.randn(len(place), size, generator=generator))
        some = nn.ModuleList([self.slow_q[number] for number in members])
        return q_logits(some, place, chosen).min(0).values.sigmoid()
