"""From a rollout's episodes to a `Batch`: advantages, masks, old log-probabilities. Numpy only.

The policy is reached through `evaluate(episodes, episode, chunk, chunks) -> (log_prob, value)`,
which the learner provides. With several processes the episodes are this one's, in whole groups, and what is
taken over all episodes (whitening, shuffling, metrics) is taken over everyone's. Shape legend as in `batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vla_rl.algorithms import advantages as adv
from vla_rl.algorithms.batch import Batch, has_spread, index_decisions, valid_actions
from vla_rl.algorithms.configs import AlgoConfig, GroupConfig, PPOConfig
from vla_rl.distributed.process_group import ALONE, ProcessGroup
from vla_rl.types import ActionChunk, Episode

Evaluate = Callable[[Sequence[Episode], np.ndarray, np.ndarray, ActionChunk], tuple[np.ndarray, np.ndarray | None]]


def skips_zero_advantage(config: AlgoConfig) -> bool:
    """Whether decisions with advantage 0 have no gradient at all, and need no forward pass."""
    regularized = config.kl_coef > 0 or config.entropy_coef > 0 or config.uses_critic
    return config.skip_zero_advantage and not regularized


def group_batch(
    config: GroupConfig,
    episodes: list[Episode],
    evaluate: Evaluate,
    shuffle: np.random.Generator | None = None,
    world: ProcessGroup = ALONE,
) -> Batch:
    """A batch whose advantages, one per episode, come from the others of its group.

    Args:
        episodes: none lost.
        shuffle: permutes advantages over all episodes (the negative control); None: as they are.

    Raises:
        ValueError: every group has one episode, so there is nothing to compare.
    """
    rewards = np.array([e.total_reward for e in episodes])
    groups = np.array([e.group for e in episodes])
    all_groups, _ = world.all_gather_rows(groups)
    if len(np.unique(all_groups)) == len(all_groups):
        raise ValueError(
            f"algo.kind {config.kind!r} compares episodes from the same initial state, but each of the "
            f"{len(all_groups)} groups has one. Set the rollout's group size to at least 2, or use ppo."
        )
    advantage, included = config.trajectory_advantages(rewards, groups)
    if config.filter_groups:
        included = included & has_spread(rewards, groups)
    if shuffle is not None:
        # Being in the batch travels with the advantage, so that the outcome decides neither.
        pooled, own = world.all_gather_rows(np.stack([advantage, included], axis=1))
        dealt = adv.shuffle_advantages(pooled, shuffle)[own]
        advantage, included = dealt[:, 0], dealt[:, 1].astype(bool)
    kept = [e for e, use in zip(episodes, included, strict=True) if use]
    episode, chunk = index_decisions(kept)
    parts = [e.chunks for e in kept]
    chunks = ActionChunk.concatenate(parts) if parts else episodes[0].chunks.select([])
    valid = _valid(kept, config, chunks.actions.shape[1])
    dense = np.where(valid, advantage[included][episode][:, None], 0.0).astype(np.float32)
    batch = Batch(kept, episode, chunk, chunks, valid, dense, np.zeros(chunks.actions.shape, np.float32))
    if not config.recompute_old_log_prob:
        batch.old_log_prob = rollout_log_prob(chunks)
        return batch
    needed = batch.active if skips_zero_advantage(config) else np.ones(batch.size, bool)
    rows = np.flatnonzero(needed)
    batch.old_log_prob[rows], _ = evaluate(kept, episode[rows], chunk[rows], chunks.select(rows))
    batch.metrics |= _log_prob_gap(chunks.log_prob, batch.old_log_prob, valid & needed[:, None], world)
    return batch


def critic_batch(
    config: PPOConfig,
    episodes: list[Episode],
    evaluate: Evaluate,
    shuffle: np.random.Generator | None = None,
    world: ProcessGroup = ALONE,
) -> Batch:
    """A batch whose advantages, one per decision or action, come from the critic's values by GAE.

    Args:
        episodes: none lost.
        shuffle: permutes advantages over all decisions, or actions (`advantage_level`), that count; the critic still
            learns the true returns.
    """
    episode, chunk = index_decisions(episodes)
    chunks = ActionChunk.concatenate([e.chunks for e in episodes])
    log_prob, value = evaluate(episodes, episode, chunk, chunks)
    assert value is not None, "a policy with a value head gives values"
    bootstrap = bootstrap_values(episodes, evaluate) if config.bootstrap_truncated else np.zeros(len(episodes))
    estimates = [
        _gae(config, e, value[episode == number], float(bootstrap[number])) for number, e in enumerate(episodes)
    ]
    advantage = np.concatenate([a for a, _ in estimates])
    returns = np.concatenate([r for _, r in estimates]).astype(np.float32)
    valid = _valid(episodes, config, chunks.actions.shape[1])
    if shuffle is not None:
        advantage = _shuffled(config, advantage, valid, shuffle, world)
    counted, own = world.all_gather_rows(advantage[valid])
    all_values, all_returns = world.all_gather_rows(value)[0], world.all_gather_rows(returns)[0]
    metrics = {
        "advantage/mean": float(counted.mean()),
        "advantage/std": float(counted.std()),
        "critic/value": float(all_values.mean()),
        "critic/explained_variance": _explained_variance(all_values, all_returns),
    }
    if config.normalize_std:
        counted = adv.whiten(counted, config.advantage_eps)
    dense = np.zeros(valid.shape, np.float32)
    dense[valid] = counted[own]
    metrics |= _log_prob_gap(chunks.log_prob, log_prob, valid, world)
    old_log_prob = log_prob if config.recompute_old_log_prob else rollout_log_prob(chunks)
    return Batch(episodes, episode, chunk, chunks, valid, dense, old_log_prob, None, value, returns, metrics)


def bootstrap_values(episodes: Sequence[Episode], evaluate: Evaluate) -> np.ndarray:
    """V after each episode's last step, float32 (E,): 0 if it terminated, V(final observation) if truncated."""
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


def rollout_log_prob(chunks: ActionChunk) -> np.ndarray:
    """The log-probabilities that the rollout recorded, float32 (N, H, A).

    Raises:
        ValueError: it recorded none.
    """
    if chunks.log_prob is None:
        raise ValueError(
            "the rollout carries no log-probabilities (greedy or scripted actions?). "
            "RL needs actions that the policy sampled, at a temperature above 0."
        )
    return chunks.log_prob


def _gae(config: PPOConfig, episode: Episode, value: np.ndarray, bootstrap: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantage (K, H) and return (K,) at the config's level."""
    factors = {"gamma": config.gamma, "gae_lambda": config.gae_lambda}
    if config.advantage_level == "action":
        return adv.action_gae(episode.reward, episode.num_steps, value, bootstrap, **factors)
    return adv.chunk_gae(episode.reward, value, bootstrap, **factors)


def _shuffled(
    config: PPOConfig, advantage: np.ndarray, valid: np.ndarray, shuffle: np.random.Generator, world: ProcessGroup
) -> np.ndarray:
    """Advantage (N, H) dealt anew at the config's level: a decision's actions keep one advantage if they share one.

    Dealt to each action alone, they would average out within a chunk, and the control move less than the run.
    """
    units = valid if config.advantage_level == "action" else valid.any(1)
    pooled, own = world.all_gather_rows(advantage[units])
    dealt = advantage.copy()
    dealt[units] = adv.shuffle_advantages(pooled, shuffle)[own]
    return dealt


def _valid(episodes: Sequence[Episode], config: AlgoConfig, num_actions: int) -> np.ndarray:
    masks = [valid_actions(e, config.mask_after_success) for e in episodes]
    return np.concatenate(masks) if masks else np.zeros((0, num_actions), bool)


def _log_prob_gap(
    recorded: np.ndarray | None, computed: np.ndarray, counted: np.ndarray, world: ProcessGroup
) -> dict[str, float]:
    """How far the rollout's log-probabilities are from the trainer's: mean absolute difference per token."""
    gap = np.zeros(0) if recorded is None else np.abs(recorded[counted] - computed[counted])
    parts = world.gather([float(gap.sum()), gap.size])
    total, num = (sum(column) for column in zip(*parts, strict=True))
    return {"rollout/log_prob_gap": total / num} if num else {}


def _explained_variance(value: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(returns - value) / Var(returns); 0 when the returns are all the same."""
    spread = float(returns.var())
    return 1.0 - float((returns - value).var()) / spread if spread > 0 else 0.0
