"""A robot's own body, simulated apart from everything around it: what imagination need not learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from vla_rl.types import EpisodeSpec, Keyframe


class Body(Protocol):
    """Moves a robot as its controller and its own weight do, with nothing movable in its way.

    It keeps nothing of an episode: where a body is stands in a `Keyframe` of its own, from which any number can go on.
    """

    def begin(self, specs: Sequence[EpisodeSpec]) -> tuple[list[Keyframe], np.ndarray]:
        """Put a body where each of B episodes begins, or at its keyframe, which a simulator wrote.

        Returns:
            Where they are; and float32 (B, S), `Observation.state` there.

        Raises:
            ValueError: no such initial state, or a keyframe of another environment.
        """
        ...

    def step(self, bodies: Sequence[Keyframe], actions: np.ndarray) -> tuple[list[Keyframe], np.ndarray]:
        """Execute a chunk, float32 (B, H, A) in the environment's units, clipped to its bounds, with each of B bodies.

        Returns:
            Where they are afterwards; and float32 (B, H, S), `Observation.state` after each action, NaN in what the
            body alone does not tell.
        """
        ...

    def close(self) -> None:
        """Release the simulator. May be called twice."""
        ...


@runtime_checkable
class EmbodiedConfig(Protocol):
    """An `EnvConfig` whose robot can be simulated alone."""

    def build_body(self) -> Body:
        """Start the simulator of the robot alone."""
        ...
