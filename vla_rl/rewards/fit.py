"""Fitting of a reward on recorded episodes, and its calibration on held-out initial states.

Success: has the task been carried out by this frame? Half of each batch are frames that show one. Progress: 1 less the
steps that are left to success, as a share of those that the slowest success of the instruction took; 0 in a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from vla_rl.data.dataset import DataNeeds
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.probability import (
    CalibrationError,
    check_outcomes,
    choose_threshold,
    fit_probability,
    sigmoid_fit,
)
from vla_rl.evaluation.signal import auc_figure, outcome_figures
from vla_rl.evaluation.statistics import clustered_wilson_interval
from vla_rl.rewards.config import RewardFitConfig, RewardNetworkConfig
from vla_rl.rewards.frames import RewardFrames
from vla_rl.rewards.model import LearnedReward, RewardFacts, RewardNetwork, logits, seen
from vla_rl.training.trainer import Trainer
from vla_rl.types import EnvSpec

_BATCH = 256  # Frames judged together.
_SAY_EVERY = 250
GET_MORE = (
    "Record more episodes of both kinds (vla-rl collect with collect.keep=all; on a robot vla-rl deploy --record), "
    "hold out a larger share of them (reward.holdout), or accept a higher reward.max_false_success."
)

DROPOUT = 0.1  # While training.


def data_needs(config: RewardFitConfig, spec: EnvSpec) -> DataNeeds:
    """What datasets must have for it."""
    cameras = config.cameras or spec.cameras
    state_dim = spec.state_dim if config.use_state else None
    return DataNeeds(cameras, spec.action_dim, state_dim, config.image_size, spec.control_hz)


def fit_reward(
    config: RewardFitConfig,
    frames: RewardFrames,
    seed: int,
    device: torch.device | str = "cpu",
    show: Callable[[str], None] = lambda _: None,
) -> LearnedReward:
    """Fit the network on most initial states, its threshold and probabilities on the others.

    Args:
        frames: all episodes, of both kinds.

    Raises:
        CalibrationError: too few failures to bound false successes, or no threshold that does.
        ValueError: all episodes ended alike.
        TrainingDivergedError: the loss became NaN or infinite too often.
    """
    if config.control == "shuffled_outcomes":
        frames = frames.with_shuffled_outcomes(seed)
    train, held = frames.hold_out(config.holdout, seed)
    _check_outcomes(config, train, held)
    longest = {
        str(text): int(train.steps_to_success[train.success & (train.instructions == text)].max())
        for text in np.unique(train.instructions[train.success])
    }
    cameras = tuple(frames.parts[0].images)
    state_dim = frames.parts[0].state.shape[1] if config.use_state else 0
    torch.manual_seed(seed)
    network = RewardNetwork(RewardNetworkConfig(width=config.width, dropout=DROPOUT), len(cameras), state_dim)
    if state_dim:
        _normalize(network, train)
    network.to(device)
    show(f"fitting on {len(train)} episodes ({100 * train.success.mean():.0f} % successes), {len(held)} held out")
    reader = _Reader(train, cameras, config.image_size, state_dim)
    _train(network, config, reader, longest, seed, show)
    facts = _calibrated(network.to("cpu").eval(), config, held, cameras, state_dim, longest)
    facts = facts.model_copy(update={"policies": frames.policies, "datasets": _fingerprints(config)})
    return LearnedReward(network, facts)


def progress_target(frames: RewardFrames, longest: dict[str, int]) -> np.ndarray:
    """What progress is to be at each frame, float32 (M,).

    Args:
        longest: instruction -> control steps of its slowest success; those of an unknown one are the slowest's of all.
    """
    most = max(longest.values())
    span = np.array([longest.get(str(text), most) for text in frames.instructions])[frames.owner]
    way = np.clip(1 - frames.remaining / span, 0, 1)
    return np.where(frames.success[frames.owner], way, 0.0).astype(np.float32)


def frame_logits(
    network: RewardNetwork, frames: RewardFrames, cameras: Sequence[str], image_size: int, state_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of success and progress at all M frames, float32 (M,) each; the same as a stream of each episode gives."""
    reader = _Reader(frames, cameras, image_size, state_dim)
    parts = []
    for first in range(0, len(frames.owner), _BATCH):
        rows = np.arange(first, min(first + _BATCH, len(frames.owner)))
        parts.append(logits(network, *reader.read(rows)))
    success, progress = zip(*parts, strict=True)
    return np.concatenate(success), np.concatenate(progress)


def highest(values: np.ndarray, frames: RewardFrames) -> np.ndarray:
    """The highest value of each episode, its first frame left out: float64 (E,); values: float (M,)."""
    later = frames.step > 0
    result = np.full(len(frames), -np.inf)
    np.maximum.at(result, frames.owner[later], values[later])
    return result


class _Reader:
    """Frames as the network reads them."""

    def __init__(self, frames: RewardFrames, cameras: Sequence[str], image_size: int, state_dim: int) -> None:
        self.frames, self._cameras, self._size, self._state_dim = frames, cameras, image_size, state_dim
        self._first = frames.first[frames.owner]

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """First, previous and present images and states at `rows`, int64 (n,), and the instructions."""
        first = self._first[rows]
        three = np.stack([first, np.maximum(rows - 1, first), rows], 1)
        obs = self.frames.observation(three.ravel())
        images, states = seen(obs, self._cameras, self._size, self._state_dim)
        shape = three.shape
        return images.reshape(*shape, *images.shape[1:]), states.reshape(*shape, -1), obs.instruction[::3]


def _check_outcomes(config: RewardFitConfig, train: RewardFrames, held: RewardFrames) -> None:
    if train.success.all() or not train.success.any():
        kind = "succeeded" if train.success.all() else "failed"
        raise ValueError(f"reward.datasets: all {len(train)} episodes to learn from {kind}. {GET_MORE}")
    check_outcomes(held.success, held.starts, config.max_false_success, config.min_failures, GET_MORE)


def _normalize(network: RewardNetwork, frames: RewardFrames) -> None:
    """By the states of these episodes' control steps: of those to learn from, not of those held out."""
    states = frames.states().astype(np.float64)
    network.state_mean.copy_(torch.from_numpy(states.mean(0)))
    network.state_spread.copy_(torch.from_numpy(np.maximum(states.std(0), 0.01)))


def _train(
    network: RewardNetwork,
    config: RewardFitConfig,
    reader: _Reader,
    longest: dict[str, int],
    seed: int,
    show: Callable[[str], None],
) -> None:
    frames, device = reader.frames, network.state_mean.device
    target = progress_target(frames, longest)
    shows, others = np.flatnonzero(frames.reached), np.flatnonzero(~frames.reached)

    def loss(step: int) -> tuple[torch.Tensor, dict[str, Any]]:
        rng = np.random.default_rng([seed, step])
        half = config.batch_size // 2
        rows = np.concatenate([rng.choice(shows, half), rng.choice(others, config.batch_size - half)])
        torch.manual_seed(int(rng.integers(2**31)))
        images, states, instruction = reader.read(rows)
        success, progress = network(
            torch.from_numpy(images).to(device), torch.from_numpy(states).to(device), instruction
        )
        reached = torch.from_numpy(frames.reached[rows]).to(device)
        of_success = F.binary_cross_entropy_with_logits(success, reached.float())
        of_progress = F.binary_cross_entropy_with_logits(progress, torch.from_numpy(target[rows]).to(device))
        accuracy = ((success > 0) == reached).float().mean()
        return of_success + of_progress, {"success": of_success, "progress": of_progress, "accuracy": accuracy}

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step % _SAY_EVERY == 0 or step == config.steps:
            text = ", ".join(f"{name} {metrics[name]:.3f}" for name in ("success", "progress") if name in metrics)
            show(f"step {step} of {config.steps}: loss of {text}")

    network.train()
    Trainer(dict(network.named_parameters()), config, "reward").run(loss, on_step)


def _calibrated(
    network: RewardNetwork,
    config: RewardFitConfig,
    held: RewardFrames,
    cameras: tuple[str, ...],
    state_dim: int,
    longest: dict[str, int],
) -> RewardFacts:
    """The threshold, and what logits mean, by episodes that the network has not learned from."""
    success, progress = frame_logits(network, held, cameras, config.image_size, state_dim)
    score, real = highest(success, held), held.success
    threshold = choose_threshold(score, real, held.starts, config.max_false_success)
    probability = fit_probability(score, real, held.starts)
    of_progress = sigmoid_fit(progress.astype(np.float64), progress_target(held, longest).astype(np.float64))
    if threshold is None or probability is None or of_progress is None:
        best = clustered_wilson_interval(score[~real] >= score[real].max(), held.starts[~real]).high
        raise CalibrationError(
            f"the reward cannot tell successes from failures: no threshold keeps the false-success rate's upper 95 % "
            f"limit at {config.max_false_success:.0%} and lets any of {real.sum()} held-out successes count (the best "
            f"that does reaches {best:.0%}). Fit it longer (reward.steps) or on more episodes. {GET_MORE}"
        )
    return RewardFacts(
        network=RewardNetworkConfig(width=config.width, dropout=DROPOUT),
        cameras=cameras,
        image_size=config.image_size,
        state_dim=state_dim,
        every=config.every,
        threshold=threshold,
        max_false_success=config.max_false_success,
        probability=probability,
        progress_slope=of_progress[0],
        progress_intercept=of_progress[1],
        longest_steps=longest,
        policies=(),
        datasets={},
        figures={**outcome_figures(real, score > threshold, held.starts), "auc": auc_figure(score, real, held.starts)},
        num_episodes=len(held),
        num_failures=int((~real).sum()),
    )


def _fingerprints(config: RewardFitConfig) -> dict[str, str]:
    return {data.path: LeRobotSource(data.path).fingerprint() for data in config.datasets}
