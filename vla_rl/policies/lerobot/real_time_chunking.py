"""Real-time chunking (Black et al. 2025, arXiv 2506.07339): a flow policy goes on from actions that are under way.

While a chunk is computed the robot plays the rest of the last one, so the new chunk must agree with it there.
Denoising is guided to that: at each step the velocity is corrected towards a sample whose beginning is that rest
(PiGDM, arXiv 2305.10844). The guidance is that of LeRobot's `RTCProcessor`, which leaves the network's Jacobian out, so
a step costs no backward pass; here as a function of tensors alone, which a CUDA graph can hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lerobot.configs import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor
from torch import Tensor

from vla_rl.policies.lerobot.flow_sampling import Velocity
from vla_rl.types import PREFIX_SCHEDULES, ActionPrefix


def rtc_config(prefix: ActionPrefix, own: Any) -> Any:
    """LeRobot's `RTCConfig` for a prefix: what it says, else the checkpoint's `own` (or None), else LeRobot's defaults.

    The horizon is at least the number of frozen actions; LeRobot would freeze no more than the horizon.

    Raises:
        ValueError: an option out of range.
    """
    config = replace(own or RTCConfig(), enabled=True, debug=False)
    if prefix.prefix_attention_schedule is not None:
        if prefix.prefix_attention_schedule not in PREFIX_SCHEDULES:
            raise ValueError(
                f"prefix_attention_schedule: got {prefix.prefix_attention_schedule!r}, must be one of "
                f"{', '.join(PREFIX_SCHEDULES)}"
            )
        config = replace(config, prefix_attention_schedule=RTCAttentionSchedule(prefix.prefix_attention_schedule))
    if prefix.max_guidance_weight is not None:
        config = replace(config, max_guidance_weight=prefix.max_guidance_weight)
    horizon = config.execution_horizon if prefix.execution_horizon is None else prefix.execution_horizon
    return replace(config, execution_horizon=max(horizon, prefix.num_frozen))


class Underway(NamedTuple):
    """What guides a sample to begin as the actions that are under way.

    Attributes:
        actions: normalized, float32 (B, C, D), padded with 0.
        weights: how much each of the chunk's actions is to agree with them, float32 (C, 1).
        most: bound of the guidance's weight, float32 ().
    """

    actions: Tensor
    weights: Tensor
    most: Tensor


def underway(leftover: Tensor, num_frozen: int, config: Any, shape: torch.Size) -> Underway:
    """Prepare actions that are under way for samples of this shape, (B, C, D), on the device of `leftover`.

    Args:
        leftover: float32 (B, P, A), normalized, P and A at most the sample's.
        config: LeRobot's `RTCConfig`.
    """
    short = shape[1] - leftover.shape[1], shape[2] - leftover.shape[2]
    horizon = min(config.execution_horizon, leftover.shape[1])
    weights = RTCProcessor(config).get_prefix_weights(num_frozen, horizon, shape[1])
    most = torch.full((), config.max_guidance_weight, dtype=torch.float32, device=leftover.device)
    return Underway(F.pad(leftover, (0, short[1], 0, short[0])), weights[:, None].to(leftover.device), most)


def guided(velocity: Velocity, given: Underway) -> Velocity:
    """The velocity that leads to samples which begin as the actions that are under way."""

    def corrected(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor | None]:
        speed, std = velocity(x, level)
        t = level[:, None, None]
        error = (given.actions - (x - t * speed)) * given.weights
        guidance = torch.minimum(t / (1 - t) * ((1 - t) ** 2 + t**2) / t**2, given.most)
        return speed - guidance * error, std

    return corrected
