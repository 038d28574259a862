"""`vla-rl world-model`: fit one, measure its trust, mine keyframes, rank policies, look at styles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Output, Overrides, OwnRecipe, RecipeName, Resume, check_writable, say
from vla_rl.cli.running import load, run
from vla_rl.common.errors import ConfigError
from vla_rl.data.keyframes import KeyframeSet
from vla_rl.recipe.checks import FIT
from vla_rl.workflows.world_model import (
    RUN,
    measure_world_model,
    mine_keyframes,
    rank_policies,
    show_styles,
)

WorldModelFolder = Annotated[str, typer.Argument(metavar="WORLD_MODEL", help="A world model's folder.")]


app = typer.Typer(no_args_is_help=True, help="Fit a world model, and measure how far it can be trusted.")


@app.command()
def fit(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Fit a world model: autoencoder, dynamics, success head and classifier, and their threshold."""
    run(RUN, recipe, overrides, output, resume)


@app.command("eval")
def evaluate(
    recipe: RecipeName,
    world_model: WorldModelFolder,
    held_out: Annotated[
        list[Path], typer.Option("--held-out", help="Dataset of real episodes of the policy, none of them fitted on.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Compare real with imagined success; give six or more."),
    ] = None,
    train: Annotated[
        list[Path] | None,
        typer.Option("--train", help="Dataset for the inverse dynamics, such as one it was fitted on."),
    ] = None,
    style: Annotated[
        list[str] | None, typer.Option("--style", help="NAME=DATASET of real episodes with another look.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the report; if not given, the world model's.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Measure how far a world model can be trusted: trust.json and trust.html."""
    styles = _styles(style or ())
    check_writable(output)
    loaded, data = load(recipe, overrides, FIT), (held_out, policy or (), train or ())
    page = measure_world_model(loaded, Path(world_model), *data, styles, output, replays=True)
    typer.echo(f"written: {page.with_suffix('.json')}\npage: {page}")


def _styles(texts: Sequence[str]) -> dict[str, Path]:

    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--style: got {text!r}, expected NAME=DATASET, as in shifted=data/shifted")
        if name in found:
            raise ConfigError(f"--style: {name!r} is given twice ({found[name]} and {path}); each needs its own name")
        found[name] = Path(path)
    return found


@app.command()
def keyframes(
    recipe: RecipeName,
    world_model: WorldModelFolder,
    dataset: Annotated[list[Path], typer.Option("--dataset", help="Real episodes of the policy that RL starts from.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")],
    overrides: Overrides = None,
) -> None:
    """Mine real episodes for the moments that decide them, from which imagined episodes can start."""
    check_writable(output)
    file = mine_keyframes(load(recipe, overrides, FIT), Path(world_model), dataset, output)
    mined = KeyframeSet.load(file)
    kinds = ", ".join(f"{count} {kind}" for kind, count in mined.counts().items())
    typer.echo(f"written: {file}  ({len(mined.keyframes)} keyframes: {kinds})")
    typer.echo(f"use: sampling.keyframes={file} sampling.keyframe_share=0.3")


@app.command()
def rank(
    recipe: RecipeName,
    world_model: WorldModelFolder,
    policy: Annotated[list[str], typer.Option("--policy", help="A policy's folder; six or more make it worth it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON file to write.")] = Path("ranking.json"),
    overrides: Overrides = None,
) -> None:
    """Rank policies by their success in imagination, and say how far the simulator agrees."""
    check_writable(output)
    found = rank_policies(load(recipe, overrides, FIT), Path(world_model), policy, output, say)
    typer.echo(f"{found.text()}\nwritten: {output}")


@app.command()
def styles(
    recipe: RecipeName,
    dataset: Annotated[Path, typer.Option("--dataset", help="Episodes with segmentation (collect.structure=true).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The PNG to write.")] = Path("styles.png"),
    episodes: Annotated[int, typer.Option("--episodes", min=1, max=32, help="How many to show.")] = 4,
    columns: Annotated[int, typer.Option("--styles", min=1, max=32, help="Styles of each.")] = 6,
    overrides: Overrides = None,
) -> None:
    """Show recorded episodes in other styles, as `world_model.style` has them fitted on."""
    check_writable(output)
    shown = show_styles(load(recipe, overrides, FIT), dataset, output, episodes, columns)
    typer.echo("\n".join([*shown, f"written: {output}  (each row: as recorded, segments, styles)"]))
