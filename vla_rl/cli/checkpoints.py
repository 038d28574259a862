"""Commands about checkpoints: `inspect`, `merge`, `memory` and `push`. Heavy imports wait until one runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Overrides, RecipeName, check_writable, load, say


class StorageDtype(StrEnum):
    """How a merged checkpoint is stored."""

    base = "base"
    float32 = "float32"
    bfloat16 = "bfloat16"


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A folder, pretrained:NAME, or the hub's ORGANIZATION/NAME or ORGANIZATION/NAME@REVISION.",
        ),
    ],
) -> None:
    """Say what a checkpoint is, what RL can be done with it, and the recipe line to start from it.

    Of a checkpoint on the hub, the weights are not downloaded, and the line names its commit.
    """
    from vla_rl.policies.base import describing_folder
    from vla_rl.policies.inspect import describe

    with describing_folder(path) as (folder, name):
        typer.echo(describe(folder).text(name))


def merge(
    adapters: Annotated[Path, typer.Argument(metavar="ADAPTERS", help="A folder of LoRA adapters (PEFT's format).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The merged checkpoint's folder; must not exist.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The checkpoint the adapters belong to, if the folder names none.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    dtype: Annotated[StorageDtype, typer.Option(help="How to store the weights; base: as they were.")] = (
        StorageDtype.base
    ),
) -> None:
    """Merge LoRA adapters into their base checkpoint, and verify it: same outputs before and after."""
    check_writable(output)
    import torch

    from vla_rl.distributed.process_group import check_device
    from vla_rl.policies.base import resolve_path
    from vla_rl.policies.openvla.merge import merge as run_merge

    check_device(device, "--device")

    stored = None if dtype is StorageDtype.base else getattr(torch, dtype.value)
    report = run_merge(adapters, output, None if base is None else resolve_path(base), device, stored)
    typer.echo(report.text())


def memory(
    recipe: RecipeName,
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="GPUs that train together; parallel=fsdp shares the weights out.")
    ] = 1,
) -> None:
    """Print the memory that a training run will need on each GPU, by part, before anything is loaded."""
    from vla_rl.recipe.checks import ANY
    from vla_rl.training.memory import estimate

    typer.echo(estimate(load(recipe, overrides, ANY, runs=False), processes).text())


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder, or a LeRobotDataset's.")],
    name: Annotated[str, typer.Argument(metavar="ORGANIZATION/NAME", help="On the Hub; made where it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Everybody may see what is made; else you alone.")] = False,
    license_name: Annotated[str | None, typer.Option("--license", help="For the card, such as mit.")] = None,
    card: Annotated[bool, typer.Option("--card", help="Upload nothing; print the card.")] = False,
) -> None:
    """Upload a run's policy or a dataset to the Hugging Face Hub, with a card made from the run's own figures."""
    from vla_rl.workflows.push import push as run_push

    typer.echo(run_push(folder, name, private=not public, license_name=license_name, card_only=card, show=say))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(inspect)
    app.command()(merge)
    app.command()(memory)
    app.command()(push)
