"""The commands of `vla-rl calibrate`, the files they write, and the workspace box from corners that are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml
from scipy.spatial.transform import Rotation

from real_robot.calibration.collect import POSE, LiveArm, Say, read_board, read_shots
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
from real_robot.contract.channels import POSE_PARTS
from real_robot.contract.contract import RobotContract
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


MIN_CORNERS = 2
MIN_SIDE = 0.02  # meters that each side must have left


def collect_corners(arm: LiveArm, ask: Callable[[str], str], say: Say) -> list[np.ndarray]:
    """Where the gripper was, (3,) each, when the person said so, until they end."""
    corners: list[np.ndarray] = []
    while not ask("Enter takes a corner, q ends: ").strip().lower().startswith("q"):
        looked = arm.look_still()
        if looked is None:
            say("not taken: the arm moves; let it stand")
            continue
        corners.append(looked[1][:3, 3])
        say(f"{len(corners)}: " + ", ".join(f"{v:.3f}" for v in corners[-1]))
    return corners


def workspace_of(contract: RobotContract, corners: Sequence[np.ndarray], margin: float) -> Workspace:
    """The smallest box around the corners, less `margin` meters on each side.

    Raises:
        ConfigError: too few corners, a side that is too short, or a contract whose state has no position in meters.
    """
    if len(corners) < MIN_CORNERS:
        raise ConfigError(
            f"workspace: {len(corners)} corners; at least {MIN_CORNERS}, opposite ones, and the table's height"
        )
    state, seen = _position(contract, corners)
    low, high = np.min(seen, axis=0) + margin, np.max(seen, axis=0) - margin
    for axis, side in zip("xyz", high - low, strict=True):
        if side < MIN_SIDE:
            apart = max(side + 2 * margin, 0.0) * 100
            raise ConfigError(
                f"workspace: along {axis} the corners are {apart:.1f} cm apart, which is too little with a margin of "
                f"{margin * 100:g} cm on each side: go to corners that differ along {axis} too"
            )
    kept = contract.safety.workspace
    return Workspace(
        state=state,
        low=_rounded(low),
        high=_rounded(high),
        commands=_commands(contract),
        meters_per_unit=kept.meters_per_unit if kept is not None else _meters_per_unit(contract),
    )


def _rounded(corner: np.ndarray) -> tuple[float, float, float]:
    x, y, z = (round(float(v), 4) for v in corner)
    return x, y, z


def _position(contract: RobotContract, corners: Sequence[np.ndarray]) -> tuple[tuple[int, int, int], np.ndarray]:
    """Which numbers of the state are the gripper's position; and the corners (N, 3) as they would stand there."""
    at = 0
    for source in contract.observation.state:
        place = 0
        for part in source.parts if source.type == POSE else ():
            if part == "position":
                scale, offset = np.array([source.convert.of(place + axis) for axis in range(3)]).T
                if wrong := [float(one) for one in scale if abs(one) != 1]:
                    raise ConfigError(
                        f"workspace: {source.topic}: convert.scale: {wrong[0]:g} for a position: the box is in meters; "
                        "leave the position's scale at 1"
                    )
                return (at + place, at + place + 1, at + place + 2), np.array(corners) * scale + offset
            place += len(POSE_PARTS[part])
        at += source.num_values
    raise ConfigError(
        f"workspace: {contract.name}'s state has no position of the gripper, so that nothing could watch the box: read "
        "a pose (geometry_msgs/PoseStamped), or give the contract a `model` with boxes and planes"
    )


def _commands(contract: RobotContract) -> tuple[int, int, int] | None:
    """Which numbers of the action move the gripper along x, y, z; None for joint commands."""
    for sink in contract.action:
        if sink.type in ("geometry_msgs/TwistStamped", POSE):
            x, y, z = sink.indices[:3]
            return x, y, z
    return None


def _meters_per_unit(contract: RobotContract) -> float:
    """Meters a second of a command of 1, where the contract's own conversion says it."""
    for sink in contract.action:
        if sink.type == "geometry_msgs/TwistStamped":
            scale = sink.convert.scale
            return max(map(abs, scale[:3] if isinstance(scale, tuple) else (scale,))) or 1.0
    return 1.0
