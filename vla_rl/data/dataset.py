"""Batches for behavior cloning: observations with the H actions that followed, from one dataset or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.cache import StoredImages, open_cache
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.keyframes import RECORDINGS, state_names
from vla_rl.data.selection import across_parts, some_states, training_mask
from vla_rl.data.source import LeRobotSource
from vla_rl.types import CONTROL_SOURCES, Observation

# In collect.json: control steps from one image to the next. A dataset that was imagined, or collected without
# every_frame, repeats its images in between, from which nothing can be learned of what to do there.
OBSERVED_EVERY = "observed_every"
NOTES_FILE = "collect.json"


@dataclass(frozen=True)
class DataNeeds:
    """What a policy needs of a dataset.

    Attributes:
        cameras: names that the dataset (after `camera_map`) must have.
        action_dim: A. state_dim: S, None where the policy reads no state.
        image_size: side to which images are resized, pixels; None keeps the dataset's.
        fps: control steps per second of the environment; None accepts any.
    """

    cameras: tuple[str, ...]
    action_dim: int
    state_dim: int | None = None
    image_size: int | None = None
    fps: float | None = None


@dataclass(frozen=True)
class BCBatch:
    """B training examples.

    Attributes:
        obs: B observations.
        actions: float32 (B, H, A), from the observation's step on; past the episode's end its last action.
        valid: bool (B, H), False past the episode's end and where a source not wanted acted.
        keyframe: float32 (B, 3), meters: where the end effector will be (`state[:3]`) when the
            gripper command next changes sign, else at the episode's end (hindsight); NaN where that was not
            recorded. None where there is no state of at least three numbers.
    """

    obs: Observation
    actions: np.ndarray
    valid: np.ndarray
    keyframe: np.ndarray | None

    @property
    def size(self) -> int:
        return len(self.actions)

    def share_of(self, part: BCBatch) -> float:
        """The weight of a part's mean loss, so that the parts' losses add up to the batch's: of the valid actions."""
        total = int(self.valid.sum())
        return int(part.valid.sum()) / total if total else part.size / self.size

    def select(self, rows: np.ndarray) -> BCBatch:
        """The examples at `rows`, in that order."""
        keyframe = None if self.keyframe is None else self.keyframe[rows]
        return BCBatch(self.obs.select(rows), self.actions[rows], self.valid[rows], keyframe)

    @staticmethod
    def concatenate(parts: Sequence[BCBatch]) -> BCBatch:
        """One batch from several, in order."""
        keyframes = [part.keyframe for part in parts if part.keyframe is not None]
        return BCBatch(
            Observation.concatenate([part.obs for part in parts]),
            np.concatenate([part.actions for part in parts]),
            np.concatenate([part.valid for part in parts]),
            np.concatenate(keyframes) if len(keyframes) == len(parts) else None,
        )


@dataclass(frozen=True)
class EpisodeDataset:
    """A dataset's frames as flat arrays, N frames of E episodes one after another.

    Attributes:
        images: the policy's camera name -> the N frames', uint8 (N, height, width, 3) where indexed.
        cameras: the policy's camera name -> the dataset's.
        state: float32 (N, S). actions, executed_actions: float32 (N, A).
        source: int8 (N,), who acted, index in `CONTROL_SOURCES`.
        task: int32 (N,), index in `instructions`.
        starts, lengths: int64 (E,). success: bool (E,), all True where it is not recorded (`has_outcomes`).
        succeeded: bool (N,), the task had been solved by the end of that frame's step (latched).
        rows: int64, the frames to learn from (all with an image of their own, or those that the config selects).
        final_images, final_state: like images and state, (E, ...), after each last action; None where not recorded.
        initial_states: E names, "task/split/index" where recorded. Episodes with the same name began alike.
        observed_every: control steps from one image and state to the next, repeated in between.
        body_moves: float32 (N, S), what actions move the robot alone, where it was replayed (`with_body_moves`).
        name: the dataset's own, without the folders above it.
        cache: folder of the decoded arrays, named after content, cameras and image size.
        is_recording: a recorder or an import wrote it. action_names, grippers: see `LeRobotSource`.
    """

    path: Path
    cache: Path
    fps: float
    images: dict[str, StoredImages]
    state: np.ndarray
    actions: np.ndarray
    executed_actions: np.ndarray
    source: np.ndarray
    task: np.ndarray
    instructions: list[str]
    starts: np.ndarray
    lengths: np.ndarray
    success: np.ndarray
    succeeded: np.ndarray
    wanted: np.ndarray
    rows: np.ndarray
    ends: np.ndarray
    keyframes: np.ndarray | None
    final_images: dict[str, np.ndarray] | None
    final_state: np.ndarray | None
    initial_states: list[str]
    weight: float = 1.0
    observed_every: int = 1
    name: str = ""
    has_outcomes: bool = True
    cameras: dict[str, str] = field(default_factory=dict)
    is_recording: bool = False
    action_names: tuple[str, ...] = ()
    grippers: tuple[int, ...] = ()
    body_moves: np.ndarray | None = None

    @property
    def episodes(self) -> np.ndarray:
        """Numbers of the episodes with at least one selected frame, int64, ascending."""
        return np.unique(np.searchsorted(self.starts, self.rows, side="right") - 1)

    @property
    def num_episodes(self) -> int:
        """Episodes with at least one selected frame."""
        return len(self.episodes)

    def state_names(self, own: str) -> list[str]:
        """Names of the E initial states that are equal, of several datasets too, where episodes began alike alone.

        See `keyframes.state_names`.
        """
        texts = [self.instructions[number] for number in self.task[self.starts]]
        return state_names(self.initial_states, texts, self.is_recording, own)

    def keep_episodes(self, keep: np.ndarray) -> EpisodeDataset:
        """The same with frames selected only in episodes where `keep`, bool (E,)."""
        return replace(self, rows=self.rows[np.repeat(keep, self.lengths)[self.rows]])

    def split(self, episodes: np.ndarray) -> tuple[EpisodeDataset, EpisodeDataset]:
        """(All others, those at `episodes`, int64 numbers)."""
        held = np.isin(np.arange(len(self.starts)), episodes)
        return self.keep_episodes(~held), self.keep_episodes(held)

    def hold_out(self, fraction: float, seed: Sequence[int]) -> tuple[EpisodeDataset, EpisodeDataset]:
        """Split whole initial states at random: (to train on, held out), at least one state in each.

        See `hold_out.some_states`. Of one state alone, its episodes are split.
        """
        episodes = self.episodes
        if len(episodes) < 2:
            raise DatasetError(f"{self.path}: {len(episodes)} episode; holding some out needs at least 2")
        held = some_states([self.initial_states[e] for e in episodes], fraction, seed)
        return self.split(episodes[held])

    def fold(self, number: int | None, count: int, seed: Sequence[int]) -> tuple[EpisodeDataset, EpisodeDataset]:
        """Split into `count` random folds of whole initial states: (all others, fold `number`); None: all, and all."""
        if number is None:
            return self, self
        states, place = np.unique([self.initial_states[e] for e in self.episodes], return_inverse=True)
        if len(states) < count:
            raise DatasetError(f"{self.path}: episodes of {len(states)} initial states; {count} folds need one each")
        held = np.zeros(len(self.starts), bool)
        held[self.episodes] = (np.random.default_rng(seed).permutation(len(states)) % count)[place] == number
        return self.keep_episodes(~held), self.keep_episodes(held)

    def batch(self, rows: np.ndarray, chunk_size: int) -> BCBatch:
        """The examples that start at frames `rows`, int64 (B,)."""
        steps = rows[:, None] + np.arange(chunk_size)
        inside = steps < self.ends[rows][:, None]
        steps = np.minimum(steps, self.ends[rows][:, None] - 1)
        obs = Observation(
            images={camera: images[rows] for camera, images in self.images.items()},
            state=self.state[rows],
            instruction=[self.instructions[i] for i in self.task[rows]],
        )
        keyframe = None if self.keyframes is None else self.keyframes[rows]
        return BCBatch(obs, self.actions[steps], inside & self.wanted[steps], keyframe)


def open_dataset(config: DatasetConfig, needs: DataNeeds) -> EpisodeDataset:
    """Open a LeRobotDataset v3, check that it fits, and decode it (once) into the cache.

    Raises:
        DatasetError: missing or damaged, other cameras, sizes or fps, NaN, or too few episodes.
        DiskFullError: no room for the cache.
    """
    source = LeRobotSource(config.path)
    names = camera_names(source, config, needs.cameras)
    _check_sizes(source, needs)
    decoded = open_cache(source, tuple(names.values()), needs.image_size)
    arrays, final_images = decoded.arrays, decoded.final_images
    if needs.state_dim is None:
        arrays["state"] = arrays["state"][:, : source.state_dim]
    ends = np.cumsum(source.lengths)
    starts = ends - source.lengths
    wanted = _frames_mask(config, source, arrays["source"], starts)
    episode_task = arrays["task"][starts]
    keep = _choose_episodes(config, source, episode_task)
    step = np.arange(len(wanted)) - np.repeat(starts, source.lengths)
    every = observed_every(source.root)
    is_seen = step % every == 0
    rows = np.flatnonzero(wanted & is_seen & np.repeat(keep, source.lengths))
    if len(rows) == 0:
        raise DatasetError(
            f"{config.path}: no frame is left after frames={config.frames}; the dataset holds "
            f"{sorted({CONTROL_SOURCES[i] for i in np.unique(arrays['source'])})}"
        )
    frame_ends = np.repeat(ends, source.lengths)
    success = np.ones(len(starts), bool) if source.success is None else source.success
    closing = arrays["action"][:, source.grippers[-1]] > 0 if source.grippers else None
    return EpisodeDataset(
        path=source.root,
        cache=decoded.folder,
        fps=source.fps,
        images={camera: decoded.images[name] for camera, name in names.items()},
        state=arrays["state"],
        actions=arrays["action"],
        executed_actions=arrays["executed_action"],
        source=arrays["source"],
        task=arrays["task"],
        instructions=source.instructions,
        starts=starts,
        lengths=source.lengths,
        success=success,
        succeeded=latched_success(arrays["succeeded"], starts, success),
        wanted=wanted,
        rows=rows,
        ends=frame_ends,
        keyframes=hindsight_keyframes(arrays["state"], closing, frame_ends, is_seen),
        final_images=None if final_images is None else {c: final_images[name] for c, name in names.items()},
        final_state=decoded.final_state,
        initial_states=source.initial_states(),
        weight=config.weight,
        observed_every=every,
        name=source.name,
        has_outcomes=source.success is not None,
        cameras=names,
        is_recording=read_notes(source.root).get("source") in RECORDINGS,
        action_names=source.action_names,
        grippers=source.grippers,
    )


def observed_every(root: Path) -> int:
    """Return the control steps from one image of a dataset to the next.

    Raises:
        DatasetError: its notes are damaged.
    """
    try:
        return int(read_notes(root).get(OBSERVED_EVERY, 1))
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{root / NOTES_FILE}: damaged ({error}). Copy or collect the dataset again.") from error


def read_notes(root: Path) -> dict[str, Any]:
    """What is noted of where a dataset comes from; empty where nothing is."""
    file = root / NOTES_FILE
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DatasetError(f"{file}: damaged ({error}). Copy or collect the dataset again.") from error


def _frames_mask(config: DatasetConfig, source: LeRobotSource, codes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    try:
        return training_mask(config.frames, codes, starts, source.success, source.interventions)
    except ValueError as error:
        raise DatasetError(f"{config.path}: {error}") from None


def latched_success(succeeded: np.ndarray, starts: np.ndarray, success: np.ndarray) -> np.ndarray:
    """Whether an episode had succeeded by the end of each step: latched, and at the last step as the episode says.

    Args:
        succeeded: bool (N,), as each step recorded it. starts: int64 (E,). success: bool (E,), of the episodes.
    """
    lengths = np.diff(starts, append=len(succeeded))
    count = np.cumsum(succeeded)
    before = np.repeat(count[starts] - succeeded[starts], lengths)
    latched = (count > before) & np.repeat(success, lengths)
    latched[starts + lengths - 1] = success
    return latched


def hindsight_keyframes(
    state: np.ndarray, closing: np.ndarray | None, ends: np.ndarray, is_seen: np.ndarray
) -> np.ndarray | None:
    """Where each frame's next gripper change happens: `state[:3]` there, or at the episode's last frame.

    Args:
        state: float32 (N, S). closing: bool (N,), whether the gripper is told to close; None: there is none.
        ends: int64 (N,), one past the last frame of each frame's episode.
        is_seen: bool (N,), frames with a state of their own; where it is an older one, the answer is NaN.

    Returns:
        float32 (N, 3), or None where S < 3, or without a gripper.
    """
    if closing is None or state.shape[1] < 3:
        return None
    num_frames = len(closing)
    changed = np.zeros(num_frames, bool)
    changed[1:] = (closing[1:] != closing[:-1]) & (ends[1:] == ends[:-1])
    at = np.append(np.flatnonzero(changed), num_frames)
    following = at[np.searchsorted(at[:-1], np.arange(num_frames), side="right")]
    there = np.minimum(following, ends - 1)
    return np.where(is_seen[there, None], state[there, :3], np.float32(np.nan))


class BCDataset:
    """Batches of one or several datasets. What a step draws depends on (seed, step) alone.

    Args:
        parts: opened datasets; each batch draws from them in proportion to their weights.
        chunk_size: H.
    """

    def __init__(self, parts: Sequence[EpisodeDataset], chunk_size: int) -> None:
        if not parts:
            raise DatasetError("no dataset given; set sft.datasets to at least one folder")
        shapes = {part.path: {c: i.shape[1:3] for c, i in part.images.items()} for part in parts}
        if len({str(sorted(s.items())) for s in shapes.values()}) > 1:
            raise DatasetError(f"datasets differ in image size: {shapes}; set sft.image_size")
        if len({part.state.shape[1] for part in parts}) > 1:
            sizes = {str(part.path): part.state.shape[1] for part in parts}
            raise DatasetError(f"datasets differ in state size: {sizes}; mix only datasets of the same robot")
        self.parts, self.chunk_size = list(parts), chunk_size
        weights = np.array([part.weight for part in parts], np.float64)
        self._share = weights / weights.sum()

    @property
    def num_frames(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    @property
    def num_episodes(self) -> int:
        return sum(part.num_episodes for part in self.parts)

    def batch(self, size: int, seed: int, step: int) -> BCBatch:
        """`size` examples drawn with replacement, the same for the same (seed, step)."""
        rng = np.random.default_rng([seed, step])
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.batch(part.rows[rng.integers(len(part.rows), size=size)], self.chunk_size)
        counts = rng.multinomial(size, self._share)
        drawn = [
            part.batch(part.rows[rng.integers(len(part.rows), size=count)], self.chunk_size)
            for part, count in zip(self.parts, counts, strict=True)
            if count
        ]
        return BCBatch.concatenate(drawn).select(rng.permutation(size))

    def hold_out(self, fraction: float, seed: int) -> tuple[BCDataset, BCDataset]:
        """Split by whole initial states: (to train on, held out); each part, where no state is in two of them."""
        names = [np.array(part.state_names(str(part.path)))[part.episodes].tolist() for part in self.parts]
        together = across_parts(names, fraction, seed)
        if together is None:
            split = [part.hold_out(fraction, [seed, i]) for i, part in enumerate(self.parts)]
        else:
            split = [part.split(part.episodes[held]) for part, held in zip(self.parts, together, strict=True)]
        train, held = ([part for part in parts if len(part.rows)] for parts in zip(*split, strict=True))
        return BCDataset(train, self.chunk_size), BCDataset(held, self.chunk_size)


def camera_names(source: LeRobotSource, config: DatasetConfig, cameras: Sequence[str]) -> dict[str, str]:
    """The policy's camera name -> the dataset's."""
    if unknown := sorted(set(config.camera_map) - set(source.cameras)):
        raise DatasetError(f"{config.path}: camera_map names {unknown}; the dataset has {sorted(source.cameras)}")
    own = {name: name for name in source.cameras if name not in config.camera_map}
    names = own | {camera: name for name, camera in config.camera_map.items()}
    if missing := [camera for camera in cameras if camera not in names]:
        free = sorted(set(names) - set(cameras)) or ["its_name"]
        raise DatasetError(
            f"{config.path}: has cameras {sorted(source.cameras)}, policy needs {list(cameras)}; missing {missing}: "
            f"if one is that view under another name, say so with camera_map: {{{free[0]}: {missing[0]}}}."
        )
    return {camera: names[camera] for camera in cameras}


def _check_sizes(source: LeRobotSource, needs: DataNeeds) -> None:
    if source.action_dim != needs.action_dim:
        raise DatasetError(
            f"{source.root}: actions have {source.action_dim} dimensions, the policy's have {needs.action_dim}; "
            "the dataset is of another robot or another control mode"
        )
    if needs.state_dim is not None and source.state_dim != needs.state_dim:
        found = f"{source.state_dim} dimensions" if source.state_dim else "no state"
        raise DatasetError(
            f"{source.root}: {found} in observation.state, the policy reads {needs.state_dim}. "
            "Set policy.use_state=false, or use a dataset with that state."
        )
    if needs.fps is not None and abs(source.fps - needs.fps) > 0.5:
        raise DatasetError(
            f"{source.root}: recorded at {source.fps:g} fps, the environment is controlled at {needs.fps:g} Hz; its "
            "actions would be too large or too small. Use data of that rate, or set the environment's rate."
        )


def _choose_episodes(config: DatasetConfig, source: LeRobotSource, episode_task: np.ndarray) -> np.ndarray:
    """bool (E,), the episodes to learn from."""
    keep = np.ones(len(source.lengths), bool)
    if config.only_successes:
        if source.success is None:
            raise DatasetError(
                f"{config.path}: does not record which episodes succeeded; set only_successes=false if all are good"
            )
        keep &= source.success
        if not keep.any():
            raise DatasetError(f"{config.path}: none of its {len(keep)} episodes succeeded; only_successes leaves none")
    if config.episodes_per_task is None:
        return keep
    chosen = np.zeros_like(keep)
    rng = np.random.default_rng(0)
    for task in np.unique(episode_task):
        candidates = np.flatnonzero(keep & (episode_task == task))
        if len(candidates) < config.episodes_per_task:
            raise DatasetError(
                f"{config.path}: {len(candidates)} usable episodes of {source.instructions[task]!r}, "
                f"episodes_per_task asks for {config.episodes_per_task}. Collect more or ask for fewer."
            )
        chosen[rng.permutation(candidates)[: config.episodes_per_task]] = True
    return chosen
