"""RND: how badly a network predicts a fixed random one, which it was taught to on embeddings of successes alone.

Random network distillation (Burda et al. 2019, arXiv:1810.12894) as a failure score (FAIL-Detect, arXiv:2503.08558):
score = |f(o) - g(o)|^2 / outputs, with g random and frozen and f trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from real_robot.failure.config import NetworkConfig, RNDConfig
from real_robot.failure.networks import MLP, make_mlp, train
from real_robot.failure.scorer import Scorer, Standardizer, Tensors
from vla_rl.data.embeddings import EmbeddedEpisodes


class RND(Scorer):
    """See the module's docstring."""

    kind = "rnd"

    def __init__(self, standardizer: Standardizer, target: MLP, predictor: MLP) -> None:
        self.standardizer, self.target, self.predictor = standardizer, target, predictor

    @classmethod
    def fit(cls, config: RNDConfig, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        embeddings = episodes.select(episodes.success).embeddings
        standardizer = Standardizer.of(embeddings)
        x = torch.from_numpy(standardizer(embeddings))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            shape: NetworkConfig = config.network.model_copy(update={"dropout": 0.0})
            target, predictor = (make_mlp(x.shape[1], config.outputs, shape) for _ in range(2))
            with torch.no_grad():
                wanted = target(x)

            def loss(rows: torch.Tensor, _: torch.Generator) -> torch.Tensor:
                return (predictor(x[rows]) - wanted[rows]).square().mean()

            train(predictor, loss, len(x), shape, seed, f"failure.{cls.kind}.network")
        return cls(standardizer, MLP.of(target), MLP.of(predictor))

    def start(self) -> None:
        """Each embedding is scored by itself."""

    def step(self, embedding: np.ndarray) -> float:
        x = self.standardizer(embedding)
        return float(np.square(self.predictor(x) - self.target(x)).mean())

    def tensors(self) -> Tensors:
        return {
            **self.standardizer.tensors(),
            **self.target.tensors("target"),
            **self.predictor.tensors("predictor"),
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        return cls(Standardizer.restore(tensors), MLP.restore(tensors, "target"), MLP.restore(tensors, "predictor"))
