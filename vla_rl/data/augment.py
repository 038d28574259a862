"""Random shift, crop and color of a batch of images, as tensor operations on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
import torch.nn.functional as F

from vla_rl.data.config import AugmentConfig

# RGB -> luma and two chroma axes (NTSC); a turn in the chroma plane is a change of hue.
_TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
_FROM_YIQ = torch.linalg.inv(_TO_YIQ)
_cropped: ContextVar[bool] = ContextVar("cropped at random", default=False)


@contextmanager
def cropped_at_random(config: AugmentConfig) -> Iterator[None]:
    """Inside the block images come from `augment`: where this config crops, a policy does not crop them again."""
    token = _cropped.set(config.crop_area < 1)
    try:
        yield
    finally:
        _cropped.reset(token)


def are_cropped() -> bool:
    """Whether the images at hand are random crops, in place of the center crop that a policy takes when it acts."""
    return _cropped.get()


def augment(images: dict[str, np.ndarray], config: AugmentConfig, generator: torch.Generator) -> dict[str, np.ndarray]:
    """Randomly changed copies of the images; each example and camera draws its own change.

    Args:
        images: camera -> uint8 (B, height, width, 3).

    Returns:
        The same shapes and dtype; the input itself where nothing is on.
    """
    if not config.active:
        return images
    return {camera: _augment_one(torch.from_numpy(batch), config, generator) for camera, batch in images.items()}


def _augment_one(batch: torch.Tensor, config: AugmentConfig, generator: torch.Generator) -> np.ndarray:
    if config.shift:
        batch = _shift(batch, config.shift, generator)
    if config.crop_area < 1 or config.recolors:
        pixels = batch.float()
        if config.crop_area < 1:
            pixels = _crop(pixels, config.crop_area, generator)
        if config.recolors:
            pixels = _color(pixels, config, generator)
        batch = pixels.round_().clamp_(0, 255).to(torch.uint8)
    return batch.numpy()


def _shift(batch: torch.Tensor, pixels: int, generator: torch.Generator) -> torch.Tensor:
    """Each image moved by up to `pixels` in both directions, its edge repeated (DrQ, arXiv 2004.13649)."""
    size, height, width, _ = batch.shape
    offsets = torch.randint(-pixels, pixels + 1, (2, size, 1), generator=generator)
    rows = (torch.arange(height) + offsets[0]).clamp_(0, height - 1)
    columns = (torch.arange(width) + offsets[1]).clamp_(0, width - 1)
    return batch[torch.arange(size)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _crop(pixels: torch.Tensor, area: float, generator: torch.Generator) -> torch.Tensor:
    """A random crop of that area, of the same aspect, scaled back bilinearly. float32 (B, height, width, 3)."""
    side = math.sqrt(area)
    centers = (torch.rand(len(pixels), 2, generator=generator) * 2 - 1) * (1 - side)
    theta = torch.zeros(len(pixels), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side
    theta[:, :, 2] = centers
    channels_first = pixels.permute(0, 3, 1, 2)
    grid = F.affine_grid(theta, list(channels_first.shape), align_corners=False)
    cropped = F.grid_sample(channels_first, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return cropped.permute(0, 2, 3, 1)


def _color(pixels: torch.Tensor, config: AugmentConfig, generator: torch.Generator) -> torch.Tensor:
    """Brightness, contrast, saturation and hue as one affine map of RGB per image. float32 (B, height, width, 3)."""
    size, height, width, _ = pixels.shape

    def draw(limit: float) -> torch.Tensor:
        return (torch.rand(size, generator=generator) * 2 - 1) * limit

    brightness, contrast = draw(config.brightness) * 255, 1 + draw(config.contrast)
    saturation, angle = 1 + draw(config.color), draw(config.color / 4) * 2 * math.pi
    turn = torch.zeros(size, 3, 3)
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = saturation * torch.cos(angle)
    turn[:, 2, 1] = saturation * torch.sin(angle)
    turn[:, 1, 2] = -turn[:, 2, 1]
    matrix = contrast[:, None, None] * (_FROM_YIQ @ turn @ _TO_YIQ)
    mean = pixels.mean((1, 2))  # Contrast is about the image's own mean color.
    offset = brightness[:, None] + (1 - contrast)[:, None] * mean
    flat = pixels.reshape(size, height * width, 3)
    return torch.baddbmm(offset[:, None], flat, matrix.transpose(1, 2)).view(size, height, width, 3)
