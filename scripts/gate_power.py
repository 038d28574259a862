"""Simulate how often one check of the gate confirms, refutes, or leaves undecided a true gain.

    python scripts/gate_power.py

Pairs are independent; in a share of them (`DISCORDANT`) one policy alone succeeds. Prints a table for
docs/closed_loop.md. It takes some minutes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np

from vla_rl.evaluation.gate import GateConfig, Verdict
from vla_rl.evaluation.sequential import Decision, PairedSequentialTest

VERDICTS: dict[Decision, Verdict] = {"better": "confirmed", "undecided": "undecided"}  # The others are "refuted".
DISCORDANT = 0.45  # As on the tabletop, sampled, after RL.


def decision_rule(config: GateConfig) -> Callable[[int, int, int], Decision]:
    """Return the gate's test as a function of the pairs so far: gained, lost, tied."""

    @cache
    def decide(gained: int, lost: int, tied: int) -> Decision:
        return PairedSequentialTest(config.alpha, config.min_gain, gained, lost, tied).decision

    return decide


def simulate(
    gain: float,
    num_pairs: int,
    num_trials: int,
    decide: Callable[[int, int, int], Decision],
    discordant: float = DISCORDANT,
    seed: int = 0,
) -> tuple[dict[str, float], float]:
    """Return the share of each verdict and the mean number of pairs.

    Args:
        gain: true difference of success rates, at most `discordant` in size.
    """
    rng = np.random.default_rng(seed)
    verdicts: Counter[str] = Counter()
    total = 0
    for _ in range(num_trials):
        draws = rng.random(num_pairs)
        gained = lost = tied = 0
        decision: Decision = "undecided"
        for draw in draws:
            if draw < (discordant + gain) / 2:
                gained += 1
            elif draw < discordant:
                lost += 1
            else:
                tied += 1
            decision = decide(gained, lost, tied)
            if decision != "undecided":
                break
        total += gained + lost + tied
        verdicts[VERDICTS.get(decision, "refuted")] += 1
    return {name: verdicts[name] / num_trials for name in ("confirmed", "refuted", "undecided")}, total / num_trials


def main(num_trials: int = 4000) -> None:
    """Print a Markdown table."""
    decide = decision_rule(GateConfig())
    print("| pairs at most | differing pairs | true gain, points | confirmed | refuted | undecided | pairs used |")
    print("|---|---|---|---|---|---|---|")
    for num_pairs, discordant in ((100, 0.45), (200, 0.35), (200, 0.45), (400, 0.45), (800, 0.45)):
        for points in (-5, 0, 5, 9, 10, 15):
            shares, used = simulate(points / 100, num_pairs, num_trials, decide, discordant)
            cells = " | ".join(f"{100 * share:.0f} %" for share in shares.values())
            print(f"| {num_pairs} | {100 * discordant:.0f} % | {points:+d} | {cells} | {used:.0f} |", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
