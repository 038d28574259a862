"""Observations as the OpenVLA network's inputs: images, normalized state, prompt; each checked."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.data.augment import are_cropped
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.network.network import Prompt
from vla_rl.policies.openvla.options import ImageChain
from vla_rl.types import Observation


class ChainedImages:
    """Images that have gone through a chain, kept so that each goes through it once: in the rollout, not in its update.

    An image is found again by its pixels, so neither rollout nor learner carry anything. Keeping begins after the first
    forward pass that has gradients: a policy that only acts keeps nothing. What is seen with gradients alone is not
    kept either: augmented demonstrations never come again. A copy of the policy shares what is kept.

    Args:
        mib: memory for them; beyond it the one that was not asked for the longest goes. 0: none is kept.

    Attributes:
        num_chained: images that went through a chain so far. num_bytes: of the kept ones.
    """

    def __init__(self, mib: int) -> None:
        self.max_bytes, self.num_bytes, self.num_chained = mib * 2**20, 0, 0
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._learns = False

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def apply(self, images: np.ndarray, chain: ImageChain, size: int) -> np.ndarray:
        """uint8 (B, height, width, 3) -> uint8 (B, size, size, 3), in torch's number of threads."""
        from vla_rl.policies.openvla.image_chain import apply_chain

        def chained(image: np.ndarray) -> np.ndarray:
            return apply_chain(image[None], chain, size)[0]

        self._learns |= torch.is_grad_enabled() and self.max_bytes > 0
        if not self._learns:
            self.num_chained += len(images)
            return np.stack(_in_threads(chained, images))
        context = f"{chain!r} {size} {images.shape[1:]}".encode()
        keys = _in_threads(lambda image: _digest(context, image), images)
        found = {key: self._kept[key] for key in keys if key in self._kept}
        missing = {key: image for key, image in zip(keys, images, strict=True) if key not in found}
        found |= zip(missing, _in_threads(chained, list(missing.values())), strict=True)
        self.num_chained += len(missing)
        for key in dict.fromkeys(keys):
            if key in self._kept or not torch.is_grad_enabled():
                self._keep(key, found[key])
        return np.stack([found[key] for key in keys])

    def _keep(self, key: bytes, image: np.ndarray) -> None:
        """Keep an image, or note that it was asked for."""
        if key not in self._kept:
            self._kept[key] = image.copy()  # Alone, and not as a row of something larger.
            self.num_bytes += image.nbytes
        self._kept.move_to_end(key)
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes


def _digest(context: bytes, image: np.ndarray) -> bytes:
    digest = hashlib.blake2b(context, digest_size=16)
    digest.update(np.ascontiguousarray(image))
    return digest.digest()


def _in_threads[T](function: Callable[[np.ndarray], T], images: Sequence[np.ndarray] | np.ndarray) -> list[T]:
    """`function` of each image, in order."""
    number = torch.get_num_threads()
    return list(_threads(number).map(function, images) if min(number, len(images)) > 1 else map(function, images))


@lru_cache(maxsize=1)
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="images")


def image_batch(
    obs: Observation,
    cameras: Sequence[str],
    size: int,
    chain: ImageChain,
    device: torch.device,
    chained: ChainedImages | None = None,
) -> Tensor:
    """uint8 (B, cameras, size, size, 3). Of images that are random crops already, the chain's center crop is left out.

    Args:
        chained: what has gone through the chain already; None: nothing is kept.

    Raises:
        ValueError: a camera is missing, or its images are not uint8 RGB.
    """
    from vla_rl.policies.openvla.image_chain import check_images

    missing = [camera for camera in cameras if camera not in obs.images]
    if missing:
        raise ValueError(f"observation lacks the images of {missing}; it has {sorted(obs.images)}")
    for camera in cameras:
        check_images(obs.images[camera], f"observation image {camera!r}")
    if are_cropped():
        chain = chain.model_copy(update={"crop_area": None})
    if chain == ImageChain():
        return torch.stack([_resize(obs.images[camera], size, device) for camera in cameras], 1)
    chained = chained or ChainedImages(0)
    images = np.stack([chained.apply(obs.images[camera], chain, size) for camera in cameras], 1)
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
