"""Commands of `vla-rl world-model` beside fitting and trust: where RL starts, whom to believe, how styles look."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.")]
WorldModelFolder = Annotated[str, typer.Argument(metavar="WORLD_MODEL", help="A world model's folder.")]
Setting = Annotated[list[str] | None, typer.Option("--set", help="key=value on the recipe.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `vla-rl world-model`."""
    app.command()(keyframes)
    app.command()(rank)
    app.command()(study)
    app.command()(styles)


def keyframes(
    recipe: RecipeName,
    world_model: WorldModelFolder,
    dataset: Annotated[list[Path], typer.Option("--dataset", help="Real episodes of the policy that RL starts from.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")],
    override: Setting = None,
) -> None:
    """Mine real episodes for the moments that decide them, from which imagined episodes can start."""
    from vla_rl.data.keyframes import KeyframeSet
    from vla_rl.recipe.recipe import load_recipe
    from vla_rl.workflows.commands import mine_keyframes

    file = mine_keyframes(load_recipe(recipe, override or ()), Path(world_model), dataset, output)
    mined = KeyframeSet.load(file)
    kinds = ", ".join(f"{count} {kind}" for kind, count in mined.counts().items())
    typer.echo(f"written: {file}  ({len(mined.keyframes)} keyframes: {kinds})")
    typer.echo(f"use: sampling.keyframes={file} sampling.keyframe_share=0.3")


def rank(
    recipe: RecipeName,
    world_model: WorldModelFolder,
    policy: Annotated[list[str], typer.Option("--policy", help="A policy's folder; six or more make it worth it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path("ranking.json"),
    override: Setting = None,
) -> None:
    """Rank policies by their success in imagination, and say how far the simulator agrees."""
    from vla_rl.recipe.recipe import load_recipe
    from vla_rl.workflows.policy_ranking import rank_policies

    loaded = load_recipe(recipe, override or ())
    found = rank_policies(loaded, Path(world_model), policy, output, lambda text: typer.echo(text, err=True))
    typer.echo(f"{found.text()}\nwritten: {output}")


def study(
    recipe: RecipeName,
    world_model: Annotated[list[str], typer.Option("--world-model", help="Its folder; 12 or more, good and bad.")],
    task: Annotated[list[str], typer.Option("--task", help="Studied by itself; two or more.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of all runs; goes on.")] = Path("runs/study"),
    jobs: Annotated[int, typer.Option(min=1, help="RL runs side by side.")] = 2,
    override: Setting = None,
) -> None:
    """Which trust figure predicts what RL gains? RL in many world models, evaluated in the simulator."""
    from vla_rl.workflows.trust_study import TABLE
    from vla_rl.workflows.trust_study import study as run_study

    found = run_study(recipe, override or (), world_model, task, output, jobs=jobs, show=typer.echo)
    typer.echo(f"{found.markdown()}\nwritten: {output / TABLE}")


def styles(
    recipe: RecipeName,
    dataset: Annotated[Path, typer.Option("--dataset", help="Episodes with segmentation (collect.structure=true).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG to write.")] = Path("styles.png"),
    episodes: Annotated[int, typer.Option("--episodes", min=1, max=32, help="How many to show.")] = 4,
    columns: Annotated[int, typer.Option("--styles", min=1, max=32, help="Styles of each.")] = 6,
    override: Setting = None,
) -> None:
    """Show recorded episodes in other styles, as `world_model.style` has them fitted on."""
    from vla_rl.recipe.recipe import load_recipe
    from vla_rl.workflows.commands import show_styles

    shown = show_styles(load_recipe(recipe, override or ()), dataset, output, episodes, columns)
    typer.echo("\n".join([*shown, f"written: {output}  (each row: as recorded, segments, styles)"]))
