"""Writing LeRobotDataset v3 fast and safely: whole shards first, then one finished dataset.

Episodes are staged as shards (two parquet files in a folder that appears by a rename), so a killed
collection loses at most the shard under way. `lerobot_assembly.assemble` then writes the dataset through
LeRobot's own `LeRobotDatasetMetadata`, in a temporary folder that is renamed when whole. Images are PNG
bytes embedded in the parquet files, as LeRobot's `use_videos=False` writes them.

LeRobot's `add_frame`/`save_episode` store the same, through one PNG file per frame.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.common.atomic import atomic_folder
from vla_rl.data.config import DatasetError
from vla_rl.data.keyframes import write_states
from vla_rl.data.segmentation import structure_file, write_structure
from vla_rl.types import Keyframe

IMAGE_PREFIX = "observation.images."
FINAL_IMAGE_PREFIX = "final_image_"
FINAL_STATE = "final_state"
OBJECT_POSES, FINAL_OBJECT_POSES = "object_poses", "final_object_poses"  # See `vla_rl.data.objects`.
STATE = "observation.state"
ACTION = "action"
EXECUTED_ACTION = "executed_action"
SUCCESS = "next.success"
CONTROL_SOURCE = "control_source"
POLICY_VERSION = "policy_version"
FAILURE_SCORE, FAILURE_THRESHOLD = "failure_score", "failure_threshold"
FAILURE_FEATURES: dict[str, dict[str, Any]] = {
    name: {"dtype": "float32", "shape": (1,), "names": None} for name in (FAILURE_SCORE, FAILURE_THRESHOLD)
}
REQUESTED_ACTION, INTERVENTION, TIME = "action.requested", "intervention", "time"
INTERVENING = ("recovery", "correction")  # who acts where LeRobot's `intervention` is true
SHARD_FRAMES, SHARD_EPISODES, SHARD_STATES = "frames.parquet", "episodes.parquet", "states.safetensors"
PREFERENCES = "preferences.jsonl"  # which of two episodes a person found better, a line each, in a dataset's folder
RECORDING_SETTINGS = "settings.json"  # of a recording that is not finished: {"rate": Hz, "robot": its name, ...}
MAX_STAT_IMAGES = 8
COUNTS = ("interventions", "recoveries", "round", "continued")
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode as it is stored: T control steps, the observation *before* each action.

    Attributes:
        task, split, index: the `EpisodeSpec` it started from.
        instruction: LeRobot's "task".
        png: camera -> T PNG-encoded frames (or JPEG, where the source had it so).
        state: float32 (T, S).
        actions: float32 (T, A), what a policy should learn: on a robot what was sent, in a simulator the expert's
            action before noise.
        executed_actions: float32 (T, A), what the environment was given (with noise, if any).
        reward: float32 (T,), reward of each step: positive at success, zero before.
        success: the task was solved.
        control_source: who acted, one of `vla_rl.types.CONTROL_SOURCES`, for each step (T).
        policy_version: which policy acted; a list where it is known for each step (T).
        interventions: times that a person took over from the policy. recoveries: segments of recovery.
        round: of collecting and training again, that the episode belongs to; 0 where there are none.
        continued: 1 where the episode began in the scene that another had left; 0: the scene was reset before it.
        failure_score: float32 (T, 2), a failure detector's score and threshold as known at each step, NaN where there
            were none yet; None without a detector. Stored where the features hold `FAILURE_FEATURES`, and not described
            in the statistics.
        requested_actions: float32 (T, A), what was asked before the supervisor's limits; None where nothing limits.
        time: float64 (T,), seconds since the first step by the robot's clock, which runs on where nothing was
            recorded; None where nobody measured. Both are stored where the features hold `robot_features`.
        final_png, final_state: the observation after the last action; empty and None where it was not recorded.
            Stored with the episode's metadata, since a LeRobot frame always has an action.
        simulator_states: the simulator's states along the episode, for keyframes; empty where none were saved.
        object_poses: float32 (T + 1, K, 4), poses of the scene's objects (`vla_rl.data.objects`); None where not told.
        structure: camera -> packed structure of T + 1 images (`vla_rl.data.segmentation`); empty where not recorded.
    """

    task: str
    split: str
    index: int
    instruction: str
    png: dict[str, list[bytes]]
    state: np.ndarray
    actions: np.ndarray
    executed_actions: np.ndarray
    reward: np.ndarray
    success: bool
    control_source: list[str]
    policy_version: str | list[str]
    final_png: dict[str, bytes]
    final_state: np.ndarray | None
    simulator_states: Sequence[Keyframe] = ()
    object_poses: np.ndarray | None = None
    structure: Mapping[str, np.ndarray] = field(default_factory=dict)
    interventions: int = 0
    recoveries: int = 0
    round: int = 0
    continued: int = 0
    failure_score: np.ndarray | None = None
    requested_actions: np.ndarray | None = None
    time: np.ndarray | None = None

    @property
    def length(self) -> int:
        return len(self.actions)

    @property
    def succeeded(self) -> np.ndarray:
        """bool (T,): the task had been solved by the end of that step."""
        solved = np.maximum.accumulate(self.reward > 0)
        solved[-1] = True
        return solved & self.success

    @property
    def intervening(self) -> np.ndarray:
        """bool (T,): a person who had taken over from the policy acted; LeRobot's flag."""
        return np.isin(self.control_source, INTERVENING)

    @property
    def num_bytes(self) -> int:
        return sum(len(frame) for frames in self.png.values() for frame in frames)


def encode_png(image: np.ndarray) -> bytes:
    """An upright RGB image, uint8 (height, width, 3), as PNG."""
    import cv2  # Not where only embeddings are read, as on a robot.

    ok, data = cv2.imencode(".png", image[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])
    assert ok, f"PNG encoding failed for an image of shape {image.shape} and dtype {image.dtype}"
    return data.tobytes()


def decode_image(data: bytes) -> np.ndarray:
    """PNG or JPEG bytes as RGB uint8 (height, width, 3).

    Raises:
        ValueError: not an image.
    """
    import cv2  # Not where only embeddings are read, as on a robot.

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"{len(data)} bytes that are neither PNG nor JPEG")
    return image[..., ::-1]


def _scalar(dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": (1,), "names": None}


def dataset_features(
    cameras: Sequence[str], image_size: tuple[int, int], state: int | Sequence[str], action: int | Sequence[str]
) -> dict[str, dict[str, Any]]:
    """LeRobot's feature dictionary for our datasets.

    Args:
        image_size: (height, width), pixels. state, action: the names of their numbers, or how many there are.
    """

    def vector(numbers: int | Sequence[str], name: str) -> dict[str, Any]:
        names = [f"{name}_{i}" for i in range(numbers)] if isinstance(numbers, int) else list(numbers)
        return {"dtype": "float32", "shape": (len(names),), "names": names}

    image = {"dtype": "image", "shape": (*image_size, 3), "names": ["height", "width", "channels"]}
    return {
        **{IMAGE_PREFIX + camera: dict(image) for camera in cameras},
        STATE: vector(state, "state"),
        ACTION: vector(action, "action"),
        EXECUTED_ACTION: vector(action, "action"),
        "next.reward": _scalar("float32"),
        SUCCESS: _scalar("bool"),
        "next.done": _scalar("bool"),
        CONTROL_SOURCE: _scalar("string"),
        POLICY_VERSION: _scalar("string"),
    }


def robot_features(features: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`dataset_features` as a robot's recording has them: `action` is what was sent, so there is no other beside it."""
    kept = {name: feature for name, feature in features.items() if name != EXECUTED_ACTION}
    return {
        **kept,
        REQUESTED_ACTION: dict(features[ACTION]),
        INTERVENTION: _scalar("bool"),
        TIME: _scalar("float64"),
    }


# --- staging -----------------------------------------------------------------------------------


def write_shard(
    folder: Path, episodes: Sequence[RecordedEpisode], rejected: Sequence[tuple[str, int]], features: Mapping[str, Any]
) -> None:
    """Write episodes, and the (task, index) of those tried but not kept, as one atomic shard folder.

    Raises:
        FileExistsError: another process has written this shard.
    """
    rows = [_episode_row(episode, features) for episode in episodes]
    with atomic_folder(folder, what="dataset shard", exclusive=True) as partial:
        (partial / "rejected.json").write_text(json.dumps([list(item) for item in rejected]))
        if episodes:
            tables = [_frame_table(episode, features) for episode in episodes]
            with pq.ParquetWriter(str(partial / SHARD_FRAMES), tables[0].schema, compression="none") as writer:
                for table in tables:  # One row group an episode.
                    writer.write_table(table)
            pq.write_table(pa.Table.from_pylist(rows), str(partial / SHARD_EPISODES))
        states = {f"{e.task}/{e.split}/{e.index}": e.simulator_states for e in episodes if e.simulator_states}
        if states:
            write_states(partial / SHARD_STATES, states)
        for number, episode in enumerate(episodes):
            if episode.structure:
                write_structure(structure_file(partial, number), episode.structure)


def read_shards(folder: Path) -> Iterator[tuple[list[dict[str, Any]], list[tuple[str, int]], Path]]:
    """For each whole shard, in order: its episodes' rows, its rejected (task, index), and its folder.

    Raises:
        DatasetError: a shard is damaged.
    """
    for shard in list_shards(folder):
        yield *read_shard(shard), shard


def staging_folder(folder: Path) -> Path:
    """Where a robot's recording is before it is finished: shards, and `RECORDING_SETTINGS`."""
    return folder.parent / f".{folder.name}.recording"


def list_shards(folder: Path) -> list[Path]:
    """The whole shards in a folder, in order."""
    return sorted(Path(folder).glob("shard_*"))


def read_shard(shard: Path) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """A shard's episodes' rows, and its rejected (task, index).

    Raises:
        DatasetError: it is damaged.
    """
    file = shard / SHARD_EPISODES
    with _whole(shard):
        rejected = [(task, int(index)) for task, index in json.loads((shard / "rejected.json").read_text())]
        return (pq.read_table(str(file)).to_pylist() if file.exists() else []), rejected


def read_frames(shard: Path, lengths: Sequence[int]) -> Iterator[pa.Table]:
    """The frames of each episode of a shard; `lengths`: how many its rows say.

    Raises:
        DatasetError: the shard is damaged.
    """
    with _whole(shard):
        frames = pq.ParquetFile(str(shard / SHARD_FRAMES))
    for number, length in enumerate(lengths):
        with _whole(shard):
            table = frames.read_row_group(number)
            if table.num_rows != length:
                raise ValueError(f"episode {number} has {table.num_rows} frames, its row says {length}")
        yield table


@contextmanager
def _whole(shard: Path) -> Iterator[None]:
    """Turn what a torn file raises into a message that says what to do."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        found = str(error).splitlines()[0] if str(error) else ""
        raise DatasetError(
            f"{shard}: this part of a recording is damaged ({type(error).__name__}: {found}). What it held is lost; "
            "move the folder away to go on with the others"
        ) from error


def _frame_table(episode: RecordedEpisode, features: Mapping[str, Any]) -> pa.Table:
    length = episode.length
    done = np.zeros(length, bool)
    done[-1] = True
    values: dict[str, Any] = {
        "next.reward": pa.array(episode.reward.astype(np.float32)),
        SUCCESS: pa.array(episode.succeeded),
        "next.done": pa.array(done),
        CONTROL_SOURCE: pa.array(episode.control_source, pa.string()),
        POLICY_VERSION: pa.array(_each_step(episode.policy_version, length), pa.string()),
        INTERVENTION: pa.array(episode.intervening),
    }
    if episode.time is not None:
        values[TIME] = pa.array(episode.time.astype(np.float64))
    for name, array in (
        (STATE, episode.state),
        (ACTION, episode.actions),
        (EXECUTED_ACTION, episode.executed_actions),
        (REQUESTED_ACTION, episode.requested_actions),
        (OBJECT_POSES, None if episode.object_poses is None else episode.object_poses[:-1].reshape(length, -1)),
    ):
        if array is None or name not in features:
            continue
        flat = pa.array(np.ascontiguousarray(array, np.float32).reshape(-1))
        # LeRobot stores vectors of length 1 as scalars.
        values[name] = flat if array.shape[1] == 1 else pa.FixedSizeListArray.from_arrays(flat, array.shape[1])
    if episode.failure_score is not None:
        for column, name in enumerate(FAILURE_FEATURES):
            values[name] = pa.array(episode.failure_score[:, column].astype(np.float32))
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for camera, frames in episode.png.items():
        values[IMAGE_PREFIX + camera] = pa.array([{"bytes": frame, "path": None} for frame in frames], image_type)
    return pa.table({name: values[name] for name in features})


def _each_step(value: str | list[str], length: int) -> list[str]:
    return [value] * length if isinstance(value, str) else value


def _episode_row(episode: RecordedEpisode, features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": episode.task,
        "split": episode.split,
        "index": episode.index,
        "instruction": episode.instruction,
        "length": episode.length,
        "success": episode.success,
        **{name: getattr(episode, name) for name in COUNTS},
        "stats": json.dumps(_episode_stats(episode, features)),
        **({} if episode.final_state is None else {FINAL_STATE: episode.final_state.astype(np.float32).tolist()}),
        **({} if episode.object_poses is None else {FINAL_OBJECT_POSES: episode.object_poses[-1].ravel().tolist()}),
        **{FINAL_IMAGE_PREFIX + camera: data for camera, data in episode.final_png.items()},
    }


def _episode_stats(episode: RecordedEpisode, features: Mapping[str, Any]) -> dict[str, dict[str, list]]:
    """LeRobot's per-episode statistics of the features, images sampled and in [0, 1], as JSON-able lists."""
    length = episode.length
    done = np.zeros((length, 1), bool)
    done[-1] = True
    vectors: dict[str, np.ndarray | None] = {
        STATE: episode.state,
        ACTION: episode.actions,
        EXECUTED_ACTION: episode.executed_actions,
        "next.reward": episode.reward[:, None],
        SUCCESS: episode.succeeded[:, None],
        "next.done": done,
        INTERVENTION: episode.intervening[:, None],
        REQUESTED_ACTION: _bounded(episode.requested_actions, episode.actions),
        TIME: None if episode.time is None else episode.time[:, None],
    }
    stats = {name: _describe(values) for name in features if (values := vectors.get(name)) is not None}
    sampled = np.unique(np.linspace(0, length - 1, min(length, MAX_STAT_IMAGES)).astype(int))
    for camera, frames in episode.png.items():
        pixels = np.stack([decode_image(frames[i]) for i in sampled])[:, ::2, ::2].reshape(-1, 3) / 255.0
        numbers = _describe(pixels)
        stats[IMAGE_PREFIX + camera] = {
            key: value if key == "count" else np.reshape(value, (3, 1, 1)).tolist() for key, value in numbers.items()
        } | {"count": [len(sampled)]}
    return stats


def _bounded(requested: np.ndarray | None, sent: np.ndarray) -> np.ndarray | None:
    """What was asked, within what was sent: a statistic must not be at the mercy of one wild request."""
    if requested is None:
        return None
    return np.clip(np.where(np.isfinite(requested), requested, sent), sent.min(0), sent.max(0))


def _describe(values: np.ndarray) -> dict[str, list]:
    """Statistics of values (rows, D) under LeRobot's names, a number a dimension."""
    values = values.astype(np.float64)
    quantiles = np.quantile(values, _QUANTILES, axis=0)
    return {
        "min": values.min(0).tolist(),
        "max": values.max(0).tolist(),
        "mean": values.mean(0).tolist(),
        "std": values.std(0).tolist(),
        "count": [len(values)],
        **{f"q{round(100 * q):02d}": row.tolist() for q, row in zip(_QUANTILES, quantiles, strict=True)},
    }
