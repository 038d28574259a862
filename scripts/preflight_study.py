"""Whether what `vla-rl plan --preflight` measures of a base policy predicts what a short run of RL gains from it.

    python scripts/preflight_study.py run runs/preflight      (resumable, one core; 2 to 7 minutes a base)
    python scripts/preflight_study.py table runs/preflight

A base is a shipped policy in an environment: tasks of the tabletop, perturbed, easier, with more or less time. Each
has 128 preflight episodes on `train` states, then the same budget of GRPO, with sampled success on `eval` states before
and after. NAME.json is its row, written when it is ready. The table ends with Spearman's rank correlation of each
predictor with the gain: intervals resample bases, p permutes gains among bases, and what a correlation's size is above
that of the share of mixed groups resamples the same bases for both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.headroom import headroom
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.signal import interval_of
from vla_rl.evaluation.statistics import resampled_counts, spearman
from vla_rl.recipe.recipe import TRAIN, check, load_recipe
from vla_rl.training.api import train
from vla_rl.workflows.plan.command import play_groups

RECIPE, EPISODES = "tabletop_grpo", 128
# 640 episodes, and `eval` states of all tasks together, twice each.
BUDGET = ("train.iterations=5", "train.groups=16", "algo.decay_iterations=5", "algo.optim.warmup_steps=5")
BUDGET += ("algo.normalize_std=false", "algo.minibatch_size=128", "train.allow_no_success=true")
STATES, NUM_TASKS = 80, 5
EVALUATION = ("eval.samples_per_state=2", "eval.temperatures=[1.0]", "eval.videos=0")
POLICIES = ("base", "clean")
ONE_CORE = ("num_threads=1", "env.num_workers=0", "env.num_envs=32")


def _of(policy: str, task: str, *changes: str) -> tuple[str, ...]:
    """Overrides of a base: a shipped policy, and one task or, where it is empty, all."""
    tasks = (f"env.tasks=[{task}]", f"eval.episodes_per_task={STATES}")
    shared = (f"eval.episodes_per_task={STATES // NUM_TASKS}",)
    return (f"policy.path=pretrained:tabletop_{policy}", *(tasks if task else shared), *changes)


def _perturbed(axis: str, level: int) -> str:
    return f"env.perturb={{axis: {axis}, level: {level}}}"


def _time(steps: int) -> str:
    return f"env.horizons={{{', '.join(f'{task}: {steps}' for task in ('push_to_zone', 'pick_place', 'pick_colour'))}}}"


BASES = {
    "base, push_to_zone": _of("base", "push_to_zone"),
    "clean, pick_place, twice the time": _of("clean", "pick_place", _time(64)),
    "base, pick_colour, camera 3": _of("base", "pick_colour", _perturbed("camera", 3)),
    "clean, push_to_zone, 4 actions, twice the time": _of("clean", "push_to_zone", _time(64), "policy.num_actions=4"),
    "base, stack": _of("base", "stack"),
    "base, pick_place, little time": _of("base", "pick_place", _time(20)),
    "clean, pick_colour, easy starts": _of("clean", "pick_colour", "env.start_spread=0.3"),
    "clean, stack, noise 3": _of("clean", "stack", _perturbed("noise", 3)),
    "base, pick_place": _of("base", "pick_place"),
    "clean, push_to_zone, light 3": _of("clean", "push_to_zone", _perturbed("light", 3)),
    "clean, pick_colour": _of("clean", "pick_colour"),
    "base, stack, robot 3": _of("base", "stack", _perturbed("robot", 3)),
    "clean, stack": _of("clean", "stack"),
    "base, pick_colour": _of("base", "pick_colour"),
    "clean, push_to_zone": _of("clean", "push_to_zone"),
    "base, all tasks": _of("base", ""),
    "clean, pick_place, layout 3": _of("clean", "pick_place", _perturbed("layout", 3)),
    "base, bowl_push": _of("base", "bowl_push"),
}
PREDICTORS: dict[str, Callable[[dict[str, Any]], float]] = {
    "success": lambda found: found["success"],
    "mixed": lambda found: found["mixed"]["value"],
    "best of 8 minus success": lambda found: found["best_of_n"] - found["success"],
    "spread": lambda found: found["spread"],
    "sampled minus greedy": lambda found: found["success"] - found["greedy"],
}


def spread(preflight: Evaluation) -> float:
    """Mean over initial states of the variance of success among a state's sampled episodes."""
    drawn = sorted((e.task, e.index, e.success) for e in preflight.select("sampled"))
    groups = (np.array([success for *_, success in group], float) for _, group in groupby(drawn, lambda e: e[:2]))
    return float(np.mean([group.var(ddof=1) for group in groups]))


def measure(overrides: tuple[str, ...]) -> dict[str, Any]:
    """One base's preflight, and what RL gained from it."""
    started = time.perf_counter()
    recipe = check(load_recipe(RECIPE, [*overrides, *BUDGET, *EVALUATION, *ONE_CORE]), TRAIN)
    preflight = play_groups(recipe, EPISODES)
    found: dict[str, Any] = {**asdict(headroom(preflight)), "spread": spread(preflight)}
    found |= {name: found[name].model_dump() for name in ("mixed", "all_failed", "all_solved")}
    with TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run")
        run = RunFolder(Path(folder) / "run")
        before, after = (Evaluation.load(run.evaluation(name)) for name in ("base", "final"))
    gain = compare(before, after).result("sampled")
    seconds = time.perf_counter() - started
    return {"preflight": found, "gain": gain.model_dump(), "overrides": overrides, "seconds": seconds}


def study(args: argparse.Namespace) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.bases or BASES:
        if not (file := args.output / f"{name}.json").exists():
            print(f"== {name}", flush=True)
            write_text_atomic(file, json.dumps(measure(BASES[name]), indent=1) + "\n")


def correlations(values: np.ndarray, gain: np.ndarray) -> list[str]:
    """A line of the table for each predictor, from float (predictors, bases) and (bases,)."""
    rng, names = np.random.default_rng(0), list(PREDICTORS)
    rows = np.array([np.repeat(np.arange(gain.size), times) for times in resampled_counts(gain.size).astype(int)])
    draws = spearman(values[:, rows], gain[rows])
    permuted = spearman(values[:, None], rng.permuted(np.tile(gain, (10_000, 1)), axis=1))
    mixed, lines = names.index("mixed"), []
    for k, rho in enumerate(spearman(values, gain)):
        inside, more = interval_of(draws[k]), interval_of(np.abs(draws[k]) - np.abs(draws[mixed]))
        p = (1 + (np.abs(permuted[k]) >= abs(rho) - 1e-9).sum()) / (1 + len(permuted[k]))
        beyond = "" if k == mixed else f"[{more.low:+.2f}, {more.high:+.2f}]"
        lines.append(f"| {names[k]} | {rho:+.2f} [{inside.low:+.2f}, {inside.high:+.2f}] | {p:.4f} | {beyond} |")
    return lines


def table(args: argparse.Namespace) -> None:
    there = {name: args.output / f"{name}.json" for name in BASES}
    rows = {name: json.loads(file.read_text()) for name, file in there.items() if file.exists()}
    if not rows:
        raise ConfigError(f"{args.output}: has no row of a base; run the study there first")
    values = np.array([[predictor(row["preflight"]) for row in rows.values()] for predictor in PREDICTORS.values()])
    gain = np.array([row["gain"]["difference"] for row in rows.values()])
    print(f"| base, figures in % | {' | '.join(PREDICTORS)} | success before, after | gain, points |")
    print(f"|{'---|' * (len(PREDICTORS) + 3)}")
    for (name, row), found in sorted(zip(rows.items(), values.T, strict=True), key=lambda item: item[1][0]):
        result = row["gain"]
        low, high = result["bootstrap"]
        cells = [f"{100 * value:.0f}" for value in found]
        print(
            f"| {name} | {' | '.join(cells)} | {100 * result['rate_a']:.1f}, {100 * result['rate_b']:.1f} % | "
            f"{100 * result['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] |"
        )
    for policy in ("", *POLICIES):  # What separates the policies is no sign that a predictor tells bases of one apart.
        of = np.array([name.startswith(policy) for name in rows])
        if of.sum() < 3:
            continue
        print(f"\n{of.sum()} bases{f' of tabletop_{policy}' if policy else ''}, {STATES} `eval` states twice each:\n")
        print("| predictor | rank correlation with the gain | p | size above that of mixed |\n|---|---|---|---|")
        print("\n".join(correlations(values[:, of], gain[of])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("output", type=Path)
    running.add_argument("--bases", nargs="+", choices=BASES, help="by default all")
    running.set_defaults(function=study)
    showing = commands.add_parser("table")
    showing.add_argument("output", type=Path)
    showing.set_defaults(function=table)
    arguments = parser.parse_args()
    try:
        arguments.function(arguments)
    except ConfigError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
