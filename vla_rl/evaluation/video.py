"""Videos of episodes: captions, colored borders, tiles side by side, MP4 and GIF.

Frames are uint8 (T, height, width, 3) RGB throughout.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from vla_rl.types import Episode

# Color-blind-safe (Okabe & Ito): bluish green, vermilion.
SUCCESS_COLOR = (0, 158, 115)
FAILURE_COLOR = (213, 94, 0)
_BORDER = 4
_CAPTION_HEIGHT = 22


def episode_frames(episode: Episode, camera: str | None = None) -> np.ndarray:
    """The frames of an episode: every control step where recorded, else one per action chunk.

    Args:
        camera: by default the first.
    """
    camera = camera or next(iter(episode.obs.images))
    first = episode.obs.images[camera][:1]
    if episode.frames is not None:
        return np.concatenate([first, episode.frames[camera]])
    return np.concatenate([episode.obs.images[camera], episode.final_obs.images[camera]])


def embedded(video: Path) -> Markup:
    """An MP4 file as the address that a page holds in place of it."""
    return Markup("data:video/mp4;base64," + base64.b64encode(video.read_bytes()).decode())


def write_episode_video(path: Path, episode: Episode, control_hz: float) -> Path:
    """Write an episode as MP4 in real time, with its instruction and outcome."""
    frames = episode_frames(episode)
    fps = control_hz * (len(frames) - 1) / max(episode.length, 1)
    return write_mp4(path, decorate(frames, episode.obs.instruction[0], episode.success), fps)


def decorate(
    frames: np.ndarray, caption: str = "", success: bool | None = None, min_size: int = 256, hold: int = 0
) -> np.ndarray:
    """Enlarge small frames (whole factors, nearest neighbor), frame them by outcome and add a caption below.

    Args:
        success: green border, red border, or none.
        min_size: the longer side reaches at least this many pixels.
        hold: repeat the last frame so many times.

    Returns:
        uint8 (T + hold, height, width, 3).
    """
    frames = upscale(frames, min_size)
    if hold:
        frames = np.concatenate([frames, np.repeat(frames[-1:], hold, axis=0)])
    if success is not None:
        color = SUCCESS_COLOR if success else FAILURE_COLOR
        num_frames, height, width, _ = frames.shape
        framed = np.empty((num_frames, height + 2 * _BORDER, width + 2 * _BORDER, 3), np.uint8)
        framed[:] = color
        framed[:, _BORDER:-_BORDER, _BORDER:-_BORDER] = frames
        frames = framed
    if caption:
        strip = _caption_strip(caption, frames.shape[2])
        frames = np.concatenate([frames, np.broadcast_to(strip, (len(frames), *strip.shape))], axis=1)
    return frames


def upscale(frames: np.ndarray, min_size: int) -> np.ndarray:
    """Repeat pixels by the smallest whole factor that brings the longer side to at least `min_size`."""
    _check(frames)
    factor = max(1, -(-min_size // max(frames.shape[1:3])))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)


def tile(videos: Sequence[np.ndarray], columns: int | None = None, gap: int = 4) -> np.ndarray:
    """Videos side by side (imagined beside real, before beside after), the shorter ones held at their end.

    Args:
        videos: each (T_i, height, width, 3), all of one size.
        columns: by default all in one row.
    """
    if not videos:
        raise ValueError("tile needs at least one video, got none")
    for video in videos:
        _check(video)
        if video.shape[1:] != videos[0].shape[1:]:
            raise ValueError(f"tile needs videos of one size, got {videos[0].shape[1:3]} and {video.shape[1:3]}")
    columns = columns or len(videos)
    rows = -(-len(videos) // columns)
    length = max(len(v) for v in videos)
    _, height, width, _ = videos[0].shape
    result = np.full((length, rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for i, video in enumerate(videos):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        held = video[np.minimum(np.arange(length), len(video) - 1)]
        result[:, top : top + height, left : left + width] = held
    return result


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> Path:
    """Write H.264 that every browser plays (even size, 4:2:0, index first)."""
    _check(frames)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    imageio.mimwrite(
        path,
        list(frames),
        format="FFMPEG",
        fps=max(fps, 1.0),
        codec="libx264",
        pixelformat="yuv420p",
        macro_block_size=2,
        output_params=["-crf", "23", "-preset", "veryfast", "-movflags", "+faststart", "-threads", "1"],
        ffmpeg_log_level="error",
    )
    return path


def _check(frames: np.ndarray) -> None:
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or len(frames) == 0:
        raise ValueError(f"frames must be uint8 (T, height, width, 3) with T > 0, got {frames.dtype} {frames.shape}")


def _caption_strip(text: str, width: int) -> np.ndarray:
    """Dark text on white, uint8 (_CAPTION_HEIGHT, width, 3), shortened to fit."""
    image = Image.new("RGB", (width, _CAPTION_HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)
    shown = text
    while draw.textlength(shown, font=font) > width - 8 and len(shown) > 1:
        shown = shown[:-2].rstrip("… ") + "…"
    draw.text((4, 3), shown, fill=(40, 40, 40), font=font)
    return np.asarray(image)
