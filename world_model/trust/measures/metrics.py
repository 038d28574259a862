"""Image metrics frame by frame: PSNR, SSIM, and curves over an episode."""

from __future__ import annotations

import cv2
import numpy as np

from vla_rl.config import Config, Number
from vla_rl.evaluation.statistics import mean_bands

# An error below one gray level: what is equal to the eye must not rule a mean.
MAX_PSNR = 50.0
_SSIM_SIGMA, _SSIM_RADIUS = 1.5, 5
MIN_SSIM_SIDE = 2 * _SSIM_RADIUS + 1  # Pixels; SSIM's window must lie inside the image.


def psnr(imagined: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each image: 10 log10(255^2 / mean squared error).

    How to read: 20 dB is a rough likeness, 30 dB is hard to tell apart, and 50 dB (where it is cut off) is equal.

    Args:
        imagined, real: uint8 (..., height, width, 3).

    Returns:
        float64 (...), in dB.
    """
    _check_pair(imagined, real)
    error = np.square(imagined.astype(np.float64) - real).mean((-3, -2, -1))
    floor = 255**2 / 10 ** (MAX_PSNR / 10)
    return 10 * np.log10(255**2 / np.maximum(error, floor))


def ssim(imagined: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Structural similarity of each image (Wang et al. 2004, IEEE Trans. Image Processing 13:600-612).

    Local means, variances and covariance under a Gaussian window (11 x 11, sigma 1.5), K1 = .01, K2 = .03, averaged
    over the places where the window lies inside the image, and over colors. How to read: 1 is the same image, 0 no
    likeness in structure; a blurred object costs more than a wrong brightness.

    Args:
        imagined, real: uint8 (..., height, width, 3), at least 11 x 11.

    Returns:
        float64 (...).
    """
    _check_pair(imagined, real)
    height, width = real.shape[-3:-1]
    side = MIN_SSIM_SIDE
    if min(height, width) < side:
        raise ValueError(f"SSIM needs images of at least {side} x {side} pixels, got {height} x {width}")
    inside = slice(_SSIM_RADIUS, -_SSIM_RADIUS)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2

    def blurred(image: np.ndarray) -> np.ndarray:
        return cv2.GaussianBlur(image, (side, side), _SSIM_SIGMA)[inside, inside]

    def one(a: np.ndarray, b: np.ndarray) -> float:
        mean_a, mean_b = blurred(a), blurred(b)
        variance_a, variance_b = blurred(a * a) - mean_a**2, blurred(b * b) - mean_b**2
        covariance = blurred(a * b) - mean_a * mean_b
        likeness = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
        return float((likeness / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))).mean())

    flat = [x.reshape(-1, height, width, 3).astype(np.float64) for x in (imagined, real)]
    return np.array([one(a, b) for a, b in zip(*flat, strict=True)]).reshape(real.shape[:-3])


class Curve(Config):
    """A figure by frame: means over the episodes that last so long, with 95 % bootstrap intervals.

    Attributes:
        steps: control steps from the episode's start, one for each frame.
        mean, low, high: of each frame.
        n: episodes that have the frame.
    """

    steps: tuple[int, ...]
    mean: tuple[Number, ...]
    low: tuple[Number, ...]
    high: tuple[Number, ...]
    n: tuple[int, ...]


def drift_curve(values: np.ndarray, groups: np.ndarray, frame_steps: int) -> Curve:
    """How a figure changes with the length of imagination.

    Late frames are means over the episodes that lasted so long, mostly failed ones; `n` says how many.

    Args:
        values: float (E, F) of frames 1 .. F, NaN past an episode's end.
        groups: (E,), initial states.
        frame_steps: G.
    """
    mean, low, high = mean_bands(values, groups)
    return Curve(
        steps=tuple(frame_steps * (i + 1) for i in range(values.shape[1])),
        mean=tuple(map(float, mean)),
        low=tuple(map(float, low)),
        high=tuple(map(float, high)),
        n=tuple(int(n) for n in np.isfinite(values).sum(0)),
    )


def _check_pair(imagined: np.ndarray, real: np.ndarray) -> None:
    if imagined.shape != real.shape or imagined.dtype != np.uint8 or real.dtype != np.uint8:
        raise ValueError(
            "images to compare must be uint8 of one shape, got "
            f"{imagined.dtype} {imagined.shape} and {real.dtype} {real.shape}"
        )
