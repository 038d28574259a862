"""Failure scores of small networks: logpZO, RND and SAFE.

The networks are applied with numpy, so that no robot needs torch, and trained with torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from real_robot.failure.scorer import Scorer, Standardizer, Tensors, WithPrevious, with_previous
from vla_rl.data.embeddings import EmbeddedEpisodes
from vla_rl.training.config import OptimConfig, TrainerConfig

if TYPE_CHECKING:
    import torch


class NetworkConfig(TrainerConfig):
    """A small network and its training; `batch_size` is of embeddings, or for SAFE of episodes."""

    width: int = 256
    layers: int = 2
    dropout: float = 0.0
    steps: int = 1500
    batch_size: int = 128
    optim: OptimConfig = OptimConfig(lr=1e-3, betas=(0.9, 0.999), grad_clip=None)


NETWORK = NetworkConfig()
SAFE_NETWORK = NetworkConfig(
    width=128, layers=1, dropout=0.3, steps=1000, batch_size=64, optim=OptimConfig(weight_decay=0.1)
)
RND_OUTPUTS = 64
INPUT_DROPOUT = 0.5  # of the embedding while SAFE is trained; a few thousand episodes overfit without


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
    name: str,
) -> None:
    """Train on `loss_of(rows int64 (B,), generator)`, `config.steps` updates.

    Args:
        name: of the score, for messages.

    Raises:
        TrainingDivergedError: `max_bad_steps` updates in a row had a NaN or infinite loss or gradient.
    """
    import torch

    from vla_rl.training.trainer import Trainer

    generator = torch.Generator().manual_seed(seed)

    def loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        rows = torch.randint(num_examples, (min(config.batch_size, num_examples),), generator=generator)
        return loss_of(rows, generator), {}

    network.train()
    Trainer(dict(network.named_parameters()), config, name).run(loss)
    network.eval()


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """float32, on the CPU."""
    return tensor.detach().float().cpu().numpy().copy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


class _MLPScorer(Scorer):
    """Base of scores of standardized embeddings by MLPs, whose names are in `names`."""

    names: ClassVar[tuple[str, ...]]

    def __init__(self, standardizer: Standardizer, *networks: MLP) -> None:
        self.standardizer, self.networks = standardizer, dict(zip(self.names, networks, strict=True))
        self.start()

    def start(self) -> None:
        """Each embedding is scored by itself."""

    def tensors(self) -> Tensors:
        parts = [network.tensors(name) for name, network in self.networks.items()]
        return {**self.standardizer.tensors(), **{name: array for part in parts for name, array in part.items()}}

    @classmethod
    def restore(cls, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> Self:
        return cls(Standardizer.restore(tensors), *(MLP.restore(tensors, name) for name in cls.names))


def _successes(episodes: EmbeddedEpisodes) -> tuple[Standardizer, torch.Tensor]:
    """The standardizer of the successes' embeddings, and these, standardized, float32 (M, D)."""
    import torch

    embeddings = episodes.select(episodes.success).embeddings
    standardizer = Standardizer.of(embeddings)
    return standardizer, torch.from_numpy(standardizer(embeddings))


class LogpZO(_MLPScorer):
    """How far from the origin a flow takes an embedding, having learned to take those of successes to noise.

    FAIL-Detect (arXiv:2503.08558). Flow matching between embeddings o and noise e: x_t = (1-t) o + t e, and v(x_t, t)
    learns e - o. One step from t = 0 gives the latent o + v(o, 0), standard normal for successes; the score is its
    squared norm over its size.
    """

    kind, names = "logpzo", ("velocity",)

    @classmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        standardizer, x = _successes(episodes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            velocity = make_mlp(x.shape[1] + 1, x.shape[1], NETWORK)

            def loss(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
                o = x[rows]
                noise = torch.randn(o.shape, generator=generator)
                t = torch.rand(len(o), 1, generator=generator)
                predicted = velocity(torch.cat([(1 - t) * o + t * noise, t], 1))
                return (predicted - (noise - o)).square().mean()

            train(velocity, loss, len(x), NETWORK, seed, cls.kind)
        return cls(standardizer, MLP.of(velocity))

    def step(self, embedding: np.ndarray) -> float:
        o = self.standardizer(embedding)
        return float(np.square(o + self.networks["velocity"](np.append(o, np.float32(0)))).mean())


class RND(_MLPScorer):
    """How badly a network predicts a fixed random one, which it was taught to on embeddings of successes alone.

    Random network distillation (Burda et al. 2019, arXiv:1810.12894) as a failure score (FAIL-Detect,
    arXiv:2503.08558): score = |f(o) - g(o)|^2 / RND_OUTPUTS, with g random and frozen and f trained.
    """

    kind, names = "rnd", ("target", "predictor")

    @classmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        standardizer, x = _successes(episodes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            target, predictor = (make_mlp(x.shape[1], RND_OUTPUTS, NETWORK) for _ in range(2))
            with torch.no_grad():
                wanted = target(x)

            def loss(rows: torch.Tensor, _: torch.Generator) -> torch.Tensor:
                return (predictor(x[rows]) - wanted[rows]).square().mean()

            train(predictor, loss, len(x), NETWORK, seed, cls.kind)
        return cls(standardizer, MLP.of(target), MLP.of(predictor))

    def step(self, embedding: np.ndarray) -> float:
        x = self.standardizer(embedding)
        return float(np.square(self.networks["predictor"](x) - self.networks["target"](x)).mean())


class SAFEMLP(_MLPScorer):
    """The cumulated score; reads each embedding with the one before."""

    kind, names = "safe_mlp", ("network",)
    needs_failures = True

    @classmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        standardizer = Standardizer.of(episodes.embeddings)
        inputs, alive, failed, weight = _padded(standardizer, episodes, previous=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = make_mlp(inputs.shape[-1], 1, SAFE_NETWORK)
            drop = torch.nn.Dropout(INPUT_DROPOUT)

            def loss(rows: torch.Tensor, _: torch.Generator) -> torch.Tensor:
                score = torch.sigmoid(network(drop(inputs[rows]))[..., 0]) * alive[rows]
                summed = score.cumsum(1)
                could = alive[rows].cumsum(1)
                wrong = torch.where(failed[rows, None], could - summed, summed) * alive[rows]
                # Relative to the chunks so far, so that long episodes do not outweigh short ones.
                return ((wrong / could.clamp_min(1)).sum(1) / alive[rows].sum(1) * weight[rows]).mean()

            train(network, loss, len(inputs), SAFE_NETWORK, seed, cls.kind)
        return cls(standardizer, MLP.of(network))

    def start(self) -> None:
        self._sum = 0.0
        self._previous = WithPrevious()

    def step(self, embedding: np.ndarray) -> float:
        logit = self.networks["network"](self._previous(self.standardizer(embedding)))
        self._sum += float(sigmoid(logit)[0])
        return self._sum


class SAFELSTM(Scorer):
    """The recurrent score."""

    kind = "safe_lstm"
    needs_failures = True

    def __init__(self, standardizer: Standardizer, lstm: LSTM, head: MLP) -> None:
        self.standardizer, self.lstm, self.head = standardizer, lstm, head

    @classmethod
    def fit(cls, episodes: EmbeddedEpisodes, seed: int) -> Self:
        import torch

        standardizer = Standardizer.of(episodes.embeddings)
        inputs, alive, failed, weight = _padded(standardizer, episodes, previous=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            lstm = torch.nn.LSTM(inputs.shape[-1], SAFE_NETWORK.width, batch_first=True)
            dropout, head = torch.nn.Dropout(SAFE_NETWORK.dropout), torch.nn.Linear(SAFE_NETWORK.width, 1)
            network = torch.nn.ModuleList([lstm, dropout, head])
            drop = torch.nn.Dropout(INPUT_DROPOUT)
            position = alive.cumsum(1) / alive.sum(1, keepdim=True)
            at = torch.where(failed[:, None], position, torch.ones_like(position)) * alive

            def loss(rows: torch.Tensor, _: torch.Generator) -> torch.Tensor:
                logits = head(dropout(lstm(drop(inputs[rows]))[0]))[..., 0]
                labels = failed[rows, None].float().expand_as(logits)
                each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
                return ((each * at[rows]).sum(1) / at[rows].sum(1) * weight[rows]).mean()

            train(network, loss, len(inputs), SAFE_NETWORK, seed, cls.kind)
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
