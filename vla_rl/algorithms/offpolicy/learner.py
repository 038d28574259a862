"""Off-policy learner: updates of the critic, and of the edit policy that raises Q, from a replay buffer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vla_rl.algorithms.offpolicy.config import (
    ENTROPY_WEIGHT,
    TARGET_DECAY,
    ConstantRateConfig,
    OnlineConfig,
    ReplayLearningConfig,
)
from vla_rl.algorithms.offpolicy.critic import SUBSET, critic_loss
from vla_rl.algorithms.offpolicy.networks import CriticNetworks, EditPolicy, q_logits
from vla_rl.algorithms.offpolicy.noise import NoiseLearner
from vla_rl.algorithms.offpolicy.replay import ReplayBatch
from vla_rl.algorithms.offpolicy.transitions import Transitions
from vla_rl.training.trainer import Trainer

_TARGET_CANDIDATES = 4  # How many stand for choice in the targets of critic.targets=best_of_n.


class OffPolicyLearner:
    """Fits a critic, and with `method: edits` an edit policy, batch by batch, on the CPU.

    Q's target at a decision that another one follows is that one's value: with `targets: td` the slow copy of V; with
    `best_of_n` the best of the frozen policy's chunks there, edited ones too, by the smallest of some slow Q (EXPO,
    arXiv 2507.07986); with `actor` that of the noise chosen there (SAC); else, and with `monte_carlo`, it is the
    discounted outcome.

    Attributes:
        networks: the critic's. editor: None without edits. noise: None where no noise is chosen.

    Args:
        noise_shape: (steps, D) of the noise that `method: noise` chooses.
        action_bounds: lowest and highest action, float32 (A,) each, that edits stay within; None: there are none.
    """

    def __init__(
        self,
        config: ReplayLearningConfig,
        networks: CriticNetworks,
        seed: int,
        noise_shape: tuple[int, int] | None = None,
        action_bounds: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        self.config, self.networks, self.seed = config, networks, seed
        self.slow_q = copy.deepcopy(networks.q).requires_grad_(False)
        critic = {n: p for n, p in networks.named_parameters() if not n.startswith("slow")}
        self._critic = Trainer(critic, ConstantRateConfig(optim=config.critic.optim), "online.critic")
        self.editor: EditPolicy | None = None
        self._editor: Trainer | None = None
        if config.method == "edits":
            sizes, edits = networks.facts, config.edits
            bounds = [bound.tolist() for bound in action_bounds or ()]
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                self.editor = EditPolicy(sizes["place"], sizes["chunk"], config.critic.hidden, edits.scale, *bounds)
            training = ConstantRateConfig(optim=edits.optim)
            self._editor = Trainer(dict(self.editor.named_parameters()), training, "online.edits")
        self.noise: NoiseLearner | None = None
        if isinstance(config, OnlineConfig) and config.method == "noise":
            assert noise_shape is not None, "the policy's own"
            self.noise = NoiseLearner(config, networks, noise_shape, seed)

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._critic.num_steps

    def update(self, batch: ReplayBatch) -> dict[str, float]:
        """One update of the critic, then one of the edit policy.

        Returns:
            Metrics by name: losses, Q and its target on average, and the edits' entropy and gain.
        """
        rng = np.random.default_rng([self.seed, self.num_updates])
        noise = torch.Generator().manual_seed(int(rng.integers(2**62)))
        place = self.networks.normal_place(torch.from_numpy(batch.place))
        chunk = self.networks.normal_chunk(torch.from_numpy(batch.chunk))
        target = self._targets(batch, rng, noise)

        def loss(_: int) -> tuple[torch.Tensor, Mapping[str, Any]]:
            value, logits = critic_loss(self.networks, self.config.critic, (place, chunk, target), rng)
            return value, {"q": logits.detach().sigmoid().mean(), "target": target.mean()}

        self.networks.follow(TARGET_DECAY)
        found = {f"critic/{name}": value for name, value in self._critic.step(loss).items()}
        with torch.no_grad():
            for slow, fast in zip(self.slow_q.parameters(), self.networks.q.parameters(), strict=True):
                slow.lerp_(fast, 1 - TARGET_DECAY)
        if self._editor is not None:
            step = self._editor.step(lambda _: self._edit_loss(batch, place, rng, noise))
            found |= {f"edits/{name}": value for name, value in step.items()}
        if self.noise is not None:
            made = self.networks.normal_chunk(torch.from_numpy(batch.candidates))
            found |= self.noise.update(place, torch.from_numpy(batch.noise), made, noise)
        return found

    @torch.no_grad()
    def values(self, transitions: Transitions) -> np.ndarray:
        """The smallest Q of the ensemble for the executed chunks, float32 (N,)."""
        place = self.networks.normal_place(torch.from_numpy(transitions.embedding))
        chunk = torch.from_numpy(transitions.chunk.reshape(len(transitions), 1, -1))
        return self.networks.smallest(place, self.networks.normal_chunk(chunk))[:, 0].numpy()

    @torch.no_grad()
    def _targets(self, batch: ReplayBatch, rng: np.random.Generator, noise: torch.Generator) -> torch.Tensor:
        """Q's targets, float32 (B,)."""
        config, target = self.config.critic, torch.from_numpy(batch.outcome.copy())
        goes_on = torch.from_numpy(batch.goes_on)
        if config.targets == "monte_carlo" or not batch.goes_on.any():
            return target
        there = self.networks.normal_place(torch.from_numpy(batch.next_place[batch.goes_on]))
        if config.targets == "td":
            value = self.networks.slow_v(there)[:, 0].sigmoid()
        elif config.targets == "actor":
            assert self.noise is not None, "checked by the config"
            members = rng.choice(config.members, size=min(SUBSET, config.members), replace=False)
            value = self.noise.value(there, members.tolist(), noise)
        else:
            value = self._best_value(there, batch.next_candidates[batch.goes_on], rng, noise)
        target[goes_on] = torch.from_numpy(batch.discount[batch.goes_on]) * value
        return target

    def _best_value(
        self, place: torch.Tensor, candidates: np.ndarray, rng: np.random.Generator, noise: torch.Generator
    ) -> torch.Tensor:
        """The best of some candidates, (B,), by the smallest of some slow Q."""
        count = min(_TARGET_CANDIDATES, candidates.shape[1])
        some = rng.choice(candidates.shape[1], size=count, replace=False)
        chunk = self.networks.normal_chunk(torch.from_numpy(candidates[:, some]))
        where = place[:, None].expand(-1, count, -1)
        if self.editor is not None:
            edited, _ = self.editor(self.networks, where, chunk, torch.randn(chunk.shape, generator=noise))
            chunk, where = torch.cat([chunk, edited], 1), torch.cat([where, where], 1)
        members = rng.choice(len(self.slow_q), size=min(SUBSET, len(self.slow_q)), replace=False)
        networks = torch.nn.ModuleList([self.slow_q[int(number)] for number in members])
        return q_logits(networks, where, chunk).min(0).values.max(1).values.sigmoid()

    def _edit_loss(
        self, batch: ReplayBatch, place: torch.Tensor, rng: np.random.Generator, noise: torch.Generator
    ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """What the frozen policy's chunks, changed, lack in Q, less entropy: what is learned on is what is changed."""
        assert self.editor is not None, "asked only where there are edits"
        size, count = batch.candidates.shape[:2]
        if not count:
            raise ValueError("edits learn on the policy's own chunks, and of these decisions none were drawn")
        chunk = batch.candidates[np.arange(size), rng.integers(count, size=size)]
        own = self.networks.normal_chunk(torch.from_numpy(chunk))
        edited, log_density = self.editor(self.networks, place, own, torch.randn(own.shape, generator=noise))
        value = self.networks.q_logits(place, edited).sigmoid().mean(0)
        with torch.no_grad():
            before = self.networks.q_logits(place, own).sigmoid().mean(0)
        loss = ENTROPY_WEIGHT * log_density.mean() - value.mean()
        return loss, {"entropy": -log_density.detach().mean(), "gain": (value.detach() - before).mean()}

    # --- checkpoints -----------------------------------------------------------------------------

    def _modules(self) -> dict[str, torch.nn.Module]:
        modules: dict[str, torch.nn.Module] = {"critic": self.networks, "slow_q": self.slow_q}
        modules |= {} if self.editor is None else {"editor": self.editor}
        return modules | ({} if self.noise is None else self.noise.modules)

    def _trainers(self) -> dict[str, Trainer]:
        trainers = {"critic": self._critic} | ({} if self._editor is None else {"editor": self._editor})
        return trainers | ({} if self.noise is None else self.noise.trainers)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors and JSON-able values from which `load_state` continues to the bit."""
        tensors: dict[str, torch.Tensor] = {}
        for name, module in self._modules().items():
            tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
        rest = {}
        for name, trainer in self._trainers().items():
            own, rest[name] = trainer.state()
            tensors |= {f"trainer.{name}.{key}": value for key, value in own.items()}
        return tensors, rest

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Undo `state`."""
        for name, module in self._modules().items():
            module.load_state_dict(_under(tensors, f"{name}."))
        for name, trainer in self._trainers().items():
            trainer.load_state(_under(tensors, f"trainer.{name}."), state[name])


def _under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
