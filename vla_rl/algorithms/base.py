"""Base classes of RL algorithms' configs: the clipped surrogate loss, the learner, group baselines, values of actions.

An algorithm is a config class in a file of its own: `make_batch` says what a rollout's advantages are, `loss` what is
minimized. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, Unpack

import numpy as np
from pydantic import Field

from vla_rl.algorithms.batch import Batch, Evaluate, decisions, has_spread, log_prob_gap, shuffle_advantages
from vla_rl.algorithms.options import AlgoOptions, LearnerOptions, SurrogateOptions
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import Config
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.types import Episode

if TYPE_CHECKING:
    import torch

    from vla_rl.algorithms.learner import Learner


class AlgoConfig(AlgoOptions):
    """Base of every algorithm."""

    def build(self, policy: Policy, seed: int = 0, **options: Unpack[LearnerOptions]) -> Learner:
        """Make the learner of `policy`; `seed` is that of minibatch order and of the shuffled control."""
        from vla_rl.algorithms.learner import Learner

        return Learner(self, policy, seed, **options)


class SurrogateConfig(SurrogateOptions, AlgoConfig):
    """Base of algorithms whose loss is the clipped surrogate."""

    def loss(
        self, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput, *, num_rows: int, only_critic: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the clipped surrogate's share of a micro-batch; see `AlgoOptions.loss`."""
        from vla_rl.algorithms.losses import surrogate_loss

        return surrogate_loss(self, batch, rows, weight, out)


def episode_batch(
    config: AlgoOptions,
    episodes: list[Episode],
    advantage: np.ndarray,
    included: np.ndarray,
    evaluate: Evaluate,
    world: ProcessGroup,
) -> Batch:
    """Make a batch in which all actions of an episode that count have one advantage, or each its own.

    Args:
        episodes: none lost. advantage: float64 (E,), or of actions (N, H). included: bool (E,), of those in the batch.
    """
    episode, chunk, chunks, valid = decisions(episodes)
    rows = np.flatnonzero(included[episode])
    episode, chunk, chunks, valid = episode[rows], chunk[rows], chunks.select(rows), valid[rows]
    worth = advantage[rows] if advantage.ndim == 2 else advantage[episode][:, None]
    dense = np.where(valid, worth, 0.0).astype(np.float32)
    batch = Batch(episodes, episode, chunk, chunks, valid, dense, np.zeros(chunks.actions.shape, np.float32))
    needed = batch.active if config.skips_zero_advantage else np.ones(batch.size, bool)
    rows = np.flatnonzero(needed)
    batch.old_log_prob[rows], _ = evaluate(episodes, episode[rows], chunk[rows], chunks.select(rows))
    batch.metrics |= log_prob_gap(chunks.log_prob, batch.old_log_prob, valid & needed[:, None], world)
    return batch


class GroupConfig(SurrogateConfig):
    """Options of algorithms that compare episodes of one group; a subclass gives `trajectory_advantages`."""

    compares_episodes: ClassVar[bool] = True

    filter_groups: bool = Field(
        default=True,
        description="Leave groups whose episodes all got the same reward out of the batch and of its normalization; "
        "false: they count with advantage 0.",
    )

    def trajectory_advantages(self, rewards: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return one advantage per episode, float64 (E,), and whether it takes part in the loss, bool (E,).

        Args:
            rewards: float (E,), each episode's total reward.
            groups: int (E,), episodes with the same number started from the same state.
        """
        raise NotImplementedError

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make a batch whose advantages, one per episode, come from the others of its group."""
        rewards = np.array([e.total_reward for e in episodes])
        groups = np.array([e.group for e in episodes])
        advantage, included = self.trajectory_advantages(rewards, groups)
        if self.filter_groups:
            included = included & has_spread(rewards, groups)
        if shuffle is not None:  # Being in the batch travels with the advantage: the outcome decides neither.
            advantage, included = shuffled_episodes(advantage, included, shuffle, world)
        return episode_batch(self, episodes, advantage, included, evaluate, world)


def shuffled_episodes(
    advantage: np.ndarray, included: np.ndarray, shuffle: np.random.Generator, world: ProcessGroup
) -> tuple[np.ndarray, np.ndarray]:
    """Deal all processes' advantages anew; return what falls to this one's episodes."""
    pooled, own = world.all_gather_rows(np.stack([advantage, included], axis=1))
    shuffled = shuffle_advantages(pooled, shuffle)[own]
    return shuffled[:, 0], shuffled[:, 1].astype(bool)


class ActionValues(Protocol):
    """Estimator of action values before execution, such as a world model that imagines them."""

    def of(
        self, episodes: Sequence[Episode], episode: np.ndarray, chunk: np.ndarray, actions: np.ndarray
    ) -> np.ndarray:
        """Return the total reward expected of an episode that goes on with each action chunk, float (N, K).

        Of an episode only what was seen and done before the decision may be used, and none of what came of it, here or
        in fitting: what has learned from the episode's own outcome makes a biased gradient.

        Args:
            episodes: E of them. episode, chunk: int64 (N,), the decisions, as in `vla_rl.algorithms.batch.Batch`.
            actions: float32 (N, K, H, A), in the environment's units.
        """
        ...


class ActionValuesConfig(Config):
    """Base of the `algo.values` section: what says beforehand how good an action is."""

    kind: str

    def build(self, policy: Policy, device: str = "cpu") -> ActionValues:
        """Return what values the policy's actions.

        Raises:
            ValueError: it cannot for this policy.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement build(policy, device) -> ActionValues")
