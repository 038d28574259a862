"""`vla-rl calibrate board | collect | camera | workspace`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from real_robot.calibration.collect import LiveArm, PoseReader, collect_bags, collect_live, pose_reader
from real_robot.calibration.intrinsics import BoardConfig
from real_robot.calibration.run import (
    camera_file,
    collect_corners,
    hand_eye_file,
    print_board,
    workspace_of,
    workspace_text,
)
from real_robot.contract.load import load_contract
from vla_rl.cli.options import say
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.errors import ConfigError
from vla_rl.config import apply_overrides, validate

BoardSettings = Annotated[
    list[str] | None, typer.Option("--set", help="key=value of the board: columns, rows, square, marker, dictionary.")
]
Robot = Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")]
PoseTopic = Annotated[
    str, typer.Option("--pose", metavar="TOPIC", help="The gripper's PoseStamped; by default the contract's own.")
]
Link = Annotated[str, typer.Option(help="Compute the pose of this link from joints, by the contract's `model`.")]
Override = Annotated[list[str] | None, typer.Option("--override", help="key=value on the contract.")]


app = typer.Typer(no_args_is_help=True, help="Where a robot's camera is, its lens, and the box it may move in.")


def _board(settings: list[str] | None) -> BoardConfig:
    return validate(BoardConfig, apply_overrides({}, settings or ()), prefix="board")


@app.command()
def board(
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write.")] = Path("board.png"),
    settings: BoardSettings = None,
    dots_per_inch: Annotated[int, typer.Option("--dpi", min=72, max=1200, help="The printer's resolution.")] = 300,
) -> None:
    """Draw a ChArUco board to print."""
    typer.echo(print_board(_board(settings), output, dots_per_inch))


@app.command()
def collect(
    robot: Robot,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where pictures and poses go; they are added.")],
    camera: Annotated[str, typer.Option(help="The camera's name in the contract.")],
    bags: Annotated[
        list[Path] | None, typer.Option("--bag", help="Take them from this recording, wherever the arm stands.")
    ] = None,
    pose: PoseTopic = "",
    link: Link = "",
    settings: BoardSettings = None,
    overrides: Override = None,
) -> None:
    """Take pairs of a picture and the gripper's pose: a person moves the arm, and says when it stands."""
    reader = _reader(robot, camera, pose, link, overrides)
    if bags:
        taken = collect_bags(reader, camera, bags, folder, _board(settings), say)
    else:
        with _live(reader) as arm:
            taken = collect_live(arm, camera, folder, _board(settings), input, say)
    typer.echo(f"{folder}: {taken} pairs taken")


@app.command()
def camera(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Pictures and poses, as `calibrate collect` took them.")
    ],
    mount: Annotated[
        Literal["gripper", "base"] | None,
        typer.Option(help="What it is on: the gripper (eye in hand), or beside the base (eye to hand)."),
    ] = None,
    intrinsics: Annotated[
        Path | None,
        typer.Option(help="With --mount: the lens, as found or the driver's; by default from these pictures."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default intrinsics.yaml or hand_eye.yaml.")
    ] = None,
) -> None:
    """Find what a camera's lens does, or with --mount where it is, with the error on pairs that were left out."""
    if mount is None and intrinsics is not None:
        raise ConfigError("--intrinsics: is of --mount, which says what the camera is on: gripper or base")
    file = output or Path("intrinsics.yaml" if mount is None else "hand_eye.yaml")
    written = camera_file(folder, file) if mount is None else hand_eye_file(folder, mount, intrinsics, file)
    for name, value in written["errors"].items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"written: {file}")


@app.command()
def workspace(
    robot: Robot,
    pose: PoseTopic = "",
    link: Link = "",
    margin: Annotated[float, typer.Option(min=0, max=0.5, help="Meters taken off each side of the box.")] = 0.02,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the section here too.")] = None,
    overrides: Override = None,
) -> None:
    """Make the contract's safety.workspace from corners that a person moves the arm to."""
    with _live(_reader(robot, "", pose, link, overrides)) as arm:
        corners = collect_corners(arm, input, say)
    text = workspace_text(workspace_of(load_contract(robot, overrides or ()), corners, margin))
    if output is not None:
        write_text_atomic(output, text)
    typer.echo(text, nl=False)


def _reader(robot: str, camera: str, pose: str, link: str, overrides: list[str] | None) -> PoseReader:
    return pose_reader(load_contract(robot, overrides or ()), camera, pose, link)


@contextmanager
def _live(reader: PoseReader) -> Iterator[LiveArm]:
    transport = reader.contract.transport.open()
    try:
        yield LiveArm(reader, transport)
    finally:
        transport.close()
