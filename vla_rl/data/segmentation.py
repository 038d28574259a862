"""What each pixel of a dataset's images shows, and how far away it is: what changes of style are guided by.

    dataset/structure/episode_000000.npz
        segments_CAMERA     uint8 (T + 1, height, width), ids
        depth_CAMERA        uint16 (T + 1, height, width), millimeters; where it is recorded

Row t belongs to the image of control step t, row T to the image after the last action; a dataset without such an image
may leave row T out. Id 0 is the background, 1 the table or whatever things stand on, 2 to 255 are things. An id means
the same thing in all frames and cameras of an episode; from episode to episode it need not. Our simulators write these
files (`collect.structure=true`); for a real video any segmentation and depth model may.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

FOLDER = "structure"
CAMERA_PREFIX = "structure."  # A simulator shows the structure of camera x as an image of camera "structure.x".
BACKGROUND, TABLE, FIRST_THING = 0, 1, 2
MAX_ID = 255
MAX_DEPTH = 65.535  # meters


# --- as a camera's image ------------------------------------------------------------------------


def pack(segments: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """One image for both, uint8 (height, width, 3): the id, and the depth's millimeters, high byte first.

    Args:
        segments: ids (height, width). depth: meters (height, width); what is farther than 65 m counts as that.
    """
    millimeters = np.clip(np.rint(depth * 1000), 0, 65535).astype(np.uint16)
    return np.stack([segments.astype(np.uint8), millimeters >> 8, millimeters & 255], -1).astype(np.uint8)


def unpack(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `pack` put into images, uint8 (..., height, width, 3): ids uint8 and millimeters uint16 (..., h, w)."""
    return images[..., 0].copy(), (images[..., 1].astype(np.uint16) << 8) | images[..., 2]


def split_cameras(images: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Images by camera, apart: those to look at, and the structure of each camera."""
    pictures = {name: image for name, image in images.items() if not name.startswith(CAMERA_PREFIX)}
    structure = {
        name.removeprefix(CAMERA_PREFIX): image for name, image in images.items() if name.startswith(CAMERA_PREFIX)
    }
    return pictures, structure


# --- on disk ------------------------------------------------------------------------------------


def structure_file(folder: Path, number: int) -> Path:
    """The file of an episode in a dataset's or a shard's folder."""
    return Path(folder) / FOLDER / f"episode_{number:06d}.npz"


def write_structure(file: Path, packed: Mapping[str, np.ndarray]) -> None:
    """Write an episode's file from packed images, camera -> uint8 (T + 1, height, width, 3)."""
    arrays: dict[str, np.ndarray] = {}
    for camera, images in packed.items():
        arrays[f"segments_{camera}"], arrays[f"depth_{camera}"] = unpack(images)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "wb") as stream:
        np.savez_compressed(stream, allow_pickle=False, **arrays)
