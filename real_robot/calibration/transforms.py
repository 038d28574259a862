"""Poses as 4 x 4 matrices: a point in the inner frame times the pose is the point in the outer one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.spatial.transform import Rotation


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
