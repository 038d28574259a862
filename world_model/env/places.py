"""Which of the episodes that begin alike an episode is, by which a world model imagines each otherwise."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vla_rl.types import EpisodeSpec


class Places:
    """Counts the episodes that have begun, by where.

    Args:
        all_alike: those that begin alike are imagined alike: each is the first.
    """

    def __init__(self, all_alike: bool) -> None:
        self._all_alike, self._begun = all_alike, Counter[str]()

    def of(self, spec: EpisodeSpec) -> int:
        """The place of an episode that begins now."""
        if self._all_alike:
            return 0
        if spec.place is not None:
            return spec.place
        self._begun[start_name(spec)] += 1
        return self._begun[start_name(spec)] - 1

    def deal(self, specs: Sequence[EpisodeSpec], size: int) -> list[EpisodeSpec]:
        """See `ImaginedEnv.deal`."""
        if self._all_alike:
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
    """Of where an episode begins."""
    name = f"{spec.task}/{spec.split}/{spec.index}"
    if spec.keyframe is None:
        return name
    digest = hashlib.blake2b(str(spec.keyframe.step).encode(), digest_size=8)
    for key, array in sorted(spec.keyframe.arrays.items()):
        digest.update(key.encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{spec.keyframe.env}/{spec.task}/{digest.hexdigest()}"
