"""The frames of recorded episodes: which rows of a dataset are frames, and what was done and reached at each.

With G = `frame_steps`, frame f of an episode is what was seen after f G control steps, frame 0 at its start. The last
frame is what was seen at the episode's end, so fewer than G actions may have led to it:

    frame      0         1         2      3
    step       0         8        16     19          an episode of 19 steps, G = 8

Cut from another step on (`first_steps` = 3), the same episode has its frames at other steps, and its first action chunk
is cut short just as the last one is; the dynamics learns from several such cuts:

    step       0    3         11        19

A LeRobotDataset's rows are observations before an action. Ours keep the observation after the last one beside the rows;
where a dataset does not, its last row is taken as the end, and its last action is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_rl.data.cache import StoredImages
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.keyframes import split_start
from vla_rl.types import EnvSpec
from world_model.data.body_moves import with_body_moves
from world_model.types import LoggedEpisode

MIN_STD = 0.01  # Of a state's dimension: 1 cm, 0.6 degrees. What varies less is noise, not to be blown up.
MAX_SCORE = 10.0  # Standard deviations from the mean that half of the states may be away from it.


@dataclass(frozen=True)
class EpisodeFrames:
    """The M frames of a dataset's E selected episodes, one episode after another. Make it with `of`.

    Attributes:
        frame_steps: G. first_steps: control steps before frame 1, 1 .. G.
        low, high: float32 (A,), actions are clipped to these.
        episodes: int64 (E,), their numbers in the dataset. steps: int64 (E,), control steps.
        starts, counts: int64 (E,): episode i has the frames starts[i] .. starts[i] + counts[i] - 1, at least two.
        owner, number: int64 (M,), which of the E episodes a frame belongs to, and its number there.
        place: int64 (M,), the dataset's row with the observation; N + e for the final observation of its episode e.
    """

    dataset: EpisodeDataset
    frame_steps: int
    first_steps: int
    low: np.ndarray
    high: np.ndarray
    episodes: np.ndarray
    steps: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    owner: np.ndarray
    number: np.ndarray
    place: np.ndarray

    @classmethod
    def of(
        cls,
        dataset: EpisodeDataset,
        frame_steps: int,
        low: np.ndarray,
        high: np.ndarray,
        first_steps: int | None = None,
    ) -> EpisodeFrames:
        """The frames of the episodes of which the dataset has selected any row.

        Args:
            frame_steps: G. low, high: (A,), bounds of the actions, in their units.
            first_steps: control steps before frame 1; None: G.

        Raises:
            DatasetError: actions of another size or scale, no episode with a second frame, or frames between images.
        """
        every = dataset.observed_every
        if frame_steps % every or (first_steps or frame_steps) % every:
            raise DatasetError(
                f"{dataset.path}: has an image every {every} control steps, and a frame is wanted after "
                f"{first_steps or frame_steps} and then every {frame_steps}; choose world_model.model.frame_steps and "
                "world_model.cuts to fit, or collect with every_frame=true"
            )
        has_end = dataset.final_images is not None and dataset.final_state is not None
        steps = dataset.lengths - (0 if has_end else 1)
        episodes = dataset.episodes
        episodes = episodes[steps[episodes] > 0]
        if len(episodes) == 0:
            raise DatasetError(f"{dataset.path}: no episode has a second frame; nothing to learn from")
        steps = steps[episodes]
        first_steps = first_steps or frame_steps
        counts = 2 + np.maximum(-(-(steps - first_steps) // frame_steps), 0)
        starts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(episodes)), counts)
        number = np.arange(len(owner)) - starts[owner]
        seen_after = np.where(number > 0, (number - 1) * frame_steps + first_steps, 0)
        place = dataset.starts[episodes][owner] + np.minimum(seen_after, steps[owner])
        if has_end:
            place[starts + counts - 1] = len(dataset.actions) + episodes
        low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
        _check_actions(dataset, episodes, low, high)
        return cls(dataset, frame_steps, first_steps, low, high, episodes, steps, starts, counts, owner, number, place)

    def cut_after(self, first_steps: int) -> EpisodeFrames:
        """The same episodes, with frame 1 after `first_steps` control steps, 1 .. G."""
        return EpisodeFrames.of(self.dataset, self.frame_steps, self.low, self.high, first_steps)

    @property
    def look(self) -> str:
        """Names the style that the images are shown in; empty: as recorded."""
        return ""

    @property
    def num_frames(self) -> int:
        return len(self.place)

    @property
    def num_values(self) -> int:
        """A, or A + S with the dataset's `body_moves`."""
        moves = self.dataset.body_moves
        return len(self.low) + (0 if moves is None else moves.shape[1])

    @property
    def cameras(self) -> tuple[str, ...]:
        """The V views, in order."""
        return tuple(self.dataset.images)

    def images(self, frames: np.ndarray) -> np.ndarray:
        """uint8 (n, V, height, width, 3) of `frames`, int64 (n,)."""
        final = self.dataset.final_images or {}
        views = [_gather(images, final.get(name), self.place[frames]) for name, images in self.dataset.images.items()]
        return np.stack(views, 1)

    def states(self, frames: np.ndarray) -> np.ndarray:
        """float32 (n, S) of `frames`, int64 (n,), in the robot's units."""
        return self.states_at(self.place[frames])

    def states_at(self, place: np.ndarray) -> np.ndarray:
        """float32 (..., S) at `place`, int64 (...), numbered as the attribute is; some repeat (`observed_every`)."""
        return _gather(self.dataset.state, self.dataset.final_state, place)

    def actions(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What led to `frames`, int64 (...): clipped actions float32 (..., G, A), executed bool (..., G).

        With the dataset's `body_moves` these follow an action's numbers: (..., G, A + S).
        """
        owner, number = self.owner[frames], self.number[frames]
        start = np.where(number > 1, (number - 2) * self.frame_steps + self.first_steps, 0)
        count = np.where(number > 1, self.frame_steps, np.where(number == 1, self.first_steps, 0))
        step = np.arange(self.frame_steps)
        offset = start[..., None] + step
        executed = (step < count[..., None]) & (offset < self.steps[owner][..., None])
        rows = self.dataset.starts[self.episodes[owner]][..., None] + np.where(executed, offset, 0)
        values = np.clip(self.dataset.executed_actions[rows], self.low, self.high)
        if self.dataset.body_moves is not None:
            values = np.concatenate([values, self.dataset.body_moves[rows]], -1)
        return values * executed[..., None], executed

    def success(self, frames: np.ndarray) -> np.ndarray:
        """Whether the episode had succeeded when each of `frames`, int64 (...), was seen: bool (...)."""
        owner, number = self.owner[frames], self.number[frames]
        episode, is_last = self.episodes[owner], number == self.counts[owner] - 1
        last_step = np.where(number > 0, (number - 1) * self.frame_steps + self.first_steps - 1, 0)
        by_step = self.dataset.succeeded[self.dataset.starts[episode] + np.where(is_last, 0, last_step)] & (number > 0)
        return np.where(is_last, self.dataset.success[episode], by_step)

    def instruction(self, frames: np.ndarray) -> list[str]:
        """What the policy was told, for each of `frames`, int64 (n,)."""
        first_rows = self.dataset.starts[self.episodes[self.owner[frames]]]
        return [self.dataset.instructions[task] for task in self.dataset.task[first_rows]]


def open_episodes(
    config: DatasetConfig,
    spec: EnvSpec,
    body: dict[str, Any] | None = None,
    show: bool = False,
) -> EpisodeDataset:
    """Open a dataset of the robot that `spec` describes, with all its cameras.

    Args:
        body: of a world model's metadata: with what actions move the robot alone, which may first be replayed.
        show: that replay's progress.

    Raises:
        DatasetError: missing or damaged, other cameras, sizes or fps, NaN, or too few episodes.
        DiskFullError: no room for the decoded images.
    """
    height, width = spec.image_size
    side = height if height == width else None
    needs = DataNeeds(spec.cameras, spec.action_dim, spec.state_dim, side, spec.control_hz)
    dataset = open_dataset(config, needs)
    sizes = {camera: images.shape[1:3] for camera, images in dataset.images.items()}
    if wrong := {camera: size for camera, size in sizes.items() if size != (height, width)}:
        raise DatasetError(
            f"{config.path}: images (height, width) of {wrong}, the world model's are {(height, width)}; images that "
            "are not square are not resized. Collect with that size."
        )
    return dataset if body is None else with_body_moves(dataset, body, show)


def tasks_of(frames: EpisodeFrames, tasks: Mapping[str, str]) -> list[str]:
    """The task of each of the E episodes: of its initial state, or the one with its instruction, or the instruction.

    Args:
        tasks: task -> instruction.
    """
    named = {text: task for task, text in tasks.items()}
    starts = [frames.dataset.initial_states[episode] for episode in frames.episodes]
    return [
        split_start(start)[0] or named.get(text, text)
        for start, text in zip(starts, frames.instruction(frames.starts), strict=True)
    ]


def logged_episodes(
    frames: EpisodeFrames, chosen: Sequence[int] | None = None, poses: np.ndarray | None = None
) -> list[LoggedEpisode]:
    """Episodes as trust is measured on.

    Args:
        chosen: which of the E episodes, in that order; None takes all.
        poses: of objects by slot, by `EpisodeFrames.place` (see `world_model.data.objects.slot_poses`).
    """
    return [_logged(frames, i, poses) for i in (range(len(frames.episodes)) if chosen is None else chosen)]


def _logged(frames: EpisodeFrames, episode: int, poses: np.ndarray | None = None) -> LoggedEpisode:
    start = frames.starts[episode]
    index = np.arange(start, start + frames.counts[episode])
    actions, executed = frames.actions(index)
    return LoggedEpisode(
        images=frames.images(index),
        states=frames.states(index),
        actions=actions,
        executed=executed,
        success=frames.success(index),
        instruction=frames.instruction(index[:1])[0],
        start=frames.dataset.initial_states[frames.episodes[episode]],
        objects=None if poses is None else poses[frames.place[index]],
    )


def state_statistics(parts: Sequence[EpisodeFrames]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (at least 0.01) of all frames' states, float32 (S,) each."""
    states = np.concatenate([part.states(np.arange(part.num_frames)) for part in parts]).astype(np.float64)
    return states.mean(0).astype(np.float32), np.maximum(states.std(0), MIN_STD).astype(np.float32)


def distances(states: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """How many standard deviations half of the states (N, S) are away from a mean at least, (S,)."""
    return np.median(np.abs(states - mean) / std, axis=0)


def check_states(frames: EpisodeFrames, mean: np.ndarray, std: np.ndarray) -> None:
    """States are of the size and the scale that a world model was fitted on.

    Raises:
        DatasetError: another number of dimensions, or one that is mostly more than ten standard deviations away.
    """
    states = frames.states(np.arange(frames.num_frames))
    if states.shape[1] != len(mean):
        raise DatasetError(
            f"{frames.dataset.path}: states have {states.shape[1]} dimensions, the world model's have {len(mean)}; "
            "the dataset is of another robot"
        )
    away = distances(states, mean, std)
    if away.size and away.max() > MAX_SCORE:
        worst = int(away.argmax())
        raise DatasetError(
            f"{frames.dataset.path}: state dimension {worst} is about {np.median(states[:, worst]):.3g}, the world "
            f"model was fitted on {mean[worst]:.3g} +- {std[worst]:.3g}; the dataset is of another robot, frame or "
            "unit. Convert it, or fit a world model from scratch."
        )


def _check_actions(dataset: EpisodeDataset, episodes: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    actions = dataset.executed_actions[np.isin(np.repeat(np.arange(len(dataset.starts)), dataset.lengths), episodes)]
    if actions.shape[1] != len(low):
        raise DatasetError(
            f"{dataset.path}: actions have {actions.shape[1]} dimensions, the bounds {len(low)}; the dataset is of "
            "another robot or another control mode"
        )
    span = high - low
    outside = (np.maximum(low - actions, actions - high) > span / 2).any(1).mean()
    if outside > 0.01:
        raise DatasetError(
            f"{dataset.path}: {outside:.0%} of the actions are far outside {low.tolist()} .. {high.tolist()} (they "
            f"span {actions.min(0).tolist()} .. {actions.max(0).tolist()}); they are in other units. Convert them."
        )
    smallest, largest = np.quantile(actions, [0.001, 0.999], axis=0)
    used = ((largest - smallest) / span)[: max(len(span) - 1, 1)].max()  # The last is the gripper, in any unit 0 or 1.
    if used < 0.02:
        raise DatasetError(
            f"{dataset.path}: the actions use only {used:.2%} of {low.tolist()} .. {high.tolist()}; they are in other "
            "units, such as meters in place of fractions of the largest step. Convert them."
        )


def _gather(rows: np.ndarray | StoredImages, final: np.ndarray | None, place: np.ndarray) -> np.ndarray:
    """`rows` (N, ...) and `final` (E, ...) one after the other, at `place`, int64 (n,) or more dimensions."""
    if final is None:
        return rows[place]
    is_final = place >= len(rows)
    values = rows[np.where(is_final, 0, place)]
    values[is_final] = final[place[is_final] - len(rows)]
    return values
