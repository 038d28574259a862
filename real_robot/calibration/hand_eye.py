"""Hand-eye calibration: the camera's pose on the gripper (eye in hand) or beside the robot (eye to hand).

OpenCV's `calibrateHandEye` (Park and Martin 1994, "Robot sensor calibration: solving AX = XB on the Euclidean group")
gives the start; from there the reprojection error over all pictures is made smallest, with the camera's place and the
board's as the unknowns. What is reported is measured on pictures that were not used: five times a fifth is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from scipy.optimize import least_squares
from scipy.spatial.transform import Rotation

from real_robot.calibration.intrinsics import BoardFinder, Corners, Intrinsics, board_pose, project, rms

Mount = Literal["gripper", "base"]
MIN_PAIRS = 8
MIN_TURN = 15.0  # degrees of the largest turn between two poses
MIN_SECOND_AXIS = 0.1  # how much of all turning is about a second axis
MAX_DISAGREEMENT = 3.0  # degrees that arm and board may turn apart, in the middle of all pairs
FOLDS = 5


def pose_of(position: np.ndarray, quaternion: np.ndarray) -> np.ndarray:
    """The pose (4, 4) of a position (3,) in meters and a quaternion x, y, z, w (4,)."""
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = Rotation.from_quat(quaternion).as_matrix(), position
    return pose


def inverse(pose: np.ndarray) -> np.ndarray:
    """The pose of the outer frame in the inner one, (4, 4)."""
    turned = np.eye(4)
    turned[:3, :3], turned[:3, 3] = pose[:3, :3].T, -pose[:3, :3].T @ pose[:3, 3]
    return turned


def angle_between(first: np.ndarray, second: np.ndarray) -> float:
    """Radians that two poses are turned against each other."""
    return float(Rotation.from_matrix(first[:3, :3].T @ second[:3, :3]).magnitude())


def average(poses: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of poses that are near each other, (4, 4)."""
    mean = np.eye(4)
    mean[:3, :3] = Rotation.from_matrix(np.array([p[:3, :3] for p in poses])).mean().as_matrix()
    mean[:3, 3] = np.median([p[:3, 3] for p in poses], axis=0)
    return mean


def to_vector(pose: np.ndarray) -> np.ndarray:
    """Rotation vector and position, (6,)."""
    return np.concatenate([Rotation.from_matrix(pose[:3, :3]).as_rotvec(), pose[:3, 3]])


def from_vector(vector: np.ndarray) -> np.ndarray:
    """The reverse of `to_vector`."""
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = Rotation.from_rotvec(vector[:3]).as_matrix(), vector[3:]
    return pose


class HandEyeError(ValueError):
    """Pairs that cannot tell where the camera is; the message says what to do."""


@dataclass(frozen=True)
class Pair:
    """A picture's board, and the gripper's pose in the robot's base (4, 4) when it was taken."""

    gripper: np.ndarray
    corners: Corners


@dataclass(frozen=True)
class HandEye:
    """Result of a hand-eye calibration.

    Attributes:
        camera: the camera's pose (4, 4) in the gripper's frame (mount "gripper") or in the base's (mount "base").
        board: the board's pose (4, 4) in the base's frame (mount "gripper") or in the gripper's.
        fit_pixels: reprojection error over the pairs used, root mean square.
        held_out_pixels, held_out_mm, held_out_degrees: of pairs left out: reprojection error; and how far the board is
            from where the others say, root mean square.
        pair_pixels: reprojection error of each pair under the result: one that stands out was moved or misread.
    """

    mount: Mount
    camera: np.ndarray
    board: np.ndarray
    num_pairs: int
    fit_pixels: float
    held_out_pixels: float
    held_out_mm: float
    held_out_degrees: float
    pair_pixels: tuple[float, ...]


def calibrate_hand_eye(pairs: Sequence[Pair], finder: BoardFinder, camera: Intrinsics, mount: Mount) -> HandEye:
    """Find the camera. See `HandEye`.

    Raises:
        HandEyeError: too few pairs, turns about no or one axis, or an arm that turns otherwise than the board does.
    """
    if len(pairs) < MIN_PAIRS:
        raise HandEyeError(f"the board is seen in {len(pairs)} pairs; at least {MIN_PAIRS}, 15 to 25 are good")
    boards = [board_pose(pair.corners, finder, camera)[0] for pair in pairs]
    _check_turns(pairs)
    _check_agreement(pairs, boards)
    found, board = _solve(pairs, boards, finder, camera, mount)
    errors = [_pixels(pair, found, board, finder, camera, mount) for pair in pairs]
    pixels, shifts, turns = _held_out(pairs, boards, finder, camera, mount)
    return HandEye(
        mount=mount,
        camera=found,
        board=board,
        num_pairs=len(pairs),
        fit_pixels=rms(np.concatenate(errors)),
        held_out_pixels=rms(pixels),
        held_out_mm=float(np.sqrt(np.mean(np.square(shifts)))) * 1e3,
        held_out_degrees=float(np.degrees(np.sqrt(np.mean(np.square(turns))))),
        pair_pixels=tuple(rms(error) for error in errors),
    )


def _check_turns(pairs: Sequence[Pair]) -> None:
    """Without two turns about different axes the camera's place cannot be told from pictures (Tsai and Lenz 1989)."""
    turns = np.array(
        [
            Rotation.from_matrix(a.gripper[:3, :3].T @ b.gripper[:3, :3]).as_rotvec()
            for a, b in itertools.combinations(pairs, 2)
        ]
    )
    largest = float(np.degrees(np.linalg.norm(turns, axis=1).max()))
    if largest < MIN_TURN:
        raise HandEyeError(
            f"the gripper turned by at most {largest:.1f} degrees between pictures: moving it without turning says "
            f"nothing of where the camera is. Turn it by {MIN_TURN:.0f} degrees and more, about different axes"
        )
    strengths = np.linalg.svd(turns, compute_uv=False)
    if strengths[1] < MIN_SECOND_AXIS * strengths[0]:
        axis = np.linalg.svd(turns)[2][0].round(2).tolist()
        raise HandEyeError(
            f"the gripper turned about one axis alone, {axis} of its own frame: the camera's place along it cannot be "
            "told. Turn it about another axis too"
        )


def _check_agreement(pairs: Sequence[Pair], boards: Sequence[np.ndarray]) -> None:
    """Arm and board turn by the same angle between two pictures, wherever the camera is."""
    couples = itertools.combinations(range(len(pairs)), 2)
    apart = [
        abs(angle_between(pairs[a].gripper, pairs[b].gripper) - angle_between(boards[a], boards[b])) for a, b in couples
    ]
    if (typical := float(np.degrees(np.median(apart)))) > MAX_DISAGREEMENT:
        raise HandEyeError(
            f"between two pictures the arm and the board turn by angles typically {typical:.1f} degrees apart; "
            f"at most {MAX_DISAGREEMENT:.0f} are sane. Was the board or its mount moved, or a picture taken while the "
            "arm moved? Is the pose that of the flange? Do the intrinsics belong to this camera and picture size?"
        )


def _solve(
    pairs: Sequence[Pair], boards: Sequence[np.ndarray], finder: BoardFinder, camera: Intrinsics, mount: Mount
) -> tuple[np.ndarray, np.ndarray]:
    """The camera's pose, and the board's, as `HandEye` has them."""
    # Eye to hand is eye in hand with base and gripper changed over.
    arm = [pair.gripper if mount == "gripper" else inverse(pair.gripper) for pair in pairs]
    turn, shift = cv2.calibrateHandEye(
        [p[:3, :3] for p in arm],
        [p[:3, 3] for p in arm],
        [b[:3, :3] for b in boards],
        [b[:3, 3] for b in boards],
        method=cv2.CALIB_HAND_EYE_PARK,
    )
    found = np.eye(4)
    found[:3, :3], found[:3, 3] = turn, shift.reshape(3)
    board = average([a @ found @ b for a, b in zip(arm, boards, strict=True)])

    def errors(vector: np.ndarray) -> np.ndarray:
        first, second = from_vector(vector[:6]), from_vector(vector[6:])
        return np.concatenate([_pixels(p, first, second, finder, camera, mount).reshape(-1) for p in pairs])

    best = least_squares(errors, np.concatenate([to_vector(found), to_vector(board)]), loss="huber", f_scale=1.0).x
    return from_vector(best[:6]), from_vector(best[6:])


def _seen(pair: Pair, found: np.ndarray, board: np.ndarray, mount: Mount) -> np.ndarray:
    """Where the board must be in the camera's frame, (4, 4)."""
    arm = pair.gripper if mount == "gripper" else inverse(pair.gripper)
    return inverse(arm @ found) @ board


def _pixels(
    pair: Pair, found: np.ndarray, board: np.ndarray, finder: BoardFinder, camera: Intrinsics, mount: Mount
) -> np.ndarray:
    """Reprojection errors of a pair's corners, (N, 2)."""
    places = finder.places(pair.corners.ids)
    return project(places, _seen(pair, found, board, mount), camera) - pair.corners.points


def _held_out(
    pairs: Sequence[Pair], boards: Sequence[np.ndarray], finder: BoardFinder, camera: Intrinsics, mount: Mount
) -> tuple[np.ndarray, list[float], list[float]]:
    """Errors of each pair under what the other folds say: pixels (N, 2), the board's shift in m and turn in radians."""
    pixels, shifts, turns = [], [], []
    for fold in range(FOLDS):
        left = range(fold, len(pairs), FOLDS)
        used = [i for i in range(len(pairs)) if i not in left]
        found, board = _solve([pairs[i] for i in used], [boards[i] for i in used], finder, camera, mount)
        for i in left:
            pixels.append(_pixels(pairs[i], found, board, finder, camera, mount))
            expected = _seen(pairs[i], found, board, mount)
            shifts.append(float(np.linalg.norm(expected[:3, 3] - boards[i][:3, 3])))
            turns.append(angle_between(expected, boards[i]))
    return np.concatenate(pixels), shifts, turns
