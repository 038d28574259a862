"""Recorded episodes of a robot as replay transitions, read while the recorder goes on writing.

A recording is a folder of shards, an episode each, until it is finished; then it is a dataset of the same episodes in
the same order. So an episode's place in its recording says which it is, before and after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from vla_rl.algorithms.offpolicy.features import NO_DRAWS, Draws, compute_features
from vla_rl.algorithms.offpolicy.transitions import Transitions, joined
from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_io import (
    ACTION,
    CONTROL_SOURCE,
    FINAL_IMAGE_PREFIX,
    FINAL_STATE,
    IMAGE_PREFIX,
    POLICY_VERSION,
    RECORDING_SETTINGS,
    STATE,
    decode_image,
    list_shards,
    read_frames,
    read_shard,
    staging_folder,
)
from vla_rl.data.source import LeRobotSource
from vla_rl.interfaces import Policy
from vla_rl.types import CONTROL_SOURCES, HUMAN_SOURCES, Observation

_TAKEN_OVER = ("recovery", "correction")


@dataclass(frozen=True)
class RecordedFrames:
    """An episode of T control steps.

    Attributes:
        obs: before each action, T rows. actions: float32 (T, A), what was executed.
        source: who drove at each step, T of `CONTROL_SOURCES`.
        continued: it began in the scene that another had left, which nobody had reset.
        success: as the simulator, a sensor or a person has said. interventions: times that a person took over.
        initial_state: task/split/index, or the recording's name and the episode's place.
        policies: versions of the policy that drove, in order.
        rate: control steps a second, as it was recorded.
        final: after the last action, one row; None: not recorded.
    """

    obs: Observation
    actions: np.ndarray
    source: np.ndarray
    success: bool
    interventions: int
    initial_state: str
    policies: tuple[str, ...]
    rate: float
    continued: bool = False
    final: Observation | None = None

    @property
    def person(self) -> np.ndarray:
        """bool (T,), a person drove."""
        return np.isin(self.source, HUMAN_SOURCES)


def recordings_in(folder: Path) -> list[Path]:
    """The recordings in a folder, under way or finished, by name; what is being written is none yet."""
    names = {path.name.removeprefix(".").removesuffix(".recording") for path in folder.glob(".*.recording")}
    names |= {path.parent.parent.name for path in folder.glob("*/meta/info.json")}
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def num_recorded(recording: Path) -> int:
    """How many whole episodes a recording has; whether it is finished or not.

    Raises:
        DatasetError: it is damaged.
    """
    if not recording.is_dir():
        found = len(list_shards(staging_folder(recording)))
        if not recording.is_dir():
            return found
    return len(LeRobotSource(recording).lengths)


def new_episodes(recording: Path, first: int, cameras: Sequence[str], most: int) -> list[RecordedFrames]:
    """The episodes of a recording from place `first` on, at most so many; whether it is finished or not.

    Args:
        recording: the folder that the recorder was given, which need not be there yet.

    Raises:
        DatasetError: an episode is damaged, or lacks a camera.
    """
    if recording.is_dir():
        return _of_dataset(recording, first, cameras, most)
    shards = list_shards(staging_folder(recording))
    try:
        if recording.is_dir():  # It was finished meanwhile, and shards are being deleted: places cannot be told.
            raise DatasetError(f"{recording}: finished")
        return [_of_shard(shard, cameras) for shard in shards[first : first + most]]
    except DatasetError:
        if not recording.is_dir():
            raise
        return _of_dataset(recording, first, cameras, most)


def _of_shard(shard: Path, cameras: Sequence[str]) -> RecordedFrames:
    rows, _ = read_shard(shard)
    if len(rows) != 1:
        raise DatasetError(f"{shard}: holds {len(rows)} episodes; a robot's recorder writes one in each")
    [frames] = read_frames(shard, [rows[0]["length"]])
    state = f"{rows[0]['task']}/{rows[0]['split']}/{rows[0]['index']}"
    return _episode(shard, frames, rows[0]["instruction"], rows[0], state, cameras, _rate(shard.parent))


def _rate(staging: Path) -> float:
    """Control steps a second of a recording that is not finished."""
    file = staging / RECORDING_SETTINGS
    try:
        return float(json.loads(file.read_text())["rate"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(
            f"{file}: does not say the rate ({type(error).__name__}: {error}). Copy it from another recording of this "
            "robot, or move the folder away"
        ) from error


def _of_dataset(recording: Path, first: int, cameras: Sequence[str], most: int) -> list[RecordedFrames]:
    source = LeRobotSource(recording)
    ends = np.cumsum(source.lengths)
    wanted = range(first, min(first + most, len(ends)))
    if not wanted:
        return []
    begin, end, at = ends[first] - source.lengths[first], ends[wanted[-1]], 0
    columns = [STATE, ACTION, CONTROL_SOURCE, POLICY_VERSION, "task_index", *(IMAGE_PREFIX + name for name in cameras)]
    if lacking := [name for name in columns if name not in source.info["features"] and name != "task_index"]:
        raise DatasetError(f"{recording}: has no column {lacking[0]!r}, which a robot's recorder writes")
    parts = []
    for table in source.batches(columns):
        low, high = max(begin - at, 0), min(end - at, table.num_rows)
        if low < high:
            parts.append(table.slice(low, high - low))
        at += table.num_rows
    frames = pa.concat_tables(parts)
    states, found = source.initial_states(), []
    known = {"success", "interventions", "continued"} & set(source.episodes.column_names)
    ending = {name: source.episode_column(name) for name in (FINAL_STATE, *(FINAL_IMAGE_PREFIX + c for c in cameras))}
    for number in wanted:
        own = frames.slice(ends[number] - source.lengths[number] - begin, source.lengths[number])
        row = {name: source.episodes.column(name)[number].as_py() for name in known}
        row |= {name: column[number] for name, column in ending.items() if column is not None}
        instruction = source.instructions[own.column("task_index")[0].as_py()]
        found.append(_episode(recording, own, instruction, row, states[number], cameras, float(source.info["fps"])))
    return found


def _episode(
    place: Path,
    frames: pa.Table,
    instruction: str,
    row: Mapping[str, Any],
    state: str,
    cameras: Sequence[str],
    rate: float,
) -> RecordedFrames:
    if lacking := [name for name in cameras if IMAGE_PREFIX + name not in frames.column_names]:
        raise DatasetError(f"{place}: has no camera {lacking[0]!r}, which the policy reads")
    try:
        images = {
            name: np.stack([decode_image(item["bytes"]) for item in frames.column(IMAGE_PREFIX + name).to_pylist()])
            for name in cameras
        }
        final = _final(row, cameras, instruction)
    except ValueError as error:
        raise DatasetError(f"{place}: {error}") from error
    source = np.array(frames.column(CONTROL_SOURCE).to_pylist())
    if unknown := sorted(set(source) - set(CONTROL_SOURCES)):
        raise DatasetError(f"{place}: {CONTROL_SOURCE} is {unknown[0]!r}; allowed: {', '.join(CONTROL_SOURCES)}")
    return RecordedFrames(
        obs=Observation(images, _numbers(frames, STATE), [instruction] * frames.num_rows),
        actions=_numbers(frames, ACTION),
        source=source,
        success=bool(row["success"]),
        interventions=int(row["interventions"]),
        initial_state=state,
        rate=rate,
        continued=bool(row.get("continued")),
        final=final,
        policies=tuple(dict.fromkeys(filter(None, frames.column(POLICY_VERSION).to_pylist()))),
    )


def _final(row: Mapping[str, Any], cameras: Sequence[str], instruction: str) -> Observation | None:
    """What was seen after an episode's last action, by its row of the recording."""
    encoded = {name: data for name in cameras if (data := row.get(FINAL_IMAGE_PREFIX + name)) is not None}
    state = row.get(FINAL_STATE)
    if state is None or len(encoded) < len(cameras):
        return None
    images = {name: decode_image(data)[None] for name, data in encoded.items()}
    return Observation(images, np.array([state], np.float32), [instruction])


def _numbers(frames: pa.Table, column: str) -> np.ndarray:
    """A column of vectors, float32 (T, D)."""
    return np.array(frames.column(column).to_pylist(), np.float32).reshape(frames.num_rows, -1)


def recorded_transitions(policy: Policy, episodes: Sequence[RecordedFrames], draws: Draws = NO_DRAWS) -> Transitions:
    """The decisions of recorded episodes, one at each control step: what was then executed, whoever drove.

    A person's success is that of the whole episode (HIL-SERL).

    Raises:
        ValueError: the policy has no embeddings.
    """
    features = compute_features(policy, (episode.obs for episode in episodes), draws)
    parts, tasks, states, first = [], [], [], 0
    for episode in episodes:
        rows = slice(first, first + len(episode.actions))
        candidates = None if features.candidates is None else features.candidates[rows]
        part = _decisions(episode.actions, policy.chunk_size, episode.success)
        parts.append(replace(part, embedding=features.embedding[rows], person=episode.person, candidates=candidates))
        tasks.append([episode.obs.instruction[0]])
        states.append([episode.initial_state])
        first = rows.stop
    return joined(parts, tasks, states)


def _decisions(actions: np.ndarray, chunk_size: int, success: bool) -> Transitions:
    """A decision at each of T steps, with the actions that followed, float32 (T, A); embeddings have no numbers yet."""
    steps = np.arange(len(actions))
    left = len(actions) - steps
    one = np.zeros(1, np.int64)
    return Transitions(
        embedding=np.zeros((len(actions), 0), np.float32),
        chunk=actions[np.minimum(steps[:, None] + np.arange(chunk_size), len(actions) - 1)],
        num_steps=np.minimum(chunk_size, left),
        following=np.where(left > chunk_size, steps + chunk_size, -1),
        elapsed=steps,
        remaining=left,
        episode=np.zeros(len(actions), np.int64),
        success=np.array([success]),
        task=one,
        initial_state=one,
    )
