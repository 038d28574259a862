"""Keyframe mining: the moments of a policy's real episodes at which their outcome is decided.

Keyframe-initialized rollouts are WoVR's (arXiv 2602.13977), which loads its keyframes from a file. Here they are found:

divergence  the most similar moments of other episodes, in the world model's latents and the robot's state, ended
            differently: the share v of successes among them is near a half. Score 4 v (1 - v).
failure     the last moment of a failed episode before v falls most. Score: the fall.
gripper     before the gripper's command changes sign. contact: before the simulator says that the gripper touches
            something. Score as for divergence, so that those come first whose outcome is open.
uniform     any moment. Score drawn at random.
uncertain   what the world model's value (`WorldModel.value`) says is open: score 4 V (1 - V).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vla_rl.data.config import DatasetConfig
from vla_rl.data.keyframes import (
    KeyframeError,
    KeyframeSet,
    KeyframeSource,
    MinedKeyframe,
    SimulatorStates,
    split_start,
)
from world_model.config import KeyframeConfig
from world_model.data.episodes import EpisodeFrames, open_episodes, tasks_of
from world_model.data.outcomes import steps_left
from world_model.model.world_model import WorldModel, load_world_model

FRAMES_AT_ONCE = 128
NEIGHBORS = 12  # Most similar moments of other episodes, whose outcomes say how much is still open.
ROWS_AT_ONCE = 1024  # Of a matrix of distances, which bounds its memory.


@dataclass(frozen=True)
class Moments:
    """The M frames of E episodes that could be keyframes, and what is known of each.

    Attributes:
        source, episode, step, number: int64 (M,): dataset, episode in it, control step, frame of the episode.
        owner: int64 (M,), numbers the episodes of all datasets.
        task: M names. start: M names of initial states.
        features: float32 (M, D), such that squared distances say how alike two moments are.
        success: bool (M,), how the episode ended.
        usable: bool (M,): an episode can begin here (not at its own start or end, nor after its success).
        predicted: float32 (M,), the world model's value; 0 where nobody asks for it.
        gripper: bool (M,), its command changes sign before the next frame. contact: bool (M,), likewise a touch.
    """

    source: np.ndarray
    episode: np.ndarray
    step: np.ndarray
    number: np.ndarray
    owner: np.ndarray
    task: np.ndarray
    start: np.ndarray
    features: np.ndarray
    success: np.ndarray
    usable: np.ndarray
    predicted: np.ndarray
    gripper: np.ndarray
    contact: np.ndarray


def mine_keyframes(
    world_model: Path, datasets: Sequence[Path], config: KeyframeConfig, device: str = "cpu"
) -> KeyframeSet:
    """Mine datasets of the current policy's real episodes. The same input gives the same keyframes.

    Raises:
        ConfigError: "uncertain" moments of a world model without a value.
        KeyframeError: episodes from `eval` or `validation` states, or none that has a usable moment.
        DatasetError: a dataset that is damaged, or of another robot or cameras than the world model's.
    """
    loaded = load_world_model(world_model, device)
    spec = loaded.metadata.env_spec()
    body = loaded.metadata.body
    opened = [open_episodes(DatasetConfig(path=str(path)), spec, body=body) for path in datasets]
    parts = [EpisodeFrames.of(one, loaded.frame_steps, spec.action_low, spec.action_high) for one in opened]
    for part in parts:
        _check_train(part)
    keyframes = choose(moments_of(loaded, parts, "uncertain" in config.kinds), config)
    if not keyframes:
        raise KeyframeError(
            f"no keyframe found in {', '.join(map(str, datasets))}: no episode has a frame between its start and its "
            "end at which it had not succeeded. Collect episodes longer than one frame, failures included."
        )
    sources = tuple(KeyframeSource(path=str(part.dataset.path), content=part.dataset.cache.name) for part in parts)
    return KeyframeSet(sources=sources, keyframes=tuple(keyframes))


def choose(moments: Moments, config: KeyframeConfig) -> list[MinedKeyframe]:
    """The best moments of each kind and task, at most one of each kind in an episode."""
    value = _values(moments)
    open_score = 4 * value * (1 - value)
    fall = _falls(moments, value)
    scores = {
        "divergence": np.where(open_score > 0, open_score, -1.0),
        "failure": np.where(fall > 0, fall, -1.0),
        "gripper": np.where(moments.gripper, open_score, -1.0),
        "contact": np.where(moments.contact, open_score, -1.0),
        "uniform": np.random.default_rng(0).random(len(value)),
        "uncertain": 4 * moments.predicted * (1 - moments.predicted),
    }
    chosen: dict[int, dict[str, float]] = {}
    for kind in config.kinds:
        score = np.where(moments.usable, scores[kind], -1.0)
        for task in sorted(set(moments.task.tolist())):
            for row in _best(score, moments.task == task, moments.owner, config.per_kind):
                chosen.setdefault(row, {})[kind] = float(score[row])
    return [
        MinedKeyframe(
            source=int(moments.source[row]),
            episode=int(moments.episode[row]),
            step=int(moments.step[row]),
            task=str(moments.task[row]),
            start=str(moments.start[row]),
            kinds=tuple(kinds),
            value=round(float(value[row]), 4),
            score=round(max(kinds.values()), 4),
        )
        for row, kinds in sorted(chosen.items())
    ]


def moments_of(world_model: WorldModel, parts: Sequence[EpisodeFrames], valued: bool = False) -> Moments:
    """Every frame of the datasets, as a candidate.

    Args:
        valued: ask for the world model's value.
    """
    columns: dict[str, list[np.ndarray]] = {name: [] for name in Moments.__dataclass_fields__}
    num_owners = 0
    for source, part in enumerate(parts):
        index = np.arange(part.num_frames)
        starts = [part.dataset.initial_states[e] for e in part.episodes]
        names = tasks_of(part, world_model.metadata.tasks)
        succeeded = part.success(index)
        columns["source"].append(np.full(len(index), source))
        columns["episode"].append(part.episodes[part.owner])
        columns["step"].append(part.number * part.frame_steps)
        columns["number"].append(part.number)
        columns["owner"].append(num_owners + part.owner)
        columns["task"].append(np.array(names, object)[part.owner])
        columns["start"].append(np.array(starts, object)[part.owner])
        columns["features"].append(_features(world_model, part))
        columns["success"].append(part.dataset.success[part.episodes][part.owner])
        columns["usable"].append((part.number > 0) & (part.number < part.counts[part.owner] - 1) & ~succeeded)
        columns["predicted"].append(_predicted(world_model, part) if valued else np.zeros(len(index), np.float32))
        columns["gripper"].append(_gripper_changes(part))
        columns["contact"].append(_touches(part))
        num_owners += len(part.episodes)
    return Moments(**{name: np.concatenate(values) for name, values in columns.items()})


@torch.no_grad()
def _features(world_model: WorldModel, part: EpisodeFrames) -> np.ndarray:
    """float32 (M, D): latents (unit variance) and normalized states, each kind with the same weight in all."""
    rows = []
    for start in range(0, part.num_frames, FRAMES_AT_ONCE):
        index = np.arange(start, min(start + FRAMES_AT_ONCE, part.num_frames))
        frames = world_model.encode(part.images(index)[:, None], part.states(index)[:, None])
        latents, states = frames.latents.flatten(1), frames.states.flatten(1)
        row = torch.cat([latents / latents.shape[1] ** 0.5, states / states.shape[1] ** 0.5], 1)
        rows.append(row.float().cpu().numpy())
    return np.concatenate(rows)


def _predicted(world_model: WorldModel, part: EpisodeFrames) -> np.ndarray:
    """float32 (M,): the world model's value at each frame."""
    left, found = steps_left(part, world_model.metadata), np.zeros(part.num_frames, np.float32)
    for start, count in zip(part.starts, part.counts, strict=True):
        index = np.arange(start, start + count)
        frames = world_model.encode(part.images(index)[None], part.states(index)[None])
        memory = world_model.begin(frames.at(slice(0, 1)), part.instruction(index[:1]), [0])
        first = world_model.value(memory, None, left[None, index[:1]])
        later = world_model.value(memory, frames.at(slice(1, None)), left[None, index[1:]])
        found[index] = torch.cat([first, later], 1)[0].cpu().numpy()
    return found


def _gripper_changes(part: EpisodeFrames) -> np.ndarray:
    """bool (M,): among the actions after a frame, until the next, the gripper's command (the last) changes sign."""
    index = np.arange(part.num_frames)
    is_last = part.number == part.counts[part.owner] - 1
    values, executed = part.actions(np.where(is_last, index, index + 1))
    command = np.sign(values[..., -1]) * executed
    before, before_executed = part.actions(index)
    last = np.where(before_executed.any(1), before_executed.shape[1] - 1 - before_executed[:, ::-1].argmax(1), 0)
    previous = np.sign(np.take_along_axis(before[..., -1], last[:, None], 1))
    changed = (command * np.concatenate([previous, command[:, :-1]], 1) < 0).any(1)
    return changed & ~is_last


def _touches(part: EpisodeFrames) -> np.ndarray:
    """bool (M,): the gripper is free at the frame and touches something at the next, as the simulator saved it."""
    found = np.zeros(part.num_frames, bool)
    try:
        states = SimulatorStates(part.dataset.path)
    except KeyframeError:  # Collected without them: a real robot's, for instance.
        return found
    for owner, episode in enumerate(part.episodes):
        start = part.dataset.initial_states[episode]
        contact = states.arrays(start, "contact")
        if contact is None:
            continue
        at = {step: bool(touching.any()) for step, touching in zip(states.steps(start), contact, strict=True)}
        for number in range(1, int(part.counts[owner]) - 1):
            step = number * part.frame_steps
            later = at.get(step + part.frame_steps, False)
            found[part.starts[owner] + number] = later and not at.get(step, True)
    return found


def _values(moments: Moments) -> np.ndarray:
    """float64 (M,): share of successes among each moment and its nearest ones in other episodes of its task."""
    value = moments.success.astype(np.float64)
    for task in sorted(set(moments.task.tolist())):
        rows = np.flatnonzero(moments.task == task)
        features = moments.features[rows].astype(np.float32)
        squares = (features**2).sum(1)
        for start in range(0, len(rows), ROWS_AT_ONCE):
            here = rows[start : start + ROWS_AT_ONCE]
            part = features[start : start + ROWS_AT_ONCE]
            distance = squares[start : start + ROWS_AT_ONCE, None] + squares - 2 * part @ features.T
            distance[moments.owner[here][:, None] == moments.owner[rows]] = np.inf
            count = min(NEIGHBORS, len(rows) - 1)
            if count < 1:
                continue
            nearest = np.argpartition(distance, count - 1, axis=1)[:, :count]
            known = np.isfinite(np.take_along_axis(distance, nearest, 1))
            successes = (moments.success[rows][nearest] & known).sum(1)
            value[here] = (successes + moments.success[here]) / (known.sum(1) + 1)
    return value


def _falls(moments: Moments, value: np.ndarray) -> np.ndarray:
    """float64 (M,): in each failed episode, at its usable moment before the largest fall of v, that fall; else 0."""
    fall = np.zeros(len(value))
    following = (moments.owner[:-1] == moments.owner[1:]) & ~moments.success[:-1] & moments.usable[:-1]
    drop = np.where(following, value[:-1] - value[1:], 0.0)
    for owner in np.unique(moments.owner[:-1][following]):
        rows = np.flatnonzero(moments.owner[:-1] == owner)
        row = rows[drop[rows].argmax()]
        fall[row] = max(drop[row], 0.0)
    return fall


def _best(score: np.ndarray, among: np.ndarray, owner: np.ndarray, count: int) -> list[int]:
    """Rows with the highest scores at or above 0, at most one of each owner."""
    rows = np.flatnonzero(among & (score >= 0))
    chosen: list[int] = []
    seen: set[int] = set()
    for row in rows[np.argsort(-score[rows], kind="stable")].tolist():
        if len(chosen) == count:
            break
        if owner[row] not in seen:
            seen.add(int(owner[row]))
            chosen.append(row)
    return chosen


def _check_train(part: EpisodeFrames) -> None:
    splits = {split_start(part.dataset.initial_states[e])[1] for e in part.episodes}
    if wrong := sorted(splits & {"eval", "validation"}):
        raise KeyframeError(
            f"{part.dataset.path}: holds episodes from {' and '.join(wrong)} states, from which nothing may be "
            "learned. Mine episodes from train states (collect.split=train)."
        )
