"""ALOHA's recordings, one HDF5 file an episode (tonyzhaozh/aloha, record_episodes.py), as a LeRobotDataset.

    vla-rl import aloha_recordings -o datasets/mine --instruction "hand over the cup"

observations/qpos (T, 14)             six joints and the gripper (0 closed, 1 open) of the left arm, then of the right
observations/images/cam_*             uint8 (T, height, width, 3), RGB; or JPEG, rows padded to the longest,
                                      whose bytes compress_len (cameras, T) counts
action (T, 14)                        where the leaders were: targets of the same joints, beside what was seen before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.config import DatasetError
from vla_rl.data.hdf5 import hdf5_files, numbers, open_hdf5, pictures
from vla_rl.data.importing import demonstration, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode

HZ = 50
_ARM = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate", "gripper")
NAMES = {7 * len(sides): [side + name for side in sides for name in _ARM] for sides in (("",), ("left_", "right_"))}
_OTHERS = ("observations", "action", "compress_len")


def import_aloha(
    sources: Sequence[Path],
    dataset: Path,
    instruction: str,
    success: bool = True,
    fps: int = 0,
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each file; it appears whole.

    Args:
        sources: files, or folders of them. dataset: folder to make; must not exist.
        instruction: what the robot was to do. success: whether it did. fps: control steps a second; 0: ALOHA's 50.
        report: told of each episode.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: a file that is not such a one, or is damaged; the message names the part.
        ConfigError: no files.
    """
    files = hdf5_files(sources)
    with open_hdf5(files[0]) as opened:
        size = numbers(opened, "action", str(files[0])).shape[1]
        states = numbers(opened["observations"], "qpos", f"{files[0]}/observations").shape[1]

    def episodes() -> Iterator[tuple[str, RecordedEpisode]]:
        for number, file in enumerate(files):
            with open_hdf5(file) as opened:
                episode = _read(opened, file, number, instruction, success)
                if left := sorted(set(opened) - set(_OTHERS)):
                    report(f"{file.name}: left out: {', '.join(left)}")
            report(f"{file.name}: {episode.length} steps")
            yield str(file), episode

    notes = {"source": "ALOHA", "files": [file.name for file in files]}
    return write_episodes(
        episodes(),
        dataset,
        fps=fps or HZ,
        robot="aloha",
        notes=notes,
        state_names=NAMES.get(states),
        action_names=NAMES.get(size),
    )


def _read(opened: Any, file: Path, number: int, instruction: str, success: bool) -> RecordedEpisode:
    where, seen = str(file), opened["observations"]
    actions = numbers(opened, "action", where)
    state = numbers(seen, "qpos", f"{where}/observations", len(actions))
    cameras = sorted(seen["images"]) if "images" in seen else []
    if not cameras:
        raise DatasetError(f"{where}/observations/images: holds no camera")
    png = {camera: pictures(seen["images"], camera, f"{where}/observations/images", len(actions)) for camera in cameras}
    if "compress_len" in opened:  # In the order of the recording script's cameras, which the file does not tell.
        counted, found = numbers(opened, "compress_len", where), np.array([[*map(len, own)] for own in png.values()])
        if counted.shape != found.shape or (np.sort(counted, 0) != np.sort(found, 0)).any():
            raise DatasetError(
                f"{where}/compress_len: {counted.shape} numbers that are not the lengths of the {found.shape} pictures "
                "(cameras, steps); the file is damaged. Leave it out"
            )
    return demonstration(instruction, number, png, state, actions, success=success)
