"""Where a task's objects are at every control step: poses that only a simulator knows, beside a dataset's observations.

    object_poses          float32 (4 K,) of a frame: x, y, z (meters) and yaw (radians) of each of K objects, before the
                          action; NaN for those that the episode's scene has not
    final_object_poses    the same after an episode's last action, with the episode's metadata

The K names, in the feature's own list as "block.x", "block.y", ..., are the simulator's, the same for all its tasks.
They are privileged: for fitting and measuring alone, never read where a policy acts or a world model imagines. Our
simulators write them with `collect.objects=true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_io import FINAL_OBJECT_POSES, OBJECT_POSES
from vla_rl.data.source import LeRobotSource, vectors

PARTS = ("x", "y", "z", "yaw")


def object_features(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """LeRobot's feature of K objects' poses; nothing for none."""
    if not names:
        return {}
    columns = [f"{name}.{part}" for name in names for part in PARTS]
    return {OBJECT_POSES: {"dtype": "float32", "shape": (len(columns),), "names": columns}}


def object_names(features: dict[str, Any]) -> tuple[str, ...]:
    """The K objects whose poses a dataset with these features holds; none where it holds none."""
    columns = features.get(OBJECT_POSES, {}).get("names") or ()
    return tuple(column.rpartition(".")[0] for column in columns[:: len(PARTS)])


def open_object_poses(path: str | Path) -> tuple[tuple[str, ...], np.ndarray, np.ndarray] | None:
    """Read a dataset's poses.

    Returns:
        The K names, float32 (N, K, 4) before each action, and float32 (E, K, 4) after each episode's last action; None
        where the dataset holds no poses.

    Raises:
        DatasetError: missing, damaged, or without the poses after the last actions.
    """
    source = LeRobotSource(path)
    names = object_names(source.info["features"])
    if not names:
        return None
    shape = (-1, len(names), len(PARTS))
    found = np.concatenate([vectors(table, OBJECT_POSES) for table in source.batches([OBJECT_POSES])])
    columns = source.episodes.column_names
    final = source.episodes.column(FINAL_OBJECT_POSES).to_pylist() if FINAL_OBJECT_POSES in columns else []
    sizes = {len(values or ()) for values in final}
    if len(found) != source.num_frames or sizes != {found.shape[1]}:
        raise DatasetError(
            f"{source.root}: {OBJECT_POSES} of {len(found)} frames for {source.num_frames}, and {FINAL_OBJECT_POSES} "
            f"of {sorted(sizes) or 'no'} numbers for {found.shape[1]}; collect it again with collect.objects=true"
        )
    return names, found.reshape(shape), np.asarray(final, np.float32).reshape(shape)
