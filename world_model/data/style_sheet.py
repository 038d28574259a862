"""Style sheet: a picture of recorded episodes in other styles, to look at before fitting."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from vla_rl.data.config import DatasetConfig
from vla_rl.types import EnvSpec
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.styled import restylers
from world_model.stage_config import StyleConfig

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
