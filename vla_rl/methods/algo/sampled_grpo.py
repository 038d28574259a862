"""GRPO that updates on a sample of the decisions, those with the largest expected gradient likeliest. Numpy only.

A decision is drawn with a probability proportional to |A| sqrt(sum of (1 - p)^2 over its tokens), p being the tokens'
likelihoods, and counts by one over that: the sum over the batch keeps its expectation (Horvitz & Thompson 1952), and
at this size of each decision's gradient, which is that of its logits, has the least variance (Zhao & Zhang 2015, arXiv
1401.2753). Decisions that are not drawn need no pass, nor does their old likelihood.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vla_rl.algorithms.batch import Batch, Evaluate, log_prob_gap, rollout_log_prob
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import ConfigError
from vla_rl.types import ActionChunk, Episode

_LEAST = 0.25  # Of the mean size, added to each: no decision counts more than about 5 / share.


class SampledGRPOConfig(GRPOConfig):
    """GRPO on a sample of the decisions, weighted so that the gradient keeps its expectation."""

    takes_stale_chunks: ClassVar[bool] = False

    kind: Literal["sampled_grpo"] = "sampled_grpo"
    share: float = Field(
        default=0.5, gt=0, le=1, description="Share of the decisions with an advantage that an update is made on."
    )
    by: Literal["gradient", "uniform"] = Field(
        default="gradient", description="What a decision is likelier to be drawn by; uniform: by nothing, the control."
    )

    @model_validator(mode="after")
    def _check(self) -> SampledGRPOConfig:
        for name in ("kl_coef", "entropy_coef"):
            if getattr(self, name) > 0:
                raise ConfigError(
                    f"algo.{name}: got {getattr(self, name):g}, allowed with algo.kind=sampled_grpo: 0, as its terms "
                    "need a pass of every decision"
                )
        return self

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make GRPO's batch, in which decisions that are not drawn have advantage 0 and others 1 / probability times.

        Raises:
            ConfigError: `by` is gradient, and the chunks were not drawn as tokens.
        """
        batch = super().make_batch(episodes, _recorded, shuffle, world)
        if self.by == "gradient" and batch.chunks.tokens is None:
            raise ConfigError(
                "algo.by: got 'gradient', which is told from likelihoods of tokens, but this policy's chunks have none "
                "(a flow, or a continuous head); set algo.by=uniform"
            )
        active = np.flatnonzero(batch.active)
        size = gradient_size(batch) if self.by == "gradient" else np.ones(batch.size)
        chance = chances(size[active], self.share)
        taken = drawn(chance, np.random.default_rng(zlib.crc32(batch.old_log_prob.tobytes())))
        weight = np.zeros(batch.size)
        weight[active[taken]] = 1 / chance[taken]
        batch.advantage = (batch.advantage * weight[:, None]).astype(np.float32)
        rows = active[taken]
        batch.old_log_prob[rows], _ = evaluate(
            episodes, batch.episode[rows], batch.chunk[rows], batch.chunks.select(rows)
        )
        counted = batch.valid & (weight > 0)[:, None]
        batch.metrics |= log_prob_gap(batch.chunks.log_prob, batch.old_log_prob, counted, world)
        batch.metrics["advantage/largest_weight"] = float(max(world.gather(float(weight.max(initial=0.0)))))
        return batch


def _recorded(
    _: Sequence[Episode], episode: np.ndarray, chunk: np.ndarray, chunks: ActionChunk
) -> tuple[np.ndarray, None]:
    """In place of the policy's, the log-probabilities that the rollout recorded: all that the draw needs."""
    return rollout_log_prob(chunks), None


def gradient_size(batch: Batch) -> np.ndarray:
    """Return |A| sqrt(sum over tokens of (1 - p)^2) of each decision, float64 (N,); A is 0 where nothing counts."""
    missing = 1 - np.exp(np.minimum(rollout_log_prob(batch.chunks), 0.0).astype(np.float64))
    return np.sqrt(((batch.advantage[..., None] * missing) ** 2).sum((1, 2)))


def chances(size: np.ndarray, share: float) -> np.ndarray:
    """Return probabilities, float64 (N,), that sum to share N: in proportion to size + `_LEAST` mean size, at most 1.

    Args:
        size: float64 (N,), at least 0.
    """
    size, wanted = size + _LEAST * size.mean() if size.any() else np.ones(len(size)), share * len(size)
    chance = np.zeros(len(size))
    while len(free := np.flatnonzero(chance < 1)):
        chance[free] = (wanted - (len(size) - len(free))) * size[free] / size[free].sum()
        if (chance[free] <= 1).all():
            break
        chance = np.minimum(chance, 1.0)
    return np.minimum(chance, 1.0)


def drawn(chance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw places, int (n,), each with its chance; n is the chances' sum, up to rounding (systematic sampling)."""
    order = rng.permutation(len(chance))
    passed = np.floor(np.cumsum(chance[order]) + rng.random())
    return np.sort(order[np.diff(passed, prepend=0.0) > 0])


METHOD = SampledGRPOConfig
