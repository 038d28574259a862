"""Algorithms whose baseline is the other episodes from the same initial state, without a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.algorithms.batch import episode_batch, has_spread, shuffle_advantages

if TYPE_CHECKING:
    from vla_rl.algorithms.batch import Batch, Evaluate
    from vla_rl.distributed.process_group import ProcessGroup
    from vla_rl.types import Episode


class GroupConfig(AlgoConfig):
    """Options of algorithms that compare episodes of one group; a subclass gives `trajectory_advantages`."""

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
        """Make a batch whose advantages, one per episode, come from the others of its group.

        Raises:
            ValueError: every group has one episode, so there is nothing to compare.
        """
        rewards = np.array([e.total_reward for e in episodes])
        groups = np.array([e.group for e in episodes])
        all_groups, _ = world.all_gather_rows(groups)
        if len(np.unique(all_groups)) == len(all_groups):
            raise ValueError(
                f"algo.kind {self.kind!r} compares episodes from the same initial state, but each of the "
                f"{len(all_groups)} groups has one. Set the rollout's group size to at least 2, or use ppo or "
                "reinforce_pp."
            )
        advantage, included = self.trajectory_advantages(rewards, groups)
        if self.filter_groups:
            included = included & has_spread(rewards, groups)
        if shuffle is not None:
            # Being in the batch travels with the advantage, so that the outcome decides neither.
            pooled, own = world.all_gather_rows(np.stack([advantage, included], axis=1))
            dealt = shuffle_advantages(pooled, shuffle)[own]
            advantage, included = dealt[:, 0], dealt[:, 1].astype(bool)
        return episode_batch(self, episodes, advantage, included, evaluate, world)


def rows_by_group(groups: np.ndarray) -> list[np.ndarray]:
    """Return each group's rows, in order of the groups' numbers; those of an array int (E,)."""
    groups = np.asarray(groups)
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def all_same(values: np.ndarray) -> bool:
    """Return whether all values (at least one) are equal, so that their advantages are exactly 0."""
    return bool((values == values[0]).all())
