"""`vla-rl demo`: the main job on the built-in tabletop, from the shipped base policy to a report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import rich

from vla_rl.compare import compare
from vla_rl.evaluation import Evaluation
from vla_rl.recipe import Recipe, load_recipe
from vla_rl.run import open_run
from vla_rl.train import train

RECIPE = "tabletop_grpo"
# How the shipped base policy was made: recipes to collect and clone, in order.
BASE_RECIPES = ("tabletop_pretrain", "tabletop_colour", "tabletop_bowl", "tabletop_habit")


def demo(overrides: Sequence[str] = (), output: Path | None = None, from_scratch: bool = False) -> Path:
    """Post-train the base policy by GRPO in the simulator, evaluate before and after, write the report.

    Args:
        overrides: `key=value` on the demo's recipe.
        output: the run's folder; by default one in `runs/`.
        from_scratch: make the base policy anew first, which takes an hour or two.

    Returns:
        the report's path.
    """
    started = time.monotonic()
    if from_scratch:
        overrides = [f"policy.path={make_base_policy()}", *overrides]
    recipe = load_recipe(RECIPE, overrides)
    folder = open_run(recipe, output, resume=False)
    rich.print(f"Post-training the base policy on the tabletop; everything goes to [bold]{folder}[/].")
    try:
        train(recipe, folder)
    except KeyboardInterrupt:
        again = shlex.join(["vla-rl", "train", RECIPE, *overrides, "--output", str(folder), "--resume"])
        rich.print(f"Stopped. The run is saved in {folder}; to go on with it:\n  {again}")
        raise
    evaluations = folder / "evaluations"
    comparison = compare(Evaluation.load(evaluations / "base.json"), Evaluation.load(evaluations / "final.json"))
    if rich.get_console().width >= 110:
        rich.print(comparison.table())
        rich.print(f"[bold]{comparison.result('sampled').text()}[/]")
    else:
        rich.print(comparison.text())
    minutes = (time.monotonic() - started) / 60
    rich.print(
        f"in {minutes:.1f} minutes. One run is no proof that RL did it: "
        f"`vla-rl ablate {RECIPE} --seeds 3` runs the negative controls; docs/results.md has ours."
    )
    return folder / "report.html"


def make_base_policy(root: Path = Path("runs")) -> Path:
    """Collect demonstrations and clone them, clean ones first, then sloppy ones; goes on where it was stopped."""
    from vla_rl import commands

    policy = Path()
    for name in BASE_RECIPES:
        recipe = load_recipe(name)
        folder = root / recipe.name
        policy = folder / "policy"
        if policy.is_dir():
            continue
        _collect(recipe)
        commands.sft(recipe, open_run(recipe, folder, resume=(folder / "config.yaml").is_file()))
    return policy


def _collect(recipe: Recipe) -> None:
    from vla_rl import commands

    assert recipe.collect is not None, "the base policy's recipes say what to collect"
    if not Path(recipe.collect.dataset).is_dir():
        commands.collect(recipe, recipe.collect, rich.print)
