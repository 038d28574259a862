"""What to learn from: frames of episodes with interventions; episodes that are not held out, by initial state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vla_rl.data.config import Frames
from vla_rl.data.lerobot_io import CONTROL_SOURCE
from vla_rl.data.source import LeRobotSource
from vla_rl.types import CONTROL_SOURCES, HUMAN_SOURCES, ControlSource

_INTERVENED: tuple[ControlSource, ...] = ("recovery", "correction", "rewind")


def training_mask(
    frames: Frames,
    source: np.ndarray,
    starts: np.ndarray,
    success: np.ndarray | None,
    interventions: np.ndarray | None = None,
) -> np.ndarray:
    """Which frames to learn from.

    - rac (arXiv 2509.07953): human OR (success AND never intervened). What the policy did before a person had to help
      is what led there, so it is left out, whatever came of the episode.
    - hg_dagger (arXiv 1810.02890): human.
    - corrections: human, without the recoveries.
    - all: every frame.

    Args:
        source: int8 (N,), index in `CONTROL_SOURCES`. starts: int64 (E,), each episode's first frame.
        success: bool (E,), None where it is not recorded.
        interventions: int64 (E,), times that a person took over, None where it is not recorded. An episode with a
            frame of recovery, correction or rewinding counts as intervened in any case.

    Returns:
        bool (N,).

    Raises:
        ValueError: rac, and there are frames of a policy, but success is not recorded.
    """
    if frames == "all":
        return np.ones(len(source), bool)
    human = np.isin(source, _codes(HUMAN_SOURCES))
    if frames == "corrections":
        return human & (source != CONTROL_SOURCES.index("recovery"))
    if frames == "hg_dagger" or human.all():
        return human
    if success is None:
        raise ValueError("frames=rac needs to know which episodes succeeded, and that is not recorded; use hg_dagger")
    lengths = np.diff(starts, append=len(source))
    intervened = np.logical_or.reduceat(np.isin(source, _codes(_INTERVENED)), starts)
    if interventions is not None:
        intervened |= interventions > 0
    alone = np.repeat(success & ~intervened, lengths)
    return human | (alone & (source == CONTROL_SOURCES.index("policy")))


def frames_in(dataset: Path, frames: Frames) -> int:
    """How many frames of a dataset `training_mask` selects.

    Raises:
        DatasetError: missing or damaged.
    """
    source = LeRobotSource(dataset)
    names = [n for table in source.batches([CONTROL_SOURCE]) for n in table.column(CONTROL_SOURCE).to_pylist()]
    codes = np.array([CONTROL_SOURCES.index(name) for name in names], np.int8)
    starts = np.cumsum(source.lengths) - source.lengths
    return int(training_mask(frames, codes, starts, source.success, source.interventions).sum())


def _codes(names: tuple[ControlSource, ...]) -> list[int]:
    return [CONTROL_SOURCES.index(name) for name in names]


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
