"""The world model as trust sees it: imagining from real frames, and what its probability is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy import METADATA, toy_world_model

from world_model.config import ImaginationConfig
from world_model.trust.subject import OpenLoop
from world_model.types import Actions, Frames


def track(*positions: float) -> Frames:
    """One episode's frames, with the toy's two views, at these positions."""
    path = torch.tensor(positions)[None, :, None]
    latents = path[..., None, None, None].expand(-1, -1, 2, -1, -1, -1).contiguous()
    return Frames(latents, torch.cat([path, torch.zeros_like(path)], 2))


def pushes(batch: int, num_frames: int) -> Actions:
    """Each moves the toy by 1 in a frame of four steps."""
    return Actions(torch.ones(batch, num_frames, 4, 3), torch.ones(batch, num_frames, 4, dtype=torch.bool))


def test_each_frame_is_imagined_from_the_real_ones_before_it() -> None:
    subject = OpenLoop(toy_world_model(), ImaginationConfig())
    found = subject.imagine_ahead(track(1, 1.5, 4, 6), pushes(1, 3), ["reach"], [0], depth=3)[0]
    where = {(1, 1): 2, (2, 1): 2.5, (3, 1): 5, (2, 2): 3, (3, 2): 3.5, (3, 3): 4}  # (frame, frames imagined)
    for (frame, depth), position in where.items():
        assert found[frame - 1, depth - 1] == pytest.approx(1 / (1 + np.exp(-2 * (position - 6))))


def test_how_far_others_go_changes_no_episodes_noise() -> None:
    subject = OpenLoop(toy_world_model(noise=0.5), ImaginationConfig())
    alone = subject.imagine_ahead(track(1, 2, 3), pushes(1, 2), ["reach"], [5], depth=2)
    longer = subject.imagine_ahead(track(1, 2, 3, 4, 5), pushes(1, 4), ["reach"], [5], depth=2)
    assert np.array_equal(longer[:, :1], alone[:, :1]) and np.array_equal(longer[:, 1], alone[:, 1])
    assert not np.array_equal(alone, subject.imagine_ahead(track(1, 2, 3), pushes(1, 2), ["reach"], [6], depth=2))


def test_without_a_calibrated_probability_the_less_sure_network_speaks() -> None:
    bare = METADATA.model_copy(update={"success_probability": None})
    calibrated, plain = (
        OpenLoop(toy_world_model(metadata=m), ImaginationConfig()).score(track(1, 7), ["reach"]).probability[0, 1]
        for m in (METADATA, bare)
    )
    assert calibrated == pytest.approx(1 / (1 + np.exp(-2)))
    assert plain == pytest.approx(1 / (1 + np.exp(-1)))


def test_what_rewards_are_lowered_by_is_not_asked_of_a_world_model() -> None:
    """Trust pays nobody: a world model without the inverse dynamics is measured all the same."""
    plain, lowered = (OpenLoop(toy_world_model(), ImaginationConfig(action_penalty=p)) for p in (0, 0.1))
    found = [one.imagine(one.begin(track(1), ["reach"], [0]), pushes(1, 2)) for one in (plain, lowered)]
    assert torch.equal(found[0][0].latents, found[1][0].latents)
    assert np.array_equal(found[0][1].probability, found[1][1].probability)


def test_the_probability_counts_where_the_environment_would_look() -> None:
    """After the horizon it pays nothing, so trust looks at nothing there."""

    def probability(**imagination: Any) -> np.ndarray:
        config = ImaginationConfig.model_validate({"reward": "probability", "dual_noise": 0, **imagination})
        subject = OpenLoop(toy_world_model(), config, chunk_frames=2)
        memory = subject.begin(track(1), ["reach"], [0])
        return subject.imagine(memory, pushes(1, 6))[1].probability[0]

    whole = probability()
    assert (whole > 0).all() and np.array_equal(probability(horizon=24), whole)
    assert np.array_equal(probability(horizon=12), np.where(np.arange(6) < 3, whole, 0))
