"""A policy's embeddings of whole episodes, with how each episode ended: what failure detectors are fitted on.

An episode is embedded at the observations from which a chunk was drawn, one every `every` control steps:

    step      0    8    16   24       an episode of 27 steps, every = 8
    number    0    1    2    3

From recorded datasets the embeddings are computed again from the stored observations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vla_rl.common.atomic import atomic_folder
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import camera_names, observed_every, read_notes
from vla_rl.data.keyframes import RECORDINGS, split_start, state_names
from vla_rl.data.lerobot_io import ACTION, CONTROL_SOURCE, POLICY_VERSION, STATE
from vla_rl.data.source import LeRobotSource, check_finite, vectors
from vla_rl.interfaces import Policy
from vla_rl.types import Episode, Observation

TENSORS_FILE, FACTS_FILE = "embeddings.safetensors", "episodes.json"
_BATCH = 64  # Observations embedded together.
_OF_CHUNKS = ("embeddings", "actions")  # Fields of `EmbeddedEpisodes`; of its episodes:
_ARRAYS, _TEXTS = (*_OF_CHUNKS, "counts", "num_steps", "success"), ("instructions", "tasks", "initial_states")


@dataclass(frozen=True)
class EmbeddedEpisodes:
    """E episodes of one policy, M embeddings of size D, one episode after another.

    Attributes:
        embeddings: float32 (M, D).
        actions: float32 (M, H, A), the chunk drawn at each; past the episode's end its last action.
        counts: int64 (E,), embeddings of each episode. num_steps: int64 (E,), control steps of each.
        success: bool (E,).
        instructions, tasks: E strings. initial_states: E names; episodes with the same name began alike.
        every: control steps from one embedding to the next.
        policy_hash: of the policy's checkpoint.
    """

    embeddings: np.ndarray
    actions: np.ndarray
    counts: np.ndarray
    num_steps: np.ndarray
    success: np.ndarray
    instructions: tuple[str, ...]
    tasks: tuple[str, ...]
    initial_states: tuple[str, ...]
    every: int
    policy_hash: str

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def dim(self) -> int:
        """D."""
        return int(self.embeddings.shape[1])

    @property
    def starts(self) -> np.ndarray:
        """int64 (E,), the row of each episode's first embedding."""
        return np.cumsum(self.counts) - self.counts

    def episode(self, number: int) -> np.ndarray:
        """The embeddings of one episode, float32 (count, D)."""
        start = self.starts[number]
        return self.embeddings[start : start + self.counts[number]]

    def select(self, chosen: np.ndarray) -> EmbeddedEpisodes:
        """The episodes at `chosen`, int64 numbers or a bool mask (E,), in that order."""
        numbers = np.arange(len(self))[np.asarray(chosen)]
        starts = self.starts
        spans = [
            np.arange(start, start + count)
            for start, count in zip(starts[numbers].tolist(), self.counts[numbers].tolist(), strict=True)
        ]
        rows = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        arrays = {name: getattr(self, name)[rows if name in _OF_CHUNKS else numbers] for name in _ARRAYS}
        texts = {name: tuple(getattr(self, name)[number] for number in numbers) for name in _TEXTS}
        return replace(self, **arrays, **texts)

    @staticmethod
    def concatenate(parts: Sequence[EmbeddedEpisodes]) -> EmbeddedEpisodes:
        """The episodes of several parts, in order.

        Raises:
            ValueError: none, or they differ in the policy, its chunks, or the steps between embeddings.
        """
        if not parts:
            raise ValueError("EmbeddedEpisodes.concatenate needs at least one part, got none")
        for name in ("policy_hash", "every", "dim"):
            if len(found := {getattr(part, name) for part in parts}) > 1:
                raise ValueError(f"embedded episodes differ in {name}: {sorted(map(str, found))}")
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        texts = {name: tuple(text for part in parts for text in getattr(part, name)) for name in _TEXTS}
        return replace(parts[0], **arrays, **texts)

    def save(self, folder: Path) -> None:
        """Write the episodes as safetensors and JSON; the folder appears whole or not at all."""
        facts = {name: getattr(self, name) for name in (*_TEXTS, "every", "policy_hash")}
        with atomic_folder(Path(folder), what="embedded episodes", replace=True) as partial:
            save_file({name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}, partial / TENSORS_FILE)
            (partial / FACTS_FILE).write_text(json.dumps(facts, indent=1))

    @staticmethod
    def load(folder: Path) -> EmbeddedEpisodes:
        """What `save` wrote.

        Raises:
            DatasetError: missing or damaged.
        """
        folder = Path(folder)
        try:
            facts = json.loads((folder / FACTS_FILE).read_text())
            texts = {name: tuple(facts.pop(name)) for name in _TEXTS}
            return EmbeddedEpisodes(**load_file(folder / TENSORS_FILE), **texts, **facts)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(
                f"{folder}: not readable embedded episodes: {error}. Delete it, and run again"
            ) from error


def embed_episodes(policy: Policy, episodes: Sequence[Episode], policy_hash: str) -> EmbeddedEpisodes:
    """Embed episodes that the policy has just run, at the observations it drew its chunks from.

    Episodes that broke (`lost`) are left out.

    Raises:
        ValueError: no episode is left.
    """
    episodes = [episode for episode in episodes if not episode.lost]
    if not episodes:
        raise ValueError("no episode to embed: none was run, or every one was lost")
    obs = (episode.obs.select([row]) for episode in episodes for row in range(episode.num_chunks))
    return EmbeddedEpisodes(
        embeddings=_embed(policy, obs),
        actions=np.concatenate([episode.chunks.actions for episode in episodes]).astype(np.float32),
        counts=np.asarray([episode.num_chunks for episode in episodes], np.int64),
        num_steps=np.asarray([episode.length for episode in episodes], np.int64),
        success=np.asarray([episode.success for episode in episodes], bool),
        instructions=tuple(episode.obs.instruction[0] for episode in episodes),
        tasks=tuple(episode.spec.task for episode in episodes),
        initial_states=tuple(f"{e.spec.task}/{e.spec.split}/{e.spec.index}" for e in episodes),
        every=policy.chunk_size,
        policy_hash=policy_hash,
    )


def embed_dataset(
    policy: Policy, config: DatasetConfig, policy_hash: str, every: int = 0, same_policy: bool = True
) -> EmbeddedEpisodes:
    """Embed the recorded episodes in which the policy alone acted.

    Args:
        config: the dataset; `frames` and `weight` are not used.
        every: control steps from one embedding to the next; 0 takes the policy's chunk size.
        same_policy: refuse episodes that another checkpoint acted in; their outcomes are not this policy's.

    Raises:
        DatasetError: missing or damaged, NaN, other cameras, no outcomes, episodes of another policy, or none left.
    """
    source = LeRobotSource(config.path)
    if source.success is None:
        raise DatasetError(f"{config.path}: does not record which episodes succeeded; failure detection needs that")
    names = camera_names(source, config, policy.cameras)
    every = every or policy.chunk_size
    if every % (seen := observed_every(source.root)):
        raise DatasetError(
            f"{config.path}: has an image every {seen} control steps, and one every {every} is to be embedded; set "
            f"failure.every to a multiple of {seen}, or collect with every_frame=true"
        )
    columns = _read_columns(source, policy, policy_hash if same_policy else None)
    chosen = columns.by_policy & (source.success if config.only_successes else True)
    numbers = _some_of_each(np.flatnonzero(chosen), columns.task, config)
    if len(numbers) == 0:
        raise DatasetError(f"{config.path}: no episode in which the policy alone acted; got {len(chosen)} others")
    starts = np.cumsum(source.lengths) - source.lengths
    rows = np.concatenate([starts[n] + np.arange(0, int(source.lengths[n]), every) for n in numbers])
    ends = np.repeat(starts + source.lengths, source.lengths)[rows]
    texts = [source.instructions[task] for task in columns.task[numbers]]
    counts = -(-source.lengths[numbers] // every)
    images = {camera: _chosen_images(source, stored, rows) for camera, stored in names.items()}
    instructions = iter(np.repeat(np.asarray(texts, object), counts))
    obs = (
        Observation({camera: next(stream) for camera, stream in images.items()}, columns.state[[row]], [instruction])
        for row, instruction in zip(rows, instructions, strict=True)
    )
    known = source.initial_states()
    states = [known[n] for n in numbers]
    return EmbeddedEpisodes(
        embeddings=_embed(policy, obs),
        actions=columns.action[np.minimum(rows[:, None] + np.arange(policy.chunk_size), ends[:, None] - 1)],
        counts=counts,
        num_steps=source.lengths[numbers],
        success=source.success[numbers],
        instructions=tuple(texts),
        tasks=tuple(split_start(state)[0] or source.name for state in states),
        initial_states=tuple(_state_names(source, states, texts)),
        every=every,
        policy_hash=policy_hash,
    )


def _state_names(source: LeRobotSource, states: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Names that are another recording's too only where the episodes began alike; under any path of the dataset."""
    if read_notes(source.root).get("source") not in RECORDINGS:
        return list(states)
    return state_names(states, texts, True, f"{source.name} {source.fingerprint()[:12]}")


@dataclass(frozen=True)
class _Columns:
    """Frames: state float32 (N, S), action float32 (N, A). Episodes: task int64 (E,), by_policy bool (E,)."""

    state: np.ndarray
    action: np.ndarray
    task: np.ndarray
    by_policy: np.ndarray


def _read_columns(source: LeRobotSource, policy: Policy, policy_hash: str | None) -> _Columns:
    optional = [name for name in (STATE, CONTROL_SOURCE, POLICY_VERSION) if source.has(name)]
    states, actions, tasks, by_policy = [], [], [], []
    versions: set[str] = set()
    for table in source.batches(["task_index", ACTION, *optional]):
        actions.append(vectors(table, ACTION))
        states.append(vectors(table, STATE) if source.has(STATE) else np.zeros((table.num_rows, 0), np.float32))
        tasks.append(np.asarray(table.column("task_index")))
        who = table.column(CONTROL_SOURCE).to_pylist() if source.has(CONTROL_SOURCE) else ["policy"] * table.num_rows
        by_policy += [name == "policy" for name in who]
        if source.has(POLICY_VERSION):
            found = table.column(POLICY_VERSION).to_pylist()
            versions |= {v for v, name in zip(found, who, strict=True) if name == "policy"}
    # `vla-rl collect` records "<name> <first twelve digits of the hash>".
    own = (policy_hash or "")[:12]
    other = sorted(version for version in versions if not version.endswith(own))
    if other:
        raise DatasetError(
            f"{source.root}: episodes of another policy ({', '.join(other)}); this one is {own}. Whether "
            "it fails says nothing about this policy: collect its own episodes, or set same_policy=false"
        )
    starts = np.cumsum(source.lengths) - source.lengths
    state, action = np.concatenate(states), np.concatenate(actions)
    check_finite(source, STATE, state)
    check_finite(source, ACTION, action)
    return _Columns(
        state,
        action,
        np.concatenate(tasks)[starts],
        np.logical_and.reduceat(np.asarray(by_policy, bool), starts),
    )


def _some_of_each(numbers: np.ndarray, task: np.ndarray, config: DatasetConfig) -> np.ndarray:
    """Up to `episodes_per_task` of the episodes of each instruction, ascending."""
    if config.episodes_per_task is None:
        return numbers
    rng = np.random.default_rng(0)
    kept = [rng.permutation(numbers[task[numbers] == t])[: config.episodes_per_task] for t in np.unique(task)]
    return np.sort(np.concatenate(kept))


def _chosen_images(source: LeRobotSource, camera: str, rows: np.ndarray) -> Iterator[np.ndarray]:
    """uint8 (1, height, width, 3) at each of `rows`, ascending."""
    first, position = 0, 0
    for frames in source.images(camera, None):
        while position < len(rows) and rows[position] < first + len(frames):
            yield frames[rows[position] - first][None]
            position += 1
        first += len(frames)


def _embed(policy: Policy, obs: Iterator[Observation]) -> np.ndarray:
    """float32 (M, D) of single observations, some at a time."""
    batches = (Observation.concatenate(batch) for batch in batched(obs, _BATCH))
    return np.concatenate([policy.embed(batch).float().cpu().numpy() for batch in batches])
