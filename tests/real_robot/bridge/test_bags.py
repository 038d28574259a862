"""Recordings into a dataset: MCAP, rosbag2 and ROS 1 bags, by the contract that drives the robot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rosbags", reason="rosbags is not installed: pip install '.[ros]'")

from rosbags.rosbag1 import Writer as Rosbag1Writer
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Rosbag2Writer

from real_robot.bridge.bags import BagError, import_bags, read_episode
from real_robot.bridge.codec import encode_image, to_quaternion, write_action
from real_robot.contract.channels import ActionSink
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.contract.safety import DimensionLimits
from real_robot.transports.messages import CompressedImage, JointState, Message, PoseStamped
from real_robot.transports.ros.typestore import native_of, ros2_name, store_of
from vla_rl.data.lerobot_io import decode_image

START = 1_700_000_000_000_000_000
STEPS = 30
NONE = np.zeros(0)


def action_at(step: int) -> np.ndarray:
    return np.array([0.01 * step, -0.5, 0, 0, 0, 0.25, 1 if step > 10 else -1], np.float32)


def messages(contract: RobotContract, without: str = "") -> list[tuple[str, int, Message]]:
    """(topic, time, message) of a recording: each step's observation, and 5 ms later its command."""
    found: list[tuple[str, int, Message]] = []
    for step in range(STEPS):
        stamp = START + step * 50_000_000
        orientation = to_quaternion(np.array([np.pi, 0, 0]))
        position = np.array([0.01 * step, 0, 0.1])
        pose = PoseStamped(stamp=stamp, frame_id="table", position=position, orientation=orientation)
        fingers = np.array([0.04, -0.04])
        joints = JointState(
            stamp=stamp, name=("finger_left", "finger_right"), position=fingers, velocity=NONE, effort=NONE
        )
        picture = np.full((16, 16, 3), (8 * step, 0, 255), np.uint8)
        image = CompressedImage(stamp=stamp, format="png", data=encode_image(picture, "png"))
        parts = [("/end_effector_pose", pose), ("/joint_states", joints), ("/agentview/image/compressed", image)]
        found += [(topic, stamp + 1_000_000, message) for topic, message in parts]
        sent = stamp + 5_000_000
        found += [(sink.topic, sent, write_action(sink, action_at(step), sent)) for sink in contract.action]
    return [item for item in found if item[0] != without]


def write_bag(path: Path, kind: str, recorded: list[tuple[str, int, Message]]) -> Path:
    """A bag of that kind; returns what a user would name."""
    store: Any = store_of("noetic" if kind == "ros1" else "humble")
    if kind == "ros1":
        writer: Any = Rosbag1Writer(path.with_suffix(".bag"))
    else:
        plugin = StoragePlugin.MCAP if kind == "mcap" else StoragePlugin.SQLITE3
        writer = Rosbag2Writer(path, version=9, storage_plugin=plugin)
    with writer:
        connections: dict[str, Any] = {}
        for topic, moment, message in recorded:
            name = ros2_name(type(message))
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, name, typestore=store)
            native = native_of(store, name, message.tree())
            data = store.serialize_ros1(native, name) if kind == "ros1" else store.serialize_cdr(native, name)
            writer.write(connections[topic], moment, data)
    if kind == "ros1":
        return path.with_suffix(".bag")
    return next(path.glob("*.mcap")) if kind == "mcap" else path


@pytest.fixture
def contract() -> RobotContract:
    return load_contract("sim_robot")


@pytest.mark.parametrize("kind", ["mcap", "sqlite", "ros1"])
def test_a_recording_becomes_an_episode(tmp_path: Path, contract: RobotContract, kind: str) -> None:
    bag = write_bag(tmp_path / "bag", kind, messages(contract))
    episode = read_episode(contract, bag, "push it", success=True).recorded
    assert episode.length == STEPS - 1, "the last observation has no action of its own"
    np.testing.assert_allclose(episode.state[:, 0], 0.01 * np.arange(STEPS - 1), atol=1e-6)
    np.testing.assert_allclose(episode.actions, [action_at(step) for step in range(STEPS - 1)], atol=1e-6)
    assert decode_image(episode.png["agentview"][20])[3, 4].tolist() == [160, 0, 255]
    assert episode.final_state[0] == pytest.approx(0.01 * (STEPS - 1))
    assert set(episode.control_source) == {"expert"} and episode.reward.tolist() == [0.0] * (STEPS - 2) + [1.0]


def test_bags_become_a_dataset_that_lerobot_reads(tmp_path: Path, contract: RobotContract) -> None:
    bags = [write_bag(tmp_path / name, "mcap", messages(contract)) for name in ("one", "two")]
    summary = import_bags(contract, bags, tmp_path / "dataset", "push it", report=lambda text: None)
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("local/test", root=tmp_path / "dataset")
    assert summary == {"episodes": 2, "frames": len(dataset)} and dataset.fps == 20
    frame = dataset[STEPS - 1 + 5]
    np.testing.assert_allclose(frame["action"], action_at(5), atol=1e-6)
    assert round(255 * float(frame["observation.images.agentview"][0].mean())) == 40
    assert frame["task"] == "push it" and int(frame["episode_index"]) == 1


def test_what_lacks_a_topic_is_refused(tmp_path: Path, contract: RobotContract) -> None:
    bag = write_bag(tmp_path / "bag", "mcap", messages(contract, without="/joint_states"))
    with pytest.raises(BagError, match=r"no usable message of /joint_states \(sensor_msgs/JointState\)"):
        import_bags(contract, [bag], tmp_path / "dataset", "push it")
    assert not (tmp_path / "dataset").exists()


def test_damaged_messages_are_left_out_and_told(tmp_path: Path, contract: RobotContract) -> None:
    recorded = messages(contract)
    place = next(i for i, (topic, _, _) in enumerate(recorded) if "image" in topic and i > 40)
    topic, moment, image = recorded[place]
    assert isinstance(image, CompressedImage)
    broken = CompressedImage(stamp=image.stamp, format="png", data=image.data[: len(image.data) // 2])
    recorded[place] = (topic, moment, broken)
    told: list[str] = []
    bag = write_bag(tmp_path / "bag", "mcap", recorded)
    summary = import_bags(contract, [bag], tmp_path / "dataset", "push it", report=told.append)
    assert summary["frames"] == STEPS - 2 and any("frames left out" in text for text in told)


def test_a_message_that_cannot_be_is_left_out_and_told(tmp_path: Path, contract: RobotContract) -> None:
    recorded = messages(contract)
    place = next(i for i, (topic, _, _) in enumerate(recorded) if topic == "/joint_states" and i > 40)
    topic, moment, joints = recorded[place]
    assert isinstance(joints, JointState)
    recorded[place] = (topic, moment, replace(joints, position=joints.position[:1]))
    told: list[str] = []
    bag = write_bag(tmp_path / "bag", "mcap", recorded)
    summary = import_bags(contract, [bag], tmp_path / "dataset", "push it", report=told.append)
    assert summary["frames"] == STEPS - 2 and any("1 values of position for 2 names" in text for text in told)


@pytest.mark.parametrize(("first", "last"), [(3.0, 3.3), (3.3, 3.0), (3.2, 3.4)])
def test_commanded_poses_of_a_gripper_that_points_down_do_not_flip(
    tmp_path: Path, contract: RobotContract, first: float, last: float
) -> None:
    """At +pi and at -pi it points down: what was commanded without a leap is recorded without one, and as measured."""
    sink = ActionSink(topic="/pose", type="geometry_msgs/PoseStamped", indices=(0, 1, 2, 3, 4, 5))
    grip = ActionSink(topic="/grip", type="std_msgs/Bool", indices=(6,))
    bounds = {"kind": "position", "low": -4, "high": 4, "max_velocity": 1}
    names = ("x", "y", "z", "rx", "ry", "rz")
    poses = [DimensionLimits(name=name, state=number, **bounds) for number, name in enumerate(names)]
    safety = contract.safety.model_copy(update={"dimensions": (*poses, contract.safety.dimensions[6])})
    turned = contract.model_copy(update={"action": (sink, grip), "safety": safety})
    asked = [np.array([0, 0, 0, angle, 0, 0, 1], np.float32) for angle in np.linspace(first, last, STEPS)]
    recorded = [item for item in messages(contract) if item[0] not in {s.topic for s in contract.action}]
    for step, action in enumerate(asked):
        sent = START + step * 50_000_000 + 5_000_000
        recorded += [(s.topic, sent, write_action(s, action, sent)) for s in turned.action]
    bag = write_bag(tmp_path / "bag", "mcap", sorted(recorded, key=lambda item: item[1]))
    episode = read_episode(turned, bag, "push it", success=True).recorded
    np.testing.assert_allclose(episode.actions, asked[: STEPS - 1], atol=1e-5)


@pytest.mark.parametrize("rate", [12.5, 0.4])
def test_a_rate_that_is_no_whole_number_is_refused(tmp_path: Path, contract: RobotContract, rate: float) -> None:
    """As `deploy --record` does: the dataset's times would not be the recording's."""
    slow = contract.model_copy(update={"rate": rate})
    bag = write_bag(tmp_path / "bag", "mcap", messages(contract))
    with pytest.raises(BagError, match=rf"rate: {rate}; a LeRobotDataset has a whole number of frames per second"):
        import_bags(slow, [bag], tmp_path / "dataset", "push it")


def test_a_file_that_is_no_recording_is_named(tmp_path: Path, contract: RobotContract) -> None:
    path = tmp_path / "bag.mcap"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(BagError, match=r"bag\.mcap: not a readable recording"):
        import_bags(contract, [path], tmp_path / "dataset", "push it")
    with pytest.raises(BagError, match=r"nope\.mcap: no such file or folder$"):
        import_bags(contract, [tmp_path / "nope.mcap"], tmp_path / "dataset", "push it")
