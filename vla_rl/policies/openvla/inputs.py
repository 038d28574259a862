"""Observations as the OpenVLA network's inputs: images, normalized state, prompt; each checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.network.network import Prompt
from vla_rl.policies.openvla.options import ImageChain
from vla_rl.types import Observation


def image_batch(obs: Observation, cameras: Sequence[str], size: int, chain: ImageChain, device: torch.device) -> Tensor:
    """uint8 (B, cameras, size, size, 3).

    Raises:
        ValueError: a camera is missing, or its images are not uint8 RGB.
    """
    from vla_rl.policies.openvla.image_chain import apply_chain, check_images

    missing = [camera for camera in cameras if camera not in obs.images]
    if missing:
        raise ValueError(f"observation lacks the images of {missing}; it has {sorted(obs.images)}")
    for camera in cameras:
        check_images(obs.images[camera], f"observation image {camera!r}")
    if chain == ImageChain():
        return torch.stack([_resize(obs.images[camera], size, device) for camera in cameras], 1)
    images = np.stack([apply_chain(obs.images[camera], chain, size) for camera in cameras], 1)
    return torch.from_numpy(images).to(device)


def _resize(images: np.ndarray, size: int, device: torch.device) -> Tensor:
    """On the device, where images are many; the same filter as the chain's."""
    image = torch.from_numpy(np.ascontiguousarray(images)).to(device)
    if image.shape[1:3] == (size, size):
        return image
    pixels = F.interpolate(image.permute(0, 3, 1, 2).float(), (size, size), mode="bilinear", antialias=True)
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def state_batch(obs: Observation, size: int, stats: NormStats, device: torch.device) -> Tensor:
    """float32 (B, S), normalized to [-1, 1].

    Raises:
        ValueError: another length, or no statistics.
    """
    if obs.state.shape[1:] != (size,):
        raise ValueError(f"observation state has shape {obs.state.shape}, this policy expects (B, {size})")
    if stats.state is None:
        raise ValueError("state statistics are not set; call set_norm_stats with those of the training data")
    return torch.from_numpy(stats.state.normalize(obs.state)).to(device)


def prompt_batch(
    prompts: Sequence[Sequence[int]], pad_id: int, side: Literal["left", "right"], device: torch.device
) -> Prompt:
    """Prompts of ids, BOS first, padded to the longest; left padding stands between BOS and the rest."""
    lengths = np.array([len(ids) for ids in prompts])
    longest = int(lengths.max())
    ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    valid = np.zeros(ids.shape, dtype=bool)
    valid[:, 0] = True
    for row, mask, prompt in zip(ids, valid, prompts, strict=True):
        row[0] = prompt[0]
        start = longest - len(prompt) + 1 if side == "left" else 1
        row[start : start + len(prompt) - 1] = prompt[1:]
        mask[start : start + len(prompt) - 1] = True
    if valid.all():
        return Prompt(torch.from_numpy(ids).to(device))
    last = torch.from_numpy(lengths - 1).to(device) if side == "right" else None
    return Prompt(torch.from_numpy(ids).to(device), torch.from_numpy(valid).to(device), last)
