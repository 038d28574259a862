"""Philox by its authors' known answers; noise that is Gaussian, and that no neighbor, order or device changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from world_model.noise import NoiseStream, philox
from world_model.types import Frames

# Random123's known answers (kat_vectors): counter, key -> words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
FRAMES = Frames(torch.zeros(1, 1, 2, 3, 5, 7), torch.zeros(1, 1, 9))  # Latents and state of sizes no multiple of 4.


def words(text: str) -> torch.Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


def test_philox_gives_the_known_answers_one_by_one_and_together() -> None:
    for counter, key, expected in KNOWN:
        assert philox(words(counter), words(key)).tolist() == words(expected).tolist()
    counters, keys, expected = (torch.stack([words(row[i]) for row in KNOWN], 1) for i in range(3))
    assert torch.equal(philox(counters, keys), expected)


@pytest.mark.parametrize("what", ["rows", "draws", "elements", "futures"])
def test_numbers_are_normal_and_independent_along_each_part_of_the_counter(what: str) -> None:
    """A correlation of n pairs has a standard deviation of 1 / sqrt(n); 5 of them are allowed."""
    if what == "rows":  # As keys that differ by 1, the hardest case.
        found = NoiseStream(range(4000)).normal(64)
    elif what == "draws":
        found = NoiseStream([7]).frames(FRAMES, 1200).latents.reshape(1200, -1)
    elif what == "futures":
        found = NoiseStream([7]).other_futures(4000).normal(64)
    else:
        found = NoiseStream([7]).normal(64, 4000).reshape(-1, 64)
    numbers = found.double().flatten().numpy()
    assert stats.kstest(numbers, "norm").pvalue > 0.001
    assert abs(stats.kurtosis(numbers)) < 0.05 and np.abs(numbers).max() > 4
    # Beside each other along the rows, and along the columns; their squares as well.
    for values in (found.double(), found.double().square() - 1):
        for first, second in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
            pairs = (first * second / values.var()).flatten()
            assert abs(float(pairs.mean())) < 5 / len(pairs) ** 0.5


def test_an_episode_draws_the_same_in_any_batch_and_place_bit_for_bit() -> None:
    seeds = [3, 2**64 - 1, 2**32, 11, 5]
    together = NoiseStream(seeds)
    expected = [together.frames(FRAMES, 3), together.frames(FRAMES, 1)]
    for order in ([4, 2, 0, 1, 3], [1], [2, 2]):
        rows = torch.tensor(order)
        apart = NoiseStream([seeds[i] for i in order])
        for count, whole in zip((3, 1), expected, strict=True):
            found = apart.frames(FRAMES, count)
            assert torch.equal(found.latents, whole.latents[rows])
            assert torch.equal(found.states, whole.states[rows])


def test_the_first_frames_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    one_by_one, together = NoiseStream([1, 2]), NoiseStream([1, 2])
    frames = [one_by_one.frames(FRAMES, 1) for _ in range(4)]
    whole = together.frames(FRAMES, 4)
    assert torch.equal(torch.cat([f.latents for f in frames], 1), whole.latents)
    assert torch.equal(torch.cat([f.states for f in frames], 1), whole.states)
    assert torch.equal(one_by_one.rows, together.rows)


def test_seeds_of_64_bits_differ_in_each_bit() -> None:
    found = NoiseStream([0, *(1 << bit for bit in range(64))]).normal(4)
    assert len(torch.unique(found, dim=0)) == 65


def test_selected_streams_go_on_by_themselves() -> None:
    stream = NoiseStream([1, 2, 3])
    stream.normal(2)
    chosen = stream.select(torch.tensor([2, 0, 2]))
    found = chosen.normal(5)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[:2], stream.normal(5)[[2, 0]])  # Not moved on by the other.
    put = NoiseStream([1, 2, 3]).put(torch.tensor([1]), NoiseStream([9]))
    assert torch.equal(put.normal(5), NoiseStream([1, 9, 3]).normal(5))


def test_other_futures_differ_and_asking_for_them_changes_nothing() -> None:
    stream, same = NoiseStream([1, 2]), NoiseStream([1, 2])
    others = stream.other_futures(3)
    found = others.normal(8)
    assert len(others) == 6 and len(torch.unique(found, dim=0)) == 6
    own = stream.normal(8)
    assert torch.equal(own, same.normal(8)) and not torch.isin(found, own).any()
    assert torch.equal(NoiseStream([1, 2]).other_futures(2, first=1).normal(8), found[[1, 2, 4, 5]])
    later = stream.other_futures(3).normal(8)  # After a draw the other futures are other ones as well.
    assert not torch.isin(later, found).any()
