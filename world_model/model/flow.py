"""Rectified flow with a noise level for each frame, by a network that predicts the clean frame.

A frame x and Gaussian noise e are joined by the straight path z = (1 - t) x + t e, t from 0 (clean) to 1 (Liu et al.,
arXiv 2209.03003). The velocity along it is (z - x) / t, so whoever predicts x knows the velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from world_model.types import Frames

LEVEL_SHIFT = 3.0  # s, for training and sampling alike (Esser et al., arXiv 2403.03206)


@dataclass(frozen=True)
class Noisy:
    """Frames with noise, and how much: levels float32 (B, T) in [0, 1]."""

    frames: Frames
    levels: torch.Tensor

    def with_states(self, clean: Frames) -> Noisy:
        """The same, with the states of `clean`: they are measured, or follow from the actions, to a millimeter."""
        return Noisy(Frames(self.frames.latents, clean.states), self.levels)


def mix(frames: Frames, noise: Frames, levels: torch.Tensor) -> Noisy:
    """`frames` brought to noise levels (B, T)."""
    t = levels[:, :, None]
    states = (1 - t) * frames.states + t * noise.states
    t = t[..., None, None, None]
    return Noisy(Frames((1 - t) * frames.latents + t * noise.latents, states), levels)


@cache
def sampling_levels(num_steps: int) -> tuple[float, ...]:
    """Noise levels at which the network is asked, from 1 down; the last step goes from the last level to 0."""
    return tuple(float(shifted(torch.tensor(1 - i / num_steps))) for i in range(num_steps))


def shifted(levels: torch.Tensor) -> torch.Tensor:
    """Levels spaced evenly in [0, 1], moved towards noise, where what happens is decided: s t / (1 + (s - 1) t)."""
    return LEVEL_SHIFT * levels / (1 + (LEVEL_SHIFT - 1) * levels)


def noised(frames: Frames, levels: torch.Tensor, generator: torch.Generator) -> Noisy:
    """The frames at noise levels (B, T), with noise drawn on the generator's device."""
    device, drawn_on = frames.latents.device, generator.device
    noise = (torch.randn(x.shape, generator=generator, device=drawn_on) for x in (frames.latents, frames.states))
    return mix(frames, Frames(*(values.to(device) for values in noise)), levels.to(device))


def sample(
    predict: Callable[[Frames, float], Frames], noise: Frames, levels: Sequence[float], temperature: float = 1.0
) -> Frames:
    """Euler's method along the flow, from noise to frames.

    Args:
        predict: noisy frames and their level -> the clean frames expected. With one step, that is the answer.
        levels: see `sampling_levels`.
        temperature: the noise is scaled by it; below 1 the frames lie nearer to what is expected.
    """
    frame = Frames(temperature * noise.latents, temperature * noise.states)
    for level, next_level in zip(levels, [*levels[1:], 0.0], strict=True):
        clean = predict(frame, level)
        keep = next_level / level
        frame = Frames(
            keep * frame.latents + (1 - keep) * clean.latents, keep * frame.states + (1 - keep) * clean.states
        )
    return frame
