"""SAFE: a network that has seen failures scores each embedding (arXiv:2506.09937).

`safe_mlp` ("Indep"): g(e_t) in (0, 1) for each embedding alone, summed up over the episode, s_t = sum_{k<=t} g(e_k);
trained so that s_t stays at 0 in successes and grows by 1 a chunk in failures.

`safe_lstm`: s_t = sigmoid(w h_t) of an LSTM over the embeddings so far; binary cross-entropy at each chunk, later
chunks of failures weighing more, since early ones are often still fine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from real_robot.failure.config import SAFEConfig
from real_robot.failure.networks import LSTM, MLP, make_mlp, sigmoid, to_numpy, train
from real_robot.failure.scorer import Scorer, Standardizer, Tensors, WithPrevious, with_previous
from vla_rl.data.embeddings import EmbeddedEpisodes

if TYPE_CHECKING:
    import torch


class SAFEMLP(Scorer):
    """The cumulated score; reads each embedding with the one before."""

    kind = "safe_mlp"
    needs_failures = True

    def __init__(self, standardizer: Standardizer, network: MLP) -> None:
        self.standardizer, self.network = standardizer, network
        self.start()

    @classmethod
    def fit(cls, config: SAFEConfig, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        standardizer = Standardizer.of(episodes.embeddings)
        inputs, alive, failed, weight = _padded(standardizer, episodes, previous=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = make_mlp(inputs.shape[-1], 1, config.network)
            drop = torch.nn.Dropout(config.input_dropout)

            def loss(rows: torch.Tensor, _: torch.Generator) -> torch.Tensor:
                score = torch.sigmoid(network(drop(inputs[rows]))[..., 0]) * alive[rows]
                summed = score.cumsum(1)
                could = alive[rows].cumsum(1)
                wrong = torch.where(failed[rows, None], could - summed, summed) * alive[rows]
                # Relative to the chunks so far, so that long episodes do not outweigh short ones.
                return ((wrong / could.clamp_min(1)).sum(1) / alive[rows].sum(1) * weight[rows]).mean()

            train(network, loss, len(inputs), config.network, seed, f"failure.{cls.kind}.network")
        return cls(standardizer, MLP.of(network))

    def start(self) -> None:
        self._sum = 0.0
        self._previous = WithPrevious()

    def step(self, embedding: np.ndarray) -> float:
        logit = self.network(self._previous(self.standardizer(embedding)))
        self._sum += float(sigmoid(logit)[0])
        return self._sum

    def tensors(self) -> Tensors:
        return {**self.standardizer.tensors(), **self.network.tensors("network")}

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        return cls(Standardizer.restore(tensors), MLP.restore(tensors, "network"))


class SAFELSTM(Scorer):
    """The recurrent score."""

    kind = "safe_lstm"
    needs_failures = True

    def __init__(self, standardizer: Standardizer, lstm: LSTM, head: MLP) -> None:
        self.standardizer, self.lstm, self.head = standardizer, lstm, head

    @classmethod
    def fit(cls, config: SAFEConfig, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        standardizer = Standardizer.of(episodes.embeddings)
        inputs, alive, failed, weight = _padded(standardizer, episodes, previous=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lstm = torch.nn.LSTM(inputs.shape[-1], config.network.width, batch_first=True)
            dropout, head = torch.nn.Dropout(config.network.dropout), torch.nn.Linear(config.network.width, 1)
            network = torch.nn.ModuleList([lstm, dropout, head])
            drop = torch.nn.Dropout(config.input_dropout)
            position = alive.cumsum(1) / alive.sum(1, keepdim=True)
            at = torch.where(failed[:, None], position, torch.ones_like(position)) * alive

            def loss(rows: torch.Tensor, _: torch.Generator) -> torch.Tensor:
                logits = head(dropout(lstm(drop(inputs[rows]))[0]))[..., 0]
                labels = failed[rows, None].float().expand_as(logits)
                each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                return ((each * at[rows]).sum(1) / at[rows].sum(1) * weight[rows]).mean()

            train(network, loss, len(inputs), config.network, seed, f"failure.{cls.kind}.network")
        learned = {name: to_numpy(parameter) for name, parameter in lstm.named_parameters()}
        bias = learned["bias_ih_l0"] + learned["bias_hh_l0"]
        recurrent = LSTM(learned["weight_ih_l0"], learned["weight_hh_l0"], bias)
        return cls(standardizer, recurrent, MLP([(to_numpy(head.weight), to_numpy(head.bias))]))

    def start(self) -> None:
        self.lstm.reset()

    def step(self, embedding: np.ndarray) -> float:
        return float(sigmoid(self.head(self.lstm.step(self.standardizer(embedding))))[0])

    def tensors(self) -> Tensors:
        lstm = {"in": self.lstm.weight_in, "hidden": self.lstm.weight_hidden, "bias": self.lstm.bias}
        return {
            **self.standardizer.tensors(),
            **self.head.tensors("head"),
            **{f"lstm.{name}": array for name, array in lstm.items()},
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        lstm = LSTM(*(tensors[f"lstm.{name}"] for name in ("in", "hidden", "bias")))
        return cls(Standardizer.restore(tensors), lstm, MLP.restore(tensors, "head"))


def _padded(
    standardizer: Standardizer, episodes: EmbeddedEpisodes, previous: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (E, T, D or 2 D), alive (E, T), failed bool (E,), and weights (E,) that balance success and failure."""
    import torch

    longest = int(episodes.counts.max())
    inputs = np.zeros((len(episodes), longest, episodes.dim * (2 if previous else 1)), np.float32)
    alive = np.zeros((len(episodes), longest), np.float32)
    for number, count in enumerate(episodes.counts):
        x = standardizer(episodes.episode(number))
        inputs[number, :count] = with_previous(x) if previous else x
        alive[number, :count] = 1
    failed = ~episodes.success
    share = failed.mean()
    weight = np.where(failed, 0.5 / max(share, 1e-9), 0.5 / max(1 - share, 1e-9)).astype(np.float32)
    return torch.from_numpy(inputs), torch.from_numpy(alive), torch.from_numpy(failed), torch.from_numpy(weight)
