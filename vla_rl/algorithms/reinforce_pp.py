"""REINFORCE++: an episode's advantage is its reward, normalized over the whole batch; no groups, no critic.

Numpy only. Shape legend: E episodes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from vla_rl.algorithms.base import SurrogateConfig, episode_batch
from vla_rl.algorithms.batch import Batch, Evaluate, shuffle_advantages, valid_actions
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.types import Episode


class ReinforcePPConfig(SurrogateConfig):
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): REINFORCE with PPO's clipping and global advantage normalization.

    The paper's KL penalty is part of the reward; here it is `kl_coef`'s term of the loss, as in every algorithm.
    """

    kind: Literal["reinforce_pp"] = "reinforce_pp"

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make a batch whose advantages, one per episode, are normalized over all processes' actions that count."""
        rewards, own = world.all_gather_rows(np.array([e.total_reward for e in episodes], np.float64))
        counts = np.array([valid_actions(e).sum() for e in episodes])
        if shuffle is not None:
            rewards = shuffle_advantages(rewards, shuffle)
        advantage = batch_normalized(rewards, world.all_gather_rows(counts)[0])[own]
        return episode_batch(self, episodes, advantage, np.ones(len(episodes), bool), evaluate, world)


def batch_normalized(rewards: np.ndarray, num_actions: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """REINFORCE++: A = (R - mean) / (std + eps) over all actions of the batch (arXiv 2501.03262, section 3).

    As the paper takes both over tokens, an episode counts once for each of its actions. The deviation is the sample
    one (n - 1). A batch whose rewards are all the same gets exactly 0.

    Args:
        rewards: float (E,). num_actions: int (E,), each episode's actions that count in the loss.

    Returns:
        float64 (E,).
    """
    per_action = np.repeat(np.asarray(rewards, np.float64), num_actions)
    if (per_action == per_action[0]).all():
        return np.zeros(len(rewards))
    return (rewards - per_action.mean()) / (per_action.std(ddof=1) + eps)
