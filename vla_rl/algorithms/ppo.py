"""PPO: advantages by GAE from a critic, which learns beside the policy. Imports no torch.

Shape legend: N decisions (chunks), K chunks of one episode, H actions in a chunk, T steps, E episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from vla_rl.algorithms.base import SurrogateConfig
from vla_rl.algorithms.batch import (
    Batch,
    Evaluate,
    decisions,
    log_prob_gap,
    shuffle_advantages,
)
from vla_rl.algorithms.options import ClipConfig
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import ConfigError
from vla_rl.interfaces import PolicyOutput
from vla_rl.types import ActionChunk, Episode

if TYPE_CHECKING:
    import torch


AdvantageLevel = Literal["action", "chunk"]


class PPOConfig(SurrogateConfig):
    """Proximal Policy Optimization (Schulman et al. 2017) with GAE (Schulman et al. 2016) and a value head."""

    uses_critic: ClassVar[bool] = True

    kind: Literal["ppo"] = "ppo"
    clip: ClipConfig = ClipConfig(high=0.2)
    gamma: float = Field(
        default=0.99, gt=0, le=1, description="Discount per decision (chunk) or per action: advantage_level."
    )
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    bootstrap_truncated: bool = Field(
        default=True,
        description="After an episode that its horizon cut off, count V of its last observation, as if it went on. "
        "false: count 0, so that not having succeeded by then is failure, as an evaluation has it.",
    )
    advantage_level: AdvantageLevel = Field(
        default="chunk", description="Whether GAE steps over chunks or over single actions."
    )
    normalize_std: bool = Field(
        default=True, description="Shift and scale the batch's advantages to mean 0, deviation 1."
    )
    value_lr: float = Field(default=3e-3, gt=0, description="Learning rate of the value head.")
    value_coef: float = Field(default=0.5, gt=0, description="Weight of the value loss.")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="How far the value may move from the rollout's; null: off."
    )
    critic_warmup: int = Field(
        default=0, ge=0, description="Iterations at the start in which only the value head learns."
    )

    @property
    def critic_lr(self) -> float:
        return self.value_lr

    def trains_only_critic(self, iteration: int) -> bool:
        return iteration < self.critic_warmup

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make a batch whose advantages, one per decision or action, come from the critic's values by GAE.

        The shuffled control permutes them over all decisions, or actions (`advantage_level`), that count; the critic
        still learns the true returns.
        """
        episode, chunk, chunks, valid = decisions(episodes)
        log_prob, value = evaluate(episodes, episode, chunk, chunks)
        assert value is not None, "a policy with a value head gives values"
        bootstrap = bootstrap_values(episodes, evaluate) if self.bootstrap_truncated else np.zeros(len(episodes))
        estimates = [
            _episode_gae(self, e, value[episode == number], float(bootstrap[number]))
            for number, e in enumerate(episodes)
        ]
        advantage = np.concatenate([a for a, _ in estimates])
        returns = np.concatenate([r for _, r in estimates]).astype(np.float32)
        if shuffle is not None:
            advantage = _shuffled(self, advantage, valid, shuffle, world)
        counted, own = world.all_gather_rows(advantage[valid])
        all_values, all_returns = world.all_gather_rows(value)[0], world.all_gather_rows(returns)[0]
        metrics = {
            "advantage/mean": float(counted.mean()),
            "advantage/std": float(counted.std()),
            "critic/value": float(all_values.mean()),
            "critic/explained_variance": _explained_variance(all_values, all_returns),
        }
        if self.normalize_std:
            counted = whiten(counted)
        dense = np.zeros(valid.shape, np.float32)
        dense[valid] = counted[own]
        metrics |= log_prob_gap(chunks.log_prob, log_prob, valid, world)
        return Batch(episodes, episode, chunk, chunks, valid, dense, log_prob, None, value, returns, metrics)

    def loss(
        self, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput, *, num_rows: int, only_critic: bool
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the clipped surrogate plus the critic's loss, a mean over the minibatch's decisions."""
        from vla_rl.algorithms.losses import surrogate_loss, tensor, value_loss

        loss, metrics = surrogate_loss(self, batch, rows, weight, out)
        assert out.value is not None and batch.returns is not None and batch.old_value is not None, "a critic has all"
        value = out.value.float()
        error = value_loss(
            value,
            tensor(batch.returns[rows], value),
            tensor(batch.old_value[rows], value),
            clip=self.value_clip,
        )
        metrics["loss/value"] = error / num_rows
        value_term = self.value_coef * metrics["loss/value"]
        return (value_term if only_critic else loss + value_term), metrics

    @model_validator(mode="after")
    def _levels_fit(self) -> PPOConfig:
        if self.ratio_level == "chunk" and self.advantage_level == "action":
            raise ConfigError(
                "algo.ratio_level: got 'chunk' with advantage_level 'action'. One ratio per chunk cannot be weighted "
                "by an advantage per action; allowed with 'action': ratio_level token or action."
            )
        return self


def bootstrap_values(episodes: Sequence[Episode], evaluate: Evaluate) -> np.ndarray:
    """Return V after each episode's last step, float32 (E,): 0 if it terminated, V(final observation) if truncated."""
    result = np.zeros(len(episodes), np.float32)
    cut = np.array([i for i, e in enumerate(episodes) if not e.terminated.any()], np.int64)
    if len(cut):
        # The value is of the observation alone; the last chunk only fills the argument.
        filler = ActionChunk.concatenate([episodes[i].chunks.select([-1]) for i in cut])
        last = np.array([episodes[i].num_chunks for i in cut])
        _, value = evaluate(episodes, cut, last, filler)
        assert value is not None, "a policy with a value head gives values"
        result[cut] = value
    return result


def _episode_gae(
    config: PPOConfig, episode: Episode, value: np.ndarray, bootstrap: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantage (K, H) and return (K,) at the config's level."""
    factors = {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
    if config.advantage_level == "action":
        return action_gae(episode.reward, episode.num_steps, value, bootstrap, **factors)
    return chunk_gae(episode.reward, value, bootstrap, **factors)


def _shuffled(
    config: PPOConfig, advantage: np.ndarray, valid: np.ndarray, shuffle: np.random.Generator, world: ProcessGroup
) -> np.ndarray:
    """Deal advantages (N, H) anew at the config's level: a decision's actions keep one advantage if they share one.

    Dealt to each action alone, they would average out within a chunk, and the control move less than the run.
    """
    units = valid if config.advantage_level == "action" else valid.any(1)
    pooled, own = world.all_gather_rows(advantage[units])
    shuffled = advantage.copy()
    shuffled[units] = shuffle_advantages(pooled, shuffle)[own]
    return shuffled


def _explained_variance(value: np.ndarray, returns: np.ndarray) -> float:
    """Return 1 - Var(returns - value) / Var(returns); 0 when the returns are all the same."""
    spread = float(returns.var())
    return 1.0 - float((returns - value).var()) / spread if spread > 0 else 0.0


def gae(
    reward: np.ndarray, value: np.ndarray, bootstrap: float, *, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute generalized advantage estimation over one episode (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lambda A_{t+1}

    Args:
        reward: float (T,). value: float (T,), the critic's estimate before each step.
        bootstrap: V after the last step: 0 when the episode terminated, V(final observation) when it was truncated.

    Returns:
        advantage float64 (T,), and return (the critic's target) A + V, float64 (T,).
    """
    reward, value = np.asarray(reward, np.float64), np.asarray(value, np.float64)
    next_value = np.append(value[1:], bootstrap)
    delta = reward + gamma * next_value - value
    advantage = np.zeros_like(delta)
    running = 0.0
    for t in reversed(range(len(delta))):
        running = delta[t] + gamma * gae_lambda * running
        advantage[t] = running
    return advantage, advantage + value


def chunk_gae(
    reward: np.ndarray, value: np.ndarray, bootstrap: float, *, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Compute GAE with one step per decision: a chunk's reward is the sum over its actions; discount per chunk.

    Args:
        reward: float (K, H), zero where not executed. value: float (K,). bootstrap: as in `gae`.

    Returns:
        advantage float64 (K, H), the same for all actions of a chunk, and return float64 (K,).
    """
    advantage, returns = gae(reward.sum(1), value, bootstrap, gamma=gamma, gae_lambda=gae_lambda)
    return np.repeat(advantage[:, None], reward.shape[1], axis=1), returns


def action_gae(
    reward: np.ndarray,
    num_steps: np.ndarray,
    value: np.ndarray,
    bootstrap: float,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute GAE with one step per executed action; discount and lambda per action.

    The critic sees the observation once per chunk, so its estimate is held for the chunk's actions.

    Args:
        reward: float (K, H). num_steps: int (K,), actions executed of each chunk, at least 1.
        value: float (K,). bootstrap: as in `gae`.

    Returns:
        advantage float64 (K, H), zero where not executed, and return at each chunk's first action, float64 (K,).
    """
    executed = np.arange(reward.shape[1]) < np.asarray(num_steps)[:, None]
    held = np.repeat(np.asarray(value, np.float64)[:, None], reward.shape[1], axis=1)
    flat, returns = gae(reward[executed], held[executed], bootstrap, gamma=gamma, gae_lambda=gae_lambda)
    advantage, target = np.zeros(reward.shape), np.zeros(reward.shape)
    advantage[executed], target[executed] = flat, returns
    return advantage, target[:, 0]


def whiten(advantage: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Return (A - mean) / (std + eps) over all entries; a single entry is only shifted."""
    centered = advantage - advantage.mean()
    return centered / (advantage.std(ddof=1) + eps) if len(advantage) > 1 else centered
