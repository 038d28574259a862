"""From an arm and a camera to files: pairs taken live and from a recording, results written, a box from corners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from memory_transport import MemoryTransport
from rendered_board import CAMERA, RenderedBoard
from scipy.spatial.transform import Rotation
from test_hand_eye import BOARD, BOARD_ON_TABLE, CAMERA_ON_GRIPPER, views
from typer.testing import CliRunner
from urdfs import PLANAR
from virtual_time import VirtualTime

from real_robot.bridge.codec import encode_image, read_state
from real_robot.calibration.collect import (
    LiveArm,
    collect_bags,
    collect_live,
    pose_reader,
    read_shots,
    write_board,
    write_shot,
)
from real_robot.calibration.hand_eye import inverse
from real_robot.calibration.run import collect_corners, workspace_of
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.transports.messages import CompressedImage, Message, PoseStamped
from vla_rl.cli.app import app
from vla_rl.config import ConfigError

CONTRACT = {
    "name": "arm",
    "observation": {
        "images": {"wrist": {"topic": "/wrist", "size": [64, 64], "align": {"tolerance": 0.5}}},
        "state": [{"topic": "/flange", "type": "geometry_msgs/PoseStamped", "align": {"tolerance": 0.5}}],
    },
    "action": [
        {
            "topic": "/twist",
            "type": "geometry_msgs/TwistStamped",
            "indices": [0, 1, 2, 3, 4, 5],
            "convert": {"scale": 0.3},
        }
    ],
    "execution": {"kind": "velocity"},
    "safety": {"dimensions": [{"name": n, "kind": "velocity", "low": -1, "high": 1} for n in "abcdef"]},
}


@pytest.fixture
def contract(tmp_path: Path) -> RobotContract:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(CONTRACT))
    return load_contract(path)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RenderedBoard]:
    scene = RenderedBoard(BOARD, tmp_path_factory.mktemp("board"))
    yield scene
    scene.close()


@pytest.fixture
def clock(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    virtual.install(monkeypatch, "real_robot.bridge", "real_robot.calibration")
    return virtual


def gripper_at(board: np.ndarray) -> np.ndarray:
    """Where the gripper is when its camera has the board there."""
    return BOARD_ON_TABLE @ inverse(board) @ inverse(CAMERA_ON_GRIPPER)


def messages(scene: RenderedBoard, gripper: np.ndarray, stamp: int, picture: bytes = b"") -> list[tuple[str, Message]]:
    """What camera and arm say. `picture`: of that pose, where it is known."""
    picture = picture or encode_image(scene.picture(gripper @ CAMERA_ON_GRIPPER, BOARD_ON_TABLE), "png")
    turned = Rotation.from_matrix(gripper[:3, :3]).as_quat()
    pose = PoseStamped(stamp=stamp, frame_id="base", position=gripper[:3, 3], orientation=turned)
    return [("/wrist", CompressedImage(stamp=stamp, format="png", data=picture)), ("/flange", pose)]


class Person:
    """Moves the arm to the next pose each time that they are asked, then says what they were told to."""

    def __init__(
        self, clock: VirtualTime, scene: RenderedBoard, transport: MemoryTransport, poses: list[np.ndarray]
    ) -> None:
        self._clock, self._scene, self._transport, self._poses = clock, scene, transport, poses
        self._now: list[tuple[str, Message]] = []
        clock.Thread(self._publish).start()

    def _publish(self) -> None:
        while True:
            self._clock.sleep(0.15)
            for topic, message in self._now:
                stamped = type(message)(**{**message.__dict__, "stamp": self._clock.time_ns()})
                self._transport.deliver(topic, stamped)

    def ask(self, text: str) -> str:
        if not self._poses:
            return "q"
        self._now = messages(self._scene, self._poses.pop(0), 0)
        self._clock.sleep(0.3)
        return ""


def test_pairs_are_taken_live_and_give_the_cameras_place(
    clock: VirtualTime, contract: RobotContract, scene: RenderedBoard, tmp_path: Path
) -> None:
    transport, said = MemoryTransport(), []
    away = gripper_at(views(np.random.default_rng(9), 1)[0])
    away[2, 3] += 5  # the board is not in sight
    poses = [gripper_at(v) for v in views(np.random.default_rng(8), 12)]
    person = Person(clock, scene, transport, [away, *poses])
    folder = tmp_path / "pairs"
    arm = LiveArm(pose_reader(contract, "wrist"), transport)
    assert collect_live(arm, "wrist", folder, BOARD, person.ask, said.append) == 12
    assert "the board is not seen" in said[0]
    assert not transport.sent, "nothing was sent to the robot"
    shots = list(read_shots(folder))
    assert shots[0].picture.shape == (480, 640, 3), "the camera's own size, not the policy's"
    assert np.abs(shots[0].gripper - poses[0]).max() < 1e-5

    lens, output = tmp_path / "lens.yaml", tmp_path / "hand_eye.yaml"
    lens.write_text(yaml.safe_dump(CAMERA.model_dump(mode="json")))
    command = ["calibrate", "camera", str(folder), "--mount", "gripper", "--intrinsics", str(lens), "-o", str(output)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "held_out_mm" in done.output, done.output
    written = yaml.safe_load(output.read_text())
    assert np.abs(np.array(written["transform"]["matrix"]) - CAMERA_ON_GRIPPER).max() < 0.003
    assert written["pairs"] == 12 and written["errors"]["held_out_mm"] < 1


def test_a_moving_arm_is_not_taken(
    clock: VirtualTime, contract: RobotContract, scene: RenderedBoard, tmp_path: Path
) -> None:
    transport, said = MemoryTransport(), []
    gripper = gripper_at(views(np.random.default_rng(7), 1)[0])
    answers = iter(["", "q"])

    def move() -> None:
        while True:
            clock.sleep(0.1)
            gripper[0, 3] += 0.002
            for topic, message in messages(scene, gripper, clock.time_ns()):
                transport.deliver(topic, message)

    clock.Thread(move).start()
    arm = LiveArm(pose_reader(contract, "wrist"), transport)
    collect_live(arm, "wrist", tmp_path, BOARD, lambda _: next(answers), said.append)
    assert said == ["not taken: the arm moves; let it stand"]


def test_pairs_are_taken_from_a_recording_where_the_arm_stands(
    contract: RobotContract, scene: RenderedBoard, tmp_path: Path
) -> None:
    pytest.importorskip("rosbags", reason="rosbags is not installed: pip install '.[ros]'")
    from test_bags import START, write_bag

    poses = [gripper_at(v) for v in views(np.random.default_rng(6), 4)]
    recorded, stamp = [], START
    for before, pose in zip([poses[0], *poses], poses, strict=False):
        for share in np.linspace(0, 1, 6):  # 1.2 s on the way, 1.6 s standing
            between = before.copy()
            between[:3, 3] += share * (pose[:3, 3] - before[:3, 3])
            recorded += [(t, stamp, m) for t, m in messages(scene, between, stamp)]
            stamp += 200_000_000
        picture = encode_image(scene.picture(pose @ CAMERA_ON_GRIPPER, BOARD_ON_TABLE), "png")
        for _ in range(8):
            recorded += [(t, stamp, m) for t, m in messages(scene, pose, stamp, picture)]
            stamp += 200_000_000
    bag = write_bag(tmp_path / "bag", "mcap", recorded)
    folder = tmp_path / "pairs"
    taken = collect_bags(pose_reader(contract, "wrist"), "wrist", [bag], folder, BOARD, print)
    shots = list(read_shots(folder))
    assert taken == len(shots) == 4
    for shot, pose in zip(shots, poses, strict=True):
        assert np.abs(shot.gripper - pose).max() < 1e-5


def test_a_folder_of_another_board_is_not_added_to(tmp_path: Path) -> None:
    write_board(tmp_path, BOARD)
    with pytest.raises(ConfigError, match="names another board"):
        write_board(tmp_path, BOARD.model_copy(update={"square": 0.04}))


def test_a_contract_without_a_pose_is_told_how_to_get_one(contract: RobotContract) -> None:
    with pytest.raises(
        ConfigError, match=r"reads no pose of the gripper: name its topic .*or give the contract a `model`"
    ):
        pose_reader(load_contract("franka_ros1"), "agentview")
    with pytest.raises(ConfigError, match="--camera: got 'front'; arm has: wrist"):
        pose_reader(contract, "front")


def test_the_pose_of_a_link_is_computed_from_joints(tmp_path: Path) -> None:
    (tmp_path / "planar.urdf").write_text(PLANAR)
    values = {
        **CONTRACT,
        "model": {"file": "planar.urdf", "joint_states": "/joint_states"},
        "observation": {
            "state": [{"topic": "/joints", "type": "sensor_msgs/JointState", "joints": ["shoulder", "elbow"]}],
        },
    }
    path = tmp_path / "planar.yaml"
    path.write_text(yaml.safe_dump(values))
    contract = load_contract(path)
    reader = pose_reader(contract, "", link="tip")
    pose = reader.pose(np.array([np.pi / 2, 0.0]))
    assert pose[:3, 3] == pytest.approx([0, 0.7, 0], abs=1e-6)
    assert pose[:3, 0] == pytest.approx([0, 1, 0], abs=1e-6)


# --- the workspace ----------------------------------------------------------------------------

CORNERS = [np.array(c) for c in ((0.3, -0.3, 0.05), (0.6, 0.3, 0.05), (0.4, 0.0, 0.5))]


def test_the_box_is_that_of_the_corners_less_a_margin(contract: RobotContract) -> None:
    box = workspace_of(contract, CORNERS, 0.02)
    assert box.low == pytest.approx((0.32, -0.28, 0.07)) and box.high == pytest.approx((0.58, 0.28, 0.48))
    assert box.state == (0, 1, 2) and box.commands == (0, 1, 2) and box.meters_per_unit == 0.3
    values = yaml.safe_load(yaml.safe_dump(CONTRACT))
    values["safety"]["workspace"] = box.model_dump(mode="json")
    assert contract.model_validate(
        {**contract.model_dump(), "safety": {**contract.safety.model_dump(), "workspace": box}}
    )


def test_the_box_is_watched_where_the_position_stands_and_at_the_fastest_axis() -> None:
    """It says how far a command leads at most: of three speeds, the highest."""
    values = yaml.safe_load(yaml.safe_dump(CONTRACT))
    values["observation"]["state"][0]["parts"] = ["quaternion", "position"]
    values["action"][0]["convert"]["scale"] = [0.1, 0.1, 0.4, 1, 1, 1]
    values |= {"rate": 20, "safety": values["safety"] | {"control_hz": 20}, "execution": {"control_hz": 20}}
    box = workspace_of(RobotContract.model_validate(values), CORNERS, 0.02)
    assert box.state == (4, 5, 6) and box.meters_per_unit == 0.4


def test_the_box_is_in_the_frame_of_the_observed_position() -> None:
    """Where the state moves or turns the axes round, the box goes with it; one in other units would be no box."""
    values = yaml.safe_load(yaml.safe_dump(CONTRACT))
    values |= {"rate": 20, "safety": values["safety"] | {"control_hz": 20}, "execution": {"control_hz": 20}}
    convert = {"scale": [1, -1, 1, 1, 1, 1, 1], "offset": [-0.5, 0, 0.1, 0, 0, 0, 0]}
    values["observation"]["state"][0] |= {"convert": convert}
    box = workspace_of(RobotContract.model_validate(values), CORNERS[:1] + CORNERS[2:], 0.02)
    assert box.low == pytest.approx((-0.18, 0.02, 0.17)) and box.high == pytest.approx((-0.12, 0.28, 0.58))
    values["observation"]["state"][0]["convert"] = {"scale": 1000}
    with pytest.raises(ConfigError, match=r"/flange: convert.scale: 1000 .* the box is in meters"):
        workspace_of(RobotContract.model_validate(values), CORNERS, 0.02)


def test_a_pose_is_in_meters_whatever_the_policys_units_are() -> None:
    values = yaml.safe_load(yaml.safe_dump(CONTRACT))
    values["observation"]["state"][0] |= {"parts": ["position", "axis_angle"]}
    values["observation"]["state"][0]["convert"] = {"scale": [1000, 1000, 1000, 57.3, 57.3, 57.3]}
    values |= {"rate": 20, "safety": values["safety"] | {"control_hz": 20}, "execution": {"control_hz": 20}}
    reader = pose_reader(RobotContract.model_validate(values), "")
    pose = PoseStamped(stamp=1, position=np.array([0.1, 0.2, 0.3]), orientation=np.array([0, 0, 0, 1.0]))
    read = reader.pose(read_state(reader.contract.observation.state[0], pose))
    np.testing.assert_allclose(read[:3], np.column_stack([np.eye(3), [0.1, 0.2, 0.3]]), atol=1e-6)


def test_a_pair_that_is_taken_after_another_was_deleted_overwrites_none(tmp_path: Path) -> None:
    """As the page on calibration says to do with one that stands out."""
    picture = np.zeros((8, 8, 3), np.uint8)
    for _ in range(3):
        write_shot(tmp_path, picture, np.eye(4))
    (tmp_path / "0001.json").unlink()
    write_shot(tmp_path, picture, np.eye(4))
    assert [shot.name for shot in read_shots(tmp_path)] == ["0000", "0002", "0003"]


@pytest.mark.parametrize(
    ("corners", "message"),
    [(CORNERS[:1], "1 corners; at least 2"), (CORNERS[:2], "along z the corners are 0.0 cm apart")],
)
def test_corners_that_make_no_box_are_refused(contract: RobotContract, corners: list[np.ndarray], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workspace_of(contract, corners, 0.02)


def test_a_state_without_a_position_cannot_watch_a_box() -> None:
    with pytest.raises(ConfigError, match="has no position of the gripper"):
        workspace_of(load_contract("ur5e_ros1"), CORNERS, 0.02)


def test_corners_are_taken_live(clock: VirtualTime, contract: RobotContract, scene: RenderedBoard) -> None:
    transport = MemoryTransport()
    poses = []
    for corner in CORNERS:
        poses.append(np.eye(4))
        poses[-1][:3, 3] = corner
    person = Person(clock, scene, transport, poses)
    arm = LiveArm(pose_reader(contract, ""), transport)
    corners = collect_corners(arm, person.ask, lambda text: None)
    assert np.array(corners) == pytest.approx(np.array(CORNERS), abs=1e-6)


def test_the_board_is_printed_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2

    output = tmp_path / "board.png"
    done = CliRunner().invoke(
        app, ["calibrate", "board", "-o", str(output), "--set", "square=0.04", "--set", "marker=0.03"]
    )
    assert done.exit_code == 0 and "320 x 240 mm" in done.output, done.output
    picture = cv2.imread(str(output), cv2.IMREAD_GRAYSCALE)
    assert picture is not None and picture.shape[1] / 300 * 25.4 == pytest.approx(320, abs=0.5)
    assert yaml.safe_load(output.with_suffix(".yaml").read_text())["square"] == 0.04
