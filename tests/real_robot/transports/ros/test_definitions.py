"""Definitions of control_msgs, std_srvs and actions: their ROS 1 checksums, their bytes on ROS 2's wire."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from processes import ROOT, missing_ros

from real_robot.transports.action_types import (
    ACTIONS,
    FollowJointTrajectoryFeedback,
    FollowJointTrajectoryGoal,
    FollowJointTrajectoryResult,
    GripperCommandGoal,
    GripperCommandResult,
    ParallelGripperCommandGoal,
    SetBoolRequest,
    SetBoolResponse,
    TriggerRequest,
    TriggerResponse,
)
from real_robot.transports.messages import JointJog, JointState, JointTrajectory, Message, MessageError

pytest.importorskip("rosbags", reason="rosbags is not installed: pip install '.[ros]'")
pytest.importorskip("cyclonedds", reason="cyclonedds is not installed: pip install '.[ros]'")

import dds_types as t

from real_robot.transports.ros.typestore import decode_cdr, encode_cdr, store_of

# As published by control_msgs: what rosserial's and other generated clients of these packages carry.
CHECKSUMS = {
    "control_msgs/GripperCommandAction": "950b2a6ebe831f5d4f4ceaba3d8be01e",
    "control_msgs/FollowJointTrajectoryAction": "bc4f9b743838566551c0390c65f1a248",
    "control_msgs/JointJog": "1685da700c8c2e1254afc92a5fb89c96",
}
# Of control_msgs 4.8.0 (Humble), 5.8.0 (Jazzy) and 6.8.0 (Kilted), by rosidl's generator.
GOAL_HASH = "RIHS01_8a9060704b269608f5a340934cc26e66869dd14bdac29e2e7fd9ec8b9882d205"
FEEDBACK_HASHES = {
    "humble": "RIHS01_3fd0aaecf71725121ae1ff7f01098a5e0da581e672be18a6b2c286cb43d96b49",
    "jazzy": "RIHS01_3fd0aaecf71725121ae1ff7f01098a5e0da581e672be18a6b2c286cb43d96b49",
    "kilted": "RIHS01_0bb018d181bdc6384dd75365480967bd1d6eaee4ef3dd597c64cd0b8bdc10867",
}
TRAJECTORY = JointTrajectory(
    stamp=0, frame_id="base", joint_names=("a", "b"), positions=np.array([[0.5, -1.0]]), times=(200_000_000,)
)
ARM_GOAL = FollowJointTrajectoryGoal(trajectory=TRAJECTORY, goal_time_tolerance=1_500_000_000)
NUMBER = {"client": 0xFEDC_BA98_7654_3210, "number": -5}
ID = list(range(16))


def by_hand(message: Message) -> Any:
    """The same for cyclonedds' encoder, without a service's header."""
    if isinstance(message, GripperCommandGoal):
        return t.GripperGoal(t.GripperCommand(message.position, message.max_effort))
    if isinstance(message, GripperCommandResult):
        return t.GripperResult(message.position, message.effort, message.stalled, message.reached_goal)
    if isinstance(message, ParallelGripperCommandGoal):
        return t.ParallelGoal(t.JointState(t.Header(), ["finger"], [0.04], [], [12.5]))
    if isinstance(message, FollowJointTrajectoryResult):
        return t.ArmResult(message.error_code, message.error_string)
    if isinstance(message, JointJog):
        return t.JointJog(t.Header(t.Time(5, 7), "base"), ["a"], [], [0.5], 0.1)
    point = t.Point([0.5, -1.0], time_from_start=t.Duration(0, 200_000_000))
    multi = t.MultiTrajectory(t.Header(), [], [])
    header = t.Header(t.Time(), "base")
    trajectory = t.Trajectory(header, ["a", "b"], [point])
    if message is TRAJECTORY:
        return trajectory
    assert message is ARM_GOAL
    return t.ArmGoal(trajectory, multi, [], [], [], [], t.Duration(1, 500_000_000))


@pytest.mark.parametrize(
    "message",
    [
        GripperCommandGoal(position=0.04, max_effort=12.5),
        GripperCommandResult(position=0.01, effort=3.0, stalled=True, reached_goal=False),
        ParallelGripperCommandGoal(
            command=JointState(
                name=("finger",), position=np.array([0.04]), velocity=np.zeros(0), effort=np.array([12.5])
            )
        ),
        FollowJointTrajectoryResult(error_code=-4, error_string="path"),
        ARM_GOAL,
        TRAJECTORY,  # joint_trajectory_controller's topic
        JointJog(
            **{"stamp": 5_000_000_007, "frame_id": "base", "joint_names": ("a",)},
            **{"velocities": np.array([0.5]), "displacements": np.zeros(0), "duration": 0.1},
        ),  # MoveIt Servo's delta_joint_cmds
    ],
    ids=lambda m: type(m).__name__,
)
def test_the_bytes_are_those_of_cyclonedds_and_come_back(message: Message) -> None:
    ours = encode_cdr(message, "humble")
    assert by_hand(message).serialize(use_version_2=False) == ours
    np.testing.assert_equal(decode_cdr(ours, type(message), "humble").tree(), message.tree())


@pytest.mark.parametrize("distro", ["humble", "iron", "jazzy", "kilted"])
def test_an_envelope_is_aligned_as_if_the_header_were_a_part_of_it(distro: str) -> None:
    """A request's 16 bytes of header come first; what follows is as if it began the message."""
    goal = GripperCommandGoal(position=0.04, max_effort=12.5)
    envelope = ACTIONS["control_msgs/GripperCommand"].ros2("SendGoal_Request")
    ours = encode_cdr(envelope(fields={"goal_id": {"uuid": bytes(ID)}, "goal": goal.tree()}), distro)
    whole = t.GripperSend(**NUMBER, goal_id=t.Uuid(ID), goal=by_hand(goal)).serialize(use_version_2=False)
    assert whole[:4] + whole[20:] == ours


@pytest.mark.parametrize(
    ("message", "hand"),
    [
        (TriggerRequest(), t.TriggerRequest(**NUMBER, structure_needs_at_least_one_member=0)),
        (TriggerResponse(success=True, message="well"), t.TriggerResponse(**NUMBER, success=True, message="well")),
        (SetBoolRequest(data=True), t.SetBoolRequest(**NUMBER, data=True)),
        (SetBoolResponse(success=False, message=""), t.SetBoolResponse(**NUMBER, success=False, message="")),
    ],
    ids=lambda m: type(m).__name__,
)
def test_services(message: Message, hand: Any) -> None:
    whole = hand.serialize(use_version_2=False)
    assert whole[:4] + whole[20:] == encode_cdr(message, "humble")
    assert decode_cdr(encode_cdr(message, "humble"), type(message), "humble") == message


def test_feedback_is_read() -> None:
    none, multi = t.Point(), t.MultiPoint()
    hand = t.ArmFeedback(t.Header(), ["a"], t.Point([1.0]), t.Point([0.9]), none, [], multi, multi, multi)
    feedback = decode_cdr(hand.serialize(use_version_2=False), FollowJointTrajectoryFeedback, "humble")
    assert feedback.joint_names == ("a",) and feedback.desired.tolist() == [1.0] and feedback.actual.tolist() == [0.9]
    with pytest.raises(MessageError):
        decode_cdr(hand.serialize(use_version_2=False)[:-9], FollowJointTrajectoryFeedback, "humble")


@pytest.mark.parametrize("distro", FEEDBACK_HASHES)
def test_ros_2s_hashes_are_those_of_the_published_packages(distro: str) -> None:
    name, store = "control_msgs/action/FollowJointTrajectory", store_of(distro)
    assert store.hash_rihs01(f"{name}_Goal") == GOAL_HASH
    assert store.hash_rihs01(f"{name}_Feedback") == FEEDBACK_HASHES[distro]


def test_ros_1s_checksums_are_those_of_the_published_packages() -> None:
    if reason := missing_ros():
        pytest.skip(reason)
    code = (
        "from real_robot.transports.ros.install import enable; enable(); "
        "from real_robot.transports.ros.definitions import ros1_classes; "
        "import json; print(json.dumps({n: k._md5sum for n, k in ros1_classes().items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    assert {name: found[name] for name in CHECKSUMS} == CHECKSUMS
