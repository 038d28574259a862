"""Training and test data of a reward: recorded episodes at the steps where it judges.

With `every` = 8, an episode of 19 steps is judged at steps 0, 8, 16 and 19, its end. Labels are the dataset's outcomes,
whoever gave them: a simulator, or a person at the console or the recorder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.data.cache import StoredImages
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.keyframes import split_start
from vla_rl.data.lerobot_io import POLICY_VERSION
from vla_rl.data.source import LeRobotSource
from vla_rl.types import Observation

NO_STEPS = -1  # To a success, of an episode that has none.


@dataclass(frozen=True)
class RewardFrames:
    """The M frames of E episodes, one episode after another.

    Attributes:
        parts: the datasets. policies: who acted in them, as they record it.
        part, place: int64 (M,), which dataset, and which of its rows; N + e is the end of its episode e.
        owner: int64 (M,), 0 .. E - 1. step: int64 (M,), control steps before the frame.
        reached: bool (M,), the task has been carried out by then.
        success: bool (E,). steps_to_success: int64 (E,), `NO_STEPS` for a failure.
        instructions, tasks, starts: E strings each; episodes with the same start began alike.
    """

    parts: list[EpisodeDataset]
    policies: tuple[str, ...]
    part: np.ndarray
    place: np.ndarray
    owner: np.ndarray
    step: np.ndarray
    reached: np.ndarray
    success: np.ndarray
    steps_to_success: np.ndarray
    instructions: np.ndarray
    tasks: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        """E."""
        return len(self.success)

    @property
    def first(self) -> np.ndarray:
        """int64 (E,), each episode's first frame."""
        return np.flatnonzero(np.diff(self.owner, prepend=-1))

    @property
    def remaining(self) -> np.ndarray:
        """Control steps from each frame to its episode's success, int64 (M,), 0 from there on; `NO_STEPS`: none."""
        left = np.maximum(self.steps_to_success[self.owner] - self.step, 0)
        return np.where(self.success[self.owner], left, NO_STEPS)

    def select(self, episodes: np.ndarray) -> RewardFrames:
        """The episodes where bool (E,), in order."""
        frames = episodes[self.owner]
        numbers = np.cumsum(episodes) - 1
        return replace(
            self,
            **{name: getattr(self, name)[frames] for name in ("part", "place", "step", "reached")},
            owner=numbers[self.owner[frames]],
            **{
                name: getattr(self, name)[episodes]
                for name in ("success", "steps_to_success", "instructions", "tasks", "starts")
            },
        )

    def hold_out(self, fraction: float, seed: int) -> tuple[RewardFrames, RewardFrames]:
        """Split whole initial states of each task at random: (to learn from, held out).

        Raises:
            DatasetError: fewer than two initial states.
        """
        held = np.zeros(len(self), bool)
        rng = np.random.default_rng(seed)
        for task in np.unique(self.tasks):
            own = np.unique(self.starts[self.tasks == task])
            held |= np.isin(self.starts, rng.permutation(own)[: round(fraction * len(own))])
        if held.all() or not held.any():
            raise DatasetError(f"reward.holdout: {len(np.unique(self.starts))} initial states; holding out needs more")
        return self.select(~held), self.select(held)

    def with_shuffled_outcomes(self, seed: int) -> RewardFrames:
        """outcomes shuffled among each task's episodes: a success then shows at an episode's last frame."""
        success, rng = self.success.copy(), np.random.default_rng(seed)
        for task in np.unique(self.tasks):
            own = np.flatnonzero(self.tasks == task)
            success[own] = success[rng.permutation(own)]
        is_last = np.append(np.diff(self.owner) > 0, True)
        ends = self.step[is_last]
        return replace(
            self,
            success=success,
            steps_to_success=np.where(success, ends, NO_STEPS),
            reached=is_last & success[self.owner],
        )

    def observation(self, frames: np.ndarray) -> Observation:
        """What is seen at `frames`, int64 (n,)."""
        images: dict[str, np.ndarray] = {}
        state = np.zeros((len(frames), self.parts[0].state.shape[1]), np.float32)
        for number, data in enumerate(self.parts):
            rows = np.flatnonzero(self.part[frames] == number)
            if not len(rows):
                continue
            place = self.place[frames[rows]]
            state[rows] = _gather(data.state, data.final_state, place)
            for camera, stored in data.images.items():
                if camera not in images:
                    images[camera] = np.zeros((len(frames), *stored.shape[1:]), np.uint8)
                images[camera][rows] = _gather(stored, (data.final_images or {}).get(camera), place)
        return Observation(images, state, self.instructions[self.owner[frames]].tolist())

    def states(self) -> np.ndarray:
        """What is recorded of the robot's state before each action of these episodes, float32 (N, S)."""
        found = []
        for number, data in enumerate(self.parts):
            firsts = self.place[self.first][self.part[self.first] == number]
            ends = data.ends[firsts]
            found += [data.state[first:end] for first, end in zip(firsts, ends, strict=True)]
        return np.concatenate(found)

    def episode(self, number: int) -> Observation:
        """What is seen at the frames of one episode, T rows."""
        return self.observation(np.flatnonzero(self.owner == number))

    @staticmethod
    def concatenate(parts: Sequence[RewardFrames]) -> RewardFrames:
        """The episodes of several, in order."""
        datasets = np.cumsum([0, *(len(p.parts) for p in parts)])
        episodes = np.cumsum([0, *(len(p) for p in parts)])
        names = ("place", "step", "reached", "success", "steps_to_success", "instructions", "tasks", "starts")
        return RewardFrames(
            parts=[data for p in parts for data in p.parts],
            policies=tuple(sorted({name for p in parts for name in p.policies})),
            part=np.concatenate([p.part + first for p, first in zip(parts, datasets, strict=False)]),
            owner=np.concatenate([p.owner + first for p, first in zip(parts, episodes, strict=False)]),
            **{name: np.concatenate([getattr(p, name) for p in parts]) for name in names},
        )


def open_frames(datasets: Sequence[DatasetConfig], needs: DataNeeds, every: int) -> RewardFrames:
    """Open datasets and find the frames at which their episodes are judged.

    Raises:
        DatasetError: missing, damaged, of another robot, without outcomes, or with fewer images than asked for.
        DiskFullError: no room for the decoded images.
    """
    return RewardFrames.concatenate([_open(config, needs, every) for config in datasets])


def _open(config: DatasetConfig, needs: DataNeeds, every: int) -> RewardFrames:
    source = LeRobotSource(config.path)
    if source.success is None:
        raise DatasetError(
            f"{config.path}: does not record which episodes succeeded, which a reward is learned from; record with "
            "outcomes, or label the episodes"
        )
    data = open_dataset(config, needs)
    if every % data.observed_every:
        raise DatasetError(
            f"{config.path}: has an image every {data.observed_every} control steps, and reward.every asks for one "
            f"every {every}; make it a multiple, or collect with every_frame=true"
        )
    return _frames(data, every, _policies(source))


def _frames(data: EpisodeDataset, every: int, policies: tuple[str, ...]) -> RewardFrames:
    has_end = data.final_images is not None and (data.final_state is not None or not data.state.shape[1])
    chosen = data.episodes
    steps = data.lengths[chosen] - (0 if has_end else 1)
    chosen, steps = chosen[steps > 0], steps[steps > 0]
    if not len(chosen):
        raise DatasetError(f"{data.path}: no episode shows what came of its actions; nothing to learn from")
    counts = 1 + -(-steps // every)
    owner = np.repeat(np.arange(len(chosen)), counts)
    number = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    is_last = number == counts[owner] - 1
    step = np.minimum(number * every, steps[owner])
    first_row = data.starts[chosen]
    place = np.where(is_last & has_end, len(data.actions) + chosen[owner], first_row[owner] + step)
    reached = np.where(step > 0, data.succeeded[first_row[owner] + np.maximum(step - 1, 0)], False)
    success = data.success[chosen]
    reached = np.where(is_last, success[owner], reached)
    to_success = np.array(
        [
            1 + int(np.argmax(data.succeeded[start : start + count])) if ok else NO_STEPS
            for start, count, ok in zip(first_row, data.lengths[chosen], success, strict=True)
        ]
    )
    instructions = np.array([data.instructions[i] for i in data.task[first_row]])
    names = [data.initial_states[e] for e in chosen]
    tasks = [split_start(name)[0] or text for name, text in zip(names, instructions, strict=True)]
    starts = np.array(data.state_names(str(data.path)))[chosen]
    return RewardFrames(
        parts=[data],
        policies=policies,
        part=np.zeros(len(owner), np.int64),
        place=place,
        owner=owner,
        step=step,
        reached=reached,
        success=success,
        steps_to_success=np.minimum(to_success, steps),
        instructions=instructions,
        tasks=np.array(tasks),
        starts=starts,
    )


def _policies(source: LeRobotSource) -> tuple[str, ...]:
    if not source.has(POLICY_VERSION):
        return (f"unknown, {source.name}",)
    found = (set(table.column(POLICY_VERSION).to_pylist()) for table in source.batches([POLICY_VERSION]))
    return tuple(sorted(set().union(*found)))


def _gather(rows: np.ndarray | StoredImages, final: np.ndarray | None, place: np.ndarray) -> np.ndarray:
    """`rows` (N, ...) and `final` (E, ...) one after the other, at `place`, int64 (n,)."""
    is_final = place >= len(rows)
    values = np.asarray(rows[np.where(is_final, 0, place)])
    if final is not None:
        values[is_final] = final[place[is_final] - len(rows)]
    return values
