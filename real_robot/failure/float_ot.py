"""FLOAT, a failure score: what partial optimal transport of the episode onto the most similar success costs.

ARMADA's FLOAT index (arXiv:2510.02298). With demonstration embeddings e_i (n of them) and the episode's z_j:

    C_ij = 1 - cos(e_i, z_j), uniform weights 1/n and 1/T;
    columns of the T - j - 1 chunks still to come cost nothing, so that what is not matched yet may wait there;
    P = argmin <P, C> + entropy, by Sinkhorn;      F_j = sum over columns k <= j of P_ik C_ik.

At the start the K demonstrations with the nearest first embedding are kept; F_j is the least over them, at each chunk
anew. Embeddings are standardized first and joined with the previous one (the two frames of the paper).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from real_robot.failure.scorer import Scorer, Standardizer, Tensors, WithPrevious, with_previous
from vla_rl.config import ConfigError
from vla_rl.data.embeddings import EmbeddedEpisodes

MAX_DEMONSTRATIONS = 300  # Successes that are kept to compare with.
MAX_ITERATIONS = 1000  # Of Sinkhorn's algorithm.
REGULARIZATION = 0.1  # Entropy of the transport plan.
NUM_CANDIDATES = 50  # K, demonstrations kept after the first embedding.
_TOLERANCE = 1e-4  # Of the plan's marginals.


class FloatOT(Scorer):
    """See the module's docstring.

    Args:
        demonstrations: float32 (M, 2 D), unit length. counts: int64 (N,), rows of each of N demonstrations.
        horizon: T, chunks of the longest episode seen.
    """

    kind = "float_ot"

    def __init__(
        self,
        standardizer: Standardizer,
        demonstrations: np.ndarray,
        counts: np.ndarray,
        horizon: int,
    ) -> None:
        self.standardizer, self.horizon = standardizer, horizon
        self.rows, self.counts = demonstrations, counts
        self.demonstrations = np.split(demonstrations, np.cumsum(counts)[:-1])
        self.start()

    @classmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        successes = np.flatnonzero(episodes.success)
        kept = np.random.default_rng(seed).permutation(successes)[:MAX_DEMONSTRATIONS]
        standardizer = Standardizer.of(episodes.select(successes).embeddings)
        parts = [_unit(with_previous(standardizer(episodes.episode(number)))) for number in kept]
        horizon = int(episodes.counts.max())
        return cls(standardizer, np.concatenate(parts), np.asarray([len(p) for p in parts], np.int64), horizon)

    @classmethod
    def check_installed(cls) -> None:
        try:
            _pot()
        except ImportError as error:
            raise ConfigError(
                "the failure detector float_ot needs POT 0.9.6 or newer; install it with `pip install '.[robot]'`, "
                "or use another detector"
            ) from error

    def start(self) -> None:
        self._previous = WithPrevious()
        self._costs: list[np.ndarray] = []  # Of each candidate: (n, chunks so far).
        self._candidates: list[np.ndarray] = []

    def step(self, embedding: np.ndarray) -> float:
        z = _unit(self._previous(self.standardizer(embedding))[None])[0]
        if not self._candidates:
            first = np.asarray([1 - demonstration[0] @ z for demonstration in self.demonstrations])
            nearest = np.argsort(first, kind="stable")[:NUM_CANDIDATES]
            self._candidates = [self.demonstrations[i] for i in nearest]
            self._costs = [np.zeros((len(candidate), 0)) for candidate in self._candidates]
        self._costs = [
            np.concatenate([cost, (1 - candidate @ z)[:, None]], axis=1, dtype=np.float64)
            for cost, candidate in zip(self._costs, self._candidates, strict=True)
        ]
        return min(
            float(self._prefix_costs(np.stack(costs)).min())
            for n in {len(cost) for cost in self._costs}
            if (costs := [cost for cost in self._costs if len(cost) == n])
        )

    def _prefix_costs(self, costs: np.ndarray) -> np.ndarray:
        """F_j of each of B candidates of n embeddings, float64 (B,), of their costs (B, n, j + 1)."""
        batch, _, seen = costs.shape
        horizon = max(self.horizon, seen)
        padded = np.concatenate([costs, np.zeros((batch, costs.shape[1], horizon - seen))], axis=2)
        plan = (
            _pot()
            .solve_batch(
                padded,
                reg=REGULARIZATION,
                max_iter=MAX_ITERATIONS,
                tol=_TOLERANCE,
                method="sinkhorn",  # Without logarithms, which are slower: no exp(-C / REGULARIZATION), C <= 2, is 0.
            )
            .plan
        )
        return (plan[:, :, :seen] * costs).sum((1, 2))

    def tensors(self) -> Tensors:
        return {**self.standardizer.tensors(), "demonstrations": self.rows, "counts": self.counts}

    def options(self) -> dict[str, Any]:
        return {"horizon": self.horizon}

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        return cls(
            Standardizer.restore(tensors),
            tensors["demonstrations"],
            tensors["counts"],
            int(options["horizon"]),
        )


def _pot() -> Any:
    """POT's batched solvers. POT imports every framework that it finds, torch among them, unless told not to."""
    for framework in ("PYTORCH", "JAX", "CUPY", "TENSORFLOW"):
        os.environ.setdefault(f"POT_BACKEND_DISABLE_{framework}", "1")
    return importlib.import_module("ot.batch")


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows scaled to length 1."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-8)
