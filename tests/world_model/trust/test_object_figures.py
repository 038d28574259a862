"""How far objects are from where they were, by hand: of what moved, by frames since the real one, by both judges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from world_model.trust.figures import as_text
from world_model.trust.measures.open_loop import object_figures
from world_model.trust.types import Scores
from world_model.types import Frames, LoggedEpisode


def episode(start: str, *path: float, poses: bool = True) -> LoggedEpisode:
    """The object is at these x, in meters; the state says how many frames there are."""
    length = len(path)
    objects = np.zeros((length, 1, 4), np.float32)
    objects[:, 0, 0] = path
    return LoggedEpisode(
        images=np.zeros((length, 1, 4, 4, 3), np.uint8),
        states=np.zeros((length, 2), np.float32),
        actions=np.zeros((length, 2, 3), np.float32),
        executed=np.arange(length)[:, None].repeat(2, 1) > 0,
        success=np.zeros(length, bool),
        instruction="push",
        start=start,
        objects=objects if poses else None,
    )


class Sure:
    """Believes that every object stays at (0, 3 mm), and reads (0, 4 mm) off every picture."""

    frame_steps, has_objects = 2, True

    def encode(self, images: np.ndarray, states: np.ndarray) -> Frames:
        return Frames(torch.zeros(*images.shape[:3], 1, 1, 1), torch.from_numpy(states))

    def begin(self, first: Frames, instruction: Any, seeds: Any) -> Any:
        return first

    def imagine(self, context: Any, actions: Any) -> tuple[Frames, Scores]:
        batch, count = actions.executed.shape[:2]
        nothing = np.zeros((batch, count))
        return Frames(torch.zeros(batch, count, 1, 1, 1, 1), torch.zeros(batch, count, 2)), Scores(nothing, nothing > 0)

    def object_poses(self, first: Frames, actions: Any, instruction: Any) -> np.ndarray:
        return self._at(len(instruction), actions.executed.shape[1] + 1, 0.003)

    def read_objects(self, frames: Frames, instruction: Any) -> np.ndarray:
        return self._at(len(instruction), frames.states.shape[1], 0.004)

    def _at(self, batch: int, count: int, y: float) -> np.ndarray:
        poses = np.zeros((batch, count, 1, 4), np.float32)
        poses[..., 1] = y
        return poses

    def decode(self, *_: Any) -> Any:
        raise NotImplementedError

    imagine_ahead = score = decode


EPISODES = [
    episode("a", 0, 0.004, 0.016),
    episode("b", 0, 0.032),
    episode("c", 0, 0, 0),
    episode("d", 9, 9, poses=False),
]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_errors_are_of_what_has_moved_and_of_the_frames_that_there_are(batch_size: int) -> None:
    found = object_figures(Sure(), EPISODES, batch_size, seed=0, not_measured={})  # type: ignore[arg-type]
    assert found["object_error_0"].value == pytest.approx(0.003) and found["object_error_0"].n == 3
    assert found["object_error_1"].value == pytest.approx(np.hypot(0.032, 0.003)), "b alone has moved by 1 cm"
    assert found["object_error_2"].value == pytest.approx(np.hypot(0.016, 0.003)), "a alone; b has ended"
    assert found["picture_object_error_2"].value == pytest.approx(np.hypot(0.016, 0.004))
    assert set(found) == {"object_error_0", "object_error_1", "object_error_2"} | {
        "picture_object_error_1",
        "picture_object_error_2",
    }
    assert as_text(found["object_error_0"].value, "mm") == "3.0 mm"


def test_without_poses_it_says_why_and_without_the_part_it_says_nothing() -> None:
    why: dict[str, str] = {}
    assert object_figures(Sure(), EPISODES[3:], 8, 0, why) == {}  # type: ignore[arg-type]
    assert len(why) == 9 and all("collect.objects=true" in text for text in why.values())
    bare, why = Sure(), {}
    bare.has_objects = False
    assert object_figures(bare, EPISODES, 8, 0, why) == {} and why == {}  # type: ignore[arg-type]
