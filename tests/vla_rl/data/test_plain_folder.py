"""Folders of videos and CSV as datasets: what is read, and errors that name file, line and column."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.lerobot_io import encode_png
from vla_rl.data.plain_folder import import_folder

CONFIG = """
fps: 10
cameras: {front: front.mp4, wrist: wrist}
state: [x, y]
action: [dx, grip]
gripper: one_closes
time: t
success: done
rotate: [wrist]
"""
LENGTHS = {"0": 4, "2": 3, "10": 5}


def image(number: int) -> np.ndarray:
    """A picture whose mean brightness tells which one it is, and whose first row is dark."""
    picture = np.full((32, 48, 3), 30 + 40 * number, np.uint8)
    picture[0] = 0
    return picture


def write_video(file: Path, length: int) -> None:
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for number in range(length):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image(number), format="rgb24")))
        container.mux(stream.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "recordings"
    for name, length in LENGTHS.items():
        episode = root / "episodes" / name
        (episode / "wrist").mkdir(parents=True)
        write_video(episode / "front.mp4", length)
        for number in range(length):
            (episode / "wrist" / f"{number + 8}.png").write_bytes(encode_png(image(number)))
        with (episode / "data.csv").open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["t", "dx", "grip", "x", "y", "done", "note"])
            for row in range(length):
                writer.writerow([0.1 * row, 0.5 * row, row % 2, int(name), row, int(name != "2"), "text"])
        (episode / "task.txt").write_text(f"push {name}\n")
    (root / "dataset.yaml").write_text(CONFIG)
    return root


def test_rows_pictures_and_instructions(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["import", str(folder), "-o", str(tmp_path / "dataset")])
    assert done.exit_code == 0 and "(3 episodes, 12 frames)" in done.stdout, done.stderr
    assert "10: 5 steps, 'push 10'" in done.stderr
    dataset = LeRobotDataset("local/imported", root=tmp_path / "dataset")
    assert dataset.fps == 10 and dataset.features["action"]["names"] == ["dx", "grip"]
    assert list(dataset.meta.episodes["success"]) == [True, False, True]
    place = 0
    for name, length in LENGTHS.items():  # 2 before 10
        for number in range(length):
            row = dataset[place]
            np.testing.assert_allclose(row["action"], [0.5 * number, 1 if number % 2 else -1])
            np.testing.assert_allclose(row["observation.state"], [int(name), number])
            assert row["task"] == f"push {name}"
            front = row["observation.images.front"].permute(1, 2, 0).numpy() * 255
            wrist = row["observation.images.wrist"].permute(1, 2, 0).numpy() * 255
            assert abs(front[4:].mean() - image(number)[4:].mean()) < 4  # A video is not exact.
            np.testing.assert_array_equal(wrist.round(), image(number)[::-1, ::-1])
            place += 1


def test_a_column_may_be_of_the_state_and_of_the_action(folder: Path, tmp_path: Path) -> None:
    edited("dataset.yaml", lambda text: text.replace("state: [x, y]", "state: [x, grip, y]"))(folder)
    import_folder(folder, tmp_path / "dataset", lambda line: None)
    row = LeRobotDataset("local/imported", root=tmp_path / "dataset")[5]  # The second of "2".
    np.testing.assert_allclose(row["observation.state"], [2, 1, 1])
    np.testing.assert_allclose(row["action"], [0.5, 1])


def edited(name: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(change((root / name).read_text()))


def write_times(episode: Path, step: float) -> None:
    with (episode / "data.csv").open(newline="") as stream:
        head, *rows = csv.reader(stream)
    with (episode / "data.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([head, *([step * number, *row[1:]] for number, row in enumerate(rows))])


def test_a_gripper_of_another_convention_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    import_folder(folder, tmp_path / "closes", said.append)
    assert not any("gripper" in line for line in said)
    edited("dataset.yaml", lambda text: text.replace("one_closes", "as_is"))(folder)
    import_folder(folder, tmp_path / "as_is", said.append)
    assert "is from 0 to 1: if that is a gripper, say in dataset.yaml gripper: one_opens or one_closes" in said[-1]


def test_a_clock_that_jitters_is_no_other_rate(folder: Path, tmp_path: Path) -> None:
    for name in LENGTHS:
        write_times(folder / "episodes" / name, 0.105)
    text = (folder / "episodes" / "0" / "data.csv").read_text()
    (folder / "episodes" / "0" / "data.csv").write_text(text.replace("0.105", "0.14"))
    assert import_folder(folder, tmp_path / "dataset", lambda line: None)["episodes"] == len(LENGTHS)


def test_a_byte_order_mark_is_no_part_of_the_instruction(folder: Path, tmp_path: Path) -> None:
    (folder / "episodes" / "0" / "task.txt").write_text("push 2", encoding="utf-8-sig")
    (folder / "episodes" / "2").rename(folder / "episodes" / "1²")
    import_folder(folder, tmp_path / "dataset", lambda line: None)
    tasks = LeRobotDataset("local/imported", root=tmp_path / "dataset").meta.episodes["tasks"]
    assert list(tasks) == [["push 2"], ["push 2"], ["push 10"]]


def test_it_is_staged_beside_the_dataset_and_what_a_killed_import_left_is_removed(folder: Path, tmp_path: Path) -> None:
    beside = tmp_path / "datasets"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, running = (beside / f".mine.import-{socket.gethostname()}-{pid}-x" for pid in (gone.pid, os.getppid()))
    for path in (left, running):
        path.mkdir(parents=True)
    seen: list[set[str]] = []
    import_folder(folder, beside / "mine", lambda line: seen.append({path.name for path in beside.iterdir()}))
    staged = seen[0] - {running.name}
    assert len(staged) == 1 and staged.pop().startswith(f".mine.import-{socket.gethostname()}-{os.getpid()}-")
    assert {path.name for path in beside.iterdir()} == {running.name, "mine"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: (root / "dataset.yaml").unlink(), r"dataset\.yaml: missing; write one that says"),
        (edited("dataset.yaml", lambda text: text + "gripers: 1\n"), r"dataset\.yaml.*gripers"),
        (edited("dataset.yaml", lambda text: text.replace("[wrist]", "[hand]")), "'hand' is none of the cameras"),
        (edited("dataset.yaml", lambda text: text.replace("dx", "dz")), r"data\.csv: has no column 'dz'; .* t, dx"),
        (
            edited("episodes/2/data.csv", lambda text: text.replace("0.5,", "half,")),
            r"episodes/2/data\.csv: line 3, column 'dx': 'half' is no finite number",
        ),
        (
            edited("episodes/2/data.csv", lambda text: text.replace("0.5,", "nan,")),
            r"line 3, column 'dx': 'nan' is no finite number",
        ),
        (
            edited("episodes/10/data.csv", lambda text: text.replace(",1,text", ",1", 1)),
            r"episodes/10/data\.csv: line 2 has 6 values, the header 7",
        ),
        (
            edited("episodes/0/data.csv", lambda text: text.replace("0.30000000000000004", "0.4")),
            r"episodes/0/data\.csv: line 5, column 't': 0\.2 s after the row before, at 10 fps 0\.1 s",
        ),
        (edited("episodes/0/data.csv", lambda text: text.splitlines()[0]), "has no row below its header"),
        (
            edited("dataset.yaml", lambda text: text.replace("grip]", "y]")),
            r"episodes/0/data\.csv: the last number of the action is from 0 to 3; gripper 'one_closes' stands for",
        ),
        (
            lambda root: write_video(root / "episodes/2/front.mp4", 2),
            r"front\.mp4: has 2 pictures, data\.csv has 3 rows",
        ),
        (lambda root: (root / "episodes/2/front.mp4").write_bytes(b"no video"), r"front\.mp4: cannot be decoded"),
        (lambda root: (root / "episodes/0/front.mp4").unlink(), r"episodes/0/front\.mp4: missing"),
        (lambda root: (root / "episodes/0/wrist/9.png").write_bytes(b"x"), r"wrist/9\.png: 1 bytes that are neither"),
        (
            lambda root: (root / "episodes/10/wrist/9.png").write_bytes(encode_png(image(1)[:20, :40])),
            r"episodes/10: picture 2 of wrist is 40 x 20 pixels, those before it 48 x 32",
        ),
        (
            lambda root: [write_times(root / "episodes" / name, 1 / 15) for name in LENGTHS],
            r"episodes/0/data\.csv: column 't': 4 rows in 0\.2 s are 15 a second, fps is 10\. Mend fps",
        ),
        (
            edited("episodes/2/data.csv", lambda text: text.replace("note", "dx")),
            r"episodes/2/data\.csv: has 2 columns 'dx'; rename one",
        ),
        (
            edited("episodes/2/data.csv", lambda text: text.replace("0.5,", "1e300,")),
            r"line 3, column 'dx': '1e300' is no finite number",
        ),
        (
            edited(
                "dataset.yaml", lambda text: text.replace("wrist: wrist", "arm/wrist: wrist").replace("[wrist]", "[]")
            ),
            r"episodes/0: a camera is named 'arm/wrist'; LeRobot allows no /",
        ),
        (lambda root: (root / "episodes/0/task.txt").unlink(), r"task\.txt: missing or no text.*give `instruction`"),
        (lambda root: (root / "episodes/0/task.txt").write_text(" "), r"task\.txt: is empty"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_left(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises((DatasetError, ConfigError), match=message):
        import_folder(folder, tmp_path / "dataset", report=lambda line: None)
    assert not (tmp_path / "dataset").exists()
