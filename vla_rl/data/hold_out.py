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
