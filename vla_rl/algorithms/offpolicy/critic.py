"""Cross-fitted critic of logged decisions: an ensemble Q and V on a frozen policy's embeddings.

Q(s, a) <- rewards in the chunk + discount^n V(s'), a whole chunk being one action (CO-RFT, arXiv 2508.02219); V is
an expectile of Q at logged chunks, so that no action is asked about which nobody took (IQL, arXiv 2110.06169). All
values are discounted probabilities of success, in [0, 1]. Every decision is judged by networks that have not seen its
initial state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from vla_rl.algorithms.offpolicy.config import TARGET_DECAY, CriticConfig, CriticNetworkConfig
from vla_rl.algorithms.offpolicy.networks import CriticNetworks
from vla_rl.algorithms.offpolicy.transitions import Transitions, draw
from vla_rl.evaluation.signal import auc
from vla_rl.training.trainer import Trainer

FOLDS = 3  # Parts of the episodes; each is judged by a critic that has not seen its initial states.
SUBSET = 2  # Networks drawn for each target, the smallest of which counts.


@dataclass(frozen=True)
class Judged:
    """What critics say of N decisions that they were not fitted on.

    Attributes:
        q: float32 (N,), the logged chunk's value, the ensemble's mean. spread: float32 (N,), its standard deviation.
        v: float32 (N,), the place's.
    """

    q: np.ndarray
    spread: np.ndarray
    v: np.ndarray

    def figures(self, transitions: Transitions, discount: float) -> dict[str, float]:
        """How good the critics are on decisions that they have not seen, against their episodes' outcomes.

        AUC of Q and V; Q minus the discounted outcome, on average, and as calibration error over ten parts of equal
        size; the ensemble's spread; how far Q - V goes with outcome - V, which is what better chunks are chosen by.
        """
        outcome, success = transitions.returns(discount), transitions.success[transitions.episode]
        parts = np.array_split(np.argsort(self.q, kind="stable"), 10)
        gaps = [abs(self.q[part].mean() - outcome[part].mean()) for part in parts if len(part)]
        return {
            "critic/auc": auc(self.q, success),
            "critic/auc_of_v": auc(self.v, success),
            "critic/over_estimation": float((self.q - outcome).mean()),
            "critic/calibration_error": float(np.mean(gaps)),
            "critic/spread": float(self.spread.mean()),
            "critic/advantage_correlation": float(np.corrcoef(self.q - self.v, outcome - self.v)[0, 1]),
        }


class Critic:
    """Critics of all folds; each judges the decisions of its own fold, whose initial states it has not seen."""

    def __init__(
        self, config: CriticConfig, transitions: Transitions, fold: np.ndarray, networks: list[CriticNetworks]
    ):
        self.config, self.transitions, self.fold, self._networks = config, transitions, fold, networks

    def judge(self) -> Judged:
        """Judge the logged chunks."""
        q = self.values(np.arange(len(self.transitions)), self.transitions.chunk[:, None])
        v = np.zeros(len(self.transitions), np.float32)
        place = _places(self.transitions)
        for number, networks in enumerate(self._networks):
            own = np.flatnonzero(self.fold == number)
            with torch.no_grad():
                v[own] = networks.v(networks.normal_place(torch.from_numpy(place[own])))[:, 0].sigmoid().numpy()
        return Judged(q.mean(0)[:, 0], q.std(0)[:, 0], v)

    def values(self, rows: np.ndarray, chunks: np.ndarray) -> np.ndarray:
        """Judge chunks that might have followed logged decisions.

        Args:
            rows: int64 (B,), which decisions. chunks: float32 (B, N, H, A), N chunks for each.

        Returns:
            float32 (members, B, N).
        """
        found = np.zeros((self.config.members, *chunks.shape[:2]), np.float32)
        place = _places(self.transitions)
        flat = chunks.reshape(*chunks.shape[:2], -1)
        for number, networks in enumerate(self._networks):
            own = np.flatnonzero(self.fold[rows] == number)
            if not len(own):
                continue
            with torch.no_grad():
                where = torch.from_numpy(place[rows[own]]).repeat_interleave(chunks.shape[1], 0)
                asked = torch.from_numpy(np.ascontiguousarray(flat[own])).flatten(0, 1)
                logits = networks.q_logits(networks.normal_place(where), networks.normal_chunk(asked))
            found[:, own] = logits.sigmoid().reshape(-1, len(own), chunks.shape[1]).numpy()
        return found


def fit_critic(
    transitions: Transitions, config: CriticConfig, seed: int, show: Callable[[str], None] = lambda _: None
) -> Critic:
    """Fit a critic for each fold on all the others, on the CPU.

    Raises:
        ValueError: fewer initial states than folds.
    """
    fold = transitions.folds(FOLDS, seed)
    networks = []
    for number in range(FOLDS):
        networks.append(_fit_fold(transitions, np.flatnonzero(fold != number), config, seed + number))
        show(f"critic: fold {number + 1} of {FOLDS}")
    return Critic(config, transitions, fold, networks)


def _fit_fold(transitions: Transitions, rows: np.ndarray, config: CriticConfig, seed: int) -> CriticNetworks:
    place, chunk = _places(transitions), transitions.chunk.reshape(len(transitions), -1)
    outcome = transitions.returns(config.discount)
    weight = None if transitions.weight is None else transitions.weight[rows]
    rng = np.random.default_rng(seed)
    networks = new_networks(config, place[rows], chunk[rows], seed)

    def loss(step: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        networks.follow(TARGET_DECAY)
        drawn = rows[draw(weight, len(rows), config.batch_size, rng)]
        here, asked = networks.normal_place(torch.from_numpy(place[drawn])), torch.from_numpy(chunk[drawn])
        target = torch.from_numpy(outcome[drawn])
        following = transitions.following[drawn]
        if config.targets == "td" and (goes_on := following >= 0).any():
            with torch.no_grad():
                there = networks.normal_place(torch.from_numpy(place[following[goes_on]]))
                later = networks.slow_v(there)[:, 0].sigmoid()
            steps = torch.from_numpy(transitions.num_steps[drawn[goes_on]]).float()
            target[torch.from_numpy(goes_on)] = config.discount**steps * later
        return critic_loss(networks, config, (here, networks.normal_chunk(asked), target), rng)[0], {}

    Trainer(dict(networks.named_parameters()), config, "offline.critic").run(loss)
    return networks.eval()


def new_networks(config: CriticNetworkConfig, place: np.ndarray, chunk: np.ndarray, seed: int) -> CriticNetworks:
    """Fresh networks, the same for the same seed, that normalize by these places (N, D) and chunks (N, H * A)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CriticNetworks(config, _mean_and_spread(place), _mean_and_spread(chunk))


def critic_loss(
    networks: CriticNetworks,
    config: CriticNetworkConfig,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rng: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of Q to its target, and V's squared distance from Q, more where V lies below (`expectile`).

    Args:
        batch: places (B, D) and chunks (B, H * A), normalized; Q's targets (B,), in [0, 1].

    Returns:
        The loss, and Q's logits (members, B).
    """
    here, asked, target = batch
    logits = networks.q_logits(here, asked)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, target.expand_as(logits))
    subset = rng.choice(config.members, size=min(SUBSET, config.members), replace=False)
    seen = logits.detach()[torch.from_numpy(subset)].sigmoid().min(0).values
    difference = seen - networks.v(here)[:, 0].sigmoid()
    weight = torch.where(difference > 0, config.expectile, 1 - config.expectile)
    return loss + (weight * difference.square()).mean(), logits


def _places(transitions: Transitions) -> np.ndarray:
    """What stands for the place, float32 (N, D + 1): the embedding and how far the episode is."""
    return np.concatenate([transitions.embedding, transitions.elapsed[:, None].astype(np.float32)], 1)


def _mean_and_spread(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each number; a spread of 0 where it never varies."""
    spread = values.std(0)
    return values.mean(0).astype(np.float32), np.where(spread > 1e-6, spread, 0).astype(np.float32)
