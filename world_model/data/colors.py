"""Color names of instructions as RGB."""

from __future__ import annotations

import re

import numpy as np

NAMES = (
    "black", "grey", "white", "red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "brown",
)  # fmt: skip
_BLACK, _GREY, _WHITE, _RED, _ORANGE, _YELLOW, _GREEN, _CYAN, _BLUE, _PURPLE, _PINK, _BROWN = range(len(NAMES))
_SYNONYMS = {
    "gray": "grey", "silver": "grey", "violet": "purple", "magenta": "pink", "turquoise": "cyan", "teal": "cyan",
    "golden": "yellow", "gold": "yellow", "wooden": "brown", "beige": "brown",
}  # fmt: skip
# Hue in degrees from which, up to the next, a saturated color has a name; red begins again at 345.
_HUES = (
    (0, _RED),
    (16, _ORANGE),
    (42, _YELLOW),
    (70, _GREEN),
    (160, _CYAN),
    (195, _BLUE),
    (255, _PURPLE),
    (305, _PINK),
)


def named_colors(instruction: str) -> frozenset[int]:
    """Positions in `NAMES` of the colors that an instruction names."""
    words = (_SYNONYMS.get(word, word) for word in re.findall(r"[a-z]+", instruction.lower()))
    return frozenset(NAMES.index(word) for word in words if word in NAMES)


def color_name(rgb: np.ndarray) -> np.ndarray:
    """Position in `NAMES` of colors, float (..., 3) in 0 .. 1: int64 (...)."""
    rgb = np.asarray(rgb, np.float64)
    value, least = rgb.max(-1), rgb.min(-1)
    saturation = (value - least) / np.maximum(value, 1e-6)
    hue = _hue(rgb, value, value - least)
    limits, names = zip(*_HUES, strict=True)
    named = np.array(names)[np.searchsorted(limits, hue, side="right") - 1]
    named = np.where(hue >= 345, _RED, named)
    named = np.where((named == _RED) & (saturation < 0.6) & (value > 0.75), _PINK, named)
    named = np.where((hue >= 10) & (hue < 42) & (value < 0.6), _BROWN, named)
    colorless = np.where(value > 0.75, _WHITE, _GREY)
    named = np.where(saturation < 0.18, colorless, named)
    return np.where(value < 0.17, _BLACK, named)


def from_hsv(hue: float, saturation: float, value: float) -> np.ndarray:
    """float64 (3,) in 0 .. 1. `hue` in turns; saturation and value are clipped to 0 .. 1."""
    saturation, value = float(np.clip(saturation, 0, 1)), float(np.clip(value, 0, 1))
    ramp = np.clip(np.abs((hue % 1.0) * 6 - np.array([3.0, 2.0, 4.0])) * np.array([1, -1, -1]) + [-1, 2, 2], 0, 1)
    return value * (1 - saturation * (1 - ramp))


def to_hsv(rgb: np.ndarray) -> tuple[float, float, float]:
    """Hue in turns, saturation and value of one color, float (3,)."""
    value, least = float(rgb.max()), float(rgb.min())
    hue = float(_hue(np.asarray(rgb, np.float64), np.array(value), np.array(value - least))) / 360
    return hue, (value - least) / max(value, 1e-6), value


def _hue(rgb: np.ndarray, value: np.ndarray, span: np.ndarray) -> np.ndarray:
    """Degrees, 0 .. 360; 0 for greys."""
    red, green, blue = np.moveaxis(rgb, -1, 0)
    safe = np.maximum(span, 1e-9)
    of_red, of_green, of_blue = (green - blue) / safe % 6, (blue - red) / safe + 2, (red - green) / safe + 4
    hue = np.where(value == red, of_red, np.where(value == green, of_green, of_blue))
    return np.where(span < 1e-9, 0.0, 60 * hue) % 360
