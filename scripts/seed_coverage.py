"""Simulate how often the interval over several training seeds holds the true gain, and how wide it is.

    python scripts/seed_coverage.py

A base policy (35 % on average, states of differing difficulty) is evaluated once; the policy of each seed, better by 15
points on average, on the same 500 states. Seeds differ by a normal spread. Prints a table for docs/results.md.
"""

from __future__ import annotations

import sys

import numpy as np

from vla_rl.evaluation.statistics import summarize_seeds

NUM_STATES = 500
GAIN = 0.15


def simulate(
    num_seeds: int, spread: float, num_trials: int, *, shared_base: bool = True, seed: int = 0
) -> tuple[float, float]:
    """Return the share of intervals that hold the true gain, and their mean width.

    Args:
        spread: standard deviation between seeds, as a fraction; drawn within 2.5 of it, so that rates stay in 0 .. 1.
        shared_base: one evaluation of the base for all seeds; otherwise one each, as with a control.
    """
    rng = np.random.default_rng(seed)
    covered, width = 0, 0.0
    for _ in range(num_trials):
        rate = rng.uniform(0.2, 0.5, NUM_STATES)
        gain = GAIN + rng.uniform(-0.1, 0.1, NUM_STATES)
        of_seed = np.clip(rng.normal(0, 1, (num_seeds, 1)), -2.5, 2.5) * spread
        before = rng.random((1 if shared_base else num_seeds, NUM_STATES)) < rate
        after = rng.random((num_seeds, NUM_STATES)) < rate + gain + of_seed
        low, high = summarize_seeds(after.astype(float) - before).interval
        covered += low <= GAIN <= high
        width += high - low
    return covered / num_trials, width / num_trials


def main(num_trials: int = 10_000) -> None:
    """Print a Markdown table."""
    print("| seeds | spread between seeds, points | over one base: coverage, width | over a control: coverage, width |")
    print("|---|---|---|---|")
    for num_seeds in (3, 5):
        for points in (0, 3, 6, 10):
            cells = []
            for shared_base in (True, False):
                covered, width = simulate(num_seeds, points / 100, num_trials, shared_base=shared_base)
                cells.append(f"{100 * covered:.1f} %, {100 * width:.1f}")
            print(f"| {num_seeds} | {points} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
