"""Simulate what the gate finds of a true gain: better, worse or undecided, in one and in two checks.

    python scripts/gate_power.py

Pairs are independent; in a share of them one policy alone succeeds. The gain is the same at every check. "Worse" is
what is rolled back. Prints tables for docs/closed_loop.md, in about a minute.
"""

from __future__ import annotations

import sys

from vla_rl.evaluation.gate import GateConfig
from vla_rl.evaluation.pooled import DIFFERING, simulate

GAINS = (-10, -5, 0, 5, 9, 10, 15)
WITHOUT_COMMON = 0.45  # Pairs that differ where policies hardly draw alike.


def main(num_trials: int = 2000) -> None:
    """Print Markdown tables."""
    alpha = GateConfig().alpha
    for differing in (DIFFERING, WITHOUT_COMMON):
        for num_checks in (1, 2):
            print(f"\n{num_checks} check{'s' * (num_checks > 1)}; pairs that differ: {100 * differing:.0f} of 100\n")
            print("| true gain, points | " + " | ".join(f"{pairs} pairs" for pairs in (100, 200, 400)) + " |")
            print("|---|---|---|---|")
            found = [
                simulate([[points / 100] * num_checks for points in GAINS], pairs, alpha, differing, num_trials)
                for pairs in (100, 200, 400)
            ]
            for row, points in enumerate(GAINS):
                cells = [
                    ", ".join(f"{100 * share[row]:.0f} %" for share in (each.better, each.worse, each.undecided))
                    + f" ({each.num_pairs[row]:.0f})"
                    for each in found
                ]
                print(f"| {points:+d} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
