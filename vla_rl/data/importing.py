"""What the importers of others' data share: episodes from anywhere, alike in shape, as one LeRobotDataset."""

from __future__ import annotations

import glob
import io
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from vla_rl.common.atomic import is_running
from vla_rl.data.config import DatasetError
from vla_rl.data.keyframes import task_of
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import (
    IMAGE_PREFIX,
    STATE,
    RecordedEpisode,
    dataset_features,
    write_shard,
)

Gripper = Literal["as_is", "one_opens", "one_closes"]
MAX_SIDE = 4_096  # pixels of a picture
_GRIPPER_SLACK = 0.05  # Beyond 0 and 1, as a sensor that was scaled to them may read.


def write_episodes(
    episodes: Iterable[tuple[str, RecordedEpisode]],
    dataset: Path,
    *,
    fps: int,
    robot: str,
    notes: Mapping[str, Any],
    state_names: Sequence[str] | None = None,
    action_names: Sequence[str] | None = None,
    has_gripper: bool = False,
    gripper_option: str = "",
    report: Callable[[str], None] = print,
) -> dict[str, int]:
    """Write a LeRobotDataset v3, an episode at a time; it appears whole.

    Args:
        episodes: each with where it is from, for errors. All have the same cameras, picture sizes, S and A; S may be 0.
        dataset: folder to make; must not exist.
        fps: control steps per second. robot: its name. notes: JSON-able provenance.
        state_names, action_names: of the S and A numbers; None: numbered.
        has_gripper: the last of unnamed actions is a gripper.
        gripper_option: where a person says so, if actions were taken as they are; "": nothing is asked.
        report: told of what deserves a look: episodes that failed, a last number that looks like a gripper.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: `dataset` exists, there is no episode, or one does not fit the first.
    """
    if dataset.exists():
        raise DatasetError(f"{dataset} exists already; choose another folder")
    with _staging(dataset) as staging:
        first: tuple[str, dict[str, Any]] | None = None
        features: dict[str, dict[str, Any]] = {}
        lowest, highest, succeeded = np.inf, -np.inf, 0
        for number, (origin, episode) in enumerate(episodes):
            succeeded, last = succeeded + episode.success, episode.actions[:, -1]
            lowest, highest = min(lowest, float(last.min())), max(highest, float(last.max()))
            shape = _shape(origin, episode)
            if first is None:
                if has_gripper and action_names is None:
                    action_names = [*(f"action_{i}" for i in range(episode.actions.shape[1] - 1)), "gripper"]
                first, features = (origin, shape), _features(shape, state_names, action_names)
            for name, found in shape.items():
                if found != first[1][name]:
                    raise DatasetError(f"{origin}: {name} {found}, of {first[0]} {first[1][name]}; import them apart")
            write_shard(staging / f"shard_{number:06d}", [episode], [], features)
        if first is None:
            raise DatasetError("no episode was found; nothing is written")
        done = assemble(staging, dataset, fps=fps, features=features, robot=robot, notes=notes)
    all_good = "; if all are good demonstrations, say so (rlds, robomimic: --success all)"
    report(f"{succeeded} of {done['episodes']} episodes succeeded{all_good * (succeeded < done['episodes'])}")
    if gripper_option and lowest >= 0 < highest:
        report(
            f"the last number of the action is from {lowest:g} to {highest:g}: if that is a gripper, say "
            f"{gripper_option} one_opens or one_closes, so that -1 is open and 1 closed as in our simulators"
        )
    return done


def demonstration(
    instruction: str,
    index: int,
    png: Mapping[str, list[bytes]],
    state: np.ndarray,
    actions: np.ndarray,
    *,
    task: str | None = None,
    success: bool = True,
    final_png: Mapping[str, bytes] | None = None,
    final_state: np.ndarray | None = None,
) -> RecordedEpisode:
    """An episode that somebody else recorded: its actions are taken as an expert's, all executed as they stand.

    Args:
        index: among the episodes of its task. task: its name; None: made of the instruction.
        png: camera -> T encoded pictures. state: float32 (T, S). actions: float32 (T, A).
        final_png, final_state: what was seen after the last action, where that is known.
    """
    reward = np.zeros(len(actions), np.float32)
    reward[-1] = success
    return RecordedEpisode(
        task=task or task_of(instruction),
        split="train",
        index=index,
        instruction=instruction,
        png=dict(png),
        state=state,
        actions=actions,
        executed_actions=actions,
        reward=reward,
        success=success,
        control_source=["expert"] * len(actions),
        policy_version="demonstration",
        final_png=dict(final_png or {}),
        final_state=final_state,
    )


def our_gripper(origin: str, actions: np.ndarray, convention: Gripper) -> np.ndarray:
    """Actions, float32 (T, A), whose last number is -1 for open and 1 for closed, as in our simulators.

    Args:
        origin: where they are from, for the error.
        convention: as_is: it is so, or no gripper; one_opens: 1 open, 0 closed; one_closes: 0 open, 1 closed.

    Raises:
        DatasetError: the last number is not of 0 to 1, as the convention says.
    """
    if convention == "as_is":
        return actions
    low, high = float(actions[:, -1].min()), float(actions[:, -1].max())
    if low < -_GRIPPER_SLACK or high > 1 + _GRIPPER_SLACK:
        raise DatasetError(
            f"{origin}: the last number of the action is from {low:g} to {high:g}; gripper {convention!r} stands for "
            "numbers of 0 to 1. Say as_is where it is -1 to 1 already, or scale it first."
        )
    last = 2 * actions[:, -1:] - 1
    return np.concatenate([actions[:, :-1], last if convention == "one_closes" else -last], axis=1)


@contextmanager
def _staging(dataset: Path) -> Iterator[Path]:
    """A folder beside the dataset, where there must be room anyway; what killed imports left there is removed."""
    start = f".{dataset.name}.import-{socket.gethostname()}-"
    for left in dataset.parent.glob(f"{glob.escape(start)}*"):
        pid = left.name.removeprefix(start).partition("-")[0]
        if pid.isdecimal() and not is_running(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    dataset.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{start}{os.getpid()}-", dir=dataset.parent) as folder:
        yield Path(folder)


def _shape(origin: str, episode: RecordedEpisode) -> dict[str, Any]:
    """What all episodes of a dataset must have in common."""
    sizes = {}
    for camera, frames in episode.png.items():
        if "/" in camera:
            raise DatasetError(f"{origin}: a camera is named {camera!r}; LeRobot allows no / in names, choose another")
        for number, data in enumerate([*frames, *filter(None, [episode.final_png.get(camera)])], 1):
            size = _size(f"{origin}: picture {number} of {camera}", data)
            if size != sizes.setdefault(camera, size):
                raise DatasetError(
                    f"{origin}: picture {number} of {camera} is {size[1]} x {size[0]} pixels, those before it "
                    f"{sizes[camera][1]} x {sizes[camera][0]}; a camera's pictures must be of one size. Scale it"
                )
    return {"pictures of": sizes, "size of state": episode.state.shape[1], "size of action": episode.actions.shape[1]}


def _size(what: str, data: bytes) -> tuple[int, int]:
    """(height, width) of a PNG or JPEG, by its beginning alone."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            size = image.height, image.width
    except OSError as error:
        raise DatasetError(f"{what}: {len(data)} bytes that are neither PNG nor JPEG") from error
    except Image.DecompressionBombError as error:
        raise DatasetError(f"{what}: {error}; at most {MAX_SIDE} pixels a side") from error
    if max(size) > MAX_SIDE:
        raise DatasetError(f"{what}: {size[1]} x {size[0]} pixels; at most {MAX_SIDE} a side")
    return size


def _features(
    shape: Mapping[str, Any], state: Sequence[str] | None, action: Sequence[str] | None
) -> dict[str, dict[str, Any]]:
    sizes = shape["pictures of"]
    features = dataset_features(
        tuple(sizes), (1, 1), state or shape["size of state"], action or shape["size of action"]
    )
    for camera, size in sizes.items():
        features[IMAGE_PREFIX + camera]["shape"] = (*size, 3)
    return {name: feature for name, feature in features.items() if name != STATE or shape["size of state"]}
