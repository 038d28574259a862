"""Counter-based noise: each number a function of its episode and its position alone.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key and a counter into
four random words and keeps no state. The key is the episode's; the counter says which draw, which future and which
element. So what an episode draws does not depend on the batch it is in, its row there, the number of environments or
processes, or the device, where a whole batch is drawn at once. Words are the same everywhere; the numbers made of them
are the same bits on one device, and on another as near as its float32 logarithm, sine and cosine (some 1e-6).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from vla_rl.types import EpisodeSpec
from world_model.types import Frames

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Of counter words 0 and 2.
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # What the key's words grow by from round to round.
WORD = 0xFFFFFFFF  # Words are unsigned, kept in int64; a product needs all of its bits, and may wrap around.


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox-4x32-10: four random words, int64 (4, ...), of a counter (4, ...) and a key (2, ...), words as well."""
    rounds = torch.arange(ROUNDS, device=key.device).view(-1, *[1] * (key.ndim - 1))
    keys = torch.stack([word + rounds * step for word, step in zip(key, KEY_STEPS, strict=True)], 1)  # (10, 2, ...)
    low, high = sorted(MULTIPLIERS)  # On the device by counting, since copying two numbers there costs more.
    multipliers = torch.arange(low, high + 1, high - low, device=key.device).view(2, *[1] * (counter.ndim - 1))
    # A round exchanges words 0 and 2. So that none is moved, rows are 0 and 2 in even rounds, 2 and 0 in odd ones.
    turns = ((multipliers.flip(0), keys.flip(1)), (multipliers, keys))
    even, odd = counter[::2], torch.stack([counter[3], counter[1]])
    for number in range(ROUNDS):
        product = even * turns[number % 2][0]
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(turns[number % 2][1][number]).bitwise_and_(WORD)
        odd = product.flip(0)
    return torch.stack([even[0], odd[1] & WORD, even[1], odd[0] & WORD])


class NoiseStream:
    """Gaussian noise for a batch of episodes, each drawing by its own key.

    Args:
        seeds: an episode's key each, of 64 bits; those that are equal draw the same.
        device: where it is drawn.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        signed = [(seed + 2**63) % 2**64 - 2**63 for seed in seeds]
        key = torch.tensor(signed, dtype=torch.int64, device=device)
        # Per row: the key, how often it has drawn, and which future it belongs to.
        self._rows = torch.stack([key, torch.zeros_like(key), torch.zeros_like(key)], 1)

    @staticmethod
    def from_rows(rows: torch.Tensor) -> NoiseStream:
        """What `rows` gave."""
        stream = NoiseStream([])
        stream._rows = rows
        return stream

    @property
    def rows(self) -> torch.Tensor:
        """Where the streams are, int64 (B, 3): key, number of draws, future."""
        return self._rows

    @rows.setter
    def rows(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def select(self, rows: torch.Tensor) -> NoiseStream:
        """Streams of their own that go on where those at `rows`, int64, are; repeats draw the same."""
        return NoiseStream.from_rows(self._rows[rows])

    def put(self, rows: torch.Tensor, other: NoiseStream) -> NoiseStream:
        """With the streams at `rows`, int64, replaced by those of `other`."""
        return NoiseStream.from_rows(self._rows.index_copy(0, rows, other._rows))

    def other_futures(self, count: int, first: int = 0) -> NoiseStream:
        """`count` streams for each one, row by row, of what else may happen from here on; it is not changed itself.

        Args:
            first: number of the first of these futures, from 0; others are others.
        """
        rows = self._rows.repeat_interleave(count, 0)
        rows[:, 2] += 1 + first + torch.arange(count, device=rows.device).repeat(len(self))
        return NoiseStream.from_rows(rows)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers, float32 (B, *shape), in one draw."""
        return self._normal(1, math.prod(shape)).reshape(len(self), *shape)

    def frames(self, like: Frames, count: int) -> Frames:
        """Noise for B x `count` frames of the sizes in `like`: a draw each, so that none depends on how many follow."""
        sizes = like.latents.shape[2:].numel(), like.states.shape[2:].numel()
        latents, states = self._normal(count, sum(sizes)).split(sizes, 2)
        return Frames(latents.unflatten(2, like.latents.shape[2:]), states.unflatten(2, like.states.shape[2:]))

    def _normal(self, draws: int, size: int) -> torch.Tensor:
        """float32 (B, draws, size), by Box and Muller's transform of the words."""
        key, drawn, future = self._rows.unbind(1)
        device, blocks = key.device, -(-size // 4)
        element = torch.arange(blocks, device=device)
        draw = drawn[:, None, None] + torch.arange(draws, device=device)[:, None]
        parts = (element, draw, future[:, None, None], torch.zeros_like(element))
        counter = torch.stack([part.expand(len(self), draws, blocks) for part in parts])
        self._rows = torch.stack([key, drawn + draws, future], 1)  # Anew: whoever took these rows keeps them.
        words = philox(counter, torch.stack([key & WORD, (key >> 32) & WORD])[:, :, None, None])
        radius = words[:2].float().add_(0.5).mul_(2**-32).log_().mul_(-2).sqrt_()
        angle = words[2:].float().mul_(2 * math.pi * 2**-32)
        normal = torch.cat([radius * angle.cos(), radius * angle.sin()])  # (4, B, draws, blocks)
        return normal.permute(1, 2, 3, 0).flatten(2)[..., :size]


class RepeatCounter:
    """Counts the episodes that have begun at each initial state."""

    def __init__(self) -> None:
        self._begun = Counter[str]()

    def next(self, spec: EpisodeSpec) -> int:
        """The repeat number, from 0, of an episode that begins now."""
        if spec.place is not None:
            return spec.place
        self._begun[start_name(spec)] += 1
        return self._begun[start_name(spec)] - 1

    def deal(self, specs: Sequence[EpisodeSpec], size: int) -> list[EpisodeSpec]:
        """See `ImaginedEnv.deal`."""
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
