"""Losses of the RL algorithms, pure torch: clipped surrogate, KL, entropy, value. Each gives (loss, metrics).

Shape legend: B decisions (chunks), H actions in a chunk, A action dimensions. A *unit* is what one
probability ratio covers: a token (B, H, A), an action (B, H) or a chunk (B,).

Losses are sums weighted by `weight` (B, H), which `minibatch_weights` makes once for whole minibatches.
So the losses, and gradients, of their micro-batches add up to the minibatch's, however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vla_rl.algorithms.batch import MAX_LOG_RATIO, Batch

if TYPE_CHECKING:
    from vla_rl.algorithms.options import AlgoOptions, SurrogateOptions
    from vla_rl.interfaces import PolicyOutput

Metrics = dict[str, torch.Tensor]

# Largest importance weight of a chunk that an earlier policy drew (AReaL, arXiv 2505.24298, truncates likewise).
BEHAVIOR_CAP = 2.0
# Error of the critic from which its loss grows linearly. Returns are at most 1 where success pays 1, so that only a
# critic gone astray gets there.
HUBER_DELTA = 10.0
FIXED_ENTROPY = (
    "algo.entropy_coef: got {:g}, but this policy's entropy does not depend on what is trained, so that a bonus does "
    "nothing: the noise of Flow-SDE, of diffusion policies and of ACT is fixed. Set it to 0; or, for a flow policy "
    "or ACT, set policy.sampling.method=flow_noise, whose noise is learned"
)


def minibatch_weights(
    valid: np.ndarray, trajectory: np.ndarray, parts: Sequence[np.ndarray], config: AlgoOptions
) -> list[np.ndarray]:
    """Return the weight of each action in the loss, float64 (B, H) for each minibatch of an epoch; 0 where not valid.

    token_mean: every valid unit of a minibatch counts the same, and its weights sum to 1. trajectory_mean: every
    trajectory of the batch does, and within it every valid unit; a minibatch's weights sum to 1 on average. Where
    the config `counts_chunks`, a chunk cut short by success counts as much as a whole one.

    Args:
        valid: bool (N, H), of the whole batch. trajectory: int (N,), which episode each decision belongs to.
        parts: the minibatches' decisions, int (B,) each; together every decision once.
    """
    weight = valid.astype(np.float64)
    if config.counts_chunks:
        weight /= np.maximum(valid.sum(1, keepdims=True), 1)
    if config.loss_reduction == "token_mean":
        return [weight[rows] / (weight[rows].sum() or 1.0) for rows in parts]
    return _by_trajectory(weight, trajectory, parts)


def _by_trajectory(weight: np.ndarray, trajectory: np.ndarray, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    _, number = np.unique(trajectory, return_inverse=True)
    totals = np.bincount(number, weights=weight.sum(1))
    weight /= np.where(totals > 0, totals, 1.0)[number][:, None]
    weight /= weight.sum() / len(parts) or 1.0
    return [weight[rows] for rows in parts]


def surrogate_loss(
    config: SurrogateOptions, batch: Batch, rows: np.ndarray, weight: np.ndarray, out: PolicyOutput
) -> tuple[torch.Tensor, Metrics]:
    """Return the clipped surrogate with the config's entropy and KL terms, and metrics; see `AlgoOptions.loss`.

    Raises:
        ValueError: an entropy bonus for a policy whose entropy has no gradient.
    """
    if config.entropy_coef > 0 and out.log_prob.requires_grad and not out.entropy.requires_grad:
        raise ValueError(FIXED_ENTROPY.format(config.entropy_coef))
    log_prob = out.log_prob.float()
    weights = tensor(weight, log_prob)
    old, advantage = tensor(batch.old_log_prob[rows], log_prob), tensor(batch.advantage[rows], log_prob)
    behavior = None if batch.behavior_log_prob is None else tensor(batch.behavior_log_prob[rows], log_prob)
    loss, metrics = policy_loss(config, log_prob, old, advantage, weights, behavior)
    metrics |= {"loss/policy": loss, "entropy": entropy_mean(out.entropy.float(), weights)}
    loss = loss - config.entropy_coef * metrics["entropy"]
    if config.kl_coef > 0:
        metrics["kl_reference"] = _kl_to_reference(batch, rows, log_prob, weights)
        loss = loss + config.kl_coef * metrics["kl_reference"]
    return loss, metrics


def _kl_to_reference(batch: Batch, rows: np.ndarray, log_prob: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    assert batch.reference_log_prob is not None, "prepare() fills it when kl_coef > 0"
    return kl_loss(log_prob, tensor(batch.reference_log_prob[rows], log_prob), weights)


def tensor(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return the values as float32, where `like` lies."""
    found = torch.as_tensor(values, dtype=torch.float32)
    return found if like.is_cpu else found.pin_memory().to(like.device, non_blocking=True)


def clipped_surrogate(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute PPO's clipped objective, negated, per unit (Schulman et al. 2017, eq. 7), with two bounds (DAPO, eq. 8).

        L = max(-A r, -A clip(r, 1 - low, 1 + high));  where A < 0 also L = min(L, -A c)  (dual clip, c > 1)

    Dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5) bounds the push away from a bad action that has
    already become much more likely.

    Args:
        log_ratio, advantage: any one shape.

    Returns:
        loss per unit, and bool per unit: True where a clip is active, so that the gradient is zero.
    """
    ratio = bounded(log_ratio).exp()
    plain = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if dual_clip is not None:
        bound = -advantage * dual_clip
        beyond = (advantage < 0) & (loss > bound)
        loss = torch.where(beyond, bound, loss)
        is_clipped = is_clipped | beyond
    return loss, is_clipped


def policy_loss(
    config: SurrogateOptions,
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    behavior: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Return the weighted clipped surrogate, a scalar, with one ratio per token, action or chunk; and `ratio_metrics`.

    Args:
        config: its ratio_level and clips. log_prob, old: (B, H, A).
        advantage: (B, H), constant over a chunk's actions when `ratio_level="chunk"`.
        weight: (B, H) from `minibatch_weights` with the same level; zero leaves an action out.
        behavior: (B, H, A), of the policies that drew the chunks; None: `old` is theirs. See `decoupled`.
    """
    log_ratio = _of_units(log_prob - old, weight, config)
    if config.ratio_level == "token":
        unit_weight = (weight / log_prob.shape[-1])[..., None].expand_as(log_ratio)
        unit_advantage = advantage[..., None].expand_as(log_ratio)
    elif config.ratio_level == "action":
        unit_weight, unit_advantage = weight, advantage
    else:
        unit_weight = weight.sum(-1)
        unit_advantage = (advantage * weight).sum(-1) / unit_weight.clamp_min(torch.finfo(weight.dtype).tiny)
    clips = config.clip.low, config.clip.high, config.clip.dual
    per_unit, is_clipped = clipped_surrogate(log_ratio, unit_advantage, *clips)
    metrics = ratio_metrics(log_ratio, unit_weight, is_clipped)
    if behavior is not None:
        per_unit, importance = decoupled(per_unit, _of_units(old - behavior, weight, config), unit_weight)
        metrics |= importance
    return (unit_weight * per_unit).sum(), metrics


def _of_units(difference: torch.Tensor, weight: torch.Tensor, config: SurrogateOptions) -> torch.Tensor:
    """Sum differences of log-probabilities (B, H, A) over what one ratio covers; 0 where the weight (B, H) is."""
    difference = torch.where((weight > 0)[..., None], difference, 0.0)
    if config.ratio_level == "token":
        return difference
    return difference.sum(-1) if config.ratio_level == "action" else difference.sum((-1, -2))


def decoupled(per_unit: torch.Tensor, log_ratio: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
    """Return the loss per unit of the decoupled objective, for chunks that an earlier policy drew, and metrics.

    Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298: the ratio is clipped around the proximal policy, and
    each unit counts by the importance weight min(proximal / behavior, BEHAVIOR_CAP), through which no gradient goes.

    Args:
        per_unit: the clipped loss. log_ratio: of proximal to behavior policy, without gradient. weight: of each unit.
            All of one shape.

    Metrics are sums over the importance weights before they are truncated, and the largest; see `ratio_metrics`.
    """
    importance = bounded(log_ratio).exp()
    return per_unit * importance.clamp_max(BEHAVIOR_CAP), {
        "importance": (weight * importance).sum(),
        "importance_squared": (weight * importance**2).sum(),
        "importance_truncated": (weight * (importance > BEHAVIOR_CAP)).sum(),
        "importance_max": torch.where(weight > 0, importance, 0.0).amax(),
    }


@torch.no_grad()
def ratio_metrics(log_ratio: torch.Tensor, weight: torch.Tensor, is_clipped: torch.Tensor) -> Metrics:
    """Return sums over the ratios, with their weights, and the largest; `approx_kl` is k3 of old to new, per unit.

    Args:
        log_ratio, weight, is_clipped: of one shape, one entry per ratio.
    """
    ratio = bounded(log_ratio).exp()
    largest = torch.where(weight > 0, ratio, -1.0).amax()  # Not by indexing, which makes a GPU's host wait.
    return {
        "clip_fraction": (weight * is_clipped).sum(),
        "ratio": (weight * ratio).sum(),
        "ratio_squared": (weight * ratio**2).sum(),
        "approx_kl": (weight * k3(log_ratio)).sum(),
        "weight": weight.sum(),
        "ratio_max": torch.where(largest < 0, 1.0, largest),
    }


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return a log ratio, any shape, of at most `MAX_LOG_RATIO`; below that the same to the bit.

    exp() of float32 is infinite from 89 on, and a clip's zero gradient times infinity is NaN. The bound moves the value
    alone. The gradient passes as if there were none, so that an action whose ratio ran away is still pulled back.
    """
    return log_ratio - (log_ratio - MAX_LOG_RATIO).clamp_min(0.0).detach()


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Estimate KL(p || q) from a sample of p, x = log q - log p, by Schulman's k3: exp(x) - 1 - x >= 0."""
    log_ratio = bounded(log_ratio)
    return torch.expm1(log_ratio) - log_ratio


def kl_loss(log_prob: torch.Tensor, reference_log_prob: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the k3 estimate of KL(policy || reference) per token (DeepSeekMath, eq. 4), weighted.

    Args:
        log_prob, reference_log_prob: (B, H, A). weight: (B, H).
    """
    return (weight * k3(reference_log_prob - log_prob).mean(-1)).sum()


def entropy_mean(entropy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean entropy per token, in nats. entropy (B, H, A), weight (B, H)."""
    return (weight * entropy.mean(-1)).sum()


def value_loss(
    value: torch.Tensor,
    target: torch.Tensor,
    old_value: torch.Tensor,
    *,
    clip: float | None = 0.2,
) -> torch.Tensor:
    """Return the critic's loss, summed over decisions: Huber's of the error; the worse of clipped and not.

    Value clipping: V may differ from the rollout's by at most `clip` (Schulman's PPO code; Engstrom et al. 2020).

    Args:
        value, target, old_value: (B,).
    """

    def error(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.huber_loss(x, target, reduction="none", delta=HUBER_DELTA)

    loss = error(value)
    if clip is not None:
        loss = torch.maximum(loss, error(old_value + (value - old_value).clamp(-clip, clip)))
    return loss.sum()
