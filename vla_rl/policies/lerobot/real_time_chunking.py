"""Real-time chunking (Black et al. 2025, arXiv 2506.07339): a flow policy goes on from actions that are under way.

While a chunk is computed the robot plays the rest of the last one, so the new chunk must agree with it there.
Denoising is guided to that: at each step the velocity is corrected towards a sample whose beginning is that rest
(PiGDM, arXiv 2305.10844). The guidance is LeRobot's `RTCProcessor`; it leaves the network's Jacobian out, so a step
costs no backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
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


def guided(velocity: Velocity, leftover: Tensor, num_frozen: int, config: Any) -> Velocity:
    """The velocity that leads to samples which begin as `leftover`.

    Args:
        leftover: float32 (B, P, A), normalized, P and A at most the sample's.
        config: LeRobot's `RTCConfig`.
    """
    processor = RTCProcessor(config)

    def corrected(x: Tensor, level: Tensor) -> tuple[Tensor, Tensor | None]:
        @torch.no_grad()  # LeRobot turns gradients on around it, but uses none that pass through the network.
        def plain(noisy: Tensor) -> Tensor:
            return velocity(noisy, level)[0]

        return processor.denoise_step(x, leftover, num_frozen, float(level[0]), plain), None

    return corrected
