"""The small networks of the scores: applied with numpy, so that no robot needs torch, and trained with torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from real_robot.failure.config import NetworkConfig
from real_robot.failure.scorer import Tensors

if TYPE_CHECKING:
    import torch


class MLP:
    """Linear layers with ReLU between them: weights float32 (out, in) and biases (out,), as torch stores them."""

    def __init__(self, layers: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.layers = layers

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """float32 (..., in) -> (..., out)."""
        for number, (weight, bias) in enumerate(self.layers):
            x = x @ weight.T + bias
            if number + 1 < len(self.layers):
                x = np.maximum(x, 0)
        return x

    def tensors(self, prefix: str) -> Tensors:
        return {
            f"{prefix}.{number}.{name}": array
            for number, layer in enumerate(self.layers)
            for name, array in zip(("weight", "bias"), layer, strict=True)
        }

    @staticmethod
    def restore(tensors: Mapping[str, np.ndarray], prefix: str) -> MLP:
        count = sum(name.startswith(f"{prefix}.") and name.endswith(".weight") for name in tensors)
        return MLP([(tensors[f"{prefix}.{i}.weight"], tensors[f"{prefix}.{i}.bias"]) for i in range(count)])

    @staticmethod
    def of(network: torch.nn.Sequential) -> MLP:
        """A copy of a torch network of linear layers, ReLUs and dropout."""
        import torch

        linear = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        return MLP([(to_numpy(layer.weight), to_numpy(layer.bias)) for layer in linear])


class LSTM:
    """One layer of LSTM, step by step: weights float32 (4 hidden, in) and (4 hidden, hidden), gates i, f, g, o."""

    def __init__(self, weight_in: np.ndarray, weight_hidden: np.ndarray, bias: np.ndarray) -> None:
        self.weight_in, self.weight_hidden, self.bias = weight_in, weight_hidden, bias
        self.reset()

    def reset(self) -> None:
        """A new sequence begins."""
        size = self.weight_hidden.shape[1]
        self.hidden, self.cell = np.zeros(size, np.float32), np.zeros(size, np.float32)

    def step(self, x: np.ndarray) -> np.ndarray:
        """float32 (in,) -> the hidden state (hidden,)."""
        gates = self.weight_in @ x + self.weight_hidden @ self.hidden + self.bias
        take, keep, new, show = np.split(gates, 4)
        self.cell = sigmoid(keep) * self.cell + sigmoid(take) * np.tanh(new)
        self.hidden = sigmoid(show) * np.tanh(self.cell)
        return self.hidden


def make_mlp(size_in: int, size_out: int, config: NetworkConfig) -> torch.nn.Sequential:
    """`config.layers` hidden layers of `config.width`, with ReLU and dropout."""
    import torch

    sizes = [size_in, *[config.width] * config.layers]
    layers: list[torch.nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU(), torch.nn.Dropout(config.dropout)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], size_out))


def train(
    network: torch.nn.Module,
    loss_of: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
    num_examples: int,
    config: NetworkConfig,
    seed: int,
    section: str,
) -> None:
    """Train on `loss_of(rows int64 (B,), generator)`, `config.steps` updates.

    Args:
        section: with the options, for messages: "failure.rnd.network".

    Raises:
        TrainingDivergedError: `config.max_bad_steps` updates in a row had a NaN or infinite loss or gradient.
    """
    import torch

    from vla_rl.training.trainer import Trainer

    generator = torch.Generator().manual_seed(seed)

    def loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        rows = torch.randint(num_examples, (min(config.batch_size, num_examples),), generator=generator)
        return loss_of(rows, generator), {}

    network.train()
    Trainer(dict(network.named_parameters()), config, section).run(loss)
    network.eval()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """float32, on the CPU."""
    return tensor.detach().float().cpu().numpy().copy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))
