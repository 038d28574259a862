"""Data types of trust: logged real episodes, and what a world model must answer about them.

Shape legend, beside `world_model.types`': E episodes, B of them at a time; an episode has T frames, its first and one
every G control steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from world_model.types import Actions, Frames, LoggedEpisode


@dataclass(frozen=True)
class Scores:
    """What the world model says about the success of B episodes, frame by frame.

    Attributes:
        probability: float32 (B, F), of the instruction being carried out: what RL is paid with reward "objects" where
            that is asked for; else with reward "probability", or where none was calibrated, the less sure of the two
            success networks' own; 0 where the environment would not look (see `OpenLoop.imagine`).
        success: bool (B, F), the episode counts as a success: the decision that RL is rewarded by, latched.
        disagreement: float32 (B, F), of the futures of the chunk that a frame is in; NaN after the config's horizon and
            where nothing was executed, infinite where futures are not finite. None where there is one alone.
    """

    probability: np.ndarray
    success: np.ndarray
    disagreement: np.ndarray | None = None


class WorldModel(Protocol):
    """A world model as the trust figures see it."""

    @property
    def frame_steps(self) -> int:
        """G, control steps from one frame to the next."""
        ...

    def encode(self, images: np.ndarray, states: np.ndarray) -> Frames:
        """uint8 (B, F, V, height, width, 3), float32 (B, F, S) -> B x F frames."""
        ...

    def decode(self, frames: Frames) -> np.ndarray:
        """B x F frames -> uint8 (B, F, V, height, width, 3)."""
        ...

    def begin(self, first: Frames, instruction: Sequence[str], seeds: Sequence[int]) -> Any:
        """Start B episodes at their first frame (F = 1). `seeds`: of each episode's noise."""
        ...

    def imagine(self, context: Any, actions: Actions) -> tuple[Frames, Scores]:
        """The F frames that follow `begin`, and what the environment that RL learns in would say of them.

        Every frame but the first of the episode is imagined from imagined frames (open loop).
        """
        ...

    def imagine_ahead(
        self, real: Frames, actions: Actions, instruction: Sequence[str], seeds: Sequence[int], depth: int
    ) -> np.ndarray:
        """Probability of success at the F frames after the first, each imagined a few frames after a real one.

        Args:
            real: B x (F + 1) frames. actions: B x F, which led to the last F. depth: D.

        Returns:
            float (B, F, D): [:, f - 1, d - 1] is of frame f imagined from the real frames up to f - d; anything where
            d > f.
        """
        ...

    def score(self, frames: Frames, instruction: Sequence[str]) -> Scores:
        """The same success head on real frames: B x F, from the episode's first frame (the reference) on."""
        ...


@runtime_checkable
class KnowsObjects(WorldModel, Protocol):
    """A world model that says where objects are, if `has_objects`."""

    @property
    def has_objects(self) -> bool:
        """Whether it has the objects part."""
        ...

    def object_poses(self, first: Frames, actions: Actions, instruction: Sequence[str]) -> np.ndarray:
        """Poses at the first frame, and at each of those that B x F actions lead to: float32 (B, F + 1, M, 4)."""
        ...

    def read_objects(self, frames: Frames, instruction: Sequence[str]) -> np.ndarray:
        """Poses that are read off B x F frames, float32 (B, F, M, 4)."""
        ...


@dataclass(frozen=True)
class PolicyOutcomes:
    """One policy acting from the same initial states in the real environment and in the world model.

    Attributes:
        name: for people.
        starts: E names of initial states; of several policies each once, the same for every policy.
        real, imagined: bool (E,), success.
        worth: float64 (E,), what the imagined episodes are paid.
        caused: bool (E,), what their actions lead to in a simulator, from the same initial states; None: not executed.
    """

    name: str
    starts: Sequence[str]
    real: np.ndarray
    imagined: np.ndarray
    worth: np.ndarray | None = None
    caused: np.ndarray | None = None


@dataclass(frozen=True)
class TrustData:
    """Everything that trust is measured on.

    Attributes:
        held_out: real episodes of the policy that RL will start from, from the run's own style and camera.
        train: real episodes to train the inverse dynamics on, such as those the world model was fitted on; where
            empty, half of `held_out` is used for it.
        styles: name -> held-out episodes with another look (lighting, colors, textures).
        policies: closed-loop outcomes of several policies.
        acting: of the policy that RL will start from; its real episodes are the held-out ones.
    """

    held_out: Sequence[LoggedEpisode]
    train: Sequence[LoggedEpisode] = ()
    styles: Mapping[str, Sequence[LoggedEpisode]] = field(default_factory=dict)
    policies: Sequence[PolicyOutcomes] = ()
    acting: PolicyOutcomes | None = None


def check_episodes(episodes: Sequence[LoggedEpisode], frame_steps: int, what: str) -> None:
    """Every episode has what is measured, of the shapes that its fields promise.

    Raises:
        ValueError: no episode, an episode of one frame, another number of actions per frame, or arrays that disagree.
    """
    if not episodes:
        raise ValueError(f"{what}: no episode; trust is measured on real episodes that the world model has not seen")
    for i, episode in enumerate(episodes):
        length = episode.num_frames
        lengths = {name: len(getattr(episode, name)) for name in ("images", "states", "actions", "executed", "success")}
        if length < 2 or set(lengths.values()) != {length}:
            raise ValueError(f"{what}: episode {i} needs at least 2 frames, as many in each array; found {lengths}")
        if episode.actions.shape[1] != frame_steps or episode.executed.shape[1] != frame_steps:
            raise ValueError(
                f"{what}: episode {i} has {episode.actions.shape[1]} actions per frame, the world model was fitted "
                f"with frame_steps = {frame_steps}; cut the episodes with that"
            )
