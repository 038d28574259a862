"""Base of the failure scores: embeddings of an episode in, one number a chunk out, higher is worse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from vla_rl.data.embeddings import EmbeddedEpisodes

Tensors = dict[str, np.ndarray]


class Scorer(ABC):
    """One episode at a time: `start`, then `step` with each embedding. Runs on numpy alone, next to the robot.

    Attributes:
        kind: its name in recipes and tables.
        needs_failures: whether it learns from failed episodes too.
    """

    kind: ClassVar[str]
    needs_failures: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        """Learn from embedded episodes: from the successes, and with `needs_failures` from the failures."""

    @classmethod  # noqa: B027 (most need nothing)
    def check_installed(cls) -> None:
        """Raise ConfigError unless the packages that it needs can be imported."""

    @abstractmethod
    def start(self) -> None:
        """A new episode begins."""

    @abstractmethod
    def step(self, embedding: np.ndarray) -> float:
        """The score after one more embedding, float32 (D,)."""

    @abstractmethod
    def tensors(self) -> Tensors:
        """What `restore` needs, as arrays."""

    def options(self) -> dict[str, Any]:
        """What else `restore` needs, JSON-able."""
        return {}

    @classmethod
    @abstractmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        """The scorer that gave these tensors and options."""

    def curve(self, embeddings: np.ndarray) -> np.ndarray:
        """The scores of a whole episode, float64 (count,), of its embeddings float32 (count, D)."""
        self.start()
        return np.asarray([self.step(embedding) for embedding in embeddings], np.float64)

    def curves(self, episodes: EmbeddedEpisodes) -> list[np.ndarray]:
        """The scores of E episodes."""
        return [self.curve(episodes.episode(number)) for number in range(len(episodes))]


class Standardizer:
    """Embeddings to mean 0, standard deviation 1 in each dimension; those that hardly vary are left small."""

    def __init__(self, mean: np.ndarray, scale: np.ndarray) -> None:
        self.mean, self.scale = mean, scale

    @staticmethod
    def of(embeddings: np.ndarray) -> Standardizer:
        """From embeddings float32 (M, D)."""
        std = embeddings.std(0, dtype=np.float64)
        floor = max(1e-2 * float(np.median(std)), 1e-8)
        return Standardizer(embeddings.mean(0, dtype=np.float64).astype(np.float32), (std + floor).astype(np.float32))

    def __call__(self, embeddings: np.ndarray) -> np.ndarray:
        """Of embeddings float32 (..., D)."""
        return (embeddings - self.mean) / self.scale

    def tensors(self) -> Tensors:
        return {"standardizer.mean": self.mean, "standardizer.scale": self.scale}

    @staticmethod
    def restore(tensors: Mapping[str, np.ndarray]) -> Standardizer:
        return Standardizer(tensors["standardizer.mean"], tensors["standardizer.scale"])


def with_previous(embeddings: np.ndarray) -> np.ndarray:
    """Each embedding of an episode with the one before it, float32 (count, 2 D); the first with itself."""
    return np.concatenate([np.concatenate([embeddings[:1], embeddings[:-1]]), embeddings], axis=1)


class WithPrevious:
    """`with_previous`, one embedding at a time."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None

    def __call__(self, embedding: np.ndarray) -> np.ndarray:
        """float32 (D,) -> (2 D,)."""
        previous = embedding if self._last is None else self._last
        self._last = embedding
        return np.concatenate([previous, embedding])
