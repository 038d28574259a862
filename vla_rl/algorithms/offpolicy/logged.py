"""Learning from logged episodes (`run: offline`): how often each decision is cloned, and which chunk stands for it.

Every policy family clones by its own loss; what differs between the kinds is which examples it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from safetensors.numpy import load_file, save_file

from vla_rl.algorithms.offpolicy.config import CriticConfig
from vla_rl.algorithms.offpolicy.critic import Critic, Judged, fit_critic
from vla_rl.algorithms.offpolicy.offline import LoggedRun, OfflineConfig
from vla_rl.algorithms.offpolicy.transitions import Transitions, logged_transitions
from vla_rl.common.atomic import atomic_folder
from vla_rl.data.dataset import BCBatch, BCDataset
from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import derived_seed, evaluation_mode
from vla_rl.training.bc_loop import train_bc
from vla_rl.training.bc_trainer import BCTrainer
from vla_rl.types import Observation

TENSORS_FILE, FACTS_FILE = "examples.safetensors", "found.json"
LARGEST_WEIGHT = 20.0  # Of a decision, in those of one that went as expected.
_BATCH = 64  # Observations drawn for together.


@dataclass(frozen=True)
class Examples:
    """What is cloned of N logged decisions.

    Attributes:
        weight: float64 (N,), how often each counts, relative to the others; 0: never.
        chunk: float32 (N, H, A), what is cloned in place of the logged chunk; None: the logged one. H is as many as the
            policy executes; of what it clones beyond these nothing is learned.
        own: bool (N,), where `chunk` replaces the logged one; None: everywhere.
    """

    weight: np.ndarray
    chunk: np.ndarray | None = None
    own: np.ndarray | None = None

    def effective_size(self) -> float:
        """How many decisions of equal weight carry as much: (sum of weights)^2 / sum of their squares."""
        return float(self.weight.sum() ** 2 / np.square(self.weight).sum())

    def save(self, folder: Path, found: Mapping[str, float]) -> None:
        """Write them as safetensors, and what was found of them as JSON; the folder appears whole or not at all."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        with atomic_folder(folder, "examples") as partial:
            save_file(arrays, partial / TENSORS_FILE)
            (partial / FACTS_FILE).write_text(json.dumps(found, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> tuple[Self, dict[str, float]]:
        """What `save` wrote."""
        return cls(**load_file(folder / TENSORS_FILE)), json.loads((folder / FACTS_FILE).read_text())


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
        return self._shown(batch.select(np.argsort(order, kind="stable")), drawn, rng)

    def _shown(self, batch: BCBatch, drawn: np.ndarray, rng: np.random.Generator) -> BCBatch:
        """The batch of the decisions `drawn`, int64 (B,), with the chunks that stand for them."""
        found, size = self._examples, len(drawn)
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


def advantage_weights(config: AdvantageWeightedConfig, transitions: Transitions, judged: Judged) -> np.ndarray:
    """exp(advantage / temperature) of each decision, at most `LARGEST_WEIGHT` (AWR, arXiv 1910.00177), float64 (N,)."""
    value = judged.q if config.advantage == "critic" else transitions.returns(config.critic.discount)
    advantage = (value - judged.v).astype(np.float64)
    return np.exp(np.minimum(advantage / config.temperature, np.log(LARGEST_WEIGHT)))


def best_of_n(
    config: BestOfNConfig, policy: Policy, data: BCDataset, critic: Critic, run: LoggedRun
) -> tuple[Examples, dict[str, float]]:
    """At logged observations, the best of the policy's own chunks and the logged one, by the ensemble's smallest Q.

    Returns:
        The examples; by the critic, how much better the chosen chunks are than the policy's own on average (`gain`,
        which is above 0 by choice alone); and how often one of the policy's own was chosen (`own`).
    """
    rng, transitions = np.random.default_rng(derived_seed(run.seed, 1)), critic.transitions
    rows = np.sort(rng.permutation(len(transitions))[: config.decisions])
    generator = torch.Generator().manual_seed(derived_seed(run.seed, 2))
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
                run.show(f"best of {config.candidates + 1}: {first + len(chosen)} of {len(rows)} observations")
    weight = np.zeros(len(transitions))
    weight[rows] = 1.0
    found = {"best_of_n/gain": float(np.concatenate(gains).mean()), "best_of_n/own": float(own[rows].mean())}
    return Examples(weight, chunk, own), found


def _draw(policy: Policy, obs: Observation, config: BestOfNConfig, generator: torch.Generator) -> np.ndarray:
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


class Kept(Protocol):
    """What a folder keeps, with figures about it."""

    def save(self, folder: Path, found: Mapping[str, float]) -> None: ...

    @classmethod
    def load(cls, folder: Path) -> tuple[Self, dict[str, float]]: ...


def kept[T: Kept](run: LoggedRun, kind: type[T], make: Callable[[], tuple[T, dict[str, float]]]) -> T:
    """What a run learns from, made once; says the figures about it."""
    if not run.examples.is_dir():
        made, found = make()
        made.save(run.examples, found)
    kept, found = kind.load(run.examples)
    for name, value in found.items():
        run.show(f"{name}: {value:.3g}")
    return kept


def clone(
    policy: Policy, run: LoggedRun, choose: Callable[[BCDataset], BCDataset], trainer: type[BCTrainer] | None = None
) -> dict[str, Any]:
    """Clone what `choose` makes of a run's datasets; see `train_bc`."""
    spec = run.spec
    return train_bc(policy, run.sft, run.folder, run.log, run.seed, env_spec=spec, choose=choose, trainer=trainer)


def with_outcomes(config: OfflineConfig, transitions: Transitions, seed: int) -> Transitions:
    """Decisions with the outcomes that are to be learned from: shuffled for the control.

    Raises:
        ValueError: all episodes ended alike.
    """
    transitions.check_outcomes_differ()
    return transitions.with_shuffled_outcomes(seed) if config.control == "shuffled_outcomes" else transitions


# --- the kinds of `offline` ---------------------------------------------------------------------


class ExamplesConfig(OfflineConfig):
    """Cloning of chosen examples.

    Attributes:
        chosen: what is chosen of logged episodes. dataset: the datasets as they are cloned.
    """

    chosen: ClassVar[type[Examples]] = Examples
    dataset: ClassVar[type[WeightedDataset]] = WeightedDataset

    def examples(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Examples, dict[str, float]]:
        """Choose what is cloned of datasets; with figures about it by name."""
        raise NotImplementedError(f"{type(self).__name__} must implement examples")

    def improve(self, policy: Policy, run: LoggedRun) -> dict[str, Any]:
        """Clone the examples; see `OfflineConfig.improve`."""

        def choose(data: BCDataset) -> BCDataset:
            found = kept(run, self.chosen, lambda: self.examples(policy, data, run))
            return self.dataset(data, found)

        return clone(policy, run, choose)


class CloningConfig(ExamplesConfig):
    """Cloning of everything."""

    kind: Literal["cloning"] = "cloning"

    @model_validator(mode="after")
    def _control_does_something(self) -> CloningConfig:
        if self.control != "none":
            raise ValueError(
                f"control: got {self.control!r}, but cloning asks for no outcomes, so the control would be the same "
                "run; leave it out, or choose another kind"
            )
        return self

    def examples(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Examples, dict[str, float]]:
        """All alike."""
        return Examples(np.ones(sum(len(part.rows) for part in data.parts))), {}


class FilteredConfig(ExamplesConfig):
    """Cloning of the episodes that succeeded."""

    kind: Literal["filtered"] = "filtered"

    def examples(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Examples, dict[str, float]]:
        """The decisions of successes."""
        transitions = with_outcomes(self, logged_transitions(None, data), run.seed)
        return Examples(transitions.success[transitions.episode].astype(np.float64)), {}


class CriticOfLogsConfig(OfflineConfig):
    """Learning by a critic of the logged episodes."""

    critic: CriticConfig = Field(default_factory=CriticConfig)

    def fitted(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Critic, Judged, dict[str, float]]:
        """Fit the critic; what it says of the logged decisions, and figures of that."""
        with evaluation_mode(policy):  # What is judged is what is executed, not what is cloned.
            logged = logged_transitions(policy, BCDataset(data.parts, policy.chunk_size), run.cache)
        critic = fit_critic(with_outcomes(self, logged, run.seed), self.critic, run.seed, run.show)
        judged = critic.judge()
        return critic, judged, judged.figures(critic.transitions, self.critic.discount)


class AdvantageWeightedConfig(CriticOfLogsConfig, ExamplesConfig):
    """Cloning of everything, each decision by how much better than expected it turned out (AWR)."""

    kind: Literal["advantage_weighted"] = "advantage_weighted"
    advantage: Literal["outcome", "critic"] = Field(
        default="outcome",
        description="What a decision is worth: its episode's discounted outcome, or its Q; both less V.",
    )
    temperature: PositiveFloat = Field(default=0.2, description="A decision counts exp(advantage / temperature) times.")

    def examples(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Examples, dict[str, float]]:
        """All, weighted."""
        critic, judged, found = self.fitted(policy, data, run)
        examples = Examples(advantage_weights(self, critic.transitions, judged))
        return examples, found | {"weights/effective_share": examples.effective_size() / len(critic.transitions)}


class BestOfNConfig(CriticOfLogsConfig, ExamplesConfig):
    """Cloning of the best of the policy's own chunks and the logged one, as the critic says (Digi-Q)."""

    kind: Literal["best_of_n"] = "best_of_n"
    candidates: PositiveInt = Field(default=8, description="Chunks drawn from the policy.")
    decisions: PositiveInt = Field(default=5000, description="Logged observations to draw for, chosen at random.")

    def examples(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Examples, dict[str, float]]:
        """Chosen ones; see `best_of_n`."""
        critic, _, found = self.fitted(policy, data, run)
        data = BCDataset(data.parts, policy.chunk_size)
        examples, gain = best_of_n(self, policy, data, critic, run)
        return examples, found | gain
