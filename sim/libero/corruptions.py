"""LIBERO-Plus's sensor noise: five of ImageNet-C's corruptions (arXiv 1903.12261) at ten severities."""

from __future__ import annotations

import numpy as np
from scipy import ndimage

KINDS = ("motion", "gaussian", "zoom", "fog", "glass")
# By severity, from 1.
MOTION = ((5, 2), (8, 3), (10, 4), (12, 5), (15, 6), (18, 8), (20, 10), (25, 12), (30, 15), (35, 20))  # radius, sigma
ZOOM_STEPS = (0.01, 0.01, 0.02, 0.02, 0.03, 0.01, 0.01, 0.02, 0.02, 0.03)
FOG_DECAY = (3.0, 2.8, 2.5, 2.2, 2.0, 1.8, 1.6, 1.5, 1.4, 1.3)
GLASS = (  # sigma, reach in pixels, rounds
    *((0.5, 1, 3), (0.7, 1, 3), (0.9, 2, 3), (1.0, 2, 2), (1.1, 3, 2)),
    *((1.3, 3, 2), (1.5, 4, 2), (1.8, 4, 2), (2.2, 5, 1), (2.5, 5, 1)),
)


def corrupted(image: np.ndarray, noise: int, rng: np.random.Generator) -> np.ndarray:
    """The image, uint8 (height, width, 3), with LIBERO-Plus's noise 1 to 50: ten severities of each of `KINDS`.

    Raises:
        ValueError: another number.
    """
    if not 1 <= noise <= 50:
        raise ValueError(f"LIBERO-Plus's noise is 1 to 50, got {noise}")
    kind, severity = divmod(noise - 1, 10)
    make = (_motion, _gaussian, _zoom, _fog, _glass)[kind]
    return np.clip(255 * make(image / 255.0, severity, rng), 0, 255).astype(np.uint8)


def _blurred(image: np.ndarray, sigma: float) -> np.ndarray:
    return ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest")


def _gaussian(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    return _blurred(image, severity + 1.0)


def _motion(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """ImageMagick's: weights fall off along a line at up to 45 degrees."""
    radius, sigma = MOTION[severity]
    angle, steps = np.radians(rng.uniform(-45, 45)), np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    rows, columns = (np.ceil(steps * part - 0.5).astype(int) for part in (np.sin(angle), np.cos(angle)))
    height, width = image.shape[:2]
    seen = np.zeros_like(image)
    for weight, row, column in zip(weights / weights.sum(), rows, columns, strict=True):
        y, x = np.clip(np.arange(height) + row, 0, height - 1), np.clip(np.arange(width) + column, 0, width - 1)
        seen += weight * image[y[:, None], x]
    return seen


def _zoom(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """The mean of the image and of ever nearer ones."""
    nearest = 1.11 + 0.05 * severity
    factors = np.arange(1, nearest, ZOOM_STEPS[severity])
    height, width = image.shape[:2]
    total = image.copy()
    for factor in factors:
        tall, wide = int(np.ceil(height / factor)), int(np.ceil(width / factor))
        top, left = (height - tall) // 2, (width - wide) // 2
        near = ndimage.zoom(image[top : top + tall, left : left + wide], (factor, factor, 1), order=1)
        down, right = (near.shape[0] - height) // 2, (near.shape[1] - width) // 2
        total += near[down : down + height, right : right + width]
    return total / (len(factors) + 1)


def _fog(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    amount, brightest, (height, width) = 0.5 * (severity + 1), image.max(), image.shape[:2]
    fog = _plasma(1 << (max(height, width) - 1).bit_length(), FOG_DECAY[severity], rng)[:height, :width, None]
    return np.clip((image + amount * fog) * brightest / (brightest + amount), 0, 1)


def _plasma(size: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """A random cloud in [0, 1], (size, size), by diamonds and squares, seamless; size is a power of two."""
    cloud, step, spread = np.zeros((size, size)), size, 100.0
    while step >= 2:
        half = step // 2

        def between(sums: np.ndarray) -> np.ndarray:
            return sums / 4 + spread * rng.uniform(-spread, spread, sums.shape)  # noqa: B023

        corners = cloud[::step, ::step]
        down = corners + np.roll(corners, -1, 0)
        cloud[half::step, half::step] = between(down + np.roll(down, -1, 1))
        middles, corners = cloud[half::step, half::step], cloud[::step, ::step]
        beside, over = corners + np.roll(corners, -1, 1), middles + np.roll(middles, 1, 0)
        cloud[::step, half::step] = between(beside + over)
        cloud[half::step, ::step] = between(corners + np.roll(corners, -1, 0) + middles + np.roll(middles, 1, 1))
        step, spread = half, spread / decay
    cloud -= cloud.min()
    return cloud / cloud.max()


def _glass(image: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Blurred; pixels swapped with near ones, one after another; blurred again."""
    sigma, reach, rounds = GLASS[severity]
    height, width = image.shape[:2]
    order = list(range(height * width))
    y, x = np.meshgrid(np.arange(height - reach, reach, -1), np.arange(width - reach, reach, -1), indexing="ij")
    y, x = np.minimum(y, height - 1), np.minimum(x, width - 1)
    for _ in range(rounds):
        dx, dy = rng.integers(-reach, reach, (2, *y.shape))
        others = np.clip(y + dy, 0, height - 1) * width + np.clip(x + dx, 0, width - 1)
        for one, other in zip((y * width + x).ravel().tolist(), others.ravel().tolist(), strict=True):
            order[one], order[other] = order[other], order[one]
    shuffled = _blurred(image, sigma).reshape(-1, 3)[order].reshape(image.shape)
    return np.clip(_blurred(shuffled, sigma), 0, 1)
