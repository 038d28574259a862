"""Options of the RL algorithms: GRPO, MC-GRPO, RLOO and PPO. Imports no torch.

Defaults follow SimpleVLA-RL (clip 0.2/0.28, no KL, no entropy bonus, one epoch, token-mean loss); its
learning rate is for a 7B policy trained whole. A recipe for a small policy sets a larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from vla_rl.algorithms import advantages
from vla_rl.config import Config, ConfigError

if TYPE_CHECKING:
    import torch

    from vla_rl.algorithms.learner import Learner
    from vla_rl.common.timing import Stopwatch
    from vla_rl.distributed.process_group import ProcessGroup

Control = Literal["none", "shuffled_rewards"]
RatioLevel = Literal["token", "action", "chunk"]
AdvantageLevel = Literal["action", "chunk"]
LossReduction = Literal["token_mean", "trajectory_mean"]


class AlgoConfig(Config):
    """What every algorithm here shares: optimizer, batching, clipped surrogate, regularizers."""

    kind: str
    # Optimizer.
    lr: float = Field(default=5e-6, gt=0, description="Learning rate of the policy.")
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = Field(
        default="adamw",
        description="adamw_8bit: AdamW with its moments in 8 bits (needs torchao); muon: Muon for hidden matrices, "
        "AdamW for embeddings, heads, vectors and convolutions.",
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's running-average factors.")
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rates rise from 0; Adam's first are big."
    )
    grad_clip: float | None = Field(
        default=1.0, gt=0, description="Largest gradient norm, of policy and critic each; null: no clipping."
    )
    max_bad_steps: PositiveInt = Field(
        default=10, description="Steps in a row with NaN loss or gradients, each skipped, after which the run stops."
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
    # Surrogate.
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(
        default=0.28, gt=0, description="The ratio is clipped above at 1 + clip_high (DAPO's clip-higher)."
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="Bound c on the ratio where the advantage is negative; null: off (RLinf uses 3).",
    )
    ratio_level: RatioLevel = Field(default="token", description="What one probability ratio covers.")
    loss_reduction: LossReduction = Field(
        default="token_mean",
        description="token_mean: every token of the minibatch counts the same; trajectory_mean: every trajectory does.",
    )
    mask_after_success: bool = Field(
        default=True, description="Leave out actions that were drawn but not executed, and any after the first success."
    )
    recompute_old_log_prob: bool = Field(
        default=True,
        description="Take the old log-probabilities from the trainer's own forward pass, not from the rollout.",
    )
    skip_zero_advantage: bool = Field(
        default=True,
        description="Spend no forward/backward on decisions whose advantage is exactly 0. Gradients stay the same; "
        "has no effect with a KL or entropy term or a critic, since these learn from every decision.",
    )
    # Regularizers.
    kl_coef: float = Field(
        default=0.0, ge=0, description="Weight of the KL to the policy at the start of the run (k3)."
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")
    bc_coef: float = Field(
        default=0.0, ge=0, description="Weight of the behavior-cloning anchor (needs demonstrations)."
    )

    @property
    def uses_critic(self) -> bool:
        """Whether the policy needs a value head."""
        return False

    def rollouts_per_group(self, group_size: int) -> int:
        """Episodes to collect from each initial state for a group size G."""
        return group_size

    def build(
        self,
        policy: torch.nn.Module,
        seed: int = 0,
        *,
        temperature: float = 1.0,
        control: Control = "none",
        stopwatch: Stopwatch | None = None,
        world: ProcessGroup | None = None,
    ) -> Learner:
        """The learner of `policy`.

        Args:
            seed: of minibatch order and of the shuffled control.
            temperature: that rollouts are drawn with; log-probabilities are taken at it.
            control: "shuffled_rewards" permutes advantages over all trajectories (negative control).
            stopwatch: counts "forward_backward" and "optimizer" seconds; by default the learner's own.
            world: the processes that learn together, which hold `policy` already; None: this one alone.
        """
        from vla_rl.algorithms.learner import Learner

        return Learner(
            self, policy, seed=seed, temperature=temperature, control=control, stopwatch=stopwatch, world=world
        )


class GroupConfig(AlgoConfig):
    """Algorithms whose baseline is the other episodes from the same initial state; no critic."""

    filter_groups: bool = Field(
        default=True,
        description="Leave groups whose episodes all got the same reward out of the batch and of its normalization; "
        "false: they count with advantage 0.",
    )

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One advantage per episode, float64 (E,), and whether it takes part in the loss, bool (E,).

        Args:
            rewards: float (E,), each episode's total reward.
            groups: int (E,), episodes with the same number started from the same state.
        """
        raise NotImplementedError


class GRPOConfig(GroupConfig):
    """Group Relative Policy Optimization (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300)."""

    renamed: ClassVar[Mapping[str, str]] = {"normalise_std": "normalize_std"}

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = Field(default=True, description="Divide by the group's standard deviation (false: Dr. GRPO).")
    advantage_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation.")

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        advantage = advantages.group_relative(rewards, groups, self.normalize_std, self.advantage_eps)
        return advantage, np.ones(len(rewards), bool)


class MCGRPOConfig(GroupConfig):
    """Median-Centered GRPO (Kim 2026, arXiv 2601.22582): G + 1 episodes, the median is baseline and left out."""

    renamed: ClassVar[Mapping[str, str]] = {"normalise_mad": "normalize_mad"}

    kind: Literal["mc_grpo"] = "mc_grpo"
    normalize_mad: bool = Field(
        default=True,
        description="Divide by the group's median absolute deviation; where that is 0, by its standard deviation.",
    )
    advantage_eps: float = Field(default=1e-6, gt=0, description="Added to the deviation.")

    def rollouts_per_group(self, group_size: int) -> int:
        """G + 1: one more, for the pivot."""
        return group_size + 1

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return advantages.median_baseline(rewards, groups, self.normalize_mad, self.advantage_eps)


class RLOOConfig(GroupConfig):
    """REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024), as RIPT-VLA uses it with PPO's clipping."""

    kind: Literal["rloo"] = "rloo"

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return advantages.leave_one_out(rewards, groups), np.ones(len(rewards), bool)


class PPOConfig(AlgoConfig):
    """Proximal Policy Optimization (Schulman et al. 2017) with GAE (Schulman et al. 2016) and a value head."""

    renamed: ClassVar[Mapping[str, str]] = {"normalise_std": "normalize_std"}

    kind: Literal["ppo"] = "ppo"
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above at 1 + clip_high.")
    gamma: float = Field(
        default=0.99, gt=0, le=1, description="Discount per decision (chunk) or per action: advantage_level."
    )
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    bootstrap_truncated: bool = Field(
        default=True,
        description="After an episode that its horizon cut off, count V of its last observation, as if it went on. "
        "false: count 0, so that not having succeeded by then is failure, as an evaluation has it.",
    )
    advantage_level: AdvantageLevel = Field(
        default="chunk", description="Whether GAE steps over chunks or over single actions."
    )
    normalize_std: bool = Field(
        default=True, description="Shift and scale the batch's advantages to mean 0, deviation 1."
    )
    advantage_eps: float = Field(default=1e-6, gt=0, description="Added to the standard deviation.")
    value_lr: float = Field(default=3e-3, gt=0, description="Learning rate of the value head.")
    value_coef: float = Field(default=0.5, gt=0, description="Weight of the value loss.")
    value_loss: Literal["huber", "mse"] = "huber"
    huber_delta: float = Field(default=10.0, gt=0, description="Error above which the Huber loss grows linearly.")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="How far the value may move from the rollout's; null: off."
    )
    critic_warmup: int = Field(
        default=0, ge=0, description="Iterations at the start in which only the value head learns."
    )

    @property
    def uses_critic(self) -> bool:
        return True

    @model_validator(mode="after")
    def _levels_fit(self) -> PPOConfig:
        if self.ratio_level == "chunk" and self.advantage_level == "action":
            raise ConfigError(
                "algo.ratio_level: got 'chunk' with advantage_level 'action'. One ratio per chunk cannot be weighted "
                "by an advantage per action; allowed with 'action': ratio_level token or action."
            )
        return self
