"""RECAP (pi*0.6, arXiv 2511.14759): cloning with the advantage as a word in the instruction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeFloat

from vla_rl.algorithms.offpolicy.logged import CriticOfLogsConfig, Examples, ExamplesConfig, WeightedDataset
from vla_rl.algorithms.offpolicy.offline import LoggedRun
from vla_rl.algorithms.offpolicy.transitions import Transitions
from vla_rl.data.dataset import BCBatch, BCDataset
from vla_rl.interfaces import Policy
from vla_rl.methods.policy.advantage_conditioned import (
    WORDS,
    AdvantageConditionedConfig,
    condition,
    unconditioned,
    with_words,
)
from vla_rl.policies.base import PolicyConfig
from vla_rl.rollout.runner import evaluation_mode
from vla_rl.types import CONTROL_SOURCES

CORRECTIONS = ("recovery", "correction")  # What a person does instead of the policy.
LOOKAHEAD = 2  # Decisions after which V says how a decision turned out.
WORDLESS = 0.3  # Share of examples cloned without a word, which guidance needs.
_CHECKED = 16  # Decisions on which the words must make a difference.


@dataclass(frozen=True)
class WordedExamples(Examples):
    """Examples of which each is cloned with a word in its instruction.

    Attributes:
        positive: bool (N,), which word. word_dropout: float64 (1,), the share of all examples that gets none.
    """

    positive: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    word_dropout: np.ndarray = field(default_factory=lambda: np.zeros(1))


class WordedDataset(WeightedDataset):
    """Datasets whose instructions say whether a decision was better than expected."""

    def __init__(self, data: BCDataset, examples: WordedExamples) -> None:
        super().__init__(data, examples)
        self._words = examples

    def _shown(self, batch: BCBatch, drawn: np.ndarray, rng: np.random.Generator) -> BCBatch:
        words = self._words
        return drop_words(batch, words.positive[drawn], float(words.word_dropout[0]), rng)


class RecapConfig(CriticOfLogsConfig, ExamplesConfig):
    """Cloning of everything, the instruction saying whether a decision was better than expected (RECAP)."""

    kind: Literal["recap"] = "recap"
    chosen: ClassVar[type[Examples]] = WordedExamples
    dataset: ClassVar[type[WeightedDataset]] = WordedDataset

    positive: float = Field(
        default=0.4, gt=0, lt=1, description="Share of each task's decisions that get the positive word."
    )
    guidance: NonNegativeFloat = Field(
        default=1.0,
        description="Of the saved policy: 1: only the positive word; more: farther from what it does without a word.",
    )

    def learner(self, policy: Policy) -> Policy:
        """What is within a policy that has the word already; guidance that it cannot have is refused."""
        policy = unconditioned(policy)
        condition(policy, self.guidance)
        return policy

    def examples(self, policy: Policy, data: BCDataset, run: LoggedRun) -> tuple[Examples, dict[str, float]]:
        """Every decision, with the word for whether it was better than expected; and how often that was said."""
        with evaluation_mode(policy):
            check_words_are_read(policy, data)
        critic, judged, found = self.fitted(policy, data, run)
        advantage = advantages(critic.transitions, judged.v, self.critic.discount)
        positive = improves(self, critic.transitions, advantage, corrections(data))
        success = critic.transitions.success[critic.transitions.episode]
        found |= {
            "recap/positive": float(positive.mean()),
            "recap/positive_of_successes": float(positive[success].mean()),
            "recap/positive_of_failures": float(positive[~success].mean()),
        }
        examples = WordedExamples(np.ones(len(positive)), positive=positive, word_dropout=np.array([WORDLESS]))
        return examples, found

    def finished(self, policy: Policy, folder: Path) -> PolicyConfig:
        """The policy with the positive word in its instruction."""
        condition(policy, self.guidance).save(folder)
        return AdvantageConditionedConfig(path=str(folder))


def advantages(transitions: Transitions, v: np.ndarray, discount: float) -> np.ndarray:
    """How much better each decision turned out than was expected, float64 (N,).

    The discounted value LOOKAHEAD decisions later, or the outcome where the episode ends before, less V here.

    Args:
        v: float32 (N,), the value of each decision's place, by networks that have not seen it.
    """
    value = transitions.returns(discount).astype(np.float64)
    at, steps = np.arange(len(transitions)), np.zeros(len(transitions), np.int64)
    for _ in range(LOOKAHEAD):
        steps = np.where(at >= 0, steps + transitions.num_steps[at], steps)
        at = np.where(at >= 0, transitions.following[at], -1)
    return np.where(at >= 0, discount**steps * v[at], value) - v


def improves(config: RecapConfig, transitions: Transitions, advantage: np.ndarray, corrected: np.ndarray) -> np.ndarray:
    """Which decisions get the positive word, bool (N,).

    Of each task the share `positive` of largest advantage, and all that a person corrected, bool (N,).
    """
    task = transitions.task[transitions.episode]
    found = corrected.copy()
    for number in np.unique(task):
        own = task == number
        least = np.quantile(advantage[own], 1 - config.positive)
        enough = advantage >= least if least > advantage[own].min() else advantage > least  # Not all, where many tie.
        found |= own & enough
    return found


def corrections(data: BCDataset) -> np.ndarray:
    """Decisions at which a person corrected the policy, bool (N,), of all datasets' one after another."""
    codes = [CONTROL_SOURCES.index(name) for name in CORRECTIONS]
    return np.concatenate([np.isin(part.source[part.rows], codes) for part in data.parts])


def drop_words(batch: BCBatch, positive: np.ndarray, dropout: float, rng: np.random.Generator) -> BCBatch:
    """The batch with words for its rows, bool (B,), but for a share `dropout` of them, whose instructions stay."""
    told, kept = with_words(batch.obs, positive).instruction, rng.random(batch.size) < dropout
    instruction = [plain if k else text for plain, text, k in zip(batch.obs.instruction, told, kept, strict=True)]
    return replace(batch, obs=replace(batch.obs, instruction=instruction))


@torch.no_grad()
def check_words_are_read(policy: Policy, data: BCDataset) -> None:
    """Refuse a policy to which the positive and the negative word are the same.

    Raises:
        ValueError: they are: it reads no instruction, does not know the words, or cuts long instructions.
    """
    part = data.parts[0]
    batch = part.batch(part.rows[:_CHECKED], data.chunk_size)
    losses = [
        float(policy.bc_loss(with_words(batch.obs, word), batch.actions, batch.valid)[0]) for word in (False, True)
    ]
    if losses[0] == losses[1]:
        raise ValueError(
            f"offline.kind=recap: {type(policy).__name__} does the same whether its instruction ends in "
            f"{WORDS[0]!r} or in {WORDS[1]!r}: it reads no instruction, cuts long ones, or has one token for both "
            f"words. Such a policy improves by offline.kind=best_of_n"
        )


METHOD = RecapConfig
