"""Training masks of episodes with interventions, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.data.selection import training_mask
from vla_rl.types import CONTROL_SOURCES

LETTERS = {"p": "policy", "e": "expert", "r": "recovery", "c": "correction", "d": "demo", "w": "rewind"}
# Alone and solved; alone and failed; helped and solved; helped and failed; a demonstration; rewound and then solved.
EPISODES = ["ppp", "pp", "pprrc", "ppr", "dd", "ppwp", "ee"]
SUCCESS = np.array([True, False, True, False, False, True, True])
CODES = np.array([CONTROL_SOURCES.index(LETTERS[x]) for x in "".join(EPISODES)], np.int8)  # type: ignore[arg-type]
STARTS = np.cumsum([0, *map(len, EPISODES)])[:-1]


def text(mask: np.ndarray) -> str:
    return " ".join("".join("1" if m else "0" for m in part) for part in np.split(mask, STARTS[1:]))


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ("all", "111 11 11111 111 11 1111 11"),
        ("rac", "111 00 00111 001 11 0000 11"),
        ("hg_dagger", "000 00 00111 001 11 0000 11"),
        ("corrections", "000 00 00001 000 11 0000 11"),
    ],
)
def test_masks(frames: str, expected: str) -> None:
    assert text(training_mask(frames, CODES, STARTS, SUCCESS)) == expected  # type: ignore[arg-type]


def test_a_take_over_without_a_frame_counts() -> None:
    """Somebody took over and gave up at once: the episode holds no frame of theirs."""
    interventions = np.array([1, 0, 1, 1, 0, 0, 0])
    assert text(training_mask("rac", CODES, STARTS, SUCCESS, interventions)).startswith("000 00 00111 001")


def test_rac_needs_success_where_a_policy_acted() -> None:
    with pytest.raises(ValueError, match="hg_dagger"):
        training_mask("rac", CODES, STARTS, None)
    assert training_mask("rac", CODES[-2:], np.array([0]), None).all()
