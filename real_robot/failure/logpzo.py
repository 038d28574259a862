"""logpZO: how far from the origin a flow takes an embedding, having learned to take those of successes to noise.

FAIL-Detect (arXiv:2503.08558). Flow matching between embeddings o and noise e: x_t = (1-t) o + t e, and v(x_t, t)
learns e - o. One step from t = 0 gives the latent o + v(o, 0), standard normal for successes; the score is its squared
norm over its size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from real_robot.failure.config import LogpZOConfig
from real_robot.failure.networks import MLP, make_mlp, train
from real_robot.failure.scorer import Scorer, Standardizer, Tensors
from vla_rl.data.embeddings import EmbeddedEpisodes


class LogpZO(Scorer):
    """See the module's docstring."""

    kind = "logpzo"

    def __init__(self, standardizer: Standardizer, velocity: MLP) -> None:
        self.standardizer, self.velocity = standardizer, velocity

    @classmethod
    def fit(cls, config: LogpZOConfig, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        embeddings = episodes.select(episodes.success).embeddings
        standardizer = Standardizer.of(embeddings)
        x = torch.from_numpy(standardizer(embeddings))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            velocity = make_mlp(x.shape[1] + 1, x.shape[1], config.network)

            def loss(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
                o = x[rows]
                noise = torch.randn(o.shape, generator=generator)
                t = torch.rand(len(o), 1, generator=generator)
                predicted = velocity(torch.cat([(1 - t) * o + t * noise, t], 1))
                return (predicted - (noise - o)).square().mean()

            train(velocity, loss, len(x), config.network, seed, f"failure.{cls.kind}.network")
        return cls(standardizer, MLP.of(velocity))

    def start(self) -> None:
        """Each embedding is scored by itself."""

    def step(self, embedding: np.ndarray) -> float:
        o = self.standardizer(embedding)
        return float(np.square(o + self.velocity(np.append(o, np.float32(0)))).mean())

    def tensors(self) -> Tensors:
        return {**self.standardizer.tensors(), **self.velocity.tensors("velocity")}

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        return cls(Standardizer.restore(tensors), MLP.restore(tensors, "velocity"))
