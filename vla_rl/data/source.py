"""Reading a LeRobotDataset v3 from disk, ours or anybody's, straight from its files.

`lerobot`'s own reader copies every parquet file into a cache in the user's home and decodes one
frame at a time; this one streams. Videos are decoded by lerobot. Format: LeRobotDataset v3.0,
https://huggingface.co/docs/lerobot/lerobot-dataset-v3
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import constants

from vla_rl.data.config import DatasetError
from vla_rl.data.hub import check_version, on_hub
from vla_rl.data.lerobot_io import ACTION, FINAL_IMAGE_PREFIX, FINAL_STATE, IMAGE_PREFIX, STATE, decode_image

_SINGLE_IMAGE = "observation.image"
_BATCH_ROWS = 512
_GRIPPER_LAST = ("tabletop", "libero", "robosuite", "maniskill", "metaworld", "robotwin", "dummy")
_GRIPPER_WORDS = ("grip", "finger")


class LeRobotSource:
    """One dataset: its facts, and streams of its columns. Of one on the Hub, what is asked for is downloaded.

    Args:
        path: its folder, or ORGANIZATION/NAME[@REVISION] on the Hub where there is no such folder.

    Attributes:
        root: the folder. name: the dataset's own.
        cameras: camera name -> its feature's name.
        fps: control steps per second.
        state_dim, action_dim: S (0 without a state) and A. state_names, action_names: of their numbers.
        grippers: which numbers of the action are a gripper's: those whose names say so. Where none has a name, the last
            one in the simulators whose convention that is, and else none.
        lengths: int64 (E,), frames of each episode. success: bool (E,), interventions: int64 (E,), times that a person
            took over; None where not recorded.
        instructions: task_index -> instruction.

    Raises:
        DatasetError: missing, another format version, damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._remote = on_hub(path)
        self.root = Path(path).expanduser() if self._remote is None else self._remote.fetch("meta/**", "collect.json")
        self.name = self.root.resolve().name if self._remote is None else self._remote.name.repo.rpartition("/")[2]
        self.info = self._read_info()
        features = self.info["features"]
        self.cameras = {
            name.removeprefix(IMAGE_PREFIX) if name.startswith(IMAGE_PREFIX) else "image": name
            for name, feature in features.items()
            if feature["dtype"] in ("image", "video") and (name.startswith(IMAGE_PREFIX) or name == _SINGLE_IMAGE)
        }
        self.fps = float(self.info["fps"])
        if ACTION not in features:
            raise DatasetError(f"{self.root}: has no {ACTION!r} column; found {sorted(features)}")
        self.action_dim = int(features[ACTION]["shape"][0])
        self.state_dim = int(features[STATE]["shape"][0]) if STATE in features else 0
        self.state_names = _names(features[STATE], "state") if self.state_dim else ()
        self.action_names = _names(features[ACTION], "action")
        is_numbered = self.action_names == _numbered("action", self.action_dim)
        is_ours = is_numbered and self.info.get("robot_type") in _GRIPPER_LAST
        self.grippers = (self.action_dim - 1,) if is_ours else grippers_of(self.action_names)
        self.instructions = self._read_instructions()
        episodes = self._read_table(self.root / "meta" / "episodes")
        order = np.argsort(_numbers(episodes, "episode_index"), kind="stable")
        self.episodes: pa.Table = episodes.take(order)
        self.lengths = _numbers(self.episodes, "length").astype(np.int64)
        self.success = (
            np.asarray(self.episodes.column("success").to_pylist(), bool)
            if "success" in self.episodes.column_names
            else None
        )
        self.interventions = (
            _numbers(self.episodes, "interventions").astype(np.int64)
            if "interventions" in self.episodes.column_names
            else None
        )
        if len(self.lengths) == 0 or self.lengths.min() < 1:
            raise DatasetError(f"{self.root}: has {len(self.lengths)} episodes, or an empty one; nothing to learn")

    @property
    def cache_home(self) -> Path:
        """Where decoded arrays are kept by default: inside the dataset; the Hub's cache is not ours, so beside it."""
        if self._remote is None:
            return self.root / ".cache"
        return Path(constants.HF_HOME) / "vla-rl"

    @property
    def num_frames(self) -> int:
        return int(self.lengths.sum())

    def is_video(self, camera: str) -> bool:
        return self.info["features"][self.cameras[camera]]["dtype"] == "video"

    def fingerprint(self) -> str:
        """A hash of the dataset's info and of each file's name, size, beginning and end; of its commit on the Hub."""
        if self._remote is not None:
            return hashlib.blake2b(str(self._remote.name).encode(), digest_size=16).hexdigest()
        digest = hashlib.blake2b((self.root / "meta" / "info.json").read_bytes(), digest_size=16)
        files = [p for folder in ("data", "meta", "videos", "images") for p in (self.root / folder).rglob("*")]
        for file in sorted(p for p in files if p.is_file()):
            add_file(digest, str(file.relative_to(self.root)), file)
        return digest.hexdigest()

    def has(self, column: str) -> bool:
        return column in self.info["features"]

    def batches(self, columns: list[str]) -> Iterator[pa.Table]:
        """The frames in order, some hundred rows at a time, of the given parquet columns."""
        self._fetch("data/**")
        for file in self._parquet_files(self.root / "data"):
            try:
                reader = pq.ParquetFile(str(file))
                for batch in reader.iter_batches(_BATCH_ROWS, columns=columns):
                    yield pa.Table.from_batches([batch])
            except (pa.ArrowException, OSError) as error:
                raise self._damaged(file, error) from error

    def images(self, camera: str, size: int | None, episodes: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """The frames of a camera in order, uint8 (some, height, width, 3), resized to `size` if given.

        Args:
            episodes: numbers of those wanted, int64, ascending; None: all.
        """
        wanted = np.arange(len(self.lengths)) if episodes is None else episodes
        return (self._video_frames if self.is_video(camera) else self._stored_images)(camera, size, wanted)

    def _stored_images(self, camera: str, size: int | None, episodes: np.ndarray) -> Iterator[np.ndarray]:
        column = self.cameras[camera]
        is_wanted = np.repeat(np.isin(np.arange(len(self.lengths)), episodes), self.lengths)
        self._fetch("data/**", f"images/{column}/**")

        def decode(item: dict[str, Any]) -> np.ndarray:
            data = item["bytes"] if item["bytes"] is not None else (self.root / item["path"]).read_bytes()
            return resize(decode_image(data), size)

        def groups() -> Iterator[list[Any]]:
            first = 0
            for table in self.batches([column]):
                kept = is_wanted[first : first + table.num_rows]
                first += table.num_rows
                if kept.any():
                    yield table.column(column).filter(pa.array(kept)).to_pylist()

        yield from self._decoded(column, groups(), decode)

    def final_images(self, camera: str, size: int | None) -> Iterator[np.ndarray] | None:
        """A camera's image after each episode's last action, as `images` gives them; None where not all have one."""
        column = FINAL_IMAGE_PREFIX + camera
        encoded = self.episode_column(column)
        if encoded is None:
            return None
        groups = (encoded[i : i + _BATCH_ROWS] for i in range(0, len(encoded), _BATCH_ROWS))
        return self._decoded(column, groups, lambda data: resize(decode_image(data), size))

    def final_states(self) -> np.ndarray | None:
        """The state after each episode's last action, float32 (E, S); None where not all have one.

        Raises:
            DatasetError: of another size than the frames' states, or not finite.
        """
        values = self.episode_column(FINAL_STATE) if self.state_dim else None
        if values is None:
            return None
        if sizes := {len(value) for value in values} - {self.state_dim}:
            raise DatasetError(f"{self.root}: {FINAL_STATE} has {min(sizes)} numbers, {STATE} has {self.state_dim}")
        states = np.asarray(values, np.float32)
        if len(bad := np.flatnonzero(~np.isfinite(states).all(1))):
            raise DatasetError(
                f"{self.root}: {FINAL_STATE} holds NaN or infinite values in {len(bad)} episodes, first in episode "
                f"{bad[0]}. Remove those episodes (lerobot-edit-dataset) or collect again."
            )
        return states

    def initial_states(self) -> list[str]:
        """The name of each episode's initial state: task/split/index, or the dataset and the episode's number."""
        names = ("env_task", "env_split", "env_index")
        if not set(names) <= set(self.episodes.column_names):
            return [f"{self.name}/{number}" for number in range(len(self.lengths))]
        columns = [self.episodes.column(name).to_pylist() for name in names]
        return [f"{task}/{split}/{index}" for task, split, index in zip(*columns, strict=True)]

    def episode_column(self, name: str) -> list[Any] | None:
        """A column of the episodes' metadata, in order; None where it is not there or has gaps."""
        files = self._parquet_files(self.root / "meta" / "episodes")
        tables = [self._read_columns(file, lambda n: n in (name, "episode_index")) for file in files]
        if any(name not in table.column_names for table in tables):
            return None
        pairs = [
            pair
            for table in tables
            for pair in zip(table.column("episode_index").to_pylist(), table.column(name).to_pylist(), strict=True)
        ]
        values = [value for _, value in sorted(pairs, key=lambda pair: pair[0])]
        return None if any(value is None for value in values) else values

    def _decoded(
        self, column: str, groups: Iterable[list[Any]], decode: Callable[[Any], np.ndarray]
    ) -> Iterator[np.ndarray]:
        with ThreadPoolExecutor() as pool:
            for group in groups:
                try:
                    yield np.stack(list(pool.map(decode, group)))
                except (OSError, ValueError) as error:
                    raise DatasetError(f"{self.root}: {column} cannot be decoded: {error}") from error

    def _video_frames(self, camera: str, size: int | None, episodes: np.ndarray) -> Iterator[np.ndarray]:
        from lerobot.datasets.video_utils import decode_video_frames

        key = self.cameras[camera]
        self._fetch(f"videos/{key}/**")
        timestamps = np.concatenate([_numbers(t, "timestamp") for t in self.batches(["timestamp"])])
        ends = np.cumsum(self.lengths)
        columns = {
            name: _numbers(self.episodes, f"videos/{key}/{name}")
            for name in ("chunk_index", "file_index", "from_timestamp")
        }
        for episode in episodes:
            start, end = ends[episode] - self.lengths[episode], ends[episode]
            path = self.root / self.info["video_path"].format(
                video_key=key,
                chunk_index=int(columns["chunk_index"][episode]),
                file_index=int(columns["file_index"][episode]),
            )
            if not path.is_file():
                raise DatasetError(f"{self.root}: {path.relative_to(self.root)} is missing; copy the dataset again")
            for first in range(start, end, _BATCH_ROWS):
                wanted = timestamps[first : min(first + _BATCH_ROWS, end)] + columns["from_timestamp"][episode]
                try:
                    frames = decode_video_frames(path, wanted.tolist(), 0.5 / self.fps, _decoder(), True)
                except (RuntimeError, ValueError, OSError) as error:
                    raise self._damaged(path, error) from error
                yield np.stack([resize(frame, size) for frame in frames.permute(0, 2, 3, 1).contiguous().numpy()])

    def _fetch(self, *patterns: str) -> None:
        if self._remote is not None:
            self._remote.fetch(*patterns)

    # --- metadata ---

    def _read_info(self) -> dict[str, Any]:
        file = self.root / "meta" / "info.json"
        if not file.is_file():
            raise DatasetError(
                f"dataset not found: {self.root} (no meta/info.json in it). `vla-rl collect` and `vla-rl import` "
                "make one; another LeRobotDataset v3 can be used as well."
            )
        try:
            info = json.loads(file.read_text())
            version, _ = info["codebase_version"], (info["features"], info["fps"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise self._damaged(file, error) from error
        check_version(version, self.root)
        return info

    def _read_instructions(self) -> list[str]:
        file = self.root / "meta" / "tasks.parquet"
        try:
            table = pq.read_table(str(file))
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(file, error) from error
        text = next(name for name in table.column_names if name != "task_index")
        pairs = sorted(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True))
        if [number for number, _ in pairs] != list(range(len(pairs))):
            raise self._damaged(file, ValueError("task numbers are not 0, 1, 2, ..."))
        return [instruction for _, instruction in pairs]

    def _read_table(self, folder: Path) -> pa.Table:
        tables = [
            self._read_columns(file, lambda name: not name.startswith(("stats/", FINAL_IMAGE_PREFIX)))
            for file in self._parquet_files(folder)
        ]
        return pa.concat_tables(tables, promote_options="permissive")

    def _read_columns(self, file: Path, wanted: Callable[[str], bool]) -> pa.Table:
        try:
            reader = pq.ParquetFile(str(file))
            return reader.read(columns=[name for name in reader.schema_arrow.names if wanted(name)])
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(file, error) from error

    def _parquet_files(self, folder: Path) -> list[Path]:
        files = sorted(folder.glob("*/*.parquet"))
        if not files:
            raise DatasetError(
                f"{self.root}: {folder.relative_to(self.root)} has no parquet file; copy the dataset again"
            )
        return files

    def _damaged(self, file: Path, error: Exception) -> DatasetError:
        return DatasetError(
            f"{file}: missing or damaged ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Copy or collect the dataset again."
        )


@cache
def _decoder() -> str:
    """Which of LeRobot's video decoders works here; asked without one, it tries and complains with each video."""
    try:
        import_module("torchcodec")
    except (ImportError, OSError, RuntimeError):  # It is not installed, or finds no FFmpeg.
        return "pyav"
    return "torchcodec"


def grippers_of(names: Sequence[str]) -> tuple[int, ...]:
    """Which numbers of an action are a gripper's, by their names: `gripper.pos`, `left_gripper`, `panda_finger`."""
    return tuple(place for place, name in enumerate(names) if any(word in name.lower() for word in _GRIPPER_WORDS))


def _numbered(name: str, size: int) -> tuple[str, ...]:
    return tuple(f"{name}_{number}" for number in range(size))


def _names(feature: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Names of a vector's numbers, in a list or a list by group; numbered where not each has one."""
    size, names = int(feature["shape"][0]), feature.get("names")
    if isinstance(names, Mapping):
        names = [text for group in names.values() if isinstance(group, list) for text in group]
    return tuple(map(str, names)) if names and len(names) == size else _numbered(name, size)


def resize(image: np.ndarray, size: int | None) -> np.ndarray:
    """uint8 (height, width, 3) scaled to (size, size, 3) by area averaging; as it is where size is None or equal."""
    if size is None or image.shape[:2] == (size, size):
        return image
    import cv2  # Not where only embeddings are read, as on a robot.

    return cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)


def vectors(table: pa.Table, column: str) -> np.ndarray:
    """A column of vectors (or scalars) as float32 (rows, D)."""
    values = table.column(column).combine_chunks()
    flat = values.flatten() if hasattr(values, "flatten") and values.type.num_fields else values
    return np.asarray(flat, np.float32).reshape(table.num_rows, -1)


def check_finite(source: LeRobotSource, column: str, values: np.ndarray) -> None:
    """Raise `DatasetError`, naming the first frame, where a column's values, float32 (frames, D), are not numbers."""
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        number = int(np.searchsorted(np.cumsum(source.lengths), bad[0], side="right"))
        raise DatasetError(
            f"{source.root}: {column} holds NaN or infinite values in {len(bad)} frames, first in episode {number}, "
            f"frame {bad[0] - int(source.lengths[:number].sum())}. Remove those episodes (lerobot-edit-dataset) or "
            "collect again."
        )


def _numbers(table: pa.Table, column: str) -> np.ndarray:
    return np.asarray(table.column(column).combine_chunks())


def add_file(digest: hashlib.blake2b, name: str, file: Path) -> None:
    """Into a hash: `name`, and the file's size, beginning and end (64 KiB each)."""
    size = file.stat().st_size
    digest.update(f"{name}:{size}".encode())
    with open(file, "rb") as stream:
        digest.update(stream.read(1 << 16))
        stream.seek(max(size - (1 << 16), 0))
        digest.update(stream.read())
