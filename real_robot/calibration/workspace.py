"""Workspace box from corners that a person moves the arm to: `safety.workspace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from real_robot.calibration.collect import POSE, LiveArm, Say
from real_robot.contract.channels import POSE_PARTS
from real_robot.contract.contract import RobotContract
from real_robot.contract.safety import Workspace
from vla_rl.config import ConfigError

MIN_CORNERS = 2
MIN_SIDE = 0.02  # meters that each side must have left


def collect_corners(arm: LiveArm, ask: Callable[[str], str], say: Say) -> list[np.ndarray]:
    """Where the gripper was, (3,) each, when the person said so, until they end."""
    corners: list[np.ndarray] = []
    while not ask("Enter takes a corner, q ends: ").strip().lower().startswith("q"):
        looked = arm.look_still()
        if looked is None:
            say("not taken: the arm moves; let it stand")
            continue
        corners.append(looked[1][:3, 3])
        say(f"{len(corners)}: " + ", ".join(f"{v:.3f}" for v in corners[-1]))
    return corners


def workspace_of(contract: RobotContract, corners: Sequence[np.ndarray], margin: float) -> Workspace:
    """The smallest box around the corners, less `margin` meters on each side.

    Raises:
        ConfigError: too few corners, a side that is too short, or a contract whose state has no position in meters.
    """
    if len(corners) < MIN_CORNERS:
        raise ConfigError(
            f"workspace: {len(corners)} corners; at least {MIN_CORNERS}, opposite ones, and the table's height"
        )
    state, seen = _position(contract, corners)
    low, high = np.min(seen, axis=0) + margin, np.max(seen, axis=0) - margin
    for axis, side in zip("xyz", high - low, strict=True):
        if side < MIN_SIDE:
            apart = max(side + 2 * margin, 0.0) * 100
            raise ConfigError(
                f"workspace: along {axis} the corners are {apart:.1f} cm apart, which is too little with a margin of "
                f"{margin * 100:g} cm on each side: go to corners that differ along {axis} too"
            )
    kept = contract.safety.workspace
    return Workspace(
        state=state,
        low=_rounded(low),
        high=_rounded(high),
        commands=_commands(contract),
        meters_per_unit=kept.meters_per_unit if kept is not None else _meters_per_unit(contract),
    )


def _rounded(corner: np.ndarray) -> tuple[float, float, float]:
    x, y, z = (round(float(v), 4) for v in corner)
    return x, y, z


def _position(contract: RobotContract, corners: Sequence[np.ndarray]) -> tuple[tuple[int, int, int], np.ndarray]:
    """Which numbers of the state are the gripper's position; and the corners (N, 3) as they would stand there."""
    at = 0
    for source in contract.observation.state:
        place = 0
        for part in source.parts if source.type == POSE else ():
            if part == "position":
                scale, offset = np.array([source.convert.of(place + axis) for axis in range(3)]).T
                if wrong := [float(one) for one in scale if abs(one) != 1]:
                    raise ConfigError(
                        f"workspace: {source.topic}: convert.scale: {wrong[0]:g} for a position: the box is in meters; "
                        "leave the position's scale at 1"
                    )
                return (at + place, at + place + 1, at + place + 2), np.array(corners) * scale + offset
            place += len(POSE_PARTS[part])
        at += source.num_values
    raise ConfigError(
        f"workspace: {contract.name}'s state has no position of the gripper, so that nothing could watch the box: read "
        "a pose (geometry_msgs/PoseStamped), or give the contract a `model` with boxes and planes"
    )


def _commands(contract: RobotContract) -> tuple[int, int, int] | None:
    """Which numbers of the action move the gripper along x, y, z; None for joint commands."""
    for sink in contract.action:
        if sink.type in ("geometry_msgs/TwistStamped", POSE):
            x, y, z = sink.indices[:3]
            return x, y, z
    return None


def _meters_per_unit(contract: RobotContract) -> float:
    """Meters a second of a command of 1, where the contract's own conversion says it."""
    for sink in contract.action:
        if sink.type == "geometry_msgs/TwistStamped":
            scale = sink.convert.scale
            return max(map(abs, scale[:3] if isinstance(scale, tuple) else (scale,))) or 1.0
    return 1.0
