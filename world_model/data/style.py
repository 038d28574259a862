"""Structure-guided changes of style (Sword, arXiv 2605.07288): the same scene in other colors, patterns and light.

Sword re-renders videos with Cosmos-Transfer under depth and segmentation. Here the segmentation itself is repainted:
each segment gets another color, its shading and its details stay, and edges, where a pixel shows a bit of two
segments, are taken apart and put together again. Nothing moves, so actions, states and outcomes stay true.

What an instruction calls by its color keeps that color's name, and nothing else gets the name: see `draw_style`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cv2
import numpy as np

from vla_rl.data.segmentation import BACKGROUND, FIRST_THING, MAX_ID, TABLE
from world_model.config import StyleConfig

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


SURFACES = (BACKGROUND, TABLE)
LIGHT = 0.3  # Largest relative change of brightness, and from place to place.
RECOLORED = 0.8  # Share of the segments that get another color.
TEXTURE = 0.25  # Strongest pattern on table and background, of their brightness.
CLEAR = 0.25  # Colors (0 .. 1, Euclidean) that are this far apart stay so; nearer ones do not come nearer.
BRIGHTEST = 1.1  # Of a new color under the brightest light: hardly over-exposed.
AT_ONCE = 8  # Images, which bounds the memory that edges take.
_LUMINANCE = np.array([0.299, 0.587, 0.114], np.float32)
_DARK = 0.04  # Added to luminances that are divided: black has noise in place of shading.
_WINDOW = 2  # Pixels around an edge's pixel where its two colors are looked up.
_TRIES = 12
_FREE, _SAME_NAME, _KEPT = range(3)


@dataclass(frozen=True)
class Palette:
    """The segments of an episode.

    Attributes:
        ids: those that are seen. color: float64 (256, 3), each one's mean in 0 .. 1, away from edges.
        names: float64 (256, len(NAMES)), share of its pixels by color name.
    """

    ids: tuple[int, ...]
    color: np.ndarray
    names: np.ndarray

    @classmethod
    def of(cls, images: Iterable[np.ndarray], segments: Iterable[np.ndarray]) -> Palette:
        """Of pictures uint8 (n, h, w, 3) and their segments uint8 (n, h, w), from one camera after another."""
        count = np.zeros((2, MAX_ID + 1))
        total = np.zeros((2, MAX_ID + 1, 3))
        names = np.zeros((2, MAX_ID + 1, len(NAMES)))
        for pictures, ids in zip(images, segments, strict=True):
            pixels, flat = pictures.reshape(-1, 3) / 255.0, ids.reshape(-1).astype(np.int64)
            called = color_name(pixels)
            inside = (neighbor(ids) == ids).reshape(-1)
            for row, chosen in enumerate((inside, ~inside)):
                of = flat[chosen]
                count[row] += np.bincount(of, minlength=MAX_ID + 1)
                for channel in range(3):
                    total[row, :, channel] += np.bincount(of, pixels[chosen, channel], MAX_ID + 1)
                cells = np.bincount(of * len(NAMES) + called[chosen], minlength=(MAX_ID + 1) * len(NAMES))
                names[row] += cells.reshape(MAX_ID + 1, -1)
        only_edges = count[0] == 0
        for values in (count, total, names):
            values[0, only_edges] = values[1, only_edges]
        number = np.maximum(count[0], 1)[:, None]
        seen = tuple(np.flatnonzero(count.sum(0)).tolist())
        return cls(seen, total[0] / number, names[0] / number)


@dataclass(frozen=True)
class Style:
    """How an episode is to look, in all its frames and cameras.

    Attributes:
        old, new: float32 (256, 3), the segments' colors; equal where a color stays.
        lit: bool (256,), segments that the light falls on.
        gain: brightness. gradient: (2,), its relative change from the middle of the image to its right and lower edge.
        side: (2,), relative brightness of what faces the right and the bottom of the image, by the depth.
        pattern: of `SURFACES`, strength, kind and seed.
    """

    old: np.ndarray
    new: np.ndarray
    lit: np.ndarray
    gain: float = 1.0
    gradient: tuple[float, float] = (0.0, 0.0)
    side: tuple[float, float] = (0.0, 0.0)
    pattern: tuple[tuple[float, str, int], ...] = ((0.0, "noise", 0),) * len(SURFACES)


# --- drawing a style ----------------------------------------------------------------------------


def draw_style(config: StyleConfig, palette: Palette, named: frozenset[int], rng: np.random.Generator) -> Style:
    """A random style of an episode.

    A segment that shows a color which the instruction names keeps its name: its color varies as long as it is called
    the same, under the brightest and the dimmest light too; if it has other colors as well, it is left as it is. Any
    other segment may become any color that the instruction does not name. Two segments that differ clearly do so
    afterwards.

    Args:
        named: positions in `NAMES` of the colors that the instruction names.
    """
    gain = float(np.exp(rng.uniform(-1, 1) * np.log1p(LIGHT)))
    gradient = rng.uniform(-0.5, 0.5, 2) * LIGHT
    side = rng.uniform(-1, 1, 2) * LIGHT if config.depth else np.zeros(2)
    kinds = ("noise", "stripes", "checks")
    pattern = tuple(
        (float(rng.uniform(0, TEXTURE)), kinds[rng.integers(len(kinds))], int(rng.integers(2**31))) for _ in SURFACES
    )
    spread = float(np.abs(gradient).sum() + np.abs(side).sum())
    lights = np.array([gain * (1 - min(spread, 0.9)), gain, gain * (1 + spread)])
    rules = {i: _rule(palette, i, named) for i in palette.ids}

    def stays_true(i: int, color: np.ndarray, strength: float = 0.0) -> bool:
        """Whether instructions name a segment in this color, light and pattern as before."""
        under = np.concatenate([lights * (1 - strength), lights * (1 + strength)])
        called = color_name(np.minimum(color * under[:, None], 1))
        if rules[i] == _FREE:
            return not named.intersection(called.tolist())
        return bool((called == color_name(palette.color[i])).all())

    new = palette.color
    for _ in range(_TRIES):
        drawn = _draw_colors(config, palette, rules, stays_true, lights.max(), rng)
        if drawn is not None:
            new = drawn
            break
    lit = np.ones(MAX_ID + 1, bool)
    for i in palette.ids:
        lit[i] = stays_true(i, new[i])
    pattern = tuple(
        p if i in rules and stays_true(i, new[i], p[0]) else (0.0, *p[1:])
        for i, p in zip(SURFACES, pattern, strict=True)
    )
    return Style(
        palette.color.astype(np.float32),
        new.astype(np.float32),
        lit,
        gain,
        (float(gradient[0]), float(gradient[1])),
        (float(side[0]), float(side[1])),
        pattern,
    )


def _rule(palette: Palette, i: int, named: frozenset[int]) -> int:
    shares = palette.names[i, sorted(named)] if named else np.zeros(1)
    if shares.sum() < 0.1:
        return _FREE
    alone = shares.max() > 0.6 and int(color_name(palette.color[i])) in named
    return _SAME_NAME if alone else _KEPT


def _draw_colors(
    config: StyleConfig,
    palette: Palette,
    rules: dict[int, int],
    stays_true: Callable[[int, np.ndarray], bool],
    brightest: float,
    rng: np.random.Generator,
) -> np.ndarray | None:
    """New colors (256, 3); None where some segment found none.

    Args:
        brightest: light that falls on them.
    """
    new, done = palette.color.copy(), []
    for i in sorted(palette.ids, key=lambda i: (-rules[i], i)):  # Those with the least freedom first.
        old = palette.color[i]
        stays = rules[i] == _KEPT or (rules[i] == _FREE and rng.random() >= RECOLORED)
        for _ in range(0 if stays else _TRIES):
            color = _propose(rules[i], old, i in SURFACES, rng)
            bright = (color * brightest).max() > max(BRIGHTEST, old.max())
            if not bright and stays_true(i, color) and _clear(color, i, new, palette.color, done):
                new[i] = color
                break
        if not _clear(new[i], i, new, palette.color, done):
            return None
        done.append(i)
    return new


def _propose(rule: int, old: np.ndarray, surface: bool, rng: np.random.Generator) -> np.ndarray:
    if rule == _SAME_NAME:
        hue, saturation, value = to_hsv(old)
        return from_hsv(
            hue + rng.uniform(-0.04, 0.04), saturation * rng.uniform(0.7, 1.2), value * rng.uniform(0.7, 1.25)
        )
    if surface:
        return from_hsv(rng.random(), rng.uniform(0, 0.6), rng.uniform(0.2, 0.85))
    return from_hsv(rng.random(), rng.uniform(0, 1), rng.uniform(0.1, 0.95))


def _clear(color: np.ndarray, i: int, new: np.ndarray, old: np.ndarray, done: list[int]) -> bool:
    """Whether it stays as far from the others' colors as it was, or far enough."""
    if not done:
        return True
    before = np.linalg.norm(old[done] - old[i], axis=1)
    return bool((np.linalg.norm(new[done] - color, axis=1) >= np.minimum(before, CLEAR) - 1e-9).all())


# --- repainting ---------------------------------------------------------------------------------


def restyle(
    images: np.ndarray, segments: np.ndarray, style: Style, depth: np.ndarray | None = None, still: bool = False
) -> np.ndarray:
    """Pictures of one camera in another style, uint8 (n, h, w, 3).

    Args:
        images: uint8 (n, h, w, 3). segments: uint8 (n, h, w).
        depth: uint16 (n, h, w), millimeters; needed for light from a side.
        still: the camera does not move. Only then do patterns, and light that differs from place to place, stay where
            they are; in other cameras they are left out.
    """
    if len(images) > AT_ONCE:
        parts = [slice(i, i + AT_ONCE) for i in range(0, len(images), AT_ONCE)]
        return np.concatenate(
            [restyle(images[p], segments[p], style, None if depth is None else depth[p], still) for p in parts]
        )
    pixels = images.astype(np.float32) / 255
    pattern = _patterns(style, (images.shape[1], images.shape[2])) if still else None
    result = _painted(pixels, segments, style)
    if pattern is not None:
        rows, columns = np.ogrid[: segments.shape[1], : segments.shape[2]]
        result *= pattern[np.minimum(segments, FIRST_THING), rows, columns][..., None]
    _repaint_edges(result, pixels, segments, style, pattern)
    light = np.full(segments.shape, style.gain, np.float32)
    if still:
        light *= _place_light(style, images.shape[1:3])
        if depth is not None and any(style.side):
            light *= 1 + _facing(depth) @ np.array(style.side, np.float32)
    result *= np.where(style.lit[segments], light, 1)[..., None]
    return np.clip(result * 255 + 0.5, 0, 255).astype(np.uint8)


def _painted(colors: np.ndarray, ids: np.ndarray, style: Style) -> np.ndarray:
    """Colors float32 (..., 3) of segments (...) in the new colors: shading as before, details as before."""
    old, new = style.old[ids], style.new[ids]
    shading = ((colors @ _LUMINANCE + _DARK) / (old @ _LUMINANCE + _DARK))[..., None]
    return colors + shading * (new - old)


def neighbor(segments: np.ndarray) -> np.ndarray:
    """The id of another segment beside each pixel, uint8 (n, h, w); its own id where there is none."""
    other = segments.copy()
    for axis in (1, 2):
        for step in (1, -1):
            beside = np.roll(segments, step, axis)
            edge = [slice(None)] * 3
            edge[axis] = slice(0, 1) if step == 1 else slice(-1, None)
            beside[tuple(edge)] = segments[tuple(edge)]
            other = np.where(beside != segments, beside, other)
    return other


def _repaint_edges(
    result: np.ndarray, pixels: np.ndarray, segments: np.ndarray, style: Style, pattern: np.ndarray | None
) -> None:
    """Where two segments meet, a pixel mixes their colors: find the mixture, and mix the new colors likewise."""
    beside = neighbor(segments)
    place = np.nonzero(beside != segments)
    if not len(place[0]):
        return
    number, row, column = place
    own, other = segments[place], beside[place]
    pure = beside == segments
    offsets = np.arange(-_WINDOW, _WINDOW + 1)
    rows = np.clip(row[:, None, None] + offsets[:, None], 0, segments.shape[1] - 1)
    columns = np.clip(column[:, None, None] + offsets, 0, segments.shape[2] - 1)
    window = (number[:, None, None], rows, columns)
    near, near_ids, near_pure = pixels[window], segments[window], pure[window]

    def color_of(ids: np.ndarray) -> np.ndarray:
        chosen = ((near_ids == ids[:, None, None]) & near_pure)[..., None]
        count = chosen.sum((1, 2))
        mean = (near * chosen).sum((1, 2)) / np.maximum(count, 1)
        return np.where(count > 0, mean, style.old[ids])

    a, b, mixed = color_of(own), color_of(other), pixels[place]
    apart = np.square(a - b).sum(-1)
    share = ((mixed - b) * (a - b)).sum(-1) / np.maximum(apart, 1e-6)
    share = np.where(apart > 0.003, np.clip(share, 0, 1), 1)[:, None]
    new_a, new_b = _painted(a, own, style), _painted(b, other, style)
    if pattern is not None:
        new_a, new_b = (
            new * pattern[np.minimum(ids, FIRST_THING), row, column][:, None]
            for new, ids in ((new_a, own), (new_b, other))
        )
    rest = mixed - share * a - (1 - share) * b
    result[place] = share * new_a + (1 - share) * new_b + rest


def _patterns(style: Style, size: tuple[int, int]) -> np.ndarray:
    """What background, table, and (1 everywhere) things are multiplied with, float32 (3, h, w)."""
    patterns = np.ones((len(SURFACES) + 1, *size), np.float32)
    for surface, (strength, kind, seed) in zip(SURFACES, style.pattern, strict=True):
        if strength:
            patterns[surface] += strength * _pattern(kind, seed, size)
    return patterns


def _pattern(kind: str, seed: int, size: tuple[int, int]) -> np.ndarray:
    """A pattern around 0, -1 .. 1, float32 (h, w)."""
    rng = np.random.default_rng(seed)
    height, width = size
    y, x = np.mgrid[0:height, 0:width] / max(size)
    if kind == "noise":
        cells = int(rng.integers(3, 14))
        grid = rng.uniform(-1, 1, (cells, cells)).astype(np.float32)
        return np.clip(cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC), -1, 1)
    angle, periods, phase = rng.uniform(0, np.pi), rng.uniform(2, 10), rng.uniform(0, 2 * np.pi)
    along = np.sin(2 * np.pi * periods * (x * np.cos(angle) + y * np.sin(angle)) + phase)
    if kind == "stripes":
        return along.astype(np.float32)
    across = np.sin(2 * np.pi * periods * (y * np.cos(angle) - x * np.sin(angle)) + phase)
    return np.clip(4 * along * across, -1, 1).astype(np.float32)


def _place_light(style: Style, size: tuple[int, int]) -> np.ndarray:
    y, x = (2 * np.mgrid[0 : size[0], 0 : size[1]] + 1) / np.array(size)[:, None, None] - 1
    return (1 + style.gradient[0] * x + style.gradient[1] * y).astype(np.float32)


def _facing(depth: np.ndarray) -> np.ndarray:
    """How far surfaces face the right and the bottom of the image, -1 .. 1, float32 (n, h, w, 2).

    The lens's focal length is taken to be the image's height: another one only makes the relief flatter or steeper.
    """
    meters = np.maximum(depth.astype(np.float32), 1) / 1000
    height = depth.shape[1]
    step = max(height // 64, 1)
    slopes = []
    for axis in (2, 1):
        index = np.minimum(np.arange(depth.shape[axis]) + step, depth.shape[axis] - 1)
        ahead = (np.take(meters, index, axis) - meters) / step
        behind = np.roll(ahead, step, axis)
        slopes.append(np.where(np.abs(ahead) < np.abs(behind), ahead, behind) * height / meters)
    right, down = slopes
    return np.stack([right, down], -1) / np.sqrt(1 + right**2 + down**2)[..., None]
