"""Values of action chunks before they are executed: the contract of the `algo.values` section."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vla_rl.config import Config
from vla_rl.interfaces import Policy
from vla_rl.types import Episode


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
