"""RLDS datasets as TensorFlow Datasets wrote them (`make_rlds.py`), read without TensorFlow; and damaged ones."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from make_rlds import LENGTHS, TASKS, values
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, open_dataset
from vla_rl.data.rlds import RldsOptions, crc32c, import_rlds, parse_example, records

HERE = Path(__file__).resolve().parent / "rlds"
LIBERO, ARM = HERE / "libero_tiny", HERE / "arm_tiny"
ARM_OPTIONS: dict[str, Any] = {
    "fps": 5,
    "action": tuple(f"action/{part}" for part in ("world_vector", "rotation_delta", "gripper_closedness_action")),
    "success": "all",
}
JPEG_LOSS = 12  # gray levels


def imported(source: Path, folder: Path, **options: Any) -> LeRobotDataset:
    import_rlds(source, folder / "dataset", RldsOptions(**options), report=lambda line: None)
    return LeRobotDataset("local/imported", root=folder / "dataset")


def picture(row: dict[str, Any], camera: str) -> np.ndarray:
    return (row[f"observation.images.{camera}"].permute(1, 2, 0).numpy() * 255).round().astype(int)


def order(dataset: LeRobotDataset) -> list[int]:
    """Which episode of `make_rlds` each one is: TensorFlow Datasets shuffles them."""
    return [LENGTHS.index(length) for length in dataset.meta.episodes["length"]]


def test_liberos_layout_is_read_to_the_number(tmp_path: Path) -> None:
    dataset = imported(LIBERO, tmp_path)
    assert dataset.fps == 20 and sorted(order(dataset)) == [0, 1, 2] and len(dataset) == sum(LENGTHS)
    place = 0
    for episode in order(dataset):
        for step in range(LENGTHS[episode]):
            row, expected = dataset[place], values(episode, step)
            np.testing.assert_array_equal(row["action"], expected["action"])
            np.testing.assert_array_equal(row["observation.state"], expected["state"])
            assert row["task"] == TASKS[episode % 2]
            for camera, name in (("agentview", "image"), ("wrist", "wrist_image")):
                assert np.abs(picture(row, camera) - expected[name]).max() <= JPEG_LOSS
            assert bool(row["next.success"]) == (step == LENGTHS[episode] - 1 and episode != 1)
            place += 1
    # And by us, as `vla-rl sft` does for LIBERO's policies.
    needs = DataNeeds(cameras=("agentview", "wrist"), action_dim=7, state_dim=8, image_size=32, fps=20)
    config = DatasetConfig(path=str(tmp_path / "dataset"), only_successes=True)
    opened = open_dataset(config, needs)
    assert opened.num_episodes == 2 and opened.final_images is None and opened.final_state is None


def test_open_x_layout_parts_text_in_the_observation_and_no_state(tmp_path: Path) -> None:
    dataset = imported(ARM, tmp_path, **ARM_OPTIONS, gripper="one_closes", rotate=("front",), last_step="observation")
    assert dataset.fps == 5 and len(dataset) == 4 and "observation.state" not in dataset.features
    for number in range(4):
        row, step = dataset[number], number % 2
        episode = int(row["task"].rpartition(" ")[2])
        assert row["task"] == f"Öffne Schublade {episode}"
        expected = values(episode, step)
        np.testing.assert_array_equal(row["action"][:6], expected["action"][:6])
        assert row["action"][6] == (1 if step else -1)
        np.testing.assert_array_equal(picture(row, "front"), expected["image"][::-1, ::-1])
    finals = open_dataset(
        DatasetConfig(path=str(tmp_path / "dataset")), DataNeeds(cameras=("front",), action_dim=7)
    ).final_images
    assert finals is not None
    ends = {int(image[0, 0, 2]) for image in finals["front"]}
    assert ends == {int(values(episode, 2)["image"][-1, -1, 2]) for episode in (0, 1)}


def test_the_command_says_how_it_reads_and_what_deserves_a_look(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["import", str(LIBERO), "-o", str(tmp_path / "libero"), "--episodes", "3"])
    assert done.exit_code == 0 and "(3 episodes, 15 frames)" in done.stdout
    assert "cameras agentview = observation/image, wrist = observation/wrist_image; state" in done.stderr
    assert "2 of 3 episodes succeeded; if all are good" in done.stderr and "gripper" not in done.stderr
    command = ["import", str(ARM), "-o", str(tmp_path / "arm"), "--fps", "5", "--camera", "agentview=front"]
    command += [word for name in ARM_OPTIONS["action"] for word in ("--action", name)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    assert "the last number of the action is from 0 to 1: if that is a gripper, say --gripper" in done.stderr
    assert "tensorflow" not in sys.modules
    done = CliRunner().invoke(app, ["import", str(ARM), "-o", "never", "--camera", "a=front", "--camera", "a=side"])
    assert done.exit_code != 0 and "--camera: 'a' is said to be 'front' and 'side'" in done.stderr


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (ARM, {"action": ARM_OPTIONS["action"]}, "does not say how fast a robot is controlled; give --fps"),
        (ARM, {"fps": 5}, "--action action: no such feature; there are .*action/world_vector"),
        (ARM, {**ARM_OPTIONS, "cameras": {"agentview": "image"}}, "--camera image: the pictures are front"),
        (
            LIBERO,
            {"state": ("observation/eef",)},
            "--state observation/eef: no such feature; .*joint_state",
        ),
        (LIBERO, {"rotate": ("image",)}, "--rotate image: the cameras are agentview, wrist"),
        (LIBERO, {"split": "val"}, "--split val: there are train"),
        (LIBERO, {"language": "text"}, "--language text: no such feature"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, source: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(source, tmp_path, **options)
    assert not (tmp_path / "dataset").exists()


def test_damage_names_the_file_and_the_record(tmp_path: Path) -> None:
    def broken(change: Any, message: str) -> None:
        copy = Path(shutil.copytree(LIBERO, tmp_path / "copy"))
        change(next(copy.glob("*/*00000-of-00002")), copy / "1.0.0")
        with pytest.raises(DatasetError, match=message):
            imported(copy, tmp_path)
        assert not (tmp_path / "dataset").exists()
        shutil.rmtree(copy)

    def flip(file: Path, place: int) -> None:
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(bytes(data))

    def fewer(file: Path, _: Path) -> None:
        first = next(records(file))
        file.write_bytes(file.read_bytes()[: len(first) + 16])

    broken(lambda file, _: flip(file, 5000), r"of-00002: record 0 is damaged: its checksum is another")
    broken(lambda file, _: flip(file, 0), r"record 0 is cut off or damaged")
    broken(lambda file, _: file.write_bytes(file.read_bytes()[:-3]), r"record 1 is cut off or damaged")
    broken(fewer, r"00000-of-00002: 1 records, dataset_info.json says 2")
    broken(lambda file, _: file.unlink(), r"00000-of-00002: missing \(1 of 2 files are\)")
    broken(lambda _, folder: (folder / "features.json").write_text("{"), r"features.json: missing or damaged")
    broken(lambda _, folder: (folder / "features.json").unlink(), r"holds no features.json")
    broken(lambda _, folder: shutil.copytree(folder, folder.parent / "1.0.1"), "holds 2: .*name one of them")

    def other_size(_: Path, folder: Path) -> None:
        text = (folder / "features.json").read_text()
        (folder / "features.json").write_text(text.replace('"7"', '"6"'))

    broken(other_size, r"record 0: steps/action has 35 numbers, expected 5 steps of 6")


def test_a_step_without_a_picture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(data: bytes) -> dict[str, Any]:
        found = parse_example(data)
        found["steps/observation/image"][3] = b""
        return found

    monkeypatch.setattr("vla_rl.data.rlds.parse_example", without)
    with pytest.raises(DatasetError, match=r"record 0: picture 4 of agentview: 0 bytes that are neither PNG nor JPEG"):
        imported(LIBERO, tmp_path)


def test_checksums_and_records_that_are_no_examples() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # The check value of CRC-32C.
    assert crc32c(bytes(32)) == 0x8A9136AA and crc32c(b"\xff" * 32) == 0x62A8AB43  # RFC 3720, B.4
    long = np.random.default_rng(0).integers(0, 256, 5000, np.uint8).tobytes()
    crc = 0xFFFFFFFF
    for value in long:  # Bit by bit, by the polynomial.
        crc ^= value
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(long) == crc ^ 0xFFFFFFFF
    with pytest.raises(ValueError, match=r"no tf\.train\.Example"):
        parse_example(b"\x0a\xff\xff\xff\xff\x0f")


def test_a_length_that_lies_asks_for_no_memory(tmp_path: Path) -> None:
    head = struct.pack("<Q", 2**40)
    crc = crc32c(head)
    file = tmp_path / "lies.tfrecord"
    file.write_bytes(head + struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF) + bytes(100))
    with pytest.raises(DatasetError, match="record 0 is cut off"):
        next(records(file))


def test_the_notes_say_where_it_came_from(tmp_path: Path) -> None:
    imported(LIBERO, tmp_path, episodes=1)
    notes = json.loads((tmp_path / "dataset" / "collect.json").read_text())
    assert notes["source"] == "RLDS" and notes["name"] == "libero_tiny" and notes["episodes"] == 1
