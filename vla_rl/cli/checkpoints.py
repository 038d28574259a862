"""Commands about what a run wrote: `report`, `inspect`, `merge` and `push`."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from real_robot.operator.hub.hub_log import read_log, shares
from vla_rl.cli.options import check_writable, say
from vla_rl.common.distributed.process_group import check_device
from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import next_command
from vla_rl.common.progress import read_status
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import KINDS
from vla_rl.data.hub import is_dataset, on_hub
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.dataset_page import write_dataset_page
from vla_rl.evaluation.foreign import file_of
from vla_rl.evaluation.report.read import status_lines
from vla_rl.evaluation.report.report import write_evaluation_report, write_report
from vla_rl.policies.base import describing_folder
from vla_rl.policies.load import describe
from vla_rl.workflows.push import push as run_push

app = typer.Typer()


class StorageDtype(StrEnum):
    """How a merged checkpoint is stored."""

    base = "base"
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
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
    with describing_folder(path) as (folder, name):
        typer.echo(describe(folder).text(name))


@app.command()
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

    from vla_rl.policies.base import resolve_path
    from vla_rl.policies.openvla.merge import merge as run_merge

    check_device(device, "--device")

    stored = None if dtype is StorageDtype.base else getattr(torch, dtype.value)
    report = run_merge(adapters, output, None if base is None else resolve_path(base), device, stored)
    typer.echo(report.text())


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder, or a LeRobotDataset's.")],
    name: Annotated[str, typer.Argument(metavar="ORGANIZATION/NAME", help="On the Hub; made where it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Everybody may see what is made; else you alone.")] = False,
    license_name: Annotated[str | None, typer.Option("--license", help="For the card, such as mit.")] = None,
    card: Annotated[bool, typer.Option("--card", help="Upload nothing; print the card.")] = False,
) -> None:
    """Upload a run's policy or a dataset to the Hugging Face Hub, with a card made from the run's own figures."""
    typer.echo(run_push(folder, name, private=not public, license_name=license_name, card_only=card, show=say))


@app.command()
def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER | FILE",
            help="A run's folder, also while it goes on; an evaluation's file; a dataset; or a hub's --log.",
        ),
    ],
    title: Annotated[str | None, typer.Option(help="Of the page; by default the recipe's name.")] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Only say where the run is, and what its rollouts lost and redid.")
    ] = False,
) -> None:
    """Write a run's report.html anew: during the run, after it, or of one that was stopped.

    Of a dataset: frames, videos, lengths, the range of each action, and what `doctor --dataset` finds.
    Of an evaluation's file, ours or one that `vla-rl compare` reads of another program, the page is written beside it.
    Of a hub's log, say the person's share of time, the requests and the waiting times.
    """
    run = RunFolder(path)
    if file_of(path)[0].is_file():
        try:
            lines = shares(read_log(path)).lines()
        except ConfigError:  # It is no hub's.
            lines = [f"report: {write_evaluation_report(path, title)}"]
    elif is_dataset(path) or (not path.exists() and on_hub(path)):
        lines = [f"report: {write_dataset_page(path)}", *_cloned_from(path)]
    elif not run.exists:
        raise ConfigError(
            f"{path}: holds no run (no config.yaml) and no dataset; name the folder that the run printed after `run:`"
        )
    elif status:
        lines = status_lines(run)
    else:
        with suppress(ConfigError):  # Of a status that cannot be read the page tells.
            if (found := read_status(run.status)) is not None and found.text():
                typer.echo(found.text())
        lines = [f"report: {write_report(path, title)}"]
    typer.echo("\n".join(lines))


def _cloned_from(dataset: Path) -> list[str]:
    """The command that clones a robot's recordings; none of a simulator's, of which the recipe is not known."""
    source = LeRobotSource(dataset)
    if source.info.get("robot_type") in KINDS["env"]:
        return []
    words = (f"env.dataset={dataset}", f"sft.datasets={dataset}", f"policy.cameras=[{','.join(source.cameras)}]")
    return [next_command("sft", "robot_sft", *words)]
