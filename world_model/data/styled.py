"""Restyled datasets for fitting: copies of episodes, and images for the autoencoder.

An episode has one style in all its frames and cameras. The copies' styles are drawn from (seed, copy, episode), so a
stopped fit goes on with the same ones, and their latents are encoded once, into the same kind of cache as the recorded
episodes'. The autoencoder, which sees single images, gets a style of its own for each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import cv2
import numpy as np
import torch

from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import EpisodeDataset
from vla_rl.data.structure import Structure, open_structure
from vla_rl.types import EnvSpec
from world_model.config import StyleConfig
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import ImageSamples
from world_model.data.style import Palette, Style, draw_style, named_colors, restyle

PALETTE_IMAGES = 8  # Of each camera, that an episode's colors are measured on.
_IMAGE_STYLES = 5  # Stream of random numbers.
_FORMAT = 1  # Of what a style looks like: another one makes other latents.


class Restyler:
    """Draws styles for a dataset's episodes, and shows its images in them."""

    def __init__(
        self, dataset: EpisodeDataset, structure: Structure, config: StyleConfig, still_cameras: frozenset[str]
    ) -> None:
        self.dataset, self.structure, self.config, self.still = dataset, structure, config, still_cameras
        self._palettes: dict[int, Palette] = {}

    def key(self, seed: Sequence[int]) -> str:
        """Of all that styles drawn with `seed` depend on, besides the dataset."""
        options = self.config.model_dump(mode="json", exclude={"share", "copies", "still_cameras"})
        parts = [_FORMAT, self.structure.key, options, sorted(self.still), list(seed)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    def palette(self, episode: int) -> Palette:
        """The colors of an episode's segments, measured on some of its frames."""
        if episode not in self._palettes:
            start, length = int(self.dataset.starts[episode]), int(self.dataset.lengths[episode])
            rows = start + np.unique(np.linspace(0, length - 1, min(length, PALETTE_IMAGES)).astype(np.int64))
            images = [self.dataset.images[camera][rows] for camera in self.dataset.images]
            segments = [self.structure.segments[camera][rows] for camera in self.dataset.images]
            self._palettes[episode] = Palette.of(images, segments)
        return self._palettes[episode]

    def style(self, episode: int, seed: Sequence[int]) -> Style:
        """The style that `seed` gives an episode; colors that its instruction names keep their names."""
        task = self.dataset.task[self.dataset.starts[episode]]
        named = named_colors(self.dataset.instructions[task])
        return draw_style(self.config, self.palette(episode), named, np.random.default_rng([*seed, episode]))

    def show(self, camera: str, images: np.ndarray, place: np.ndarray, style: Style) -> np.ndarray:
        """Images uint8 (n, h, w, 3) of a camera in a style.

        Args:
            place: int64 (n,), the dataset's rows; N + e for the final image of episode e.
        """
        depth = None if self.structure.depth is None else self.structure.depth[camera][place]
        return restyle(images, self.structure.segments[camera][place], style, depth, camera in self.still)


@dataclass(frozen=True)
class StyledFrames(EpisodeFrames):
    """Episodes' frames whose images are in other styles; everything else is as recorded.

    Attributes:
        seed: of the styles, one for each episode.
    """

    restyler: Restyler
    seed: tuple[int, ...]

    @classmethod
    def restyled(cls, frames: EpisodeFrames, restyler: Restyler, seed: Sequence[int], weight: float) -> StyledFrames:
        """The frames of `frames` in other styles; `weight` is their dataset's share of batches."""
        values = {field.name: getattr(frames, field.name) for field in fields(EpisodeFrames)}
        values["dataset"] = replace(frames.dataset, weight=weight)
        return cls(**values, restyler=restyler, seed=tuple(seed))

    @property
    def look(self) -> str:
        return self.restyler.key(self.seed)

    def cut_after(self, first_steps: int) -> StyledFrames:
        return self.restyled(super().cut_after(first_steps), self.restyler, self.seed, self.dataset.weight)

    def images(self, frames: np.ndarray) -> np.ndarray:
        images = super().images(frames)
        episodes = self.episodes[self.owner[frames]]
        for episode in np.unique(episodes).tolist():
            rows = np.flatnonzero(episodes == episode)
            style = self.restyler.style(episode, self.seed)
            for view, camera in enumerate(self.cameras):
                images[rows, view] = self.restyler.show(camera, images[rows, view], self.place[frames[rows]], style)
        return images


class StyledImages(ImageSamples):
    """Images for training the autoencoder, a share of them in a style of their own.

    What a step draws depends on (seed, step) alone, and is as without styles but for the style.

    Args:
        parts: datasets. restylers: of each.
    """

    def __init__(self, parts: Sequence[EpisodeDataset], restylers: Sequence[Restyler], share: float) -> None:
        super().__init__(parts)
        self._restylers, self._styled_share = list(restylers), share

    def batch(self, size: int, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ImageSamples.batch`. A styled image differs from its mean image by as much as the recorded one did."""
        images, means = super().batch(size, seed, step)
        own = np.random.default_rng([seed, step, _IMAGE_STYLES]).random(size) < self._styled_share
        for i, (part, view, row) in enumerate(self.draw(size, seed, step)):
            if not own[i]:
                continue
            restyler = self._restylers[part]
            dataset = restyler.dataset
            episode = int(np.searchsorted(dataset.starts, row, side="right")) - 1
            style = restyler.style(episode, [seed, _IMAGE_STYLES, step, i])
            before = images[i].numpy()
            after = restyler.show(list(dataset.images)[view], before[None], np.array([row]), style)[0]
            means[i] += torch.from_numpy(after.astype(np.float32) - before)
            images[i] = torch.from_numpy(after)
        return images, means


def restylers(
    config: StyleConfig,
    parts: Sequence[EpisodeFrames],
    camera_maps: Sequence[Mapping[str, str]],
    known_still: Sequence[str],
) -> list[Restyler]:
    """A restyler for each dataset.

    Args:
        camera_maps: of each dataset, see `DatasetConfig`.
        known_still: cameras that do not move, where the config does not say.

    Raises:
        ConfigError: a still camera that the datasets do not have.
        DatasetError: a dataset without segmentation, or without depth where that is asked for.
    """
    still = frozenset(known_still if config.still_cameras is None else config.still_cameras)
    if unknown := sorted(still - set(parts[0].cameras)) if config.still_cameras is not None else []:
        raise ConfigError(f"world_model.style.still_cameras: unknown {unknown}; allowed: {', '.join(parts[0].cameras)}")
    return [
        Restyler(part.dataset, open_structure(part.dataset, names, config.depth), config, still)
        for part, names in zip(parts, camera_maps, strict=True)
    ]


def with_styles(
    config: StyleConfig, parts: Sequence[EpisodeFrames], makers: Sequence[Restyler], seed: int
) -> list[EpisodeFrames]:
    """The recorded episodes and their styled copies, weighted so that `share` of what is drawn is styled."""
    result: list[EpisodeFrames] = []
    for part in parts:
        result.append(replace(part, dataset=replace(part.dataset, weight=part.dataset.weight * (1 - config.share))))
    for copy in range(config.copies):
        for number, (part, maker) in enumerate(zip(parts, makers, strict=True)):
            weight = part.dataset.weight * config.share / config.copies
            result.append(StyledFrames.restyled(part, maker, (seed, copy, number), weight))
    return result


SMALLEST = 96  # Side of a picture on the sheet, pixels.


def write_style_sheet(
    config: StyleConfig,
    dataset: DatasetConfig,
    spec: EnvSpec,
    file: Path,
    *,
    seed: int,
    num_episodes: int,
    num_styles: int,
) -> list[str]:
    """Write a PNG: a row for each of two moments and each camera of an episode; as recorded, segments, then styles.

    Args:
        num_episodes: spread over the dataset. num_styles: columns of each row.

    Returns:
        the instruction of each episode shown.

    Raises:
        ConfigError, DatasetError: as for fitting.
    """
    frames = EpisodeFrames.of(open_episodes(dataset, spec), 1, spec.action_low, spec.action_high)
    maker = restylers(config, [frames], [dataset.camera_map], tuple(spec.projections))[0]
    chosen = np.unique(np.linspace(0, len(frames.episodes) - 1, num_episodes).astype(np.int64))
    colors = np.random.default_rng(5).integers(40, 256, (256, 3)).astype(np.uint8)
    rows = []
    for number in chosen.tolist():
        episode = int(frames.episodes[number])
        styles = [maker.style(episode, (seed, copy, 0)) for copy in range(num_styles)]
        for moment in (0, int(frames.counts[number]) * 2 // 3):
            index = frames.starts[number] + np.array([moment])
            images, place = frames.images(index), frames.place[index]
            for view, camera in enumerate(frames.cameras):
                cells = [images[0, view], colors[maker.structure.segments[camera][place][0]]]
                cells += [maker.show(camera, images[:, view], place, style)[0] for style in styles]
                rows.append(np.concatenate(cells, 1))
    sheet = np.concatenate(rows)
    scale = max(-(-SMALLEST // frames.images(np.arange(1)).shape[2]), 1)
    sheet = np.repeat(np.repeat(sheet, scale, 0), scale, 1)
    encoded, data = cv2.imencode(".png", sheet[..., ::-1])
    assert encoded, f"PNG encoding failed for a sheet of shape {sheet.shape}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data.tobytes())
    return [frames.instruction(frames.starts[[number]])[0] for number in chosen.tolist()]
