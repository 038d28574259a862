"""Options and hooks that every RL algorithm has, and those of the clipped surrogate. Imports no torch.

Defaults follow SimpleVLA-RL (clip 0.2/0.28, no KL, no entropy bonus, one epoch, token-mean loss); its learning rate is
for a 7B policy trained whole. A recipe for a small policy sets a larger one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypedDict

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from vla_rl.algorithms.batch import Batch, Evaluate
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.progress import Stopwatch
from vla_rl.config import Config
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.training.config import OptimConfig, OptimizedConfig
from vla_rl.types import Episode

if TYPE_CHECKING:
    import torch


Control = Literal["none", "shuffled_rewards"]
RatioLevel = Literal["token", "action", "chunk"]
LossReduction = Literal["token_mean", "trajectory_mean"]
ONE_LIKELIHOOD = (
    "algo.ratio_level: got {!r}, but a chunk of this policy has one likelihood, that of all its tokens; set it to chunk"
)


class LearnerOptions(TypedDict, total=False):
    """What a learner is told besides its algorithm, policy and seed.

    Attributes:
        temperature: that rollouts are drawn with; log-probabilities are taken at it. By default 1.
        control: "shuffled_rewards" permutes advantages over all trajectories (negative control). By default "none".
        stopwatch: counts "forward_backward" and "optimizer" seconds; by default the learner's own.
        world: the processes that learn together, which hold `policy` already; by default this one alone.
    """

    temperature: float
    control: Control
    stopwatch: Stopwatch
    world: ProcessGroup


class ClipConfig(Config):
    """Bounds on the probability ratio."""

    low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - low.")
    high: float = Field(default=0.28, gt=0, description="The ratio is clipped above at 1 + high (DAPO's clip-higher).")
    dual: float | None = Field(
        default=None,
        gt=1,
        description="Bound c on the ratio where the advantage is negative; null: off (RLinf uses 3).",
    )


class AlgoOptions(OptimizedConfig):
    """What every algorithm shares: options of optimizer, batching and demonstrations; the learner's hooks.

    Attributes:
        compares_episodes: an advantage comes from the other episodes of a group, which so needs two at least.
        takes_stale_chunks: it can learn from chunks that an earlier policy drew.
        uses_critic: the policy needs a value head, which learns at `critic_lr`.
    """

    compares_episodes: ClassVar[bool] = False
    takes_stale_chunks: ClassVar[bool] = True
    uses_critic: ClassVar[bool] = False

    kind: str
    # Optimizer.
    optim: OptimConfig = Field(
        default=OptimConfig(lr=5e-6, betas=(0.9, 0.999), weight_decay=0.0),
        description="Of the policy, and but for the learning rate of its critic.",
    )
    decay_iterations: NonNegativeInt = Field(
        default=0, description="Iterations over which learning rates fall linearly to 0, such as all; 0: they stay."
    )
    # Batching. A decision is one action chunk.
    epochs: PositiveInt = Field(default=1, description="Passes over the rollout.")
    minibatch_size: PositiveInt = Field(
        default=512,
        description="Decisions per optimizer step, about: the rollout is cut evenly into the nearest number of parts.",
    )
    micro_batch_size: PositiveInt = Field(
        default=32, description="Decisions per forward/backward; gradients of a minibatch are accumulated over these."
    )
    loss_reduction: LossReduction = Field(
        default="token_mean",
        description="token_mean: every token of a minibatch counts the same; trajectory_mean: every trajectory of the "
        "rollout does.",
    )
    bc_coef: float = Field(
        default=0.0, ge=0, description="Weight of the behavior-cloning anchor (needs demonstrations)."
    )

    @property
    def critic_lr(self) -> float | None:
        """Learning rate of the critic, which is the policy's value head; None: the algorithm has none."""
        return None

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether decisions with advantage 0 have no gradient, and need no pass: no other term of the loss has."""
        return not self.uses_critic

    @property
    def has_reference(self) -> bool:
        """Whether the loss asks the log-probabilities of the policy at the start of the run."""
        return False

    @property
    def counts_chunks(self) -> bool:
        """Whether a chunk cut short by success counts as much in the loss as a whole one."""
        return False

    def check_policy(self, policy: Policy) -> None:
        """Refuse a policy that the algorithm cannot train, by a ValueError."""

    def lr_share(self, iteration: int) -> float:
        """Return the share of the learning rates left in an iteration, counted from 0."""
        return max(0.0, 1 - iteration / self.decay_iterations) if self.decay_iterations else 1.0

    def trains_only_critic(self, iteration: int) -> bool:
        """Whether the policy's own weights stay as they are in this iteration, counted from 0."""
        return False

    def rollouts_per_group(self, group_size: int) -> int:
        """Return the number of episodes to collect from each initial state for a group size G."""
        return group_size

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make a rollout's batch: decisions, their advantages and old log-probabilities.

        Args:
            episodes: this process's, none lost, in whole groups.
            evaluate: gives the policy's log-probabilities and values without gradient.
            shuffle: permutes the advantages over all processes' episodes (the negative control); None: as they are.
            world: the processes that learn together; what is taken over all episodes is taken over everyone's.

        Raises:
            ValueError: the episodes hold nothing that the algorithm can learn from.
        """
        raise NotImplementedError

    def loss(
        self, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput, *, num_rows: int, only_critic: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a micro-batch's share of its minibatch's loss, and metrics.

        Args:
            batch: as `make_batch` made it, or without episodes. rows: int64 (B,), the micro-batch's decisions.
            weight: float64 (B, H), of each action in the loss; about 1 in sum over the minibatch.
            out: what the policy gives for these decisions, with gradient.
            num_rows: decisions of the minibatch. only_critic: as `trains_only_critic` says of this iteration.

        Metrics are scalars, added up over micro-batches; of `NAME_max` the largest. Those without a "/" are sums
        weighted by `weight`, and divided by the one named "weight".
        """
        raise NotImplementedError


class SurrogateOptions(AlgoOptions):
    """Options of the clipped surrogate and its regularizers."""

    clip: ClipConfig = ClipConfig()
    ratio_level: RatioLevel = Field(default="token", description="What one probability ratio covers.")
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the policy at the start of the run (k3)."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")

    @property
    def skips_zero_advantage(self) -> bool:
        return not (self.kl_coef > 0 or self.entropy_coef > 0 or self.uses_critic)

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def counts_chunks(self) -> bool:
        return self.ratio_level == "chunk"

    def check_policy(self, policy: Policy) -> None:
        if policy.has_one_likelihood and self.ratio_level != "chunk":
            raise ValueError(ONE_LIKELIHOOD.format(self.ratio_level))
