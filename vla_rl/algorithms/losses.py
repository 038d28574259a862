"""Losses of the RL algorithms, pure torch: clipped surrogate, KL, entropy, value. Each gives (loss, metrics).

Shape legend: B decisions (chunks), H actions in a chunk, A action dimensions. A *unit* is what one
probability ratio covers: a token (B, H, A), an action (B, H) or a chunk (B,).

Losses are sums weighted by `weight` (B, H), which `action_weights` makes once for a whole minibatch.
So the losses, and gradients, of its micro-batches add up to the minibatch's, however it is cut.
"""

from __future__ import annotations

import numpy as np
import torch

from vla_rl.algorithms.configs import LossReduction, RatioLevel

Metrics = dict[str, torch.Tensor]


def action_weights(
    valid: np.ndarray, trajectory: np.ndarray, ratio_level: RatioLevel, reduction: LossReduction
) -> np.ndarray:
    """Weight of each action in the loss; they sum to 1 over the minibatch.

    token_mean: every valid unit counts the same. trajectory_mean: every trajectory counts the same,
    and within it every valid unit. With `ratio_level="chunk"` a chunk's weight is spread evenly over
    its valid actions, so a chunk cut short by success counts as much as a whole one.

    Args:
        valid: bool (B, H). trajectory: int (B,), which episode each decision belongs to.

    Returns:
        float64 (B, H), zero where not valid; all zero when nothing is valid.
    """
    weight = valid.astype(np.float64)
    if ratio_level == "chunk":
        weight /= np.maximum(valid.sum(1, keepdims=True), 1)
    if reduction == "trajectory_mean":
        _, number = np.unique(trajectory, return_inverse=True)
        totals = np.bincount(number, weights=weight.sum(1))
        weight /= np.where(totals > 0, totals, 1.0)[number][:, None]
    total = weight.sum()
    return weight / total if total > 0 else weight


def clipped_surrogate(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective, negated, per unit (Schulman et al. 2017, eq. 7), with two bounds (DAPO, eq. 8).

        L = max(-A r, -A clip(r, 1 - low, 1 + high));  where A < 0 also L = min(L, -A c)  (dual clip, c > 1)

    Dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5) bounds the push away from a bad action that has
    already become much more likely.

    Args:
        log_ratio, advantage: any one shape.

    Returns:
        loss per unit, and bool per unit: True where a clip is active, so that the gradient is zero.
    """
    ratio = log_ratio.exp()
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
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantage: torch.Tensor,
    weight: torch.Tensor,
    *,
    ratio_level: RatioLevel = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """The weighted clipped surrogate, with one ratio per token, action or chunk.

    Args:
        log_prob, old_log_prob: (B, H, A).
        advantage: (B, H), constant over a chunk's actions when `ratio_level="chunk"`.
        weight: (B, H) from `action_weights` with the same level; zero leaves an action out.

    Returns:
        scalar, and metrics summed with the same weights: `clip_fraction`, `ratio`, `ratio_squared`,
        `approx_kl` (k3 of old to new, per unit), `weight`; and `ratio_max`.
    """
    counted = weight > 0
    difference = torch.where(counted[..., None], log_prob - old_log_prob, 0.0)
    if ratio_level == "token":
        log_ratio, unit_weight = difference, (weight / log_prob.shape[-1])[..., None].expand_as(difference)
        unit_advantage = advantage[..., None].expand_as(difference)
    elif ratio_level == "action":
        log_ratio, unit_weight, unit_advantage = difference.sum(-1), weight, advantage
    else:
        log_ratio, unit_weight = difference.sum((-1, -2)), weight.sum(-1)
        unit_advantage = (advantage * weight).sum(-1) / unit_weight.clamp_min(torch.finfo(weight.dtype).tiny)
    per_unit, is_clipped = clipped_surrogate(log_ratio, unit_advantage, clip_low, clip_high, dual_clip)
    with torch.no_grad():
        ratio = log_ratio.exp()
        metrics = {
            "clip_fraction": (unit_weight * is_clipped).sum(),
            "ratio": (unit_weight * ratio).sum(),
            "ratio_squared": (unit_weight * ratio**2).sum(),
            "approx_kl": (unit_weight * k3(log_ratio)).sum(),
            "weight": unit_weight.sum(),
            "ratio_max": ratio[unit_weight > 0].max() if bool(counted.any()) else torch.ones((), device=ratio.device),
        }
    return (unit_weight * per_unit).sum(), metrics


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimator of KL(p || q) from a sample of p, log_ratio = log q - log p: exp(x) - 1 - x >= 0."""
    return torch.expm1(log_ratio) - log_ratio


def kl_loss(log_prob: torch.Tensor, reference_log_prob: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """k3 estimate of KL(policy || reference) per token (DeepSeekMath, eq. 4), weighted.

    Args:
        log_prob, reference_log_prob: (B, H, A). weight: (B, H).
    """
    return (weight * k3(reference_log_prob - log_prob).mean(-1)).sum()


def entropy_mean(entropy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Weighted mean entropy per token, in nats. entropy (B, H, A), weight (B, H)."""
    return (weight * entropy.mean(-1)).sum()


def value_loss(
    value: torch.Tensor,
    target: torch.Tensor,
    old_value: torch.Tensor,
    *,
    kind: str = "huber",
    clip: float | None = 0.2,
    huber_delta: float = 10.0,
) -> torch.Tensor:
    """The critic's loss, summed over decisions: 0.5 error^2, or Huber; the worse of clipped and not.

    Value clipping: V may differ from the rollout's by at most `clip` (Schulman's PPO code; Engstrom et al. 2020).

    Args:
        value, target, old_value: (B,).
    """

    def error(x: torch.Tensor) -> torch.Tensor:
        if kind == "huber":
            return torch.nn.functional.huber_loss(x, target, reduction="none", delta=huber_delta)
        return 0.5 * (x - target) ** 2

    loss = error(value)
    if clip is not None:
        loss = torch.maximum(loss, error(old_value + (value - old_value).clamp(-clip, clip)))
    return loss.sum()
