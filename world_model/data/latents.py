"""Latents of a dataset's frames, encoded once and memory-mapped; images for training the autoencoder; both on a device.

Held on a device, they let an update upload the numbers of what it draws, and no more.

The cache is an .npy file in a folder beside the decoded dataset. Its name is a hash of all that the latents depend on:
the dataset's content, its cameras in order, image size, frames, and the autoencoder's weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from vla_rl.common.atomic import atomic_folder, disk_full
from vla_rl.data.cache import StoredImages
from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import EpisodeDataset
from world_model.data.episodes import EpisodeFrames
from world_model.interfaces import Autoencoder

log = logging.getLogger(__name__)

FORMAT = 1
FRAMES_AT_ONCE = 128
SHARE = 0.5  # Of the device's free memory, that what is held may take.
MEAN_OF = 1000  # Images that a mean image is the mean of.


@dataclass(frozen=True)
class EncodedEpisodes:
    """Episodes' frames with their latents.

    Attributes:
        latents: float16 (M, V, C, h, w), memory-mapped, scaled.
        chosen: int64, those of the E episodes to learn from.
    """

    frames: EpisodeFrames
    latents: np.ndarray
    chosen: np.ndarray


def open_latents(
    frames: EpisodeFrames,
    autoencoder: Autoencoder,
    folder: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EncodedEpisodes:
    """The latents of all frames, encoded first if they are not cached yet.

    Args:
        folder: of the cache; None takes the one where the decoded dataset lies.
        on_progress: called with the number of frames encoded, and of all.

    Raises:
        DatasetError: images of another size than the autoencoder's.
        ValueError: latents that are not finite.
        DiskFullError: no room for the cache; the message says how much it needs.
    """
    sizes = {name: images.shape[1:3] for name, images in frames.dataset.images.items()}
    if wrong := {name: size for name, size in sizes.items() if size != tuple(autoencoder.image_size)}:
        raise DatasetError(
            f"{frames.dataset.path}: images (height, width) of {wrong}, the autoencoder's are "
            f"{tuple(autoencoder.image_size)}; collect with that size"
        )
    path = (folder or frames.dataset.cache.parent) / f"latents_{_key(frames, autoencoder)}"
    if not path.is_dir():
        with atomic_folder(path, what="latent cache") as partial:
            _write_latents(frames, autoencoder, partial / "latents.npy", on_progress)
            (partial / "latents.json").write_text(json.dumps({"dataset": str(frames.dataset.path)}))
    latents = np.load(path / "latents.npy", mmap_mode="r")
    return EncodedEpisodes(frames, latents, np.arange(len(frames.episodes)))


def weights_hash(module: nn.Module) -> str:
    """A hash of a module's parameters and buffers, names and values."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _key(frames: EpisodeFrames, autoencoder: Autoencoder) -> str:
    parts = [
        FORMAT,
        frames.dataset.cache.name,
        frames.cameras,
        frames.frame_steps,
        hashlib.blake2b(frames.place.tobytes(), digest_size=12).hexdigest(),
        type(autoencoder).__name__,
        autoencoder.image_size,
        weights_hash(cast(nn.Module, autoencoder)),
        *([frames.look] if frames.look else []),
    ]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def _write_latents(
    frames: EpisodeFrames, autoencoder: Autoencoder, file: Path, on_progress: Callable[[int, int], None] | None
) -> None:
    """Stream latents into an .npy file. Plain writes: a full disk then is an error, not a bus fault."""
    shape = (frames.num_frames, len(frames.cameras), *autoencoder.latent_shape)
    needed = 2 * int(np.prod(shape))
    if shutil.disk_usage(file.parent).free < needed:
        raise disk_full(file, f"latents ({needed / 2**20:.0f} MiB needed)")
    device = next(cast(nn.Module, autoencoder).parameters()).device
    with open(file, "wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f2", "fortran_order": False, "shape": shape})
        for start in range(0, frames.num_frames, FRAMES_AT_ONCE):
            index = np.arange(start, min(start + FRAMES_AT_ONCE, frames.num_frames))
            images = torch.from_numpy(frames.images(index)).to(device)
            latents = autoencoder.encode(images.flatten(0, 1)).half()
            if not bool(torch.isfinite(latents).all()):
                raise ValueError(
                    f"autoencoder: gives NaN or infinite latents for images of {frames.dataset.path}; its weights are "
                    "damaged, or it was never calibrated"
                )
            stream.write(latents.cpu().contiguous().numpy().data)
            if on_progress is not None:
                on_progress(int(index[-1]) + 1, frames.num_frames)


class ImageSamples:
    """Images for training the autoencoder: any row and camera of several datasets, in proportion to their weights.

    What a step draws depends on (seed, step) alone.
    """

    def __init__(self, parts: Sequence[EpisodeDataset]) -> None:
        self._parts = list(parts)
        weights = np.array([part.weight for part in parts], np.float64)
        self._share = weights / weights.sum()
        self._views = [list(part.images.values()) for part in parts]
        self._means = [[_mean_image(images, part.rows) for images in part.images.values()] for part in parts]

    def batch(self, size: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images uint8 (size, height, width, 3), and the mean image of each one's camera, float32, likewise (0 .. 255).

        The mean image is what stands still where the camera does.
        """
        drawn = self.draw(size, seed, step)
        images = [self._views[part][view][row] for part, view, row in drawn]
        means = [self._means[part][view] for part, view, _ in drawn]
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(means))

    def hold(self, device: torch.device) -> bool:
        """Keep all images on a device that has room for them, for `batch_there`; whether it has."""
        views = [images for views in self._views for images in views]
        if not has_room(sum(images.distinct.nbytes for images in views), device, "images to learn from"):
            return False
        self._starts = np.cumsum([0, *(len(images.distinct) for images in views)])[:-1]
        self._firsts = np.cumsum([0, *map(len, self._views)])[:-1]
        means = np.stack([mean for means in self._means for mean in means])
        self._held = stacked([images.distinct for images in views], device), stacked([means], device)
        return True

    def batch_there(self, size: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `batch`, from what is held."""
        images, means = self._held
        numbers = [
            (self._starts[view := self._firsts[part] + own] + self._views[part][own].number[row], view)
            for part, own, row in self.draw(size, seed, step)
        ]
        index = uploaded(np.array(numbers), images.device)
        return images[index[:, 0]], means[index[:, 1]]

    def draw(self, size: int, seed: int, step: int) -> list[tuple[int, int, int]]:
        """Part, view and row of the images of a batch."""
        rng = np.random.default_rng([seed, step])
        drawn = []
        for part in rng.choice(len(self._parts), size, p=self._share).tolist():
            view = int(rng.integers(len(self._views[part])))
            rows = self._parts[part].rows
            drawn.append((part, view, int(rows[rng.integers(len(rows))])))
        return drawn


def _mean_image(images: StoredImages, rows: np.ndarray) -> np.ndarray:
    """float32 (height, width, 3), of up to a thousand rows spread over all."""
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), MEAN_OF)).astype(np.int64)]
    return images[some].mean(0, dtype=np.float32)


def has_room(num_bytes: int, device: torch.device, what: str) -> bool:
    """Whether to hold so much on a device: never on a CPU, and on CUDA up to half of what is free; the log says no."""
    if device.type == "cpu":
        return False
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes <= SHARE * free:
        return True
    log.warning(
        "%s: %.1f GB, more than half of the %.1f GB that are free on the device; each update uploads its own, which is "
        "slower", what, num_bytes / 2**30, free / 2**30,
    )  # fmt: skip
    return False


def uploaded(index: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 numbers on a device, in a copy for which the host does not wait."""
    return torch.from_numpy(index.astype(np.int64)).pin_memory().to(device, non_blocking=True)


def stacked(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """Arrays under one another, of which only one at a time is on the host in whole."""
    made = torch.empty(
        (sum(map(len, parts)), *parts[0].shape[1:]), dtype=torch.from_numpy(parts[0][:0].copy()).dtype, device=device
    )
    start = 0
    for part in parts:
        made[start : start + len(part)].copy_(torch.from_numpy(np.array(part)))
        start += len(part)
    return made
