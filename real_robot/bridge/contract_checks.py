"""Whether a contract's limits mean what its messages mean: speeds or set-points, in which unit, of which numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vla_rl.config import ConfigError

if TYPE_CHECKING:
    from real_robot.bridge.contract import ActionSink, RobotContract

KINDS = {
    **dict.fromkeys(("geometry_msgs/TwistStamped", "control_msgs/JointJog"), "velocity"),
    **dict.fromkeys(("geometry_msgs/PoseStamped", "trajectory_msgs/JointTrajectory"), "position"),
    **dict.fromkeys(("control_msgs/FollowJointTrajectory", "control_msgs/GripperCommand"), "position"),
    "control_msgs/ParallelGripperCommand": "position",
}  # of what these messages hold; the others hold what their driver takes them for


def check_limits(contract: RobotContract) -> None:
    """
    Raises:
        ConfigError: a speed under the limits of a set-point, or the reverse: a hold would move the robot; a number of
            the state or the action that is not there; or a workspace in another unit, or direction, than its commands.
    """
    _check_numbers(contract)
    for sink in contract.action:
        for place, number in enumerate(sink.indices):
            _check_kind(contract, sink, place, number)
    _check_workspace(contract)


def _check_numbers(contract: RobotContract) -> None:
    size, box = contract.observation.state_dim, contract.safety.workspace
    read = [(f"safety.dimensions: {d.name}: state", d.state) for d in contract.safety.dimensions if d.state is not None]
    read += [("safety.workspace.state", number) for number in (box.state if box else ())]
    asked = [("execution.unblended", number) for number in contract.execution.unblended]
    for what, numbers, most in (("observation.state", read, size), ("the action", asked, contract.action_dim)):
        for name, number in numbers:
            if not 0 <= number < most:
                there = f"the numbers 0 to {most - 1}" if most else "no numbers"
                raise ConfigError(f"{name}: {number}; {what} has {there}")


def _check_kind(contract: RobotContract, sink: ActionSink, place: int, number: int) -> None:
    limits = contract.safety.dimensions[number]
    kind = KINDS.get(sink.type, limits.kind)
    if limits.kind != kind:
        does = "go on at its last speed" if kind == "velocity" else "be sent to 0"
        raise ConfigError(
            f"safety.dimensions: {limits.name}: kind {limits.kind}, but {sink.topic} ({sink.type}) takes it for a "
            f"{kind}: a robot that is to hold would {does}; set kind: {kind}"
        )
    _, offset = sink.convert.of(place)
    if limits.kind == "velocity" and offset:
        raise ConfigError(
            f"action: {sink.topic}: convert.offset: {offset:g} for {limits.name}, a velocity: a robot that is to hold, "
            "at 0, would be told to move; leave it out"
        )


def _check_workspace(contract: RobotContract) -> None:
    box = contract.safety.workspace
    if box is None or box.commands is None:
        return
    told = {number: (sink, place) for sink in contract.action for place, number in enumerate(sink.indices)}
    seen = [(source, place) for source in contract.observation.state for place in range(source.num_values)]
    for number, measured in zip(box.commands, box.state, strict=True):
        (sink, there), (source, here), limits = told[number], seen[measured], contract.safety.dimensions[number]
        (scale, offset), (factor, shift) = sink.convert.of(there), source.convert.of(here)
        frames = [name.lstrip("/") for name in (sink.frame, source.frame)]
        if all(frames) and frames[0] != frames[1]:
            raise ConfigError(
                f"safety.workspace.commands: {limits.name} is sent in the frame {sink.frame!r} ({sink.topic}), and "
                f"measured in {source.frame!r} ({source.topic}): the box needs both in the same frame"
            )
        if limits.kind == "velocity":
            if not scale * factor > 0:
                raise ConfigError(
                    f"safety.workspace.commands: {limits.name} is sent with convert.scale {scale:g}, and its place "
                    f"measured with {factor:g}: above 0 it would move down, so the box would be watched on the wrong "
                    "side; give both the same sign, or leave commands out"
                )
            continue
        if not np.allclose([scale * factor, offset * factor + shift], [1, 0], atol=1e-6):
            raise ConfigError(
                f"safety.workspace.commands: {limits.name} is sent with convert {scale:g} * x + {offset:g}, and "
                f"measured with {factor:g} * x + {shift:g}: the box needs both in the same unit"
            )
