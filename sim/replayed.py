"""State by replay: seed and actions so far, for simulators that give no state of their own."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sim.base import check_known
from sim.single_env import SingleEnv, SingleObservation
from vla_rl.types import SPLITS, EpisodeSpec, Keyframe

SEEDS_PER_SPLIT = 2**29  # The seed is (the split's place + 1) times this, plus the index: no two splits share one.


class OwnRandomness:
    """Python's and numpy's global generators as one environment has them; some simulators draw from these."""

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def __call__(self, seed: int | None = None) -> Iterator[None]:
        """Within, the global generators go on where this environment left them, or begin at `seed`."""
        outside = random.getstate(), np.random.get_state()
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            elif self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


class ReplayedEnv(SingleEnv):
    """A `SingleEnv` that begins at a seed; a stored state is that seed's place and the actions so far, done again."""

    def __init__(self) -> None:
        self._task = ""
        self._start = (0, 0)
        self._actions: list[np.ndarray] = []
        self._instruction = ""

    @abstractmethod
    def _begin(self, task: str, seed: int) -> None:
        """Put the simulator in the initial state of this seed."""

    @abstractmethod
    def _advance(self, action: np.ndarray) -> bool:
        """One control step with an action, float32 (A,), within the bounds. Returns success."""

    def reset(self, spec: EpisodeSpec) -> SingleObservation:
        """Start the episode.

        Raises:
            ValueError: an unknown task or split, an index out of range, or a keyframe of another environment or task.
        """
        check_known(f"{self.spec.kind} task", spec.task, self.spec.tasks)
        split, index, actions = spec.split, spec.index, np.zeros((0, self.spec.action_dim), np.float32)
        if (keyframe := spec.keyframe) is not None:
            if (keyframe.env, keyframe.task) != (self.spec.kind, spec.task):
                found, asked = f"{keyframe.env}/{keyframe.task}", f"{self.spec.kind}/{spec.task}"
                raise ValueError(f"this keyframe is of {found}, the episode asked for is of {asked}")
            split, index = SPLITS[int(keyframe.arrays["split"])], int(keyframe.arrays["index"])
            actions = keyframe.arrays["actions"]
        if split not in SPLITS or not 0 <= index < SEEDS_PER_SPLIT:
            raise ValueError(f"no initial state {index} in split {split!r}: indices are below {SEEDS_PER_SPLIT}")
        self._task, self._start, self._actions = spec.task, (SPLITS.index(split), index), []
        self.horizon, self.num_steps = self.spec.horizon[spec.task], 0
        self._begin(spec.task, (self._start[0] + 1) * SEEDS_PER_SPLIT + index)
        for action in actions:
            self.apply(action)
            self.num_steps += 1
        self._instruction = spec.instruction or self.spec.tasks[spec.task]
        return self.observe()

    def apply(self, action: np.ndarray) -> bool:
        """One control step, without rendering where the simulator can do without. Returns success."""
        self._actions.append(np.array(action, np.float32))
        return self._advance(self._actions[-1])

    def save_state(self) -> Keyframe:
        """The initial state's place and the actions so far."""
        arrays = {"split": np.array(self._start[0]), "index": np.array(self._start[1])}
        arrays["actions"] = np.array(self._actions, np.float32).reshape(-1, self.spec.action_dim)
        return Keyframe(self.spec.kind, self._task, self.num_steps, arrays)
