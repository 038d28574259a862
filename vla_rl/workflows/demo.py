"""`vla-rl demo`: the whole loop, from a shipped policy and world model to a report: on the tabletop, or in LIBERO."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import rich

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.errors import ConfigError
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.evaluation.compare import compare
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.checks import FIT, LOOP, PLAN
from vla_rl.recipe.recipe import Recipe, check, load_recipe
from vla_rl.recipe.runs import LoopRecipe
from vla_rl.workflows.collect import clone, collect
from vla_rl.workflows.jobs import BASE
from vla_rl.workflows.loop.closed_loop import loop
from vla_rl.workflows.loop.controls import evaluations
from vla_rl.workflows.loop.rounds import Round
from vla_rl.workflows.sweep import LABELS
from vla_rl.workflows.world_model import fit_world_model

RECIPE, LIBERO_RECIPE = "tabletop_imagination", "libero_imagination"
# How the shipped base policy was made: recipes to collect and clone, in order.
BASE_RECIPES = ("tabletop_pretrain", "tabletop_colour", "tabletop_bowl", "tabletop_habit")
WORLD_MODEL_RECIPE = "tabletop_world_model"


def demo(
    overrides: Sequence[str] = (),
    output: Path | None = None,
    from_scratch: bool = False,
    libero: bool = False,
    *,
    program: Sequence[str],
) -> Path:
    """Real episodes of the base policy, a world model calibrated on them, GRPO in it, real success before and after.

    Beside it, on another core, the same with shuffled rewards.

    Args:
        overrides: `key=value` on the demo's recipe.
        output: the run's folder; by default one in `runs/`.
        from_scratch: make the base policy and the base world model anew first, which takes hours.
        libero: on a task of LIBERO (which is installed separately), not on the tabletop.
        program: how `vla-rl` is started, for the controls.

    Returns:
        the report's path.

    Raises:
        ConfigError: LIBERO from scratch; or the recipe's refusals.
    """
    if libero and from_scratch:
        raise ConfigError(
            "demo: got --libero and --from-scratch, allowed: one of them. The commands that made LIBERO's policy and "
            "world model are in world_model/pretrained/README.md."
        )
    name = LIBERO_RECIPE if libero else RECIPE
    started = time.monotonic()
    if from_scratch:
        policy = make_base_policy()
        world_model = make_base_world_model(policy)
        overrides = [f"policy.path={policy}", f"env.path={world_model}", *overrides]
    overrides = [*for_gpu(name, overrides), *overrides]
    recipe = check(load_recipe(name, overrides), LOOP)
    folder = open_run(recipe, output, resume=False)
    rich.print(f"Post-training the base policy in imagination; everything goes to [bold]{folder}[/].")
    try:
        done = loop(recipe, folder, program, lambda text: rich.print(f"[bold]{text}[/]"))
    except KeyboardInterrupt:
        again = shlex.join(["vla-rl", "loop", name, *overrides, "--output", str(folder), "--resume"])
        rich.print(f"Stopped. The run is saved in {folder}; to resume it:\n  {again}")
        raise
    _show(recipe, done)
    rich.print(
        f"in {(time.monotonic() - started) / 60:.1f} minutes. One run is no proof that RL did it: "
        f"docs/results_{'libero' if libero else 'tabletop'}.md has several seeds, with controls."
    )
    rich.print(f"policy: {RunFolder(done.run).policy}")
    return RunFolder(done.run).report


def for_gpu(name: str, overrides: Sequence[str]) -> list[str]:
    """What the demo sets in a recipe on a GPU, where a pass takes about as long for many episodes as for a few.

    All of an iteration's episodes are imagined at once, and a minibatch is not cut; elsewhere nothing is set.
    """
    recipe = check(load_recipe(name, overrides), PLAN)
    if resolve_device(recipe.device).partition(":")[0] != "cuda":
        return []
    given = {text.partition("=")[0] for text in overrides}
    wanted = {
        "env.num_envs": recipe.train.groups * recipe.train.group_size,
        "algo.micro_batch_size": recipe.algo.minibatch_size,
    }
    return [f"{name}={value}" for name, value in wanted.items() if name not in given]


def _show(recipe: LoopRecipe, done: Round) -> None:
    """What the run and its controls came to."""
    base = Evaluation.load(RunFolder(done.run).evaluation(BASE))
    for name, after in evaluations(recipe, done).items():
        comparison = compare(base, after)
        for mode in sorted(comparison.modes, reverse=True):  # sampled first
            rich.print(f"[bold]{LABELS[name]}[/]: {comparison.result(mode).text()}")


def make_base_policy(root: Path = Path("runs")) -> Path:
    """Collect demonstrations and clone them, clean ones first, then sloppy ones; goes on where it was stopped."""
    policy = Path()
    for name in BASE_RECIPES:
        recipe = load_recipe(name)
        run = RunFolder(root / recipe.name)
        policy = run.policy
        if policy.is_dir():
            continue
        _collect(recipe)
        clone(recipe, open_run(recipe, run.path, resume=run.exists))
    return policy


def make_base_world_model(policy: Path, root: Path = Path("runs")) -> Path:
    """Collect broad episodes, some of them the policy's, and fit a world model; goes on where it was stopped."""
    recipe = check(load_recipe(WORLD_MODEL_RECIPE, [f"policy.path={policy}"]), FIT)
    run = RunFolder(root / recipe.name)
    return fit_world_model(recipe, open_run(recipe, run.path, resume=run.exists))


def _collect(recipe: Recipe) -> None:
    assert recipe.collect is not None, "the base policy's recipes say what to collect"
    if not Path(recipe.collect.dataset).is_dir():
        collect(recipe, recipe.collect, rich.print)
