"""Autonomous practice (FastRLAP, arXiv 2304.09831): a task and its reset task in turn, in the same scene.

A robot drives home by itself after every episode, and the next one begins in the scene as it is then: the other task
after a success, the same one again after a failure. A person resets the scene only where that leads nowhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from vla_rl.interfaces import VecEnv
from vla_rl.types import EpisodeSpec, Keyframe


@runtime_checkable
class PracticeEnv(VecEnv, Protocol):
    """An environment whose robots can go on where an episode has ended."""

    def drive_home(self, env_ids: Sequence[int] | None = None) -> list[Keyframe | None]:
        """End the episode of each given environment: let go, and drive to where episodes begin, unrecorded.

        Returns:
            Each scene as it is then: a keyframe in which an episode of any task of the scene can begin
            (`EnvConfig.reset_tasks`); None where only a person could go on.

        Raises:
            NotImplementedError: the simulator knows no way home.
        """
        ...


@dataclass(frozen=True)
class _Scene:
    """A scene in which no episode runs: the task that is next in it.

    Attributes:
        left: as the last episode has left it; None: a person resets it first. failures: in a row, up to now.
    """

    task: str
    left: Keyframe | None = None
    failures: int = 0


class Practice:
    """Schedule of practice: the next episode of each scene, of which there are as many as environments.

    Args:
        forward, reset: the tasks; the second one undoes the first.
        attempts: failures in a row in one scene, after which a person resets it.

    Attributes:
        num_resets: times that a person has reset a scene.
    """

    def __init__(self, env: PracticeEnv, forward: str, reset: str, attempts: int) -> None:
        self.attempts, self.num_resets = attempts, 0
        self._env, self._other = env, {forward: reset, reset: forward}
        self._new = _Scene(forward)
        self._waiting = deque([self._new] * env.num_envs)
        self._running: dict[int, _Scene] = {}  # By index of the initial state.

    def specs(self, states: Sequence[EpisodeSpec]) -> Iterator[EpisodeSpec | None]:
        """As many episodes as initial states are given, each when a scene waits for one; None while none does.

        Each has the index of its initial state, which differ, whether a person's reset leads to that or not.
        """
        for state in states:
            while not self._waiting:
                yield None
            self._running[state.index] = scene = self._waiting.popleft()
            self.num_resets += scene.left is None
            yield replace(state, task=scene.task, keyframe=scene.left)

    def ended(self, env_id: int, spec: EpisodeSpec, success: bool, lost: bool) -> None:
        """Say how the episode in an environment has ended, before another begins there; it drives home."""
        scene = self._running.pop(spec.index)
        left = None if lost else self._env.drive_home([env_id])[0]
        failures = 0 if success else scene.failures + 1
        if left is None or failures >= self.attempts:
            self._waiting.append(self._new)
        else:
            task = self._other[scene.task] if success else scene.task
            self._waiting.append(_Scene(task, left, failures))
