"""Pairs of picture and gripper pose, where the arm stands still: from the live robot, or from recordings."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from real_robot.bridge.bags import read_frames
from real_robot.bridge.codec import encode_image
from real_robot.bridge.robot import TopicRobot
from real_robot.calibration.hand_eye import angle_between, pose_of
from real_robot.calibration.intrinsics import BoardConfig, BoardFinder
from real_robot.contract.channels import AlignConfig, ConversionConfig, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import measured_joints
from real_robot.kinematics.arm_model import ArmModel
from real_robot.transports.base import QosConfig, Transport, TransportError
from real_robot.types import RobotObservation
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError, dump_yaml, read_yaml, validate

MAX_PAIRS = 1000
POSE = "geometry_msgs/PoseStamped"
Say = Callable[[str], None]
STILL_METERS, STILL_DEGREES = 0.001, 0.2  # that a standing arm may move between two looks
LOOK = 0.4  # seconds between the two looks
BAG_RATE = 2.5  # looks a second at a recording
NEW_DEGREES, NEW_METERS = 3.0, 0.02  # that a pose of a recording must differ from the last one taken
PATIENCE = 5.0  # seconds for a picture and a pose to come together


@dataclass(frozen=True)
class Shot:
    """A picture, uint8 (height, width, 3) RGB, and the gripper's pose in the base's frame (4, 4)."""

    name: str
    picture: np.ndarray
    gripper: np.ndarray


def write_board(folder: Path, board: BoardConfig) -> None:
    """Say which board the folder's pictures show.

    Raises:
        ConfigError: the folder's pictures show another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "board.yaml").exists() and read_board(folder) != board:
        raise ConfigError(f"{folder}: board.yaml names another board than is asked for; take another folder")
    write_text_atomic(folder / "board.yaml", dump_yaml(board))


def read_board(folder: Path) -> BoardConfig:
    """The board that the folder's pictures show."""
    return validate(BoardConfig, read_yaml(folder / "board.yaml"), prefix="board")


def write_shot(folder: Path, picture: np.ndarray, gripper: np.ndarray) -> Path:
    """Add a pair; the pose is written last, so that a pair is whole or not there. Returns its file."""
    number = max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()), default=-1) + 1
    path = folder / f"{number:04d}.json"
    path.with_suffix(".png").write_bytes(encode_image(picture, "png"))
    write_text_atomic(path, json.dumps({"gripper": gripper.tolist()}))
    return path


def read_shots(folder: Path) -> Iterator[Shot]:
    """The folder's pairs, in their order.

    Raises:
        ConfigError: none, too many, or a file that cannot be read.
    """
    paths = sorted(folder.glob("*.json"))
    if not 0 < len(paths) <= MAX_PAIRS:
        raise ConfigError(f"{folder}: {len(paths)} pairs; 1 to {MAX_PAIRS} (`vla-rl calibrate collect` takes them)")
    for path in paths:
        try:
            gripper = np.array(json.loads(path.read_text())["gripper"], np.float64)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: no pose: {error}") from error
        picture = cv2.imread(str(path.with_suffix(".png")))
        if gripper.shape != (4, 4) or not np.isfinite(gripper).all() or picture is None:
            raise ConfigError(f"{path}: needs a pose of 4 x 4 finite numbers and {path.stem}.png beside it")
        yield Shot(path.stem, cv2.cvtColor(picture, cv2.COLOR_BGR2RGB), gripper)


@dataclass(frozen=True)
class PoseReader:
    """A contract to listen by, without actions, and the gripper's pose (4, 4) of the state (S,) that it gives."""

    contract: RobotContract
    pose: Callable[[np.ndarray], np.ndarray]


def pose_reader(contract: RobotContract, camera: str, topic: str = "", link: str = "") -> PoseReader:
    """What to listen to for the gripper's pose, and for a camera in its own size.

    Args:
        camera: its name in the contract, or "" for none.
        topic: a PoseStamped of the gripper in the base's frame; empty: the contract's own, or `link`.
        link: the link of the robot's file (`model`) whose pose is computed from joints.

    Raises:
        ConfigError: no such camera, or nothing that gives a pose.
    """
    observation = contract.observation
    if camera and camera not in observation.images:
        raise ConfigError(f"--camera: got {camera!r}; {contract.name} has: {', '.join(observation.images)}")
    images = {camera: observation.images[camera].model_copy(update={"size": None})} if camera else {}
    if link:
        state, pose = observation.state, _from_joints(contract, link)
    else:
        source = _pose_source(contract, topic)
        state, pose = (source,), lambda values: pose_of(values[:3], values[3:7])
    changed = observation.model_copy(
        update={"images": images, "state": state, "reference": "", "instruction_topic": "", "max_age": 1.0}
    )
    return PoseReader(contract.model_copy(update={"observation": changed, "action": ()}), pose)


def _pose_source(contract: RobotContract, topic: str) -> StateSource:
    known = [s for s in contract.observation.state if s.type == POSE]
    if topic:
        known = [s for s in known if s.topic == topic] or [
            StateSource(
                topic=topic, type=POSE, qos=QosConfig(reliability="best_effort"), align=AlignConfig(tolerance=0.1)
            )
        ]
    if not known:
        raise ConfigError(
            f"{contract.name} reads no pose of the gripper: name its topic (--pose /tcp_pose), or give the contract a "
            "`model` (URDF) and name the gripper's link (--link tool0)"
        )
    # In the driver's meters, whatever the policy's units are.
    return known[0].model_copy(update={"parts": ("position", "quaternion"), "convert": ConversionConfig()})


def _from_joints(contract: RobotContract, link: str) -> Callable[[np.ndarray], np.ndarray]:
    if contract.model is None:
        raise ConfigError(f"--link: {contract.name} has no `model` (URDF or MJCF) to compute {link!r} with")
    arm = ArmModel(contract.model, Path(contract.model.file))
    number, measured = arm.link(link), measured_joints(contract, contract.model)
    if not measured:
        raise ConfigError(f"--link: none of {contract.name}'s state is a joint of {contract.model.file}")

    def pose(state: np.ndarray) -> np.ndarray:
        joints = arm.neutral.copy()
        for one in measured:
            joints[arm.index(one.joint)] = one.scale * float(state[one.number]) + one.offset
        made = np.eye(4)
        made[:3, :3], made[:3, 3] = arm.rotation(joints, number), arm.position(joints, number)
        return made

    return pose


class LiveArm:
    """A robot that is looked at, never commanded.

    Raises:
        TransportError: the robot cannot be reached.
    """

    def __init__(self, reader: PoseReader, transport: Transport) -> None:
        self._reader = reader
        self._robot = TopicRobot(reader.contract, transport)

    def look(self) -> tuple[RobotObservation, np.ndarray]:
        """An observation and the gripper's pose (4, 4).

        Raises:
            TransportError: they do not come together; the message says what is missing.
        """
        deadline = time.monotonic() + PATIENCE
        while (observation := self._robot.read()) is None:
            if time.monotonic() > deadline:
                missing = ", ".join(self._robot.missing()) or "picture and pose of one time"
                raise TransportError(f"nothing to take in {PATIENCE:.0f} s; missing: {missing} (see `vla-rl doctor`)")
            time.sleep(0.02)
        return observation, self._reader.pose(observation.state)

    def look_still(self) -> tuple[RobotObservation, np.ndarray] | None:
        """The same of an arm that stands; None where it moves."""
        _, before = self.look()
        time.sleep(LOOK)
        observation, pose = self.look()
        return (observation, pose) if is_still(before, pose) else None


def is_still(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two poses (4, 4) are as good as one."""
    meters, degrees = differ(first, second)
    return meters <= STILL_METERS and degrees <= STILL_DEGREES


def differ(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Meters and degrees between two poses."""
    return float(np.linalg.norm(first[:3, 3] - second[:3, 3])), float(np.degrees(angle_between(first, second)))


def collect_live(
    arm: LiveArm, camera: str, folder: Path, board: BoardConfig, ask: Callable[[str], str], say: Say
) -> int:
    """Take a pair each time that the person says so, until they end. Returns how many."""
    write_board(folder, board)
    finder, taken = BoardFinder(board), 0
    while not ask("Enter takes a pair, q ends: ").strip().lower().startswith("q"):
        looked = arm.look_still()
        if looked is None:
            say("not taken: the arm moves; let it stand")
            continue
        observation, pose = looked
        corners = finder.find(observation.images[camera])
        if corners is None:
            say("not taken: the board is not seen well enough; nearer, or with less glare")
            continue
        path = write_shot(folder, observation.images[camera], pose)
        taken += 1
        say(f"{path.stem}: {len(corners.ids)} corners; {taken} taken")
    return taken


def collect_bags(
    reader: PoseReader, camera: str, bags: Sequence[Path], folder: Path, board: BoardConfig, say: Say
) -> int:
    """Take a pair wherever a recording shows the board and an arm that stands, at a new pose. Returns how many."""
    write_board(folder, board)
    finder, taken = BoardFinder(board), 0
    contract = _for_bags(reader.contract, camera)
    last: np.ndarray | None = None
    for bag in bags:
        frames, _ = read_frames(contract, bag, say, picture_every=0.5 / BAG_RATE)
        poses = [reader.pose(state) for _, state, _ in frames]
        for index in range(1, len(frames)):
            pose = poses[index]
            if not is_still(poses[index - 1], pose) or (last is not None and not _is_new(last, pose)):
                continue
            picture = frames[index][0][camera]
            if finder.find(picture) is not None:
                write_shot(folder, picture, pose)
                last, taken = pose, taken + 1
    return taken


def _for_bags(contract: RobotContract, camera: str) -> RobotContract:
    """The contract with a picture that may be as old as the last look: while the arm stands that is no matter."""
    image = contract.observation.images[camera]
    align = image.align.model_copy(update={"strategy": "asof", "tolerance": 1 / BAG_RATE})
    images = {camera: image.model_copy(update={"align": align})}
    observation = contract.observation.model_copy(update={"images": images})
    return contract.model_copy(update={"observation": observation, "rate": BAG_RATE})


def _is_new(first: np.ndarray, second: np.ndarray) -> bool:
    meters, degrees = differ(first, second)
    return meters > NEW_METERS or degrees > NEW_DEGREES
