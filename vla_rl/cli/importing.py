"""`vla-rl import`: data in others' formats, or a recording that was cut off, into a LeRobotDataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from real_robot.operator.recording_folder import finish
from vla_rl.cli.options import check_writable, say
from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import next_command
from vla_rl.data.hdf5 import import_libero, is_hdf5, layout_of
from vla_rl.data.hub import is_dataset
from vla_rl.data.lab_hdf5 import RobomimicOptions, import_aloha, import_robomimic
from vla_rl.data.lerobot_io import RECORDING_SETTINGS, staging_folder
from vla_rl.data.plain_folder import import_folder
from vla_rl.data.rlds import RldsOptions, import_rlds, versions
from vla_rl.data.source import LeRobotSource


class Format(StrEnum):
    """What a source is."""

    libero = "libero"
    aloha = "aloha"
    robomimic = "robomimic"
    rlds = "rlds"
    folder = "folder"
    bags = "bags"
    recording = "recording"


# What each is, and by what it is recognized.
FORMATS = {
    Format.libero: "LIBERO's demonstrations (.hdf5)",
    Format.aloha: "ALOHA's recordings (.hdf5, or a folder of them)",
    Format.robomimic: "robomimic's demonstrations (.hdf5)",
    Format.rlds: "an RLDS dataset (features.json)",
    Format.folder: "videos and CSV (dataset.yaml, episodes/)",
    Format.bags: "a robot's bags (.mcap, .bag, rosbag2)",
    Format.recording: "a recording that was cut off (.NAME.recording beside it)",
}
# The options that not all of them have.
OPTIONS = {
    Format.libero: ("keep_pauses",),
    Format.aloha: ("instruction", "failures", "fps"),
    Format.robomimic: ("fps", "camera", "state", "action", "instruction", "gripper", "success", "episodes"),
    Format.rlds: (
        *("fps", "camera", "state", "action", "language", "gripper", "rotate", "last_step", "success", "split"),
        "episodes",
    ),
    Format.bags: ("robot", "instruction", "failures"),
}
Cameras = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=FEATURE", help="rlds, robomimic: pictures among what is observed, and their name here."),
]
State = Annotated[
    list[str] | None,
    typer.Option(metavar="FEATURE", help="rlds, robomimic: of the state, in order; by default it is found."),
]
Action = Annotated[
    list[str] | None, typer.Option(metavar="FEATURE", help="rlds, robomimic: of the action, in order; by default all.")
]
Language = Annotated[str, typer.Option(metavar="FEATURE", help="rlds: the instruction; by default it is found.")]
Gripper = Annotated[
    Literal["as_is", "one_opens", "one_closes"],
    typer.Option(help="rlds, robomimic: as_is, or for 0..1: one_opens, one_closes; becomes -1 open, 1 closed."),
]
Rotate = Annotated[list[str] | None, typer.Option(metavar="NAME", help="rlds: a camera that is upside down.")]
LastStep = Annotated[
    Literal["action", "observation"],
    typer.Option(help="rlds: action: the last step has one to learn from; observation: only what was seen."),
]
Success = Annotated[
    Literal["reward", "all"],
    typer.Option(help="rlds, robomimic: reward: success where it is positive; all: each episode."),
]
Rate = Annotated[
    int, typer.Option(min=0, help="rlds, aloha, robomimic: control steps a second; 0: as the format or the file says.")
]
Robot = Annotated[str, typer.Option(metavar="ROBOT", help="bags: a contract (YAML), or the name of a shipped one.")]


app = typer.Typer()


@app.command("import")
def import_data(
    context: typer.Context,
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE...", help="Files, or a folder; of a recording its dataset's folder.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The dataset's folder; must not exist. A recording has one.")
    ] = None,
    form: Annotated[Format | None, typer.Option("--format", help="By default it is recognized.")] = None,
    keep_pauses: Annotated[
        bool, typer.Option("--keep-pauses", help="libero: keep steps in which nothing is commanded.")
    ] = False,
    robot: Robot = "",
    instruction: Annotated[str, typer.Option(help="bags, aloha, robomimic: what the robot was asked to do.")] = "",
    failures: Annotated[bool, typer.Option("--failures", help="bags, aloha: these recordings show failures.")] = False,
    fps: Rate = 0,
    camera: Cameras = None,
    state: State = None,
    action: Action = None,
    language: Language = "",
    gripper: Gripper = "as_is",
    rotate: Rotate = None,
    last_step: LastStep = "action",
    success: Success = "reward",
    split: Annotated[str, typer.Option(help="rlds: which of the dataset's splits.")] = "train",
    episodes: Annotated[int, typer.Option(min=0, help="rlds, robomimic: at most so many; 0: all.")] = 0,
) -> None:
    """Make a LeRobotDataset of ALOHA's, robomimic's or LIBERO's HDF5, RLDS, bags, videos and CSV, or a cut recording.

    An option of another format than SOURCE has is refused. RLDS is read without TensorFlow.
    """
    form = form or _recognized(sources)
    _check_options(context, form)
    if form in (Format.rlds, Format.folder, Format.recording) and len(sources) > 1:
        raise ConfigError(f"import: got {len(sources)} sources; of {FORMATS[form]} give one folder")
    if form is not Format.recording and output is None:
        raise ConfigError(f"--output: {FORMATS[form]} needs it; name the dataset's folder to make")
    check_writable(output)
    folder = output or sources[0]
    done = _imported(form, sources, folder, context.params)
    typer.echo(f"dataset: {folder}  ({done['episodes']} episodes, {done['frames']} frames)")
    typer.echo(next_command("report", folder, what="is it sound"))


def _imported(form: Format, sources: Sequence[Path], output: Path, given: Mapping[str, Any]) -> dict[str, int]:
    if form is Format.recording:
        return finish(output)
    if form is Format.libero:
        return import_libero(sources, output, given["keep_pauses"], say)
    if form is Format.folder:
        return import_folder(sources[0], output, say)
    if form is Format.bags:
        return _import_bags(sources, output, given["robot"], given["instruction"], not given["failures"])
    if form is Format.aloha:
        if not given["instruction"]:
            raise ConfigError("import: ALOHA's files do not say what the robot was asked to do; give --instruction")
        return import_aloha(sources, output, given["instruction"], not given["failures"], given["fps"], say)
    if form is Format.robomimic:
        one = {name: given[name] for name in ("fps", "instruction", "gripper", "success", "episodes")}
        keys = {name: tuple(given[name] or ()) for name in ("state", "action")}
        return import_robomimic(
            sources, output, RobomimicOptions(cameras=_cameras(given["camera"] or ()), **keys, **one), say
        )
    several = {name: tuple(given[name] or ()) for name in ("state", "action", "rotate")}
    one = {name: given[name] for name in ("fps", "language", "gripper", "last_step", "success", "split", "episodes")}
    options = RldsOptions(cameras=_cameras(given["camera"] or ()), **several, **one)
    return import_rlds(sources[0], output, options, say)


def _recognized(sources: Sequence[Path]) -> Format:
    """
    Raises:
        ConfigError: a source is not there, has none of the forms, or another than the first.
    """
    (first, form), *others = [(source, _form(source)) for source in sources]
    for other, its in others:
        if its is not form:
            raise ConfigError(f"import: {first} is {FORMATS[form]}, {other} {FORMATS[its]}; import one after the other")
    return form


def _form(source: Path) -> Format:
    if (staging_folder(source) / RECORDING_SETTINGS).is_file():
        return Format.recording
    if is_dataset(source):
        LeRobotSource(source)  # An older version's error names LeRobot's converter.
        raise ConfigError(f"{source}: is a LeRobotDataset already; name it in env.dataset and sft.datasets as it is")
    if is_hdf5(source) and source.is_file():
        return Format(layout_of(source))
    if source.is_dir() and (files := sorted(file for file in source.iterdir() if is_hdf5(file))):
        return Format(layout_of(files[0]))
    if (source.suffix in (".mcap", ".bag") and source.exists()) or (source / "metadata.yaml").is_file():
        return Format.bags
    if (source / "dataset.yaml").is_file() or (source / "episodes").is_dir():
        return Format.folder
    if versions(source):
        return Format.rlds
    known = "; ".join(FORMATS.values())
    raise ConfigError(
        f"{source}: is none of these: {known}. --format says which it is"
        if source.exists()
        else f"{source}: no such file or folder, nor a recording that was cut off; import takes: {known}"
    )


def _check_options(context: typer.Context, form: Format) -> None:
    """
    Raises:
        ConfigError: an option was given that this format has not.
    """
    own = OPTIONS.get(form, ())
    for name in dict.fromkeys(name for names in OPTIONS.values() for name in names if name not in own):
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            owners = " and ".join(FORMATS[owner] for owner, names in OPTIONS.items() if name in names)
            raise ConfigError(
                f"{_flag(name)}: is of {owners}, and this is {FORMATS[form]}, whose own options are: "
                f"{', '.join(map(_flag, own)) or 'none'}. Leave it out, or name the form by --format"
            )
    if form is Format.recording and context.params["output"] is not None:
        raise ConfigError("--output: a recording becomes the dataset that it was begun as; leave --output out")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _cameras(texts: Sequence[str]) -> dict[str, str]:
    """Name of a camera -> its feature, of NAME=FEATURE."""
    cameras: dict[str, str] = {}
    for text in texts:
        name, found, feature = text.partition("=")
        if not (name and found and feature):
            raise ConfigError(f"--camera: got {text!r}, expected NAME=FEATURE, as in agentview=image")
        if cameras.setdefault(name, feature) != feature:
            raise ConfigError(f"--camera: {name!r} is said to be {cameras[name]!r} and {feature!r}; give it one name")
    return cameras


def _import_bags(bags: Sequence[Path], output: Path, robot: str, instruction: str, success: bool) -> dict[str, int]:
    from real_robot.contract.load import load_contract

    if not (robot and instruction):
        raise ConfigError("import: a robot's bags need --robot (its contract) and --instruction (what it was asked)")
    contract = load_contract(robot)
    try:
        from real_robot.bridge.bags import import_bags
    except ModuleNotFoundError as error:
        raise ConfigError(f"import: {error.name} is not installed. Run: pip install '.[ros]'") from error
    return import_bags(contract, bags, output, instruction, success, say)
