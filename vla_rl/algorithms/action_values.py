"""How good is an action, asked before it is taken: the contract of the `algo.values` section, and what is made of it.

Numpy only. `dr_grpo.py` has the formula that `Correction` and `Coefficients` are parts of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import Config
from vla_rl.interfaces import Policy
from vla_rl.types import Episode


class ActionValues(Protocol):
    """What is expected of actions before they are taken, such as by a world model that imagines what they do."""

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


@dataclass(frozen=True)
class Correction:
    """What the values say of N decisions, for c = d = 1.

    Attributes:
        executed: float64 (N,), of the chunk that was executed: to take off its advantage.
        candidates: float64 (N, K), the advantages of the chunks drawn beside it, 1/K included.
        state: float64 (N,), of the state, beyond the group: to take off the executed chunk's advantage.
    """

    executed: np.ndarray
    candidates: np.ndarray
    state: np.ndarray

    @staticmethod
    def of(executed: np.ndarray, candidates: np.ndarray, others: np.ndarray) -> Correction:
        """Make it from values, so that no chunk is part of its own baseline.

        Args:
            executed: float (N,). candidates: float (N, K). others: float (N,), mean reward of the group's others.
        """
        mean = candidates.mean(1, keepdims=True)  # A candidate's baseline is the mean of the others, its factor 1/K.
        own = (candidates - mean) / (candidates.shape[1] - 1)
        return Correction(executed - mean[:, 0], own, mean[:, 0] - others)


class Coefficients(NamedTuple):
    """c, of the chunks' values, and d, of the states'."""

    chunk: float
    state: float


class CoefficientFit(NamedTuple):
    """Sums over earlier decisions from which c and d follow: those that minimize the mean square of what is left.

    Attributes:
        by_chunk, by_state: of the advantage times `Correction.executed`, and times `Correction.state`.
        chunk, state: of their squares; of the candidates' advantages too, which are the price of c.
        both: of one times the other.
    """

    by_chunk: float = 0.0
    by_state: float = 0.0
    chunk: float = 0.0
    state: float = 0.0
    both: float = 0.0

    @staticmethod
    def of(advantage: np.ndarray, correction: Correction) -> CoefficientFit:
        """Make the sums of decisions whose advantages are float (N,)."""
        x, z = correction.executed, correction.state
        price = (correction.candidates**2).sum()
        sums = (advantage * x).sum(), (advantage * z).sum(), (x**2).sum() + price, (z**2).sum(), (x * z).sum()
        return CoefficientFit(*map(float, sums))

    def over(self, world: ProcessGroup) -> CoefficientFit:
        """Return the sums over all processes' decisions; called by all together."""
        return CoefficientFit(*(sum(column) for column in zip(*world.gather(list(self)), strict=True)))

    def then(self, later: CoefficientFit, memory: float) -> CoefficientFit:
        """Return the sums with a later batch's added; the earlier count `memory` times."""
        return CoefficientFit(*(memory * a + b for a, b in zip(self, later, strict=True)))

    def coefficients(self, otherwise: Coefficients) -> Coefficients:
        """Return c and d, each from 0 to 1; `otherwise` where there is nothing to tell them from."""
        if self.chunk <= 0 and self.state <= 0:
            return otherwise
        c = d = 0.0
        for _ in range(100):  # One after the other: it converges to the least square within the bounds.
            c = min(max((self.by_chunk - self.both * d) / self.chunk, 0.0), 1.0) if self.chunk > 0 else 0.0
            d = min(max((self.by_state - self.both * c) / self.state, 0.0), 1.0) if self.state > 0 else 0.0
        return Coefficients(c, d)

    def left(self, square: float, at: Coefficients) -> float:
        """Return the sum of squares that is left at these coefficients of advantages whose sum of squares is given."""
        c, d = at
        taken = 2 * (c * self.by_chunk + d * self.by_state - c * d * self.both)
        return square - taken + c**2 * self.chunk + d**2 * self.state
