"""Writing LeRobotDataset v3 fast and safely: whole shards first, then one finished dataset.

Episodes are staged as shards (two parquet files in a folder that appears by a rename), so a killed
collection loses at most the shard under way. `assemble` then writes the dataset through LeRobot's
own `LeRobotDatasetMetadata`, in a temporary folder that is renamed when whole. Images are PNG
bytes embedded in the parquet files, as LeRobot's `use_videos=False` writes them.

LeRobot's `add_frame`/`save_episode` store the same, through one PNG file per frame; docs/results.md
has both rates.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.common.atomic import atomic_folder
from vla_rl.data.keyframes import STATES_FOLDER, write_states
from vla_rl.data.segmentation import structure_file, write_structure
from vla_rl.types import Keyframe

if TYPE_CHECKING:
    import pyarrow as pa

IMAGE_PREFIX = "observation.images."
FINAL_IMAGE_PREFIX = "final_image_"
FINAL_STATE = "final_state"
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
REPO_ID = "local/vla-rl"  # LeRobot wants a name; nothing is looked up under it.
SHARD_FRAMES, SHARD_EPISODES, SHARD_STATES = "frames.parquet", "episodes.parquet", "states.safetensors"
MAX_STAT_IMAGES = 8
_COUNTS = ("interventions", "recoveries", "round")
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode as it is stored: T control steps, the observation *before* each action.

    Attributes:
        task, split, index: the `EpisodeSpec` it started from.
        instruction: LeRobot's "task".
        png: camera -> T PNG-encoded frames.
        state: float32 (T, S).
        actions: float32 (T, A), what a policy should learn (the clean expert action).
        executed_actions: float32 (T, A), what the environment was given (with noise, if any).
        reward: float32 (T,), reward of each step: positive at success, zero before.
        success: the task was solved.
        control_source: who acted, one of `vla_rl.types.CONTROL_SOURCES`, for each step (T).
        policy_version: which policy acted.
        interventions: times that a person took over from the policy. recoveries: segments of recovery.
        round: of collecting and training again, that the episode belongs to; 0 where there are none.
        failure_score: float32 (T, 2), a failure detector's score and threshold as known at each step, NaN where there
            were none yet; None without a detector. Stored where the features hold `FAILURE_FEATURES`, and not described
            in the statistics.
        final_png, final_state: the observation after the last action. Stored with the episode's
            metadata, since a LeRobot frame always has an action.
        simulator_states: the simulator's states along the episode, for keyframes; empty where none were saved.
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
    policy_version: str
    final_png: dict[str, bytes]
    final_state: np.ndarray
    simulator_states: Sequence[Keyframe] = ()
    structure: Mapping[str, np.ndarray] = field(default_factory=dict)
    interventions: int = 0
    recoveries: int = 0
    round: int = 0
    failure_score: np.ndarray | None = None

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
    def num_bytes(self) -> int:
        return sum(len(frame) for frames in self.png.values() for frame in frames)


def encode_png(image: np.ndarray) -> bytes:
    """An upright RGB image, uint8 (height, width, 3), as PNG."""
    import cv2

    ok, data = cv2.imencode(".png", image[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])
    assert ok, f"PNG encoding failed for an image of shape {image.shape} and dtype {image.dtype}"
    return data.tobytes()


def decode_image(data: bytes) -> np.ndarray:
    """PNG or JPEG bytes as RGB uint8 (height, width, 3).

    Raises:
        ValueError: not an image.
    """
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"{len(data)} bytes that are neither PNG nor JPEG")
    return image[..., ::-1]


def dataset_features(
    cameras: Sequence[str], image_size: tuple[int, int], state_dim: int, action_dim: int
) -> dict[str, dict[str, Any]]:
    """LeRobot's feature dictionary for our datasets. `image_size` is (height, width), pixels."""

    def vector(dim: int, name: str) -> dict[str, Any]:
        return {"dtype": "float32", "shape": (dim,), "names": [f"{name}_{i}" for i in range(dim)]}

    def scalar(dtype: str) -> dict[str, Any]:
        return {"dtype": dtype, "shape": (1,), "names": None}

    image = {"dtype": "image", "shape": (*image_size, 3), "names": ["height", "width", "channels"]}
    return {
        **{IMAGE_PREFIX + camera: dict(image) for camera in cameras},
        STATE: vector(state_dim, "state"),
        ACTION: vector(action_dim, "action"),
        EXECUTED_ACTION: vector(action_dim, "action"),
        "next.reward": scalar("float32"),
        SUCCESS: scalar("bool"),
        "next.done": scalar("bool"),
        CONTROL_SOURCE: scalar("string"),
        POLICY_VERSION: scalar("string"),
    }


# --- staging -----------------------------------------------------------------------------------


def write_shard(
    folder: Path, episodes: Sequence[RecordedEpisode], rejected: Sequence[tuple[str, int]], features: Mapping[str, Any]
) -> None:
    """Write episodes, and the (task, index) of those tried but not kept, as one atomic shard folder.

    Raises:
        FileExistsError: another process has written this shard.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

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
    """For each whole shard, in order: its episodes' rows, its rejected (task, index), and its folder."""
    import pyarrow.parquet as pq

    for shard in sorted(Path(folder).glob("shard_*")):
        rejected = [(task, int(index)) for task, index in json.loads((shard / "rejected.json").read_text())]
        file = shard / SHARD_EPISODES
        yield (pq.read_table(str(file)).to_pylist() if file.exists() else []), rejected, shard


def _frame_table(episode: RecordedEpisode, features: Mapping[str, Any]) -> pa.Table:
    import pyarrow as pa

    length = episode.length
    done = np.zeros(length, bool)
    done[-1] = True
    values: dict[str, Any] = {
        "next.reward": pa.array(episode.reward.astype(np.float32)),
        SUCCESS: pa.array(episode.succeeded),
        "next.done": pa.array(done),
        CONTROL_SOURCE: pa.array(episode.control_source, pa.string()),
        POLICY_VERSION: pa.array([episode.policy_version] * length, pa.string()),
    }
    for name, array in (
        (STATE, episode.state),
        (ACTION, episode.actions),
        (EXECUTED_ACTION, episode.executed_actions),
    ):
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


def _episode_row(episode: RecordedEpisode, features: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "task": episode.task,
        "split": episode.split,
        "index": episode.index,
        "instruction": episode.instruction,
        "length": episode.length,
        "success": episode.success,
        **{name: getattr(episode, name) for name in _COUNTS},
        "stats": json.dumps(_episode_stats(episode, features)),
        FINAL_STATE: episode.final_state.astype(np.float32).tolist(),
        **{FINAL_IMAGE_PREFIX + camera: data for camera, data in episode.final_png.items()},
    }


def _episode_stats(episode: RecordedEpisode, features: Mapping[str, Any]) -> dict[str, dict[str, list]]:
    """LeRobot's per-episode statistics of the features, images sampled and in [0, 1], as JSON-able lists."""
    length = episode.length
    done = np.zeros((length, 1), bool)
    done[-1] = True
    vectors = {
        STATE: episode.state,
        ACTION: episode.actions,
        EXECUTED_ACTION: episode.executed_actions,
        "next.reward": episode.reward[:, None],
        SUCCESS: episode.succeeded[:, None],
        "next.done": done,
    }
    stats = {name: _describe(vectors[name]) for name in features if name in vectors}
    sampled = np.unique(np.linspace(0, length - 1, min(length, MAX_STAT_IMAGES)).astype(int))
    for camera, frames in episode.png.items():
        pixels = np.stack([decode_image(frames[i]) for i in sampled])[:, ::2, ::2].reshape(-1, 3) / 255.0
        numbers = _describe(pixels)
        stats[IMAGE_PREFIX + camera] = {
            key: value if key == "count" else np.reshape(value, (3, 1, 1)).tolist() for key, value in numbers.items()
        } | {"count": [len(sampled)]}
    return stats


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


# --- assembly ----------------------------------------------------------------------------------


def assemble(
    shards: Path, dataset: Path, *, fps: int, features: Mapping[str, Any], robot: str, notes: Mapping[str, Any]
) -> dict[str, int]:
    """Write the finished LeRobotDataset v3 from staged shards, atomically.

    Args:
        shards: folder of `shard_*` folders.
        dataset: where the dataset appears; must not exist, or be an empty folder.
        notes: JSON-able provenance, written to `collect.json` in the dataset.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        FileExistsError: `dataset` has content; the shards are still there.
    """
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    with atomic_folder(dataset, what="dataset", exclusive=True) as partial:
        root = partial / "content"  # LeRobot insists on making its folder itself.
        meta = LeRobotDatasetMetadata.create(
            REPO_ID, fps, dict(features), robot_type=robot, root=root, use_videos=False, metadata_buffer_size=100
        )
        writer = _DataWriter(root, meta)
        for rows, _, shard in read_shards(shards):
            writer.add_shard(rows, shard)
            if (shard / SHARD_STATES).is_file():
                (root / STATES_FOLDER).mkdir(exist_ok=True)
                shutil.copy2(shard / SHARD_STATES, root / STATES_FOLDER / f"{shard.name}.safetensors")
        writer.close()
        meta.finalize()
        (root / "collect.json").write_text(json.dumps(dict(notes), indent=1))
        for item in root.iterdir():
            item.rename(partial / item.name)
        root.rmdir()
    return {"episodes": meta.total_episodes, "frames": meta.total_frames}


class _DataWriter:
    """Appends staged episodes to `data/chunk-*/file-*.parquet`, and registers each in the metadata."""

    def __init__(self, root: Path, meta: Any) -> None:
        from lerobot.datasets.feature_utils import get_hf_features_from_features

        self._root, self._meta = root, meta
        self._schema = get_hf_features_from_features(meta.features).arrow_schema
        self._chunk, self._file = 0, -1
        self._writer: Any = None
        self._bytes = 0

    def add_shard(self, rows: Sequence[Mapping[str, Any]], shard: Path) -> None:
        import pyarrow.parquet as pq

        if not rows:
            return
        frames = pq.ParquetFile(str(shard / SHARD_FRAMES))
        for number, row in enumerate(rows):
            self._add_episode(row, frames.read_row_group(number), structure_file(shard, number))

    def _add_episode(self, row: Mapping[str, Any], frames: pa.Table, structure: Path) -> None:
        import pyarrow as pa

        meta, length = self._meta, row["length"]
        if structure.is_file():
            target = structure_file(self._root, meta.total_episodes)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(structure, target)
        assert frames.num_rows == length, f"a staged episode has {frames.num_rows} frames, its row says {length}"
        first, episode_index = meta.total_frames, meta.total_episodes
        meta.save_episode_tasks([row["instruction"]])
        numbers = np.arange(length)
        columns = {
            **{name: frames.column(name) for name in frames.column_names},
            "timestamp": pa.array((numbers / meta.fps).astype(np.float32)),
            "frame_index": pa.array(numbers),
            "episode_index": pa.array(np.full(length, episode_index)),
            "index": pa.array(first + numbers),
            "task_index": pa.array(np.full(length, meta.get_task_index(row["instruction"]))),
        }
        table = pa.table({name: columns[name] for name in self._schema.names}).cast(self._schema)
        self._write(table)
        stats = {k: {s: np.asarray(v) for s, v in entry.items()} for k, entry in json.loads(row["stats"]).items()}
        extra = {k: v for k, v in row.items() if k.startswith(FINAL_IMAGE_PREFIX)}
        meta.save_episode(
            episode_index,
            length,
            [row["instruction"]],
            stats,
            {
                "data/chunk_index": self._chunk,
                "data/file_index": self._file,
                "dataset_from_index": first,
                "dataset_to_index": first + length,
                "success": row["success"],
                "env_task": row["task"],
                "env_split": row["split"],
                "env_index": row["index"],
                **{name: row.get(name, 0) for name in _COUNTS},
                FINAL_STATE: np.asarray(row[FINAL_STATE], np.float32),
                **extra,
            },
        )

    def _write(self, table: pa.Table) -> None:
        import pyarrow.parquet as pq
        from lerobot.datasets.utils import update_chunk_file_indices

        limit = self._meta.data_files_size_in_mb * 2**20
        if self._writer is None or self._bytes + table.nbytes > limit:
            self.close()
            if self._file < 0:
                self._file = 0
            else:
                self._chunk, self._file = update_chunk_file_indices(self._chunk, self._file, self._meta.chunks_size)
            path = self._root / self._meta.data_path.format(chunk_index=self._chunk, file_index=self._file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(str(path), self._schema, compression="snappy")
            self._bytes = 0
        self._writer.write_table(table)
        self._bytes += table.nbytes

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
