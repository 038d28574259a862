"""Doubly robust GRPO: what a model expects of actions takes noise out of the real episodes' gradient, and adds no bias.

At each decision K more chunks are drawn from the policy and valued by a model, Q. With c and d of at most 1 the
gradient is, A being GRPO's advantage and m the mean of the K values,

    c mean_k (Q_k - mean of the others' Q) grad log p(a_k)
    + (A - c (Q(executed) - m) - d (m - mean reward of the group's others)) grad log p(executed)

What c and d multiply is 0 on average whatever Q is, so a wrong Q costs variance alone. c takes off what the model knows
of this chunk's luck: a control variate (Jiang & Li 2016, arXiv 1511.03722; Q-Prop, Gu et al. 2017, arXiv 1611.02247);
d what it knows of the luck before: a critic's baseline. Two conditions: Q knows nothing of the episode's own outcome,
and c and d come from earlier batches. c = d = 0 is GRPO. Not "Dr. GRPO", which is `normalize_std: false`. Numpy only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Unpack

from pydantic import Field, SerializeAsAny

from vla_rl.algorithms.action_values import ActionValuesConfig
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import component

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vla_rl.algorithms.base import LearnerOptions
    from vla_rl.algorithms.batch import Batch
    from vla_rl.algorithms.dr_learner import DRLearner
    from vla_rl.interfaces import Policy, PolicyOutput


class DRGRPOConfig(GRPOConfig):
    """Doubly robust GRPO, for real episodes: a model's action values as a control variate, which adds no bias."""

    takes_stale_chunks: ClassVar[bool] = False

    kind: Literal["dr_grpo"] = "dr_grpo"
    normalize_std: bool = Field(default=False, description="Divide by the group's standard deviation, as in grpo.")
    filter_groups: Literal[False] = Field(
        default=False,
        description="Always false: a group whose episodes all got the same reward still tells what the values missed.",
    )
    values: Annotated[SerializeAsAny[ActionValuesConfig], component("values")] = Field(
        description="What values action chunks before they are executed: a world model, or a class of your own."
    )
    candidates: int = Field(default=4, ge=2, description="K, the action chunks drawn beside the executed one.")
    coefficient: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="c, how much of what the values say of the executed chunk is taken off, in the first iteration.",
    )
    state_coefficient: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="d, how far the baseline moves from the group's rewards to the values of the state, in the first "
        "iteration.",
    )
    fit_coefficients: bool = Field(
        default=True,
        description="From the second iteration on c and d are what would have left the least variance in the earlier "
        "ones, 0 to 1; false: they stay as given.",
    )
    coefficient_memory: float = Field(
        default=0.8, ge=0, le=1, description="How much an iteration counts for c and d, compared with the next one."
    )

    def loss(
        self, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput, *, num_rows: int, only_critic: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the clipped surrogate of all rows; regularizers and metrics are of the executed chunks alone."""
        from vla_rl.algorithms.dr_learner import surrogate_with_candidates

        return surrogate_with_candidates(self, batch, rows, weight, out)

    def build(self, policy: Policy, seed: int = 0, **options: Unpack[LearnerOptions]) -> DRLearner:
        """Make the learner of `policy`; `seed` is also that of the chunks drawn beside the executed ones."""
        from vla_rl.algorithms.dr_learner import DRLearner

        return DRLearner(self, policy, seed, **options)
