"""Plain folders of videos and CSV, one an episode, as a LeRobotDataset.

vla-rl import recordings -o datasets/mine

recordings/dataset.yaml              what the columns mean (`FolderConfig`)
recordings/episodes/000/data.csv     a header, then a row each control step
recordings/episodes/000/front.mp4    a picture for each row: a video, or a folder of numbered pictures (front/)
recordings/episodes/000/task.txt     the instruction
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
from av.error import FFmpegError
from pydantic import Field, PositiveInt, model_validator

from vla_rl.config import Config, read_yaml, validate
from vla_rl.data.config import DatasetError
from vla_rl.data.importing import Gripper, demonstration, our_gripper, write_episodes
from vla_rl.data.lerobot_io import RecordedEpisode, decode_image, encode_png

CONFIG_FILE, EPISODES = "dataset.yaml", "episodes"
PICTURES = (".png", ".jpg", ".jpeg")
MOST_DRIFT = 0.5  # of a control step, between two rows of the time column
MOST_OFF = 0.1  # by which the rate of a whole episode may differ from fps, as a share
_LARGEST = float(np.finfo(np.float32).max)  # as which datasets store numbers
EXAMPLE = """fps: 20
cameras: {agentview: front.mp4, wrist: wrist.mp4}
state: [x, y, z, roll, pitch, yaw, finger_left, finger_right]
action: [dx, dy, dz, droll, dpitch, dyaw, gripper]
"""


class FolderConfig(Config):
    """What the columns and files of a folder of episodes mean."""

    fps: PositiveInt = Field(description="Control steps, and so rows and pictures, a second.")
    cameras: dict[str, str] = Field(
        min_length=1, description="Our name of each camera -> its video, or folder of pictures, in an episode's folder."
    )
    action: tuple[str, ...] = Field(min_length=1, description="Columns of the action, in order; the gripper last.")
    state: tuple[str, ...] = Field(default=(), description="Columns of the state *before* the action, in order.")
    table: str = Field(default="data.csv", description="The table in an episode's folder.")
    instruction: str = Field(default="", description="What the robot was told, in all episodes; empty: a file says.")
    instruction_file: str = Field(default="task.txt", description="That file, in an episode's folder.")
    success: str = Field(default="", description="Column whose last row is 1 or 0; empty: all episodes succeeded.")
    time: str = Field(default="", description="Column of seconds; where given, its steps are held against fps.")
    gripper: Gripper = Field(
        default="as_is",
        description="Of the action's last number. as_is: -1 open, 1 closed already, or no gripper; one_opens: 1 open, "
        "0 closed; one_closes: 0 open, 1 closed.",
    )
    rotate: tuple[str, ...] = Field(default=(), description="Cameras that are upside down, by our name.")

    @model_validator(mode="after")
    def _rotates_cameras(self) -> FolderConfig:
        if unknown := sorted(set(self.rotate) - set(self.cameras)):
            raise ValueError(f"rotate: {unknown[0]!r} is none of the cameras {', '.join(self.cameras)}")
        return self


def import_folder(folder: Path, dataset: Path, report: Callable[[str], None] = print) -> dict[str, int]:
    """Write a LeRobotDataset v3 with an episode for each folder in `folder`/episodes; it appears whole.

    Args:
        folder: with dataset.yaml. dataset: folder to make; must not exist.
        report: told of each episode.

    Returns:
        {"episodes": ..., "frames": ...}.

    Raises:
        DatasetError: a file is missing or does not fit; the message names file, row and column.
        ConfigError: dataset.yaml has a wrong key or value.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise DatasetError(f"{file}: missing; write one that says what the columns mean, such as\n{EXAMPLE}")
    config = validate(FolderConfig, read_yaml(file), prefix=str(file))
    folders = sorted((path for path in (folder / EPISODES).glob("*") if path.is_dir()), key=_natural)
    if not folders:
        raise DatasetError(f"{folder / EPISODES}: holds no folder; expected one for each episode, such as 000")

    def episodes() -> Iterator[tuple[str, RecordedEpisode]]:
        of_task: Counter[str] = Counter()
        for path in folders:
            episode = _read(path, config, of_task)
            report(f"{path.name}: {episode.length} steps, {episode.instruction!r}")
            yield str(path), episode

    notes = {"source": "folder", "name": folder.resolve().name, **config.model_dump(mode="json")}
    return write_episodes(
        episodes(),
        dataset,
        fps=config.fps,
        robot="unknown",
        notes=notes,
        state_names=config.state,
        action_names=config.action,
        gripper_option=f"in {file.name} gripper:" if config.gripper == "as_is" else "",
        report=report,
    )


def _read(folder: Path, config: FolderConfig, of_task: Counter[str]) -> RecordedEpisode:
    wanted = (*config.state, *config.action, *filter(None, (config.success, config.time)))
    columns = read_table(folder / config.table, wanted)
    length = len(columns[config.action[0]])
    if config.time:
        _check_time(folder / config.table, columns[config.time], config)
    success = bool(columns[config.success][-1] > 0) if config.success else True
    png = {}
    for camera, name in config.cameras.items():
        frames = [
            encode_png(image[::-1, ::-1] if camera in config.rotate else image) for image in _pictures(folder / name)
        ]
        if len(frames) != length:
            raise DatasetError(
                f"{folder / name}: has {len(frames)} pictures, {config.table} has {length} rows; each row needs the "
                "picture of its moment. Cut or resample one of them."
            )
        png[camera] = frames
    instruction = config.instruction or _text(folder / config.instruction_file)
    index = of_task[instruction]
    of_task[instruction] += 1

    def stacked(names: tuple[str, ...]) -> np.ndarray:
        values = np.stack([columns[name] for name in names], axis=1) if names else np.zeros((length, 0))
        return values.astype(np.float32)

    actions = our_gripper(str(folder / config.table), stacked(config.action), config.gripper)
    return demonstration(instruction, index, png, stacked(config.state), actions, success=success)


def read_table(file: Path, columns: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The named columns of a CSV file with a header, float64 (T,) each.

    Raises:
        DatasetError: missing, no row, a column that is not there, or something that is no finite number, by its line.
    """
    if not file.is_file():
        raise DatasetError(f"{file}: missing")
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in columns if name not in header]:
                raise DatasetError(f"{file}: has no column {missing[0]!r}; its first line has {', '.join(header)}")
            if twice := [name for name in columns if header.count(name) > 1]:
                raise DatasetError(f"{file}: has {header.count(twice[0])} columns {twice[0]!r}; rename one")
            places = {name: header.index(name) for name in columns}
            rows = [_row(file, reader.line_num, row, places, len(header)) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{file}: no CSV in UTF-8 ({error})") from error
    if not rows:
        raise DatasetError(f"{file}: has no row below its header")
    values = np.array(rows)
    return {name: values[:, number] for number, name in enumerate(places)}


def _row(file: Path, line: int, row: list[str], places: dict[str, int], width: int) -> list[float]:
    if len(row) != width:
        raise DatasetError(f"{file}: line {line} has {len(row)} values, the header {width}")
    numbers = []
    for name, place in places.items():
        try:
            number = float(row[place])
        except ValueError:
            number = math.nan
        if not abs(number) <= _LARGEST:
            raise DatasetError(f"{file}: line {line}, column {name!r}: {row[place]!r} is no finite number")
        numbers.append(number)
    return numbers


def _check_time(file: Path, seconds: np.ndarray, config: FolderConfig) -> None:
    steps = np.diff(seconds) * config.fps
    if len(wrong := np.flatnonzero(np.abs(steps - 1) > MOST_DRIFT)):
        line = int(wrong[0]) + 3  # The header is line 1, the first row line 2.
        raise DatasetError(
            f"{file}: line {line}, column {config.time!r}: {steps[wrong[0]] / config.fps:.3g} s after the row before, "
            f"at {config.fps} fps {1 / config.fps:.3g} s are expected ({len(wrong)} such rows). Resample, or mend fps."
        )
    if abs(steps.sum() - len(steps)) > MOST_OFF * len(steps) + MOST_DRIFT:  # Each row alone may be late by a little.
        raise DatasetError(
            f"{file}: column {config.time!r}: {len(seconds)} rows in {seconds[-1] - seconds[0]:.3g} s are "
            f"{len(steps) / (seconds[-1] - seconds[0]):.3g} a second, fps is {config.fps}. Mend fps, or resample."
        )


def _pictures(path: Path) -> Iterator[np.ndarray]:
    """The RGB pictures of a video or of a folder, in order."""
    if path.is_dir():
        for file in sorted((f for f in path.iterdir() if f.suffix.lower() in PICTURES), key=_natural):
            try:
                yield decode_image(file.read_bytes())
            except ValueError as error:
                raise DatasetError(f"{file}: {error}") from error
        return
    if not path.is_file():
        raise DatasetError(f"{path}: missing")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DatasetError(f"{path}: holds no video")
            for frame in container.decode(video=0):
                yield frame.to_ndarray(format="rgb24")
    except (FFmpegError, OSError) as error:
        raise DatasetError(f"{path}: cannot be decoded ({error}). Is it a whole video?") from error


def _text(file: Path) -> str:
    try:
        text = " ".join(file.read_text(encoding="utf-8-sig").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{file}: missing or no text ({error}); or give `instruction` in {CONFIG_FILE}") from error
    if not text:
        raise DatasetError(f"{file}: is empty; what was the robot told?")
    return text


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts 2 before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
