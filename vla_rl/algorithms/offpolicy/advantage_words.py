"""The advantage as words in the instruction, which a policy learns to act on (RECAP of pi*0.6, arXiv 2511.14759)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vla_rl.algorithms.offpolicy.config import RecapConfig
from vla_rl.algorithms.offpolicy.transitions import Transitions
from vla_rl.data.dataset import BCBatch, BCDataset
from vla_rl.interfaces import Policy
from vla_rl.types import CONTROL_SOURCES, Observation

WORDS = ("negative", "positive")
CORRECTIONS = ("recovery", "correction")  # What a person does instead of the policy.
_CHECKED = 16  # Decisions on which the words must make a difference.


def with_words(obs: Observation, positive: Sequence[bool] | np.ndarray | bool) -> Observation:
    """The same with "Advantage: positive" or "Advantage: negative" at the instruction's end; bool (B,), or one."""
    wanted = np.broadcast_to(positive, obs.batch_size)
    return replace(
        obs,
        instruction=[
            f"{text.rstrip('. ')}. Advantage: {WORDS[int(word)]}"
            for text, word in zip(obs.instruction, wanted, strict=True)
        ],
    )


def advantages(config: RecapConfig, transitions: Transitions, v: np.ndarray, discount: float) -> np.ndarray:
    """How much better each decision turned out than was expected, float64 (N,).

    The discounted value `lookahead` decisions later, or the outcome where the episode ends before, less V here.

    Args:
        v: float32 (N,), the value of each decision's place, by networks that have not seen it.
    """
    value = transitions.returns(discount).astype(np.float64)
    if config.lookahead is not None:
        at, steps = np.arange(len(transitions)), np.zeros(len(transitions), np.int64)
        for _ in range(config.lookahead):
            steps = np.where(at >= 0, steps + transitions.num_steps[at], steps)
            at = np.where(at >= 0, transitions.following[at], -1)
        value = np.where(at >= 0, discount**steps * v[at], value)
    return value - v


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
            f"offline.method=recap: {type(policy).__name__} does the same whether its instruction ends in "
            f"{WORDS[0]!r} or in {WORDS[1]!r}: it reads no instruction, cuts long ones, or has one token for both "
            f"words. Such a policy improves by offline.method=best_of_n"
        )
