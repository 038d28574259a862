"""Learner of noise steering: DSRL with noise aliasing (arXiv 2506.15799)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from vla_rl.algorithms.offpolicy.config import OnlineConfig, online_training
from vla_rl.algorithms.offpolicy.networks import CriticNetworks, mlp, q_logits
from vla_rl.algorithms.offpolicy.noise import NoiseActor
from vla_rl.training.trainer import Trainer


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
        place, hidden, size = networks.facts["place"], config.noise.hidden, shape[0] * shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = NoiseActor(place, shape, hidden, config.noise.scale)
            self.q = nn.ModuleList(mlp(place + size, config.critic.hidden) for _ in range(config.critic.members))
        self.slow_q = copy.deepcopy(self.q).requires_grad_(False)
        self.modules: dict[str, nn.Module] = {"actor": self.actor, "noise_q": self.q, "slow_noise_q": self.slow_q}
        self.trainers = {
            "actor": Trainer(dict(self.actor.named_parameters()), online_training(config.noise.optim), "online.noise"),
            "noise_q": Trainer(dict(self.q.named_parameters()), online_training(config.critic.optim), "online.critic"),
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
            loss = self.config.noise.entropy * log_density.mean() - value.mean()
            return loss, {"entropy": -log_density.detach().mean(), "gain": value.detach().mean() - before}

        found = {f"noise_q/{name}": value for name, value in self.trainers["noise_q"].step(distill).items()}
        with torch.no_grad():
            for slow, fast in zip(self.slow_q.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, 1 - self.config.critic.target_decay)
        return found | {f"noise/{name}": value for name, value in self.trainers["actor"].step(improve).items()}

    @torch.no_grad()
    def value(self, place: torch.Tensor, members: list[int], generator: torch.Generator) -> torch.Tensor:
        """What the actor's choice is worth at places (B, D), (B,): the smallest slow Q of these members (SAC)."""
        size = self.actor.shape[0] * self.actor.shape[1]
        chosen, _ = self.actor(place, torch.randn(len(place), size, generator=generator))
        some = nn.ModuleList([self.slow_q[number] for number in members])
        return q_logits(some, place, chosen).min(0).values.sigmoid()
