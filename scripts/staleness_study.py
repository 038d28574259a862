"""Does a policy trained with rollout.staleness 2 reach the success of one trained with 0? Several seeds, paired.

python scripts/staleness_study.py --output runs/staleness train.iterations=8

trains the recipe with each staleness and seed at Ray's actors, evaluates each on the same initial states of the
validation split, and prints the difference over seeds with its 95 % interval. Killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from vla_rl.cli.options import PROGRAM  # noqa: E402
from vla_rl.common.run_folder import RunFolder  # noqa: E402
from vla_rl.evaluation.results import Evaluation  # noqa: E402
from vla_rl.workflows.ablate import Gain, gain_of  # noqa: E402
from vla_rl.workflows.jobs import FINAL  # noqa: E402
from vla_rl.workflows.sweep import sweep  # noqa: E402

STALENESS = (0, 2)
MARGIN = 0.05  # the interval must lie within, in fractions


def differences(runs: dict[tuple[int, int], Path], seeds: int) -> list[tuple[Gain, int]]:
    """The later staleness over the first, for each mode, and the episodes of each evaluation.

    Args:
        runs: (staleness, seed) -> the run's folder.
    """
    first, second = (
        [Evaluation.load(RunFolder(runs[staleness, seed]).evaluation(FINAL)) for seed in range(seeds)]
        for staleness in STALENESS
    )
    names = [f"staleness {staleness}" for staleness in STALENESS]
    return [
        (gain_of(names[1], names[0], mode, second, first), first[0].rate(mode).num_episodes) for mode in first[0].modes
    ]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe: its size, for example")
    parser.add_argument("--recipe", default="tabletop_grpo")
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each with a Ray of its own")
    parser.add_argument("--hosts", type=int, default=2)
    options = parser.parse_args()
    seeds = ",".join(str(seed) for seed in range(options.seeds))
    over = [f"rollout.staleness={','.join(map(str, STALENESS))}", f"seed={seeds}"]
    overrides = [f"rollout={{kind: ray, hosts: {options.hosts}}}", *options.overrides]
    found = sweep(options.recipe, overrides, over, options.output, program=PROGRAM, jobs=options.jobs, show=print)
    keys = [(staleness, seed) for staleness in STALENESS for seed in range(options.seeds)]
    runs = {key: options.output / row.run for key, row in zip(keys, found.rows, strict=True)}
    for gain, num_episodes in differences(runs, options.seeds):
        low, high = gain.interval
        is_same = low > -MARGIN and high < MARGIN
        print(
            f"{gain.mode}: {gain.of} - {gain.over} = {100 * gain.mean:+.1f} points, 95 % interval {100 * low:+.1f} to "
            f"{100 * high:+.1f}, n = {num_episodes} each, by seed "
            f"{' '.join(f'{100 * each:+.1f}' for each in gain.per_seed)}; within 5 points: {'yes' if is_same else 'no'}"
        )


if __name__ == "__main__":
    main()
