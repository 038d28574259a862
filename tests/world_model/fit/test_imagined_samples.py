"""Which recorded episodes are imagined for the success networks to learn from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from world_model.fit.replay import _choose


def parts(**weights: float) -> Any:
    """Datasets of 24 episodes, by weight, of which every second is chosen."""
    chosen = np.arange(0, 24, 2)
    found = [
        SimpleNamespace(chosen=chosen, frames=SimpleNamespace(dataset=SimpleNamespace(weight=weight)))
        for weight in weights.values()
    ]
    return SimpleNamespace(parts=found, num_episodes=12 * len(found))


@pytest.mark.parametrize("most", [8, 24, 2000])
def test_datasets_are_imagined_in_proportion_to_their_weights(most: int) -> None:
    """Also where they hold fewer episodes than are asked for, as a loop's do."""
    which, episode = _choose(parts(newest=3.0, old=1.0), most, seed=1).T
    newest, old = (episode[which == number] for number in (0, 1))
    assert len(newest) == 3 * len(old) and len(episode) == min(most, 24)
    assert set(episode.tolist()) <= set(range(0, 24, 2))
    times = np.bincount(newest, minlength=24)[::2]
    assert times.max() - times.min() <= 1, "none comes again before all have come"


def test_one_dataset_is_imagined_once() -> None:
    which, episode = _choose(parts(only=0.5), 2000, seed=1).T
    assert not which.any() and sorted(episode.tolist()) == list(range(0, 24, 2))
