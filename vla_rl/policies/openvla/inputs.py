"""Observations as the OpenVLA network's inputs: images, normalized state, prompt; each checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vla_rl.data.augment import are_cropped
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.image_chain import apply_chain, bilinear_resize, check_images
from vla_rl.policies.openvla.llama_tokenizer import PromptTokenizer
from vla_rl.policies.openvla.options import Architecture, ImageChain
from vla_rl.types import Observation


def prepare_images(
    obs: Observation, cameras: Sequence[str], size: int, chain: ImageChain, device: torch.device
) -> Observation:
    """The observation with the images of `cameras` taken through a chain, uint8 (B, size, size, 3), on the host
    again. Itself where there is nothing to do, or a resize alone, which a GPU does faster than it sends back.

    Of images that are random crops already, the chain's center crop is left out.

    Raises:
        ValueError: a camera is missing, or its images are not uint8 RGB.
    """
    if obs.is_prepared:
        return obs
    missing = [camera for camera in cameras if camera not in obs.images]
    if missing:
        raise ValueError(f"observation lacks the images of {missing}; it has {sorted(obs.images)}")
    for camera in cameras:
        check_images(obs.images[camera], f"observation image {camera!r}")
    if are_cropped():
        chain = chain.model_copy(update={"crop_area": None})
    fit = all(obs.images[camera].shape[1:3] == (size, size) for camera in cameras)
    if chain == ImageChain() and (fit or device.type != "cpu"):
        return obs

    images = {camera: apply_chain(obs.images[camera], chain, size, device) for camera in cameras}
    return replace(obs, images=images, is_prepared=True)


def network_inputs(
    obs: Observation,
    cameras: Sequence[str],
    arch: Architecture,
    tokenizer: PromptTokenizer,
    stats: NormStats | None,
    device: torch.device,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """What `OpenVLANetwork.prefix` reads of a prepared observation, on the device; `stats`: of a state that is read."""
    prompts = [tokenizer.encode_prompt(text) for text in obs.instruction]
    images = image_batch(obs, cameras, arch.image_size, device)
    state = None if stats is None or arch.state_dim is None else state_batch(obs, arch.state_dim, stats, device)
    return images, state, *prompt_batch(prompts, arch.llm.vocab_size, device)


def image_batch(obs: Observation, cameras: Sequence[str], size: int, device: torch.device) -> Tensor:
    """uint8 (B, cameras, size, size, 3) of a prepared observation."""
    return torch.stack([_resize(obs.images[camera], size, device) for camera in cameras], 1)


def _resize(images: np.ndarray, size: int, device: torch.device) -> Tensor:
    """By the chain's filter, on the device."""
    image = torch.from_numpy(np.ascontiguousarray(images)).to(device)
    return image if image.shape[1:3] == (size, size) else bilinear_resize(image, size)


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


def prompt_batch(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Prompts' ids and which are valid, as `OpenVLANetwork.prefix` takes them, of ids with BOS first."""
    longest = max(map(len, prompts))
    ids = np.full((len(prompts), longest), pad_id, dtype=np.int64)
    valid = np.zeros(ids.shape, dtype=bool)
    valid[:, 0] = True
    for row, mask, prompt in zip(ids, valid, prompts, strict=True):
        row[0] = prompt[0]
        start = longest - len(prompt) + 1
        row[start : start + len(prompt) - 1] = prompt[1:]
        mask[start : start + len(prompt) - 1] = True
    return torch.from_numpy(ids).to(device), None if valid.all() else torch.from_numpy(valid).to(device)
