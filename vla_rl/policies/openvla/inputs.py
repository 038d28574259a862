"""Observations as the OpenVLA network's inputs: images by its chain, normalized state, prompt; each checked.

The image chain of OpenVLA's published checkpoints, on uint8 images, without TensorFlow.

rotation -> JPEG encode and decode -> antialiased Lanczos resize -> center crop and resize back

Each stage gives what TensorFlow 2.15 gives (tests hold them against it, stage by stage):

- JPEG: quality 95, 4:2:0. TensorFlow decodes with libjpeg-turbo's fast integer DCT; simplejpeg can,
  OpenCV and Pillow use the accurate one (a mean difference of 4 of 255 on high-contrast patterns).
- resize: `tf.image.resize(method="lanczos3", antialias=True)`, rounded to the nearest.
- crop: `tf.image.crop_and_resize`, bilinear between pixel centers of the box, then truncated x 255.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import cv2
import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from torch import Tensor

from vla_rl.data.augment import are_cropped
from vla_rl.policies.normalization import NormStats
from vla_rl.policies.openvla.options import Architecture, ImageChain
from vla_rl.policies.openvla.tokenizer import PromptTokenizer
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


CPU = torch.device("cpu")


def apply_chain(images: np.ndarray, chain: ImageChain, size: int, device: torch.device = CPU) -> np.ndarray:
    """uint8 (B, height, width, 3) -> uint8 (B, size, size, 3).

    The host turns and compresses, in torch's number of threads; resize and crop are the device's. Its sums in float64
    are in another order, so that a pixel may round otherwise only where it lies between two numbers to 1e-12.

    Raises:
        ValueError: not uint8 images with three channels.
    """
    check_images(images)
    if chain.rotate:
        images = images[:, ::-1, ::-1]
    if chain.jpeg_quality is not None:
        images = _round_trips(images, chain.jpeg_quality)
    pixels = torch.from_numpy(np.ascontiguousarray(images)).to(CPU if device.type == "mps" else device)  # No float64.
    if images.shape[1:3] != (size, size):
        pixels = lanczos_resize(pixels, size) if chain.resize == "lanczos3" else bilinear_resize(pixels, size)
    if chain.crop_area is not None:
        pixels = center_crop(pixels, chain.crop_area)
    return pixels.cpu().numpy()


def check_images(images: np.ndarray, name: str = "images") -> None:
    """Raise ValueError unless `images` is uint8 (B, height, width, 3)."""
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8 or 0 in images.shape[1:]:
        raise ValueError(
            f"{name}: got {images.dtype} of shape {images.shape}, expected uint8 (B, height, width, 3), RGB"
        )


def jpeg_round_trip(image: np.ndarray, quality: int = 95) -> np.ndarray:
    """Encode uint8 (height, width, 3) as JPEG with 4:2:0 chroma, and decode it as TensorFlow does."""
    options = [
        cv2.IMWRITE_JPEG_QUALITY,
        quality,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    ]
    done, data = cv2.imencode(".jpg", cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2BGR), options)
    assert done, "OpenCV encodes any uint8 image"
    return decode_jpeg(data.tobytes())


def decode_jpeg(data: bytes) -> np.ndarray:
    """uint8 (height, width, 3) RGB of JPEG bytes, by the fast integer DCT that TensorFlow takes by default."""
    return simplejpeg.decode_jpeg(data, "RGB", fastdct=True)


def _round_trips(images: np.ndarray, quality: int) -> np.ndarray:
    number = min(torch.get_num_threads(), len(images))
    mapped = _threads(torch.get_num_threads()).map if number > 1 else map
    return np.stack(list(mapped(lambda image: jpeg_round_trip(image, quality), images)))


@lru_cache(maxsize=1)
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, thread_name_prefix="images")


def lanczos_resize(images: Tensor, size: int) -> Tensor:
    """uint8 (B, height, width, 3) -> uint8 (B, size, size, 3), antialiased Lanczos of radius 3, rounded."""
    number, height, width, channels = images.shape
    rows, columns = (_lanczos_matrix(length, size, images.device) for length in (height, width))
    tall = rows @ images.double().reshape(number, height, width * channels)
    wide = columns @ tall.reshape(number, size, width, channels)
    return wide.round().clamp(0, 255).to(torch.uint8)


@lru_cache(maxsize=16)
def _lanczos_matrix(source: int, target: int, device: torch.device) -> Tensor:
    """float64 (target, source): each row the weights of one output pixel, summing to 1."""
    scale = source / target
    widening = max(scale, 1.0)
    centers = (np.arange(target) + 0.5) * scale
    x = (np.arange(source) + 0.5 - centers[:, None]) / widening
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
    return torch.from_numpy(weights / weights.sum(1, keepdims=True)).to(device)


def center_crop(images: Tensor, area: float) -> Tensor:
    """The middle `area` share of uint8 (B, n, n, 3), stretched back to its size."""
    low, high, fraction = _crop_samples(images.shape[1], area, images.device)
    pixels = images.float() * float(np.float32(1 / 255))
    along_rows = _lerp(pixels[:, :, low], pixels[:, :, high], fraction[None, None, :, None])
    cropped = _lerp(along_rows[:, low], along_rows[:, high], fraction[None, :, None, None])
    return (cropped.clamp(0, 1) * 255.5).trunc().to(torch.uint8)


def _lerp(a: Tensor, b: Tensor, fraction: Tensor) -> Tensor:
    """Not `torch.lerp`, which rounds otherwise."""
    return a + (b - a) * fraction


@lru_cache(maxsize=16)
def _crop_samples(size: int, area: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Per output pixel: the pixels before and after its sampling point, and how far between; float32 throughout."""
    last = np.float32(size - 1)
    side = np.sqrt(np.float32(area))
    start = (np.float32(1) - side) / np.float32(2)
    points = start * last + np.arange(size, dtype=np.float32) * ((start + side) - start)
    low = np.floor(points)
    below, above = (torch.from_numpy(ends.astype(np.int64)).to(device) for ends in (low, np.ceil(points)))
    return below, above, torch.from_numpy(points - low).to(device)


def bilinear_resize(images: Tensor, size: int) -> Tensor:
    """uint8 (B, height, width, 3) -> uint8 (B, size, size, 3), antialiased, rounded."""
    pixels = F.interpolate(images.permute(0, 3, 1, 2).float(), (size, size), mode="bilinear", antialias=True)
    return pixels.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
