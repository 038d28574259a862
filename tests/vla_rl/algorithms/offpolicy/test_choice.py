"""Which of a frozen policy's chunks acts: the greedy one, unless the whole ensemble prefers another."""

from __future__ import annotations

import torch

from vla_rl.algorithms.offpolicy.value_guided import choose

VALUES = torch.tensor(
    [
        [[0.5, 0.6, 0.9], [0.2, 0.3, 0.1], [0.4, 0.4, 0.4]],  # (2 networks, 3 observations, 3 chunks)
        [[0.3, 0.4, 0.2], [0.9, 0.8, 0.95], [0.7, 0.7, 0.6]],
    ]
)


def test_a_draw_acts_where_all_networks_prefer_it_to_the_greedy_chunk() -> None:
    assert choose(VALUES, "lead").tolist() == [1, 0, 0]


def test_what_one_network_believes_of_the_place_decides_nothing() -> None:
    offset = torch.tensor([[0.05], [-0.2]])[..., None]
    assert choose(VALUES + offset, "lead").tolist() == choose(VALUES, "lead").tolist()


def test_by_value_the_network_that_thinks_least_of_the_place_decides() -> None:
    assert choose(VALUES, "value").tolist() == [1, 1, 0]
