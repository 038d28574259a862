"""ALOHA's and robomimic's HDF5 as datasets: what stands beside what, what is named, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import h5py
import numpy as np
import pytest
from own_recordings import aloha, motion, robomimic, so101
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.hdf5 import MAX_STEPS, layout_of
from vla_rl.data.lab_hdf5 import RobomimicOptions, import_robomimic
from vla_rl.data.source import LeRobotSource


def run(*command: str | Path) -> Any:
    return CliRunner().invoke(app, ["import", *map(str, command)])


def edited(file: Path) -> Any:
    return h5py.File(file, "a")


def opened(dataset: Path, cameras: tuple[str, ...], action_dim: int, state_dim: int) -> EpisodeDataset:
    return open_dataset(DatasetConfig(path=str(dataset)), DataNeeds(cameras, action_dim, state_dim))


@pytest.mark.parametrize("compressed", [True, False])
def test_aloha_keeps_every_number_and_picture_in_its_row(compressed: bool, tmp_path: Path) -> None:
    recordings = aloha(tmp_path / "aloha", episodes=2, compressed=compressed)
    done = run(recordings, "-o", tmp_path / "dataset", "--instruction", "hand it over")
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"\nnext, is it sound: vla-rl report {tmp_path / 'dataset'}\n")
    data = opened(tmp_path / "dataset", ("cam_high", "cam_left_wrist", "cam_right_wrist"), 14, 14)
    state, action, images = motion(1, 14, (6, 13))
    second = slice(int(data.starts[1]), None)
    np.testing.assert_allclose(data.state[second][:, :6], state[:, :6])
    np.testing.assert_allclose(data.actions[second][:, 7:13], action[:, 7:13])
    assert set(np.unique(data.actions[:, 13])) == {0, 1}
    seen = data.images["cam_high"][second]
    assert np.abs(seen.astype(float) - images).mean() < (4 if compressed else 1e-9)  # Red stays red.
    source = LeRobotSource(tmp_path / "dataset")
    assert source.fps == 50 and source.instructions == ["hand it over"] and source.grippers == (6, 13)
    assert source.action_names[:2] == ("left_waist", "left_shoulder") and source.action_names[13] == "right_gripper"


def test_robomimic_keeps_every_number_and_picture_in_its_row(tmp_path: Path) -> None:
    file = robomimic(tmp_path / "demos.hdf5", episodes=3)
    done = run(file, "-o", tmp_path / "dataset", "--instruction", "lift the cube")
    assert done.exit_code == 0, done.output
    assert "3 of 3 episodes succeeded" in done.stderr
    data = opened(tmp_path / "dataset", ("agentview", "robot0_eye_in_hand"), 7, 9)
    with h5py.File(file) as raw:
        demo: Any = raw["data/demo_2"]
        last = slice(int(data.starts[2]), None)
        np.testing.assert_allclose(data.actions[last], demo["actions"], rtol=1e-6)
        np.testing.assert_allclose(data.state[last][:, :3], demo["obs/robot0_eef_pos"], rtol=1e-6)
        np.testing.assert_allclose(data.state[last][:, 7:], demo["obs/robot0_gripper_qpos"], rtol=1e-6)
        np.testing.assert_array_equal(data.images["agentview"][last], demo["obs/agentview_image"])
    source: Any = LeRobotSource(tmp_path / "dataset")
    assert source.fps == 20 and source.grippers == (6,) and source.action_names[0] == "dx"
    assert source.state_names[3] == "robot0_eef_quat.0"


def test_robomimic_of_another_robot_takes_what_it_is_told(tmp_path: Path) -> None:
    file = robomimic(tmp_path / "demos.hdf5", episodes=4)
    with edited(file) as raw:
        raw["data"].attrs["env_args"] = json.dumps({"env_name": "bench", "type": 3})
        raw["data/demo_1"].attrs["ep_meta"] = json.dumps({"lang": "open  the drawer"})
        raw["data/demo_0/rewards"][...] = 0
        for number in range(4):
            raw[f"data/demo_{number}/actions"][:, 6] = np.arange(raw[f"data/demo_{number}/actions"].shape[0]) % 2
    options = RobomimicOptions(
        fps=10,
        instruction="",
        cameras={"front": "agentview_image"},
        state=("object",),
        gripper="one_closes",
        episodes=2,
    )
    with pytest.raises(ValueError, match="does not say what the robot was told; give --instruction"):
        import_robomimic([file], tmp_path / "dataset", options, lambda _: None)
    with h5py.File(file, "a") as raw:
        raw["data/demo_0"].attrs["ep_meta"] = json.dumps({"lang": "close the drawer"})
    assert import_robomimic([file], tmp_path / "dataset", options, lambda _: None)["episodes"] == 2
    source: Any = LeRobotSource(tmp_path / "dataset")
    assert sorted(source.instructions) == ["close the drawer", "open the drawer"]
    assert source.success is not None and source.success.tolist() == [False, True]
    assert list(source.cameras) == ["front"] and source.grippers == (6,) and source.state_names[0] == "object.0"
    assert set(np.unique(opened(tmp_path / "dataset", ("front",), 7, 10).actions[:, 6])) == {-1, 1}


def shorter(raw: Any) -> None:
    qpos = raw["observations/qpos"][:-1]
    del raw["observations/qpos"]
    raw["observations/qpos"] = qpos


def not_finite(raw: Any) -> None:
    raw["action"][3, 2] = np.nan


def no_camera(raw: Any) -> None:
    del raw["observations/images"]


def torn_jpeg(raw: Any) -> None:
    raw["observations/images/cam_high"][4, 2:] = 0


def other_lengths(raw: Any) -> None:
    raw["compress_len"][0, 1] += 1


def endless(raw: Any) -> None:
    del raw["action"]
    raw.create_dataset("action", (MAX_STEPS + 1, 14), np.float32, chunks=True)


def vast(raw: Any) -> None:
    del raw["observations/images/cam_high"]
    shape = (len(raw["action"]), 20_000, 20_000, 3)
    raw.create_dataset("observations/images/cam_high", shape, np.uint8, chunks=(1, 64, 64, 3))


def huge_picture(raw: Any) -> None:
    """A JPEG whose head says that it is far larger than it is."""
    images = raw["observations/images/cam_high"]
    row = bytes(images[0])
    place = row.index(b"\xff\xc0") + 5
    images[0] = np.frombuffer(row[:place] + b"\xff\x00\xff\x00" + row[place + 4 :], np.uint8)


def elsewhere(raw: Any) -> None:
    del raw["action"]
    raw["action"] = h5py.ExternalLink("episode_1.hdf5", "/action")


def objects(raw: Any) -> None:
    del raw["action"]
    raw.create_dataset("action", (3,), h5py.string_dtype())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shorter, r"observations/qpos: has \d+ rows, its actions \d+"),
        (not_finite, "episode_0.hdf5/action: row 3 holds NaN"),
        (no_camera, "observations/images: holds no camera"),
        (torn_jpeg, "cam_high: picture 4: 2 bytes that are no whole JPEG"),
        (other_lengths, r"compress_len: .* are not the lengths of the \(3, \d+\) pictures"),
        (endless, r"action: has shape \(100001, 14\); an episode has 1 to 100000 steps"),
        (vast, r"cam_high: has shape \(\d+, 20000, 20000, 3\), over 16 GiB"),
        (huge_picture, "picture 1 of cam_high: Image size .* at most 4096 pixels a side"),
        (elsewhere, "action: lies in another file"),
        (objects, r"action: is object \(3,\), expected numbers"),
    ],
)
def test_a_bad_file_is_refused_by_the_part_that_is_bad(
    damage: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    recordings = aloha(tmp_path / "aloha", episodes=2)
    with h5py.File(recordings / "episode_0.hdf5", "a") as raw:
        damage(raw)
    done = run(recordings, "-o", tmp_path / "dataset", "--instruction", "hand it over")
    assert done.exit_code == 2 and not (tmp_path / "dataset").exists()
    assert re.search(said, " ".join(done.stderr.split())), done.stderr


def test_a_truncated_file_and_one_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = robomimic(tmp_path / "demos.hdf5", episodes=1)
    (tmp_path / "cut.hdf5").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(DatasetError, match=r"cut\.hdf5: no HDF5, or a damaged file"):
        layout_of(tmp_path / "cut.hdf5")
    with h5py.File(tmp_path / "other.hdf5", "w") as raw:
        raw["weights"] = np.zeros(3)
    with pytest.raises(DatasetError, match="holds weights; known are ALOHA's files"):
        layout_of(tmp_path / "other.hdf5")
    with h5py.File(file, "a") as raw:
        del raw["data/demo_0/obs"]
    done = run(file, "-o", tmp_path / "dataset")
    assert done.exit_code == 2 and "dataset_states_to_obs.py" in done.stderr


def test_what_each_format_takes_and_what_needs_no_import(tmp_path: Path) -> None:
    recordings = aloha(tmp_path / "aloha", episodes=1)
    done = run(recordings, "-o", tmp_path / "dataset")
    assert done.exit_code == 2 and "give --instruction" in done.stderr
    done = run(recordings, "-o", tmp_path / "dataset", "--state", "qvel")
    assert done.exit_code == 2 and "--state: is of" in done.stderr and "--instruction, --failures, --fps" in done.stderr
    dataset = so101(tmp_path / "so101", episodes=1, videos=False)
    done = run(dataset, "-o", tmp_path / "dataset")
    assert done.exit_code == 2 and "is a LeRobotDataset already" in done.stderr
    info = dataset / "meta" / "info.json"
    info.write_text(info.read_text().replace("v3.0", "v2.1"))
    done = run(dataset, "-o", tmp_path / "dataset")
    assert done.exit_code == 2 and "lerobot.scripts.convert_dataset_v21_to_v30" in done.stderr


def test_jpeg_of_aloha_is_kept_as_it_is(tmp_path: Path) -> None:
    recordings = aloha(tmp_path / "aloha", episodes=1)
    assert run(recordings, "-o", tmp_path / "dataset", "--instruction", "x", "--fps", "25").exit_code == 0
    source = LeRobotSource(tmp_path / "dataset")
    (table,) = source.batches(["observation.images.cam_high"])
    stored = table.column("observation.images.cam_high").to_pylist()[3]["bytes"]
    with h5py.File(recordings / "episode_0.hdf5") as raw:
        row: Any = raw["observations/images/cam_high"]
        assert stored == bytes(row[3]).rstrip(b"\0")
    assert cv2.imdecode(np.frombuffer(stored, np.uint8), cv2.IMREAD_COLOR) is not None and source.fps == 25
