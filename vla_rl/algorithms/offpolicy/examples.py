"""What to clone of logged episodes: how often each decision counts, and which chunk stands for it.

Every policy family clones by its own loss; what differs between the methods is which examples it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from vla_rl.algorithms.offpolicy.advantage_words import advantages, corrections, drop_words, improves
from vla_rl.algorithms.offpolicy.config import OfflineConfig, RecapConfig
from vla_rl.algorithms.offpolicy.critic import Critic, Judged
from vla_rl.algorithms.offpolicy.transitions import Transitions
from vla_rl.common.atomic import atomic_folder
from vla_rl.data.dataset import BCBatch, BCDataset
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import derived_seed, evaluation_mode
from vla_rl.types import Observation

TENSORS_FILE, FACTS_FILE = "examples.safetensors", "found.json"
_BATCH = 64  # Observations drawn for together.


@dataclass(frozen=True)
class Examples:
    """What is cloned of N logged decisions.

    Attributes:
        weight: float64 (N,), how often each counts, relative to the others; 0: never.
        chunk: float32 (N, H, A), what is cloned in place of the logged chunk; None: the logged one. H is as many as the
            policy executes; of what it clones beyond these nothing is learned.
        own: bool (N,), where `chunk` replaces the logged one; None: everywhere.
        positive: bool (N,), which word the instruction gets; None: none. Of all examples a share of `word_dropout`,
            float64 (1,), gets none.
    """

    weight: np.ndarray
    chunk: np.ndarray | None = None
    own: np.ndarray | None = None
    positive: np.ndarray | None = None
    word_dropout: np.ndarray | None = None

    def effective_size(self) -> float:
        """How many decisions of equal weight carry as much: (sum of weights)^2 / sum of their squares."""
        return float(self.weight.sum() ** 2 / np.square(self.weight).sum())

    def save(self, folder: Path, found: Mapping[str, float]) -> None:
        """Write them as safetensors, and what was found of them as JSON; the folder appears whole or not at all."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        with atomic_folder(folder, "examples") as partial:
            save_file(arrays, partial / TENSORS_FILE)
            (partial / FACTS_FILE).write_text(json.dumps(found, indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> tuple[Examples, dict[str, float]]:
        """What `save` wrote."""
        return Examples(**load_file(folder / TENSORS_FILE)), json.loads((folder / FACTS_FILE).read_text())


class WeightedDataset(BCDataset):
    """Datasets of which each decision is drawn as often as its weight says.

    A dataset has its share of a batch times its decisions' mean weight: one of which less is cloned is drawn less.
    """

    def __init__(self, data: BCDataset, examples: Examples) -> None:
        super().__init__(data.parts, data.chunk_size)
        self._examples = examples
        sizes = [len(part.rows) for part in self.parts]
        self._part = np.repeat(np.arange(len(sizes)), sizes)
        self._rows = np.concatenate([part.rows for part in self.parts])
        weight = examples.weight * (self._share / sizes)[self._part]
        self._until = np.cumsum(weight / weight.sum())

    def batch(self, size: int, seed: int, step: int) -> BCBatch:
        """`size` examples drawn with replacement, the same for the same (seed, step)."""
        rng = np.random.default_rng([seed, step])
        drawn = np.searchsorted(self._until, rng.random(size), side="right")
        drawn = np.minimum(drawn, len(self._until) - 1)
        order = np.argsort(self._part[drawn], kind="stable")
        chosen = [drawn[order][self._part[drawn[order]] == number] for number in range(len(self.parts))]
        pairs = [(part, rows) for part, rows in zip(self.parts, chosen, strict=True) if len(rows)]
        batch = BCBatch.concatenate([part.batch(self._rows[rows], self.chunk_size) for part, rows in pairs])
        batch = batch.select(np.argsort(order, kind="stable"))
        found = self._examples
        if found.positive is not None and found.word_dropout is not None:
            batch = drop_words(batch, found.positive[drawn], float(found.word_dropout[0]), rng)
        if found.chunk is None:
            return batch
        chunk = found.chunk[drawn]
        missing = self.chunk_size - chunk.shape[1]  # A policy may clone more actions than it executes.
        actions = np.concatenate([chunk, np.repeat(chunk[:, -1:], missing, 1)], 1)
        valid = np.tile(np.arange(self.chunk_size) < chunk.shape[1], (size, 1))
        if found.own is not None:  # A logged chunk ends with its episode.
            own = found.own[drawn, None]
            actions = np.where(own[..., None], actions, batch.actions)
            valid = np.where(own, valid, batch.valid)
        return replace(batch, actions=actions, valid=valid)


def advantage_weights(config: OfflineConfig, transitions: Transitions, judged: Judged) -> np.ndarray:
    """exp(advantage / temperature) of each decision, at most `largest_weight` (AWR, arXiv 1910.00177), float64 (N,)."""
    value = judged.q if config.advantage == "critic" else transitions.returns(config.critic.discount)
    advantage = (value - judged.v).astype(np.float64)
    return np.exp(np.minimum(advantage / config.temperature, np.log(config.largest_weight)))


def worded(
    config: RecapConfig, data: BCDataset, transitions: Transitions, v: np.ndarray, discount: float
) -> tuple[Examples, dict[str, float]]:
    """Every decision, with the word for whether it was better than expected; and how often that was said."""
    advantage = advantages(config, transitions, v, discount)
    positive = improves(config, transitions, advantage, corrections(data))
    success = transitions.success[transitions.episode]
    found = {
        "recap/positive": float(positive.mean()),
        "recap/positive_of_successes": float(positive[success].mean()),
        "recap/positive_of_failures": float(positive[~success].mean()),
    }
    return Examples(np.ones(len(positive)), positive=positive, word_dropout=np.array([config.dropout])), found


def best_of_n(
    config: OfflineConfig,
    policy: Policy,
    data: BCDataset,
    transitions: Transitions,
    critic: Critic,
    seed: int,
    show: Callable[[str], None] = lambda _: None,
) -> tuple[Examples, dict[str, float]]:
    """At logged observations, the best of the policy's own chunks and the logged one, by the ensemble's smallest Q.

    Returns:
        The examples; by the critic, how much better the chosen chunks are than the policy's own on average (`gain`,
        which is above 0 by choice alone); and how often one of the policy's own was chosen (`own`).
    """
    rng = np.random.default_rng(derived_seed(seed, 1))
    rows = np.sort(rng.permutation(len(transitions))[: config.decisions])
    generator = torch.Generator().manual_seed(derived_seed(seed, 2))
    chunk = transitions.chunk.copy()
    gains, own = [], np.zeros(len(chunk), bool)
    with evaluation_mode(policy):
        for first in range(0, len(rows), _BATCH):
            chosen = rows[first : first + _BATCH]
            drawn = _draw(policy, observations(data, chosen), config, generator)
            candidates = np.concatenate([transitions.chunk[chosen][:, None], drawn], 1)
            value = critic.values(chosen, candidates).min(0)
            best = value.argmax(1)
            chunk[chosen] = candidates[np.arange(len(chosen)), best]
            gains.append(value.max(1) - value[:, 1:].mean(1))
            own[chosen] = best > 0
            if first // _BATCH % 10 == 0:
                show(f"best of {config.candidates + 1}: {first + len(chosen)} of {len(rows)} observations")
    weight = np.zeros(len(transitions))
    weight[rows] = 1.0
    found = {"best_of_n/gain": float(np.concatenate(gains).mean()), "best_of_n/own": float(own[rows].mean())}
    return Examples(weight, chunk, own), found


def _draw(policy: Policy, obs: Observation, config: OfflineConfig, generator: torch.Generator) -> np.ndarray:
    """Chunks of the policy, float32 (B, candidates, H, A)."""
    many = policy.prepare(obs).select(np.repeat(np.arange(obs.batch_size), config.candidates))
    actions = policy.act(many, generator).actions
    return actions.reshape(obs.batch_size, config.candidates, *actions.shape[1:])


def observations(data: BCDataset, numbers: np.ndarray) -> Observation:
    """What was seen at decisions, int64 (B,) ascending, of all datasets' one after another."""
    starts = np.cumsum([0, *(len(part.rows) for part in data.parts)])
    parts = []
    for part, start, end in zip(data.parts, starts, starts[1:], strict=False):
        inside = numbers[(numbers >= start) & (numbers < end)]
        if len(inside):
            parts.append(part.batch(part.rows[inside - start], data.chunk_size).obs)
    return Observation.concatenate(parts)
