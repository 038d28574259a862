"""Commands that make a LeRobotDataset of data in others' formats: `import-libero`, `import-rlds`, `import-folder`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import check_writable, say

Dataset = Annotated[Path, typer.Option("--output", "-o", help="The dataset's folder; must not exist.")]


class Gripper(StrEnum):
    """What the last number of others' actions means."""

    as_is = "as_is"
    one_opens = "one_opens"
    one_closes = "one_closes"


class LastStep(StrEnum):
    """What the last step of an RLDS episode holds."""

    action = "action"
    observation = "observation"


class Success(StrEnum):
    """Which episodes of an RLDS dataset succeeded."""

    reward = "reward"
    all = "all"


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command(name="import-libero")(import_libero)
    app.command(name="import-rlds")(import_rlds)
    app.command(name="import-folder")(import_folder)


def import_libero(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="LIBERO's demonstrations, TASK_demo.hdf5.")],
    output: Dataset,
    keep_pauses: Annotated[
        bool, typer.Option("--keep-pauses", help="Keep steps in which nothing is commanded.")
    ] = False,
) -> None:
    """LIBERO's published demonstrations into a LeRobotDataset, each action beside what was seen before it."""
    from vla_rl.data.libero_hdf5 import import_libero as run_import

    _check_there(*files)
    check_writable(output)
    _written(output, run_import(files, output, keep_pauses, say))


def import_rlds(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With features.json and the tfrecord files.")],
    output: Dataset,
    fps: Annotated[int, typer.Option(min=0, help="Control steps a second; 0: 20 for LIBERO's, else it is asked.")] = 0,
    camera: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FEATURE", help="A picture below observation, and its name here; none: all there."),
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(metavar="FEATURE", help="Of the state, in order; none: observation/state.")
    ] = None,
    action: Annotated[
        list[str] | None, typer.Option(metavar="FEATURE", help="Of the action, in order; none: action.")
    ] = None,
    instruction: Annotated[str, typer.Option(metavar="FEATURE", help="The text; by default it is found.")] = "",
    gripper: Annotated[
        Gripper, typer.Option(help="as_is, or for 0..1: one_opens, one_closes; becomes -1 open, 1 closed.")
    ] = Gripper.as_is,
    rotate: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A camera that is upside down.")] = None,
    last_step: Annotated[
        LastStep, typer.Option(help="action: the last step has one to learn from; observation: only what was seen.")
    ] = LastStep.action,
    success: Annotated[
        Success, typer.Option(help="reward: success where it is positive; all: each episode.")
    ] = Success.reward,
    split: Annotated[str, typer.Option(help="Which of the dataset's splits.")] = "train",
    episodes: Annotated[int, typer.Option(min=0, help="At most so many; 0: all.")] = 0,
) -> None:
    """An RLDS dataset (OpenVLA's modified_libero_rlds, Open X) into a LeRobotDataset; needs no TensorFlow."""
    from vla_rl.data.rlds import RldsOptions
    from vla_rl.data.rlds import import_rlds as run_import

    _check_there(folder)
    check_writable(output)
    options = RldsOptions(
        fps=fps,
        cameras=_cameras(camera or ()),
        state=tuple(state or ()),
        action=tuple(action or ()),
        instruction=instruction,
        gripper=gripper.value,
        rotate=tuple(rotate or ()),
        last_step=last_step.value,
        success=success.value,
        split=split,
        episodes=episodes,
    )
    _written(output, run_import(folder, output, options, say))


def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With dataset.yaml and episodes/000, 001, ...")],
    output: Dataset,
) -> None:
    """Folders of videos and CSV, one an episode, into a LeRobotDataset."""
    from vla_rl.data.plain_folder import import_folder as run_import

    _check_there(folder)
    check_writable(output)
    _written(output, run_import(folder, output, say))


def _check_there(*paths: Path) -> None:
    from vla_rl.config import ConfigError

    if absent := [str(path) for path in paths if not path.exists()]:
        raise ConfigError(f"{', '.join(absent)}: no such file or folder")


def _cameras(texts: Sequence[str]) -> dict[str, str]:
    """Name of a camera -> its feature, of NAME=FEATURE."""
    from vla_rl.config import ConfigError

    cameras: dict[str, str] = {}
    for text in texts:
        name, found, feature = text.partition("=")
        if not (name and found and feature):
            raise ConfigError(f"--camera: got {text!r}, expected NAME=FEATURE, as in agentview=image")
        if cameras.setdefault(name, feature) != feature:
            raise ConfigError(f"--camera: {name!r} is said to be {cameras[name]!r} and {feature!r}; give it one name")
    return cameras


def _written(output: Path, done: dict[str, int]) -> None:
    typer.echo(f"dataset: {output}  ({done['episodes']} episodes, {done['frames']} frames)")
