"""The rclpy transport's conversions and goals, with stand-ins for rclpy's objects: a real rclpy is not at hand."""

from __future__ import annotations

import array
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_messages import EXAMPLES

pytest.importorskip("rosbags", reason="rosbags is not installed: pip install '.[ros]'")

from rosbags.interfaces import Nodetype

from real_robot.transports.action_types import (
    ACTIONS,
    FollowJointTrajectoryGoal,
    GripperCommandGoal,
    GripperCommandResult,
    SetBoolRequest,
)
from real_robot.transports.base import TransportError
from real_robot.transports.messages import JointTrajectory, Message, MessageError
from real_robot.transports.rclpy_node import RclpyAction, RclpyConfig, fill, native_class, tree_of
from real_robot.transports.ros.typestore import ros2_name, store_of

CODES = {"float64": "d", "float32": "f", "uint8": "B", "int32": "i", "uint32": "I", "uint16": "H"}
TRAJECTORY = JointTrajectory(joint_names=("a",), positions=np.array([[0.5]]), times=(10**8,))


def generated(name: str) -> type:
    """A class like rosidl_generator_py's of that type: its fields, their types' names, and defaults of their kinds."""
    package, kind, short = name.split("/")
    module = sys.modules.setdefault(f"{package}.{kind}", types.ModuleType(f"{package}.{kind}"))
    if not hasattr(module, short):
        _, fields = store_of("jazzy").fielddefs[name]
        named = {field: _named(node) for field, node in fields if field != "structure_needs_at_least_one_member"}

        def make(self: Any) -> None:
            for field, node in fields:
                if field in named:
                    setattr(self, field, _default(node))

        members = {"__init__": make, "get_fields_and_field_types": classmethod(lambda cls: dict(named))}
        setattr(module, short, type(short, (), members))
    return getattr(module, short)


def _named(node: Any) -> str:
    kind, detail = node
    if kind == Nodetype.NAME:
        generated(detail)
        return detail.replace("/msg/", "/")
    if kind == Nodetype.BASE:
        return {"float64": "double", "bool": "boolean"}.get(detail[0], detail[0])
    return f"{_named(detail[0])}[{detail[1]}]" if kind == Nodetype.ARRAY else f"sequence<{_named(detail[0])}>"


def _default(node: Any) -> Any:
    kind, detail = node
    if kind == Nodetype.NAME:
        return generated(detail)()
    if kind == Nodetype.BASE:
        return {"string": "", "bool": False}.get(detail[0], 0.0 if "float" in detail[0] else 0)
    (inner_kind, inner), size = detail
    if kind == Nodetype.ARRAY:
        return np.zeros(size, inner[0])
    return [] if inner_kind == Nodetype.NAME or inner[0] == "string" else array.array(CODES[inner[0]])


@pytest.fixture(autouse=True)
def packages() -> Any:
    """Message packages that are made up here are gone afterwards."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.rpartition(".")[2] in ("msg", "action", "srv"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "message",
    [
        *EXAMPLES,
        GripperCommandGoal(position=0.04, max_effort=3.0),
        SetBoolRequest(data=True),
        FollowJointTrajectoryGoal(trajectory=TRAJECTORY, goal_time_tolerance=5),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_message_goes_into_rclpys_and_back(message: Message) -> None:
    native = fill(generated(ros2_name(type(message)))(), message.tree())
    np.testing.assert_equal(type(message).from_tree(tree_of(native)).tree(), message.tree())


def test_what_rclpy_gives_is_read_and_checked() -> None:
    """Numbers come as array.array."""
    native = generated("sensor_msgs/msg/JointState")()
    native.name, native.position = ["a", "b"], array.array("d", [1.0, 2.0])
    from real_robot.transports.messages import JointState

    assert JointState.from_tree(tree_of(native)).position.tolist() == [1.0, 2.0]
    native.position.append(3.0)
    with pytest.raises(MessageError, match="3 values of position for 2 names"):
        JointState.from_tree(tree_of(native))


def test_what_is_missing_is_said() -> None:
    with pytest.raises(TransportError, match=r"apt install ros-.*-no-such-msgs"):
        native_class("no_such_msgs/Thing")
    if importlib.util.find_spec("rclpy") is None:
        with pytest.raises(TransportError, match=r"Source a ROS 2 .* the transport ros2"):
            RclpyConfig().open()


# --- goals ---------------------------------------------------------------------------------------------


class Future:
    """Of rclpy's: callbacks that are called with it once there is a result."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []
        self.value: Any = None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def result(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def give(self, value: Any) -> None:
        self.value = value
        for callback in self.callbacks:
            callback(self)


class Handle:
    """A goal handle of rclpy's."""

    def __init__(self, accepted: bool = True) -> None:
        self.accepted, self.ended, self.canceled = accepted, Future(), 0

    def get_result_async(self) -> Future:
        return self.ended

    def cancel_goal_async(self) -> Future:
        self.canceled += 1
        return Future()


class Client:
    """An ActionClient of rclpy's."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any, Future]] = []

    def server_is_ready(self) -> bool:
        return True

    def send_goal_async(self, goal: Any, feedback_callback: Any) -> Future:
        self.asked.append((goal, feedback_callback, Future()))
        return self.asked[-1][2]


def gripper() -> tuple[Client, RclpyAction, Callable[..., Any]]:
    goal, result = (generated(f"control_msgs/action/GripperCommand_{part}") for part in ("Goal", "Result"))
    kind = type("GripperCommand", (), {"Goal": goal, "Result": result})

    def ended(status: int, **values: Any) -> Any:
        return types.SimpleNamespace(status=status, result=fill(result(), values))

    client = Client()
    return client, RclpyAction(client, kind, ACTIONS["control_msgs/GripperCommand"]), ended


def test_a_goal_is_accepted_followed_and_ends() -> None:
    client, action, ended = gripper()
    goal = action.send(GripperCommandGoal(position=0.04, max_effort=3.0))
    ((native, feedback, future),) = client.asked
    assert (native.command.position, native.command.max_effort, goal.status) == (0.04, 3.0, "pending")
    handle = Handle()
    future.give(handle)
    assert goal.status == "active"
    here = fill(generated("control_msgs/action/GripperCommand_Result")(), {"position": 0.01})
    feedback(types.SimpleNamespace(feedback=here))
    assert isinstance(goal.feedback, GripperCommandResult) and goal.feedback.position == 0.01
    action.cancel(goal)
    assert handle.canceled == 1
    handle.ended.give(ended(6, stalled=True))
    assert goal.status == "aborted" and isinstance(goal.result, GripperCommandResult) and goal.result.stalled


def test_a_goal_that_is_canceled_before_it_is_accepted_is_canceled_then() -> None:
    client, action, ended = gripper()
    goal = action.send(GripperCommandGoal(position=0.04))
    action.cancel(goal)
    handle = Handle()
    client.asked[0][2].give(handle)
    assert handle.canceled == 1
    handle.ended.give(ended(5))
    assert goal.status == "canceled"


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [(Handle(accepted=False), "rejected", ""), (RuntimeError("no context"), "lost", "no context")],
    ids=["rejected", "failed"],
)
def test_a_goal_that_is_not_accepted_says_why(answer: Any, status: str, text: str) -> None:
    client, action, _ = gripper()
    goal = action.send(GripperCommandGoal(position=0.04))
    client.asked[0][2].give(answer)
    assert (goal.status, goal.text) == (status, text)
