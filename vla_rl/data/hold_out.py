"""Which episodes are held out: those of whole initial states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np


def whole_states(states: Sequence[str], count: int) -> np.ndarray:
    """Choose states in order of appearance, until they have about `count` episodes; some, and not all of them.

    A state that would bring more too many than are still lacking is passed over.

    Args:
        states: names of E episodes' initial states, two at least, in random order. count: 1 .. E - 1.

    Returns:
        bool (E,), the episodes of the states chosen.
    """
    sizes, chosen, found = Counter(states), set[str](), 0
    for state, size in sizes.items():
        if found + size / 2 <= count and len(chosen) < len(sizes) - 1:
            chosen.add(state)
            found += size
    chosen = chosen or {min(sizes, key=lambda state: sizes[state])}
    return np.array([state in chosen for state in states])


def some_states(states: Sequence[str], fraction: float, seed: int | Sequence[int]) -> np.ndarray:
    """Choose whole initial states at random, of which there are several; of one alone, some of its episodes.

    Args:
        states: of each of E episodes. fraction: of the episodes, about; at least one is chosen, and one is not.

    Returns:
        bool (E,), those chosen.
    """
    order = np.random.default_rng(seed).permutation(len(states))
    count = min(max(round(fraction * len(states)), 1), len(states) - 1)
    chosen = np.zeros(len(states), bool)
    ordered = [states[int(number)] for number in order]
    chosen[order] = whole_states(ordered, count) if len(set(states)) > 1 else np.arange(len(states)) < count
    return chosen


def across_parts(names: Sequence[Sequence[str]], fraction: float, seed: int) -> list[np.ndarray] | None:
    """Choose whole initial states of several datasets together, where some are in more than one of them.

    Args:
        names: of each dataset's episodes' initial states.

    Returns:
        bool of each dataset's episodes, those held out; None where no state is in two datasets.
    """
    states = [name for own in names for name in own]
    if sum(len(set(own)) for own in names) == len(set(states)):
        return None
    return np.split(some_states(states, fraction, seed), np.cumsum([len(own) for own in names])[:-1])
