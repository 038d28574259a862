"""Repeat numbers of episodes that begin at the same initial state: which noise each is imagined with."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vla_rl.types import EpisodeSpec


class RepeatCounter:
    """Counts the episodes that have begun at each initial state.

    Args:
        same_noise: every repeat has the noise of the first.
    """

    def __init__(self, same_noise: bool) -> None:
        self._same_noise, self._begun = same_noise, Counter[str]()

    def next(self, spec: EpisodeSpec) -> int:
        """The repeat number, from 0, of an episode that begins now."""
        if self._same_noise:
            return 0
        if spec.place is not None:
            return spec.place
        self._begun[start_name(spec)] += 1
        return self._begun[start_name(spec)] - 1

    def deal(self, specs: Sequence[EpisodeSpec], size: int) -> list[EpisodeSpec]:
        """See `ImaginedEnv.deal`."""
        if self._same_noise:
            return list(specs)
        dealt = []
        for spec in specs:
            name = start_name(spec)
            dealt.append(replace(spec, place=self._begun[name], group=self._begun[name]))
            self._begun[name] += size
        return dealt

    def state(self) -> dict[str, int]:
        """For a checkpoint, JSON-able."""
        return dict(self._begun)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Undo `state`."""
        self._begun = Counter(state)


def start_name(spec: EpisodeSpec) -> str:
    """A name for the initial state or keyframe at which an episode begins."""
    name = f"{spec.task}/{spec.split}/{spec.index}"
    if spec.keyframe is None:
        return name
    digest = hashlib.blake2b(str(spec.keyframe.step).encode(), digest_size=8)
    for key, array in sorted(spec.keyframe.arrays.items()):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{spec.keyframe.env}/{spec.task}/{digest.hexdigest()}"
