"""Pairs of picture and pose: taken by a person from the live robot, or from recordings, where the arm stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from real_robot.bridge.robot import TopicRobot
from real_robot.calibration.arm_pose import PoseReader
from real_robot.calibration.board import BoardConfig, BoardFinder
from real_robot.calibration.pairs import write_board, write_shot
from real_robot.calibration.transforms import angle_between
from real_robot.contract.contract import RobotContract
from real_robot.transports.base import Transport, TransportError
from real_robot.types import RobotObservation

Say = Callable[[str], None]
STILL_METERS, STILL_DEGREES = 0.001, 0.2  # that a standing arm may move between two looks
LOOK = 0.4  # seconds between the two looks
BAG_RATE = 2.5  # looks a second at a recording
NEW_DEGREES, NEW_METERS = 3.0, 0.02  # that a pose of a recording must differ from the last one taken
PATIENCE = 5.0  # seconds for a picture and a pose to come together


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
    from real_robot.bridge.bags import read_frames

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
