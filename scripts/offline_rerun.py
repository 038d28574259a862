"""Every method of `run: offline` over several seeds against the policy that it began with, in one table.

python scripts/offline_rerun.py                                    # seven methods, seeds 0, 1, 2, 500 updates each
python scripts/offline_rerun.py --methods filtered,preferences --seeds 3,4 eval.videos=0

The first run collects the logged episodes, so let it end before several run side by side (--jobs). Killed, the same
command goes on. The figures of docs/results_experience.md were measured before a logged action's tokens were counted
together (CHANGELOG.md); this makes them anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rich

from vla_rl.cli.options import PROGRAM
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.statistics import SEEDS_ALIKE
from vla_rl.workflows.jobs import job, run_jobs
from vla_rl.workflows.sweep import gain_of

OPTIONS = {
    "best_of_n": (),
    "filtered": (),
    "advantage_weighted": (),
    "cloning": (),
    "recap": (),
    "preferences": ("sft.optim.lr=2e-5", "sft.optim.warmup_steps=20"),
    "ppo": (),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tabletop_offline")
    parser.add_argument("--methods", default=",".join(OPTIONS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--output", type=Path, default=Path("runs/offline_rerun"))
    parser.add_argument("overrides", nargs="*", help="of the recipe, for all runs")
    args = parser.parse_args()
    methods, seeds = args.methods.split(","), args.seeds.split(",")
    shared = [*("sft.steps=500", "eval.videos=0"), *args.overrides]
    base = job("eval", args.recipe, shared, args.output / "base")
    runs = {
        method: [
            job(
                "train",
                args.recipe,
                [*shared, *OPTIONS[method], f"offline.kind={method}", "offline.evaluate=after", f"seed={seed}"],
                args.output / f"{method}-seed{seed}",
            )
            for seed in seeds
        ]
        for method in methods
    }
    run_jobs([base, *(run for of_method in runs.values() for run in of_method)], args.jobs, PROGRAM, rich.print)
    before = Evaluation.load(base.result)
    print(f"| method | {' | '.join(before.modes)} |\n|---|{'---|' * len(before.modes)}")
    for method, of_method in runs.items():
        after = [Evaluation.load(run.result) for run in of_method]
        cells = []
        for mode in before.modes:
            gain = gain_of(method, "base", mode, after, [before] * len(after))
            low, high = (f"{100 * end:+.1f}" for end in gain.interval)
            cells.append(f"{100 * gain.mean:+.1f} [{low}, {high}]")
        print(f"| `{method}` | {' | '.join(cells)} |")
    print(f"\n{SEEDS_ALIKE}")


if __name__ == "__main__":
    main()
