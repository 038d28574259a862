"""The commands of `vla-rl calibrate`, and the files they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import yaml
from scipy.spatial.transform import Rotation

from real_robot.calibration.collect import read_board, read_shots
from real_robot.calibration.hand_eye import HandEye, Mount, Pair, calibrate_hand_eye
from real_robot.calibration.intrinsics import (
    BoardConfig,
    BoardFinder,
    Corners,
    Intrinsics,
    calibrate_camera,
    draw_board,
    load_intrinsics,
)
from real_robot.contract.safety import Workspace
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config, ConfigError, dump_yaml


def print_board(board: BoardConfig, path: Path, dots_per_inch: int) -> str:
    """Write the board as a PNG of its true size, with board.yaml's content beside it. Returns what to do with it."""
    if path.suffix != ".png":
        raise ConfigError(f"--output: got {path}; the board is written as a .png")
    done, data = cv2.imencode(".png", draw_board(board, dots_per_inch))
    if not done:
        raise ConfigError(f"{path}: the board cannot be drawn at {dots_per_inch} dots an inch")
    path.write_bytes(data.tobytes())
    write_text_atomic(path.with_suffix(".yaml"), dump_yaml(board))
    width, height = (side * 1e3 for side in board.extent)
    return (
        f"{path}: {width:.0f} x {height:.0f} mm. Print it at 100 %, glue it onto something flat, measure a square, and "
        f"say --set square=... where it is not {board.square * 1e3:g} mm"
    )


def read_views(folder: Path) -> tuple[BoardFinder, list[tuple[str, Pair]], tuple[int, int]]:
    """The folder's board, its pairs by name where the board is seen, and the pictures' size (height, width)."""
    finder, pairs, sizes = BoardFinder(read_board(folder)), [], set()
    for shot in read_shots(folder):
        sizes.add(shot.picture.shape[:2])
        if (corners := finder.find(shot.picture)) is not None:
            pairs.append((shot.name, Pair(shot.gripper, corners)))
    if len(sizes) != 1:
        raise ConfigError(f"{folder}: pictures of different sizes, {sorted(sizes)}: of one camera they are alike")
    return finder, pairs, sizes.pop()


def camera_file(folder: Path, output: Path) -> dict[str, Any]:
    """Intrinsics from the folder's pictures, written to `output`. Returns what was written."""
    finder, pairs, size = read_views(folder)
    camera, error, held_out = calibrate_camera([pair.corners for _, pair in pairs], finder, size)
    errors = {"fit_pixels": round(error, 4), "held_out_pixels": round(held_out, 4)}
    return _write(output, {"intrinsics": camera, "pictures": len(pairs), "errors": errors})


def hand_eye_file(folder: Path, mount: Mount, intrinsics: Path | None, output: Path) -> dict[str, Any]:
    """Where the camera is, from the folder's pairs, written to `output`. Returns what was written."""
    finder, pairs, size = read_views(folder)
    views = [pair.corners for _, pair in pairs]
    camera = _camera(intrinsics, views, finder, size)
    found = calibrate_hand_eye([pair for _, pair in pairs], finder, camera, mount)
    worst = sorted(zip(found.pair_pixels, (name for name, _ in pairs), strict=True), reverse=True)[:3]
    frames = {
        "gripper": "the camera in the frame of the gripper's pose",
        "base": "the camera in the base frame of the gripper's pose",
    }
    return _write(
        output,
        {
            "meaning": f"{frames[mount]}; the camera's z is forward, y down, as OpenCV's",
            "mount": mount,
            "transform": _pose(found, "camera"),
            "board": _pose(found, "board"),
            "pairs": found.num_pairs,
            "errors": {
                "fit_pixels": round(found.fit_pixels, 4),
                "held_out_pixels": round(found.held_out_pixels, 4),
                "held_out_mm": round(found.held_out_mm, 3),
                "held_out_degrees": round(found.held_out_degrees, 4),
                "worst_pairs": {name: round(error, 3) for error, name in worst},
            },
            "intrinsics": camera,
        },
    )


def _camera(path: Path | None, views: list[Corners], finder: BoardFinder, size: tuple[int, int]) -> Intrinsics:
    if path is None:
        return calibrate_camera(views, finder, size)[0]
    camera = load_intrinsics(path)
    if (camera.height, camera.width) != size:
        raise ConfigError(f"{path}: of pictures of {camera.height} x {camera.width}; these are {size[0]} x {size[1]}")
    return camera


def _pose(found: HandEye, which: str) -> dict[str, list[Any]]:
    pose = getattr(found, which)
    quaternion = Rotation.from_matrix(pose[:3, :3]).as_quat()
    return {
        "position": [round(float(v), 6) for v in pose[:3, 3]],
        "quaternion_xyzw": [round(float(v), 7) for v in quaternion],
        "matrix": [[round(float(v), 7) for v in row] for row in pose],
    }


def _write(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    plain = {k: v.model_dump(mode="json") if isinstance(v, Config) else v for k, v in values.items()}
    write_text_atomic(path, yaml.safe_dump(plain, sort_keys=False, default_flow_style=None))
    return plain


def workspace_text(box: Workspace) -> str:
    """The section as it goes into the contract."""
    section = {"safety": {"workspace": box.model_dump(mode="json", exclude_none=True)}}
    return yaml.safe_dump(section, sort_keys=False, default_flow_style=None)
