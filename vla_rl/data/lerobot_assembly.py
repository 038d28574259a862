"""The finished LeRobotDataset v3 of staged shards (`vla_rl.data.lerobot_io`), through LeRobot's own metadata."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.common.atomic import atomic_folder
from vla_rl.data.keyframes import STATES_FOLDER
from vla_rl.data.lerobot_io import (
    COUNTS,
    FINAL_IMAGE_PREFIX,
    FINAL_OBJECT_POSES,
    FINAL_STATE,
    SHARD_STATES,
    read_frames,
    read_shards,
)
from vla_rl.data.segmentation import structure_file

METADATA = "lerobot.datasets.dataset_metadata"
REPO_ID = "local/vla-rl"  # LeRobot wants a name; nothing is looked up under it.


def load_lerobot() -> None:
    """Import what `assemble` needs now; that takes seconds, which a program may not have when it ends."""
    importlib.import_module(METADATA)


def assemble(
    shards: Path,
    dataset: Path,
    *,
    fps: int,
    features: Mapping[str, Any],
    robot: str,
    notes: Mapping[str, Any],
    files: Mapping[str, str] | None = None,
) -> dict[str, int]:
    """Write the finished LeRobotDataset v3 from staged shards, atomically.

    Args:
        shards: folder of `shard_*` folders.
        dataset: where the dataset appears; must not exist, or be an empty folder.
        notes: JSON-able provenance, written to `collect.json` in the dataset.
        files: name -> text of other files to be in the dataset.

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
        for name, text in (files or {}).items():
            (root / name).write_text(text)
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
        self._writer: pq.ParquetWriter | None = None
        self._bytes = 0

    def add_shard(self, rows: Sequence[Mapping[str, Any]], shard: Path) -> None:
        if not rows:
            return
        tables = read_frames(shard, [row["length"] for row in rows])
        for number, (row, frames) in enumerate(zip(rows, tables, strict=True)):
            self._add_episode(row, frames, structure_file(shard, number))

    def _add_episode(self, row: Mapping[str, Any], frames: pa.Table, structure: Path) -> None:
        meta, length = self._meta, row["length"]
        if structure.is_file():
            target = structure_file(self._root, meta.total_episodes)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(structure, target)
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
        for name in (FINAL_STATE, FINAL_OBJECT_POSES):
            if row.get(name) is not None:
                extra[name] = np.asarray(row[name], np.float32)
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
                **{name: row.get(name, 0) for name in COUNTS},
                **extra,
            },
        )

    def _write(self, table: pa.Table) -> None:
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
