"""The study of trees (scripts/branch_study.py): advantages and pieces by hand, and an expected gradient that stays."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from vla_rl.types import EpisodeSpec

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))

import branch_study as study


def leaf(success: float, *gradient: float) -> study.Node:
    return study.Node(np.array(gradient or (0.0,)), 1.0, 8.0, success)


def test_advantages_by_hand() -> None:
    """Two trunks: one of success 0, and one that branches into a success and a failure."""
    fork = study.Node(np.zeros(1), 1.0, 8.0, children=[leaf(1), leaf(0)])
    assert fork.value == 0.5 and fork.all_steps == 24
    for averaged, second in ((False, -0.25), (True, -0.125)):  # The failure: 0 - 1, or 0 - (1 + 0) / 2; times 1/4.
        found = [a for _, a in study.advantages([fork, leaf(0)], averaged)]
        assert found == pytest.approx([0.25, 0.25, second, -0.25])


@pytest.mark.parametrize("averaged", [False, True])
def test_the_expected_gradient_is_that_of_whole_episodes(averaged: bool) -> None:
    """Two decisions, each right half of the time, and a success where both are; scores +-1/2, over all outcomes."""

    def trunk(first: int, *second: int) -> study.Node:
        kids = [leaf(first * action, 0, action - 0.5) for action in second]
        return study.Node(np.array([first - 0.5, 0]), 1.0, 8.0, children=kids)

    trunks = [trunk(*actions) for actions in product((0, 1), repeat=3)]
    sums = [
        sum(a * node.gradient for node, a in study.advantages(pair, averaged)) for pair in product(trunks, repeat=2)
    ]
    np.testing.assert_allclose(np.mean(sums, axis=0), [1 / 8, 1 / 8])


def test_a_group_by_hand() -> None:
    fork = study.Node(np.array([1.0, 0]), 2.0, 8.0, children=[leaf(1, 0, 1), leaf(0, 0, 1)])
    found = study.measured([fork, leaf(0, 1, 0)], averaged=False)
    # Of the first decision 0.25 - 0.25, of the second 0.25 - 0.25; alone: (2 + 1 + 1 + 1) / 16. 4 times 8 steps.
    assert found == pytest.approx([0, 5 / 16, 32, 1])


def piece(first: int, success: float, steps: list[float], entropy: list[float]) -> study.Piece:
    ones = np.ones(len(steps))
    gradient = np.eye(4)[first : first + len(steps)]
    return study.Piece(EpisodeSpec("go"), first, success, np.array(steps), np.array(entropy), ones, gradient, [])


def test_a_piece_is_cut_where_it_branches() -> None:
    trunk, branch = piece(0, 1.0, [8, 7, 6, 5], [9, 1, 3, 2]), piece(2, 0.0, [4, 3], [0, 0])
    trunk.branches[2] = [branch]
    node = study.tree(trunk, lambda _: [1, 2])  # At 1 it has no branch.
    assert node.gradient.tolist() == [1, 1, 0, 0] and node.steps == 15
    assert [(child.steps, child.value) for child in node.children] == [(11, 1), (7, 0)]
    assert study.tree(trunk, lambda _: []).all_steps == 26
    assert study.first_above(1.5)(trunk) == [2] and study.first_above(5)(trunk) == []
    assert study.at_highest(trunk) == [2] and study.at_random(trunk)[0] in (1, 2, 3)
