"""Pairs of a picture and the gripper's pose, in a folder: NNNN.png, NNNN.json, and the board in board.yaml."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from real_robot.bridge.images import encode_image
from real_robot.calibration.board import BoardConfig
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError, dump_yaml, read_yaml, validate

MAX_PAIRS = 1000


@dataclass(frozen=True)
class Shot:
    """A picture, uint8 (height, width, 3) RGB, and the gripper's pose in the base's frame (4, 4)."""

    name: str
    picture: np.ndarray
    gripper: np.ndarray


def write_board(folder: Path, board: BoardConfig) -> None:
    """Say which board the folder's pictures show.

    Raises:
        ConfigError: the folder's pictures show another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "board.yaml").exists() and read_board(folder) != board:
        raise ConfigError(f"{folder}: board.yaml names another board than is asked for; take another folder")
    write_text_atomic(folder / "board.yaml", dump_yaml(board))


def read_board(folder: Path) -> BoardConfig:
    """The board that the folder's pictures show."""
    return validate(BoardConfig, read_yaml(folder / "board.yaml"), prefix="board")


def write_shot(folder: Path, picture: np.ndarray, gripper: np.ndarray) -> Path:
    """Add a pair; the pose is written last, so that a pair is whole or not there. Returns its file."""
    number = max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()), default=-1) + 1
    path = folder / f"{number:04d}.json"
    path.with_suffix(".png").write_bytes(encode_image(picture, "png"))
    write_text_atomic(path, json.dumps({"gripper": gripper.tolist()}))
    return path


def read_shots(folder: Path) -> Iterator[Shot]:
    """The folder's pairs, in their order.

    Raises:
        ConfigError: none, too many, or a file that cannot be read.
    """
    paths = sorted(folder.glob("*.json"))
    if not 0 < len(paths) <= MAX_PAIRS:
        raise ConfigError(f"{folder}: {len(paths)} pairs; 1 to {MAX_PAIRS} (`vla-rl calibrate collect` takes them)")
    for path in paths:
        try:
            gripper = np.array(json.loads(path.read_text())["gripper"], np.float64)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: no pose: {error}") from error
        picture = cv2.imread(str(path.with_suffix(".png")))
        if gripper.shape != (4, 4) or not np.isfinite(gripper).all() or picture is None:
            raise ConfigError(f"{path}: needs a pose of 4 x 4 finite numbers and {path.stem}.png beside it")
        yield Shot(path.stem, cv2.cvtColor(picture, cv2.COLOR_BGR2RGB), gripper)
