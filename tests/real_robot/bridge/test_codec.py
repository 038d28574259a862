"""Numbers out of messages and into them, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from real_robot.bridge.codec import (
    axis_angles_near,
    check_frame,
    decode_image,
    read_action,
    read_state,
    to_axis_angle,
    to_quaternion,
    write_action,
    write_goal,
)
from real_robot.contract.channels import ActionSink, StateSource
from real_robot.transports.action_types import FollowJointTrajectoryGoal, GripperCommandGoal
from real_robot.transports.messages import (
    Bool,
    Float64MultiArray,
    Image,
    JointState,
    JointTrajectory,
    MessageError,
    PoseStamped,
    TwistStamped,
    WrenchStamped,
)

NONE = np.zeros(0)
ACTION = np.array([0.1, -0.2, 0.3, 0.4, 0.5, -0.6, 1.0], np.float32)


def joints(**change: object) -> JointState:
    values = {"name": ("c", "a", "b"), "position": np.array([3.0, 1.0, 2.0]), "velocity": NONE, "effort": NONE}
    return JointState(**values | change)  # type: ignore[arg-type]


def test_joints_are_taken_by_name() -> None:
    source = StateSource(topic="/j", type="sensor_msgs/JointState", joints=("a", "c"), convert={"scale": 10.0})
    assert read_state(source, joints()).tolist() == [10.0, 30.0]


@pytest.mark.parametrize(
    ("source", "message", "reason"),
    [
        ({"joints": ("a", "z")}, joints(), "no value of joint z"),
        ({"joints": ("a",)}, joints(position=np.array([0.0, np.nan, 0.0])), "NaN"),
    ],
)
def test_joint_messages_that_lack_something_are_refused(source: dict, message: JointState, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        read_state(StateSource(topic="/j", type="sensor_msgs/JointState", **source), message)


def test_a_pose_becomes_position_and_axis_angle() -> None:
    source = StateSource(topic="/p", type="geometry_msgs/PoseStamped", parts=("position", "axis_angle"))
    half = math.radians(90) / 2
    pose = PoseStamped(position=np.array([1.0, 2.0, 3.0]), orientation=np.array([0, 0, math.sin(half), math.cos(half)]))
    np.testing.assert_allclose(read_state(source, pose), [1, 2, 3, 0, 0, math.pi / 2], atol=1e-6)
    with pytest.raises(MessageError, match="no unit quaternion"):
        read_state(source, PoseStamped(position=np.zeros(3), orientation=np.zeros(4)))
    with pytest.raises(MessageError, match="no unit quaternion"):
        read_state(source, PoseStamped(position=np.zeros(3), orientation=np.array([0, 0, 0, 1.2])))


def test_a_state_is_near_the_axis_angle_that_the_contract_names_and_zero_elsewhere() -> None:
    near = {"type": "geometry_msgs/PoseStamped", "axis_angle_near": (3.0, 0, 0), "convert": {"scale": 2.0}}
    source = StateSource(topic="/p", parts=("position", "quaternion", "axis_angle"), **near)
    assert axis_angles_near(source).tolist() == [0] * 7 + [6, 0, 0]
    assert axis_angles_near(StateSource(topic="/j", type="sensor_msgs/JointState", joints=("a",))).tolist() == [0]


def test_the_smallest_picture_has_one_pixel() -> None:
    def gray(height: int, data: bytes) -> Image:
        return Image(height=height, width=1, encoding="mono8", step=1, data=data)

    assert decode_image(gray(1, b"\x07")).tolist() == [[[7, 7, 7]]]
    with pytest.raises(MessageError, match="image of 0 x 1; each side is 1 to"):
        decode_image(gray(0, b""))


@pytest.mark.parametrize("angle", [3.0, 3.14, 3.1416, 3.15, 3.3])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_gripper_that_points_down_has_no_jump(angle: float, sign: int) -> None:
    """Angles on both sides of pi, from either of the two quaternions of the rotation."""
    vector = np.array([angle, 0.05, -0.02])
    back = to_axis_angle(sign * to_quaternion(vector), near=np.array([math.pi, 0, 0]))
    np.testing.assert_allclose(back, vector, atol=1e-9)


def test_near_zero_the_small_rotation_is_meant() -> None:
    np.testing.assert_allclose(to_axis_angle(-to_quaternion(np.array([0, 0.3, 0])), np.zeros(3)), [0, 0.3, 0])
    assert to_axis_angle(np.array([0, 0, 0, 1.0]), np.zeros(3)).tolist() == [0, 0, 0]


def test_a_wrench_is_force_then_torque() -> None:
    source = StateSource(topic="/ft/wrench", type="geometry_msgs/WrenchStamped", convert={"scale": 0.5})
    message = WrenchStamped(force=np.array([2.0, -4.0, 6.0]), torque=np.array([0.0, 1.0, -1.0]))
    assert read_state(source, message).tolist() == [1.0, -2.0, 3.0, 0.0, 0.5, -0.5]
    assert source.names == tuple(f"ft.wrench.{name}" for name in ("fx", "fy", "fz", "tx", "ty", "tz"))
    with pytest.raises(MessageError, match=r"NaN or infinity in ft.wrench.ty"):
        read_state(source, WrenchStamped(force=np.zeros(3), torque=np.array([0.0, np.nan, 0.0])))


def test_a_float_array_must_have_its_size() -> None:
    source = StateSource(
        topic="/f", type="std_msgs/Float64MultiArray", size=2, align={"timeline": "receive"}, convert={"offset": (1, 2)}
    )
    assert read_state(source, Float64MultiArray(data=np.array([5.0, 6.0]))).tolist() == [6.0, 8.0]
    with pytest.raises(MessageError, match="3 numbers, the contract says 2"):
        read_state(source, Float64MultiArray(data=np.zeros(3)))


def test_frames_are_compared() -> None:
    source = StateSource(topic="/p", type="geometry_msgs/PoseStamped", frame="base")
    check_frame(source, PoseStamped(frame_id="/base", position=np.zeros(3), orientation=np.zeros(4)))
    with pytest.raises(MessageError, match="frame 'tool', expected 'base'"):
        check_frame(source, PoseStamped(frame_id="tool", position=np.zeros(3), orientation=np.zeros(4)))


def test_a_twist_is_scaled_and_stamped() -> None:
    sink = ActionSink(
        topic="/t",
        type="geometry_msgs/TwistStamped",
        indices=(0, 1, 2, 3, 4, 5),
        frame="base",
        convert={"scale": (2, 2, 2, 10, 10, 10)},
    )
    message = write_action(sink, ACTION, stamp=42)
    assert isinstance(message, TwistStamped) and (message.stamp, message.frame_id) == (42, "base")
    np.testing.assert_allclose(message.linear, [0.2, -0.4, 0.6], rtol=1e-6)
    np.testing.assert_allclose(message.angular, [4, 5, -6], rtol=1e-6)


def test_a_trajectory_has_one_point_a_while_ahead() -> None:
    names = ("a", "b")
    sink = ActionSink(
        topic="/t", type="trajectory_msgs/JointTrajectory", indices=(1, 0), joints=names, time_from_start=0.2
    )
    message = write_action(sink, ACTION, stamp=1)
    assert isinstance(message, JointTrajectory) and message.joint_names == names and message.times == (200_000_000,)
    np.testing.assert_allclose(message.positions, [[-0.2, 0.1]], rtol=1e-6)


@pytest.mark.parametrize(
    "sink",
    [
        {"type": "geometry_msgs/TwistStamped", "indices": (5, 4, 3, 2, 1, 0), "convert": {"scale": 4, "offset": 1}},
        {"type": "geometry_msgs/PoseStamped", "indices": (0, 1, 2, 3, 4, 5)},
        {"type": "trajectory_msgs/JointTrajectory", "indices": (1, 0), "joints": ("a", "b")},
        {"type": "sensor_msgs/JointState", "indices": (1, 0), "joints": ("a", "b"), "convert": {"scale": (2, 5)}},
        {"type": "control_msgs/JointJog", "indices": (1, 0), "joints": ("a", "b"), "convert": {"scale": 3}},
        {"type": "std_msgs/Float64MultiArray", "indices": (2, 3, 4)},
        {"type": "std_msgs/Bool", "indices": (6,)},
    ],
    ids=lambda s: s["type"].split("/")[1],
)
def test_a_recorded_command_reads_back_as_its_action(sink: dict) -> None:
    sink = ActionSink(topic="/t", **sink)
    back = read_action(sink, write_action(sink, ACTION, stamp=1))
    np.testing.assert_allclose(back, ACTION[list(sink.indices)], rtol=1e-5)


def test_a_pose_command_and_a_gripper_switch() -> None:
    sink = ActionSink(topic="/t", type="geometry_msgs/PoseStamped", indices=(0, 1, 2, 3, 4, 5))
    message = write_action(sink, ACTION, stamp=1)
    assert isinstance(message, PoseStamped)
    np.testing.assert_allclose(to_axis_angle(message.orientation, np.zeros(3)), ACTION[3:6], rtol=1e-6)
    switch = ActionSink(topic="/g", type="std_msgs/Bool", indices=(6,), threshold=0.5)
    closed, opened = write_action(switch, ACTION, 0), write_action(switch, -ACTION, 0)
    assert isinstance(closed, Bool) and closed.data and isinstance(opened, Bool) and not opened.data


@pytest.mark.parametrize(
    ("convert", "threshold"),
    [({}, 0.0), ({"scale": -1}, 0.0), ({"scale": -2, "offset": 1}, 0.4), ({}, 5.0), ({}, -3.0)],
)
def test_a_switch_that_is_read_is_sent_on_as_it_was(convert: dict, threshold: float) -> None:
    """By the guard, and by a policy that has learned from a recording: one that is turned round does not turn back."""
    switch = ActionSink(topic="/g", type="std_msgs/Bool", indices=(0,), convert=convert, threshold=threshold)
    for is_on in (True, False):
        assert write_action(switch, read_action(switch, Bool(data=is_on)), stamp=0) == Bool(data=is_on)


def test_a_switch_is_on_above_its_threshold_and_reads_as_one_or_minus_one() -> None:
    switch = ActionSink(topic="/g", type="std_msgs/Bool", indices=(0,), threshold=0.5)
    assert [write_action(switch, np.array([x]), stamp=0).data for x in (0.5, 0.51)] == [False, True]
    assert [read_action(switch, Bool(data=is_on)).tolist() for is_on in (True, False)] == [[1.0], [-1.0]]


def test_goals_have_the_contracts_numbers() -> None:
    gripper = ActionSink(
        topic="/g", type="control_msgs/GripperCommand", indices=(6,), convert={"scale": 0.04}, goal={"max_effort": 20}
    )
    goal = write_goal(gripper, ACTION)
    assert isinstance(goal, GripperCommandGoal) and goal.max_effort == 20
    np.testing.assert_allclose(goal.numbers, ACTION[6:7] * 0.04, rtol=1e-6)
    arm = ActionSink(topic="/a", type="control_msgs/FollowJointTrajectory", indices=(1, 0), joints=("a", "b"))
    trajectory = write_goal(arm, ACTION)
    assert isinstance(trajectory, FollowJointTrajectoryGoal)
    assert (trajectory.trajectory.stamp, trajectory.trajectory.times) == (0, (100_000_000,)), "0: as soon as it comes"
    np.testing.assert_allclose(trajectory.numbers, [-0.2, 0.1], rtol=1e-6)
    parallel = ActionSink(
        topic="/p", type="control_msgs/ParallelGripperCommand", indices=(6,), joints=("f",), goal={"max_effort": 5}
    )
    command = write_goal(parallel, ACTION).tree()["command"]
    assert command["name"] == ["f"] and command["position"].tolist() == [1.0] and command["effort"].tolist() == [5.0]
    switch = ActionSink(topic="/s", type="std_srvs/SetBool", indices=(6,), threshold=0.5)
    assert [write_goal(switch, a).data for a in (ACTION, -ACTION)] == [True, False]
