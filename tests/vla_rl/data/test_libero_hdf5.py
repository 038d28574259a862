"""LIBERO's HDF5 files as datasets: which picture stands beside which action, what is left out, what is refused.

`tests/sim/libero/test_libero_demonstrations.py` has one from the stock environment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetError
from vla_rl.data.hdf5 import import_libero, read_demos

LENGTH, SIZE = 8, 16


def demo(seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """What LIBERO's script stores: row j holds action j, and what was seen after it."""
    rng = np.random.default_rng(seed)
    values = {
        "actions": rng.uniform(-1, 1, (LENGTH, 7)),
        "obs/agentview_rgb": rng.integers(0, 255, (LENGTH, SIZE, SIZE, 3), np.uint8),
        "obs/eye_in_hand_rgb": rng.integers(0, 255, (LENGTH, SIZE, SIZE, 3), np.uint8),
        "obs/ee_states": rng.normal(size=(LENGTH, 6)),
        "obs/gripper_states": rng.normal(size=(LENGTH, 2)),
        "rewards": np.eye(LENGTH, dtype=np.uint8)[-1],
    }
    return {key: value for key, value in {**values, **changes}.items() if value is not None}


def write(folder: Path, *demos: dict[str, np.ndarray], name: str = "open_the_box", convention: str = "opengl") -> Path:
    file = folder / f"{name}_demo.hdf5"
    with h5py.File(file, "w") as opened:
        data = opened.create_group("data")
        data.attrs["problem_info"] = json.dumps({"language_instruction": "open the lid of the box"})
        data.attrs["macros_image_convention"] = convention
        for number, values in enumerate(demos):
            for key, value in values.items():
                data[f"demo_{number}/{key}"] = value
    return file


def imported(files: list[Path], folder: Path, **options: Any) -> LeRobotDataset:
    import_libero(files, folder / "dataset", report=lambda line: None, **options)
    return LeRobotDataset("local/imported", root=folder / "dataset")


def picture(row: dict[str, Any], camera: str) -> np.ndarray:
    return (row[f"observation.images.{camera}"].permute(1, 2, 0).numpy() * 255).round().astype(np.uint8)


@pytest.mark.parametrize("convention", ["opengl", "opencv"])
def test_each_action_stands_beside_what_was_seen_before_it(tmp_path: Path, convention: str) -> None:
    values = demo()
    dataset = imported([write(tmp_path, values, convention=convention)], tmp_path)
    assert len(dataset) == LENGTH - 1 and dataset.fps == 20
    for number in range(LENGTH - 1):
        row = dataset[number]
        before = values["obs/agentview_rgb"][number]
        np.testing.assert_array_equal(
            picture(row, "agentview"), before[::-1, ::-1] if convention == "opengl" else before[:, ::-1]
        )
        np.testing.assert_allclose(row["action"], values["actions"][number + 1].astype(np.float32))
        state = np.concatenate([values["obs/ee_states"][number], values["obs/gripper_states"][number]])
        np.testing.assert_allclose(row["observation.state"], state.astype(np.float32))
        assert row["task"] == "open the box"
    assert [bool(row["next.success"]) for row in map(dataset.__getitem__, range(LENGTH - 1))] == [False] * 6 + [True]


def test_the_instruction_is_the_benchmarks(tmp_path: Path) -> None:
    """LIBERO evaluates "pick up the black bowl ..."; its files of that task say "pick the akita black bowl ..."."""
    (own,) = read_demos(write(tmp_path, demo()).rename(tmp_path / "mine.hdf5"))
    ((episode, _),) = read_demos(write(tmp_path, demo(), name="KITCHEN_SCENE1_open_the_top_drawer"))
    assert episode.instruction == "open the top drawer" and own[0].instruction == "open the lid of the box"


def test_steps_that_command_nothing_are_left_out(tmp_path: Path) -> None:
    actions = demo()["actions"]
    actions[:, -1] = [-1, -1, -1, 1, 1, 1, 1, 1]
    actions[[2, 3, 5], :-1] = 0  # at 3 the gripper closes, which is a command
    file = write(tmp_path, demo(actions=actions))
    dataset = imported([file], tmp_path)
    np.testing.assert_allclose(
        np.stack([dataset[i]["action"] for i in range(len(dataset))]), actions[[1, 3, 4, 6, 7]].astype(np.float32)
    )
    (tmp_path / "whole").mkdir()
    assert len(imported([file], tmp_path / "whole", keep_pauses=True)) == LENGTH - 1


def test_demonstrations_come_in_their_numbers_order_and_failures_are_marked(tmp_path: Path) -> None:
    demos = [demo(seed) for seed in range(11)]
    demos[10]["rewards"] = np.zeros(LENGTH, np.uint8)
    dataset = imported([write(tmp_path, *demos)], tmp_path)
    firsts = [dataset[7 * number]["action"].numpy() for number in range(11)]
    np.testing.assert_allclose(firsts, [values["actions"][1].astype(np.float32) for values in demos])
    episodes = dataset.meta.episodes
    assert list(episodes["success"]) == [True] * 10 + [False]
    assert set(episodes["env_task"]) == {"open_the_box"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"obs/ee_states": None}, "demo_0/obs/ee_states: missing"),
        ({"actions": np.zeros((LENGTH, 6))}, r"demo_0/actions has shape \(8, 6\), its state 8 numbers; expected"),
        ({"obs/gripper_states": np.zeros((3, 2))}, "demo_0/obs/gripper_states: has 3 rows, its actions 8"),
        ({"obs/ee_states": np.full((LENGTH, 6), np.nan)}, "ee_states: row 0 holds NaN"),
        ({"actions": np.zeros((LENGTH, 7))}, "commands nothing at any step"),
        (
            {"obs/agentview_rgb": np.ones((LENGTH, SIZE, SIZE, 3), np.float32)},
            r"demo_0/obs/agentview_rgb: is float32 \(8, 16, 16, 3\), expected uint8 \(T, height, width, 3\)",
        ),
        ({"obs/agentview_rgb": np.zeros((LENGTH, 3, SIZE, SIZE), np.uint8)}, r"is uint8 \(8, 3, 16, 16\), expected"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_left(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path, demo(**changes))
    with pytest.raises(DatasetError, match=message):
        import_libero([file], tmp_path / "dataset", report=lambda line: None)
    assert not (tmp_path / "dataset").exists()


def test_files_that_are_no_hdf5_or_of_two_sizes_are_refused(tmp_path: Path) -> None:
    torn = tmp_path / "torn_demo.hdf5"
    torn.write_bytes(write(tmp_path, demo()).read_bytes()[:2000])
    with pytest.raises(DatasetError, match=r"torn_demo\.hdf5: no HDF5, or a damaged file"):
        import_libero([torn], tmp_path / "dataset")
    pictures = {f"obs/{name}_rgb": np.zeros((LENGTH, 8, 8, 3), np.uint8) for name in ("agentview", "eye_in_hand")}
    files = [write(tmp_path, demo()), write(tmp_path, demo(**pictures), name="small")]
    with pytest.raises(
        DatasetError, match=r"small_demo\.hdf5: pictures of .*\(8, 8\).*, of .*open_the_box_demo\.hdf5 .*\(16, 16\)"
    ):
        import_libero(files, tmp_path / "dataset", report=lambda line: None)
    with pytest.raises(DatasetError, match="convention is 'metal', known: opengl, opencv"):
        import_libero([write(tmp_path, demo(), convention="metal")], tmp_path / "dataset")


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, demo())
    with pytest.raises(ConfigError, match=r"named more than once: .*open_the_box_demo\.hdf5"):
        import_libero([file, file.parent / "." / file.name], tmp_path / "dataset")


def test_the_command(tmp_path: Path) -> None:
    file = write(tmp_path, demo(), demo(1))
    done = CliRunner().invoke(app, ["import", str(file), "-o", str(tmp_path / "dataset")])
    assert done.exit_code == 0 and "(2 episodes, 14 frames)" in done.stdout
    assert "open_the_box_demo.hdf5: 2 demonstrations" in done.stderr
