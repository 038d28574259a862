"""The offline leaderboard: the cloning methods and preferences of `vla-rl offline` on the same 2,000 logged episodes.

    python scripts/offline_leaderboard.py --output runs/leaderboard
    python scripts/offline_leaderboard.py --output runs/leaderboard --seeds 0,1,2 --methods filtered,best_of_n

The same command goes on where it stopped: finished runs are not repeated, and another seed or method joins the table
(a method's line is then of all its seeds). Method ppo, whose policy is not cloned, is run by itself.
The episodes are those of the recipe tabletop_offline, collected where they are missing: 240 initial states a task from
200000 on by the shipped policy, 80 from 210000 by it at temperature 1.5, 80 from 220000 by a noisy expert, all of the
split `train`; every policy is evaluated on the split `eval`, paired with the policy that all begin with. The
fingerprint of their initial states, lengths and outcomes is printed, written into the table, and must stay the same.

Further words are overrides of the recipe for every run, such as sft.steps=1000.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import Recipe, load_recipe
from vla_rl.workflows.ablate import gain_of
from vla_rl.workflows.jobs import job, run_jobs
from vla_rl.workflows.offline import collect_missing

RECIPE = "tabletop_offline"
# Of the episodes whose figures are in docs/results_experience.md.
PUBLISHED = "afcecc842579b1d6"
# A method's own options, where the recipe's are not for it.
METHODS: dict[str, list[str]] = {
    "cloning": [],
    "filtered": [],
    "advantage_weighted": [],
    "best_of_n": [],
    "recap": [],
    "preferences": ["sft.lr=2e-5", "sft.warmup_steps=20", "sft.steps=300"],
}
CONTROL = "shuffled_outcomes"
TABLE, MARKDOWN = "leaderboard.json", "leaderboard.md"


def fingerprint(recipe: Recipe) -> str:
    """Of the logged episodes: where each began, how long it was and how it ended, in their order."""
    assert recipe.sft is not None, "a recipe of vla-rl offline"
    digest = hashlib.sha256()
    for dataset in recipe.sft.datasets:
        source = LeRobotSource(dataset.path)
        success = [None] * len(source.lengths) if source.success is None else [bool(each) for each in source.success]
        for episode in zip(source.initial_states(), map(int, source.lengths), success, strict=True):
            digest.update(json.dumps(episode).encode())
    return digest.hexdigest()[:16]


def check_same_episodes(found: str, table: Path) -> None:
    """Refuse to add runs on other episodes to a table.

    Raises:
        ConfigError: the table was made of others.
    """
    if table.is_file() and (before := json.loads(table.read_text())["dataset"]) != found:
        raise ConfigError(
            f"{table}: is about other logged episodes (fingerprint {before}, now {found}). Choose another --output, or "
            "put the episodes back"
        )


def earlier_seeds(table: Path, label: str) -> list[int]:
    """The seeds that a line of the table is of; none where it has no such line."""
    rows = json.loads(table.read_text())["rows"] if table.is_file() else []
    return next((old["seeds"] for old in rows if old["method"] == label), [])


def row(label: str, seeds: Sequence[int], base: Evaluation, runs: Sequence[Evaluation]) -> dict[str, Any]:
    """One line of the table, rates and gains in fractions.

    The interval of one seed's gain is about new initial states; that of three or more about a new seed too; two seeds
    have none.
    """
    modes: dict[str, Any] = {}
    for mode in base.modes:
        gain = gain_of(label, "base", mode, runs, [base] * len(runs))
        interval = gain.interval if len(runs) > 1 else compare(base, runs[0]).result(mode).bootstrap
        modes[mode] = {
            "success": sum(run.rate(mode).rate for run in runs) / len(runs),
            "gain": gain.mean,
            "interval": [None if math.isnan(end) else end for end in interval],
            "by_seed": list(gain.per_seed),
            "episodes": runs[0].rate(mode).num_episodes,
        }
    return {"method": label, "seeds": list(seeds), "modes": modes}


def markdown(document: dict[str, Any]) -> str:
    """The table for a page, best mean gain first."""
    modes = list(document["base"])
    lines = [
        f"{document['recipe']}: {document['episodes']} logged episodes, fingerprint {document['dataset']}; "
        + ", ".join(f"{mode} {100 * document['base'][mode]:.1f} %" for mode in modes)
        + " before.",
        "",
        "| method | seeds | n each | " + " | ".join(f"{mode} | gain" for mode in modes) + " |",
        "|---" * (3 + 2 * len(modes)) + "|",
    ]
    for entry in sorted(document["rows"], key=lambda r: -sum(r["modes"][mode]["gain"] for mode in modes)):
        cells = [entry["method"], ", ".join(map(str, entry["seeds"])), str(entry["modes"][modes[0]]["episodes"])]
        for mode in modes:
            found = entry["modes"][mode]
            low, high = found["interval"]
            interval = "needs 3 seeds" if low is None else f"{100 * low:+.1f}, {100 * high:+.1f}"
            cells += [f"{100 * found['success']:.1f} %", f"{100 * found['gain']:+.1f} [{interval}]"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def arms_of(methods: Sequence[str], controls: Sequence[str]) -> dict[str, list[str]]:
    """Label -> overrides, of the methods and of the negative controls.

    Raises:
        ConfigError: an unknown method.
    """
    if unknown := sorted({*methods, *controls} - METHODS.keys()):
        raise ConfigError(f"--methods, --controls: got {unknown}; methods are {', '.join(METHODS)}")
    arms = {method: [f"offline.method={method}", *METHODS[method]] for method in methods}
    return arms | {
        f"{method}-{CONTROL}": [f"offline.method={method}", f"offline.control={CONTROL}", *METHODS[method]]
        for method in controls
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Collect, run what is missing, and write the table.

    Raises:
        ConfigError: an unknown method, or an output folder of other episodes.
        RuntimeError: a run failed; its log is named.
    """
    arms = arms_of(args.methods, args.controls)
    recipe = load_recipe(args.recipe, args.overrides)
    collect_missing(recipe, print)
    found, table = fingerprint(recipe), args.output / TABLE
    print(f"logged episodes: fingerprint {found}")
    if args.recipe == RECIPE and found != PUBLISHED:
        print(
            f"These are not the episodes of docs/results_experience.md ({PUBLISHED}): another processor or library "
            "draws others from the same states. Compare the methods of this table with one another, not with figures "
            "there."
        )
    check_same_episodes(found, table)
    args.output.mkdir(parents=True, exist_ok=True)
    seeds = {label: sorted({*args.seeds, *earlier_seeds(table, label)}) for label in arms}
    base = job("eval", args.recipe, args.overrides, args.output / "base")
    jobs = {
        (label, seed): job(
            "offline",
            args.recipe,
            [*own, *args.overrides, f"seed={seed}", "offline.evaluate=after"],
            args.output / f"{label}-seed{seed}",
        )
        for label, own in arms.items()
        for seed in seeds[label]
    }
    run_jobs([base, *jobs.values()], args.jobs, [sys.executable, "-m", "vla_rl"], print)
    document = collect_table(args, found, Evaluation.load(base.result), jobs)
    write_text_atomic(table, json.dumps(document, indent=1) + "\n")
    write_text_atomic(args.output / MARKDOWN, markdown(document))
    return document


def collect_table(args: argparse.Namespace, found: str, base: Evaluation, jobs: dict[Any, Any]) -> dict[str, Any]:
    """The table of this command's runs, and of the lines that earlier ones left."""
    labels = list(dict.fromkeys(label for label, _ in jobs))
    runs = {label: {seed: one for (name, seed), one in jobs.items() if name == label} for label in labels}
    rows = [
        row(label, list(own), base, [Evaluation.load(one.result) for one in own.values()])
        for label, own in runs.items()
    ]
    table = args.output / TABLE
    if table.is_file():
        rows += [old for old in json.loads(table.read_text())["rows"] if old["method"] not in labels]
    recipe = load_recipe(args.recipe, args.overrides)
    assert recipe.sft is not None, "a recipe of vla-rl offline"
    return {
        "recipe": recipe.name,
        "overrides": list(args.overrides),
        "dataset": found,
        "episodes": sum(len(LeRobotSource(dataset.path).lengths) for dataset in recipe.sft.datasets),
        "base": {mode: base.rate(mode).rate for mode in base.modes},
        "rows": rows,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs and the table")
    parser.add_argument("--recipe", default=RECIPE, help="another recipe of vla-rl offline")
    parser.add_argument("--methods", type=names, default=list(METHODS), help="with commas; default: all")
    parser.add_argument("--controls", type=names, default=["best_of_n"], help="methods also run on shuffled outcomes")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in names(text)], default=[0], help="with commas")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("overrides", nargs="*", help="of the recipe, for every run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it from the command line."""
    args = parse(arguments)
    try:
        print(markdown(run(args)))
    except (ConfigError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(f"table: {args.output / MARKDOWN}")


if __name__ == "__main__":
    main()
