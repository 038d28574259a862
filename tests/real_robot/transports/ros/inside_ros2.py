"""The rclpy transport on a real rclpy, and what is built for it; test_rclpy_graph.py runs this with ROS 2's Python."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import control_msgs.msg
import numpy as np
import pytest
import rclpy
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from std_srvs.srv import SetBool, Trigger
from test_messages import EXAMPLES

from real_robot.transports.action_types import (
    ACTIONS,
    SERVICES,
    FollowJointTrajectoryGoal,
    GripperCommandGoal,
    ParallelGripperCommandGoal,
    SetBoolRequest,
    TriggerRequest,
)
from real_robot.transports.base import QosConfig, TransportError
from real_robot.transports.messages import Bool, JointState, JointTrajectory, Message, MessageError, String
from real_robot.transports.rclpy_node import RclpyConfig, RclpyTransport, native_class, tree_of
from real_robot.transports.ros import ros2_messages
from real_robot.transports.ros.install import RosInstallError

JOINTS = JointState(name=("finger",), position=np.array([0.04]), velocity=np.zeros(0), effort=np.array([12.5]))
TRAJECTORY = JointTrajectory(
    stamp=0, frame_id="base", joint_names=("a", "b"), positions=np.array([[0.5, -1.0]]), times=(200_000_000,)
)
GOALS = [
    GripperCommandGoal(position=0.04, max_effort=12.5),
    ParallelGripperCommandGoal(command=JOINTS),
    FollowJointTrajectoryGoal(trajectory=TRAJECTORY, goal_time_tolerance=1_500_000_000),
]
# Of the definitions that control_msgs 5.8.0 (Jazzy) publishes, by rosidl's generator.
HASHES = {
    "msg/JointJog": "ba249455a20f70168a1acb7bf43b776b72ff1f7eb5fc4cfea443f749e963c6e7",
    "action/GripperCommand": "e17c0e644eccf14bea84a0a93e0977182872c2eb7873ca6694900059b46dbc84",
    "action/ParallelGripperCommand": "adfd3c1ebe8abc38ebcc0e454b6423d291d4010dd5697d14eca5b9be4726ae18",
    "action/FollowJointTrajectory": "738ebcb7a2d7cfa42f9f1001cc99ce3a4383d1cfe508015d9be8485e4b1c66f6",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """The transport, and a plain node."""
    transport = RclpyConfig().open("test")
    assert isinstance(transport, RclpyTransport)
    node = rclpy.create_node("other")
    yield transport, node
    node.destroy_node()
    transport.close()


def until(condition: Callable[[], Any], node: Any = None) -> Any:
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02) if node is None else rclpy.spin_once(node, timeout_sec=0.02)
    return value


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_goes_over_the_graph_and_back(pair: tuple[Any, Any], message: Message) -> None:
    """Out by the transport, echoed by the plain node, and in again."""
    (transport, node), got = pair, list[Message]()
    kind, name = native_class(message.TYPE), f"/{type(message).__name__.lower()}"
    back = node.create_publisher(kind, f"{name}/back", 1)
    node.create_subscription(kind, name, back.publish, 1)
    transport.subscribe(f"{name}/back", type(message), QosConfig(), got.append)
    publish = transport.advertise(name, type(message), QosConfig())
    until(lambda: transport.has_listener(name) and back.get_subscription_count(), node)

    def answered() -> bool:
        publish(message)
        return bool(got)

    until(answered, node)
    np.testing.assert_equal(got[0].tree(), message.tree())


def test_best_effort_and_latched(pair: tuple[Any, Any]) -> None:
    transport, got = pair[0], list[Message]()
    for topic, qos in (
        ("/best", QosConfig(reliability="best_effort")),
        ("/latched", QosConfig(durability="transient_local")),
    ):
        publish = transport.advertise(topic, String, qos)
        publish(String(data=topic))
        transport.subscribe(topic, String, qos, got.append)
        until(lambda publish=publish, topic=topic: publish(String(data=topic)) or any(m.data == topic for m in got))  # type: ignore[attr-defined]


def test_publishers_are_counted_though_their_nodes_have_one_name(pair: tuple[Any, Any]) -> None:
    from std_msgs.msg import String as Native

    transport, _ = pair
    ours = transport.node.get_name()
    assert ours.startswith("vla_rl_test_")
    transport.advertise("/shared", String, QosConfig())
    until(lambda: transport.node.count_publishers("/shared") == 1)
    assert transport.other_publishers("/shared") == []
    twin = rclpy.create_node(ours)
    twin.create_publisher(Native, "/shared", 1)
    until(lambda: transport.other_publishers("/shared") == [f"/{ours}"])
    twin.destroy_node()


def test_services_answer_refuse_and_are_missing(pair: tuple[Any, Any]) -> None:
    (transport, node), got = pair, list[Any]()

    def switch(request: Any, response: Any) -> Any:
        response.success, response.message = bool(request.data), "as asked"
        return response

    node.create_service(SetBool, "/switch", switch)
    node.create_service(Trigger, "/begin", lambda _, response: response)
    for name, kind, request, success in (
        ("/switch", "std_srvs/SetBool", SetBoolRequest(data=True), True),
        ("/begin", "std_srvs/Trigger", TriggerRequest(), False),
    ):
        client = transport.service(name, SERVICES[kind])
        until(lambda client=client: client.ready, node)
        client.call(request, got.append)
        until(lambda: got, node)
        assert got.pop().success is success
    assert not transport.service("/nowhere", SERVICES["std_srvs/Trigger"]).ready
    with pytest.raises(TransportError, match="apt install"):
        native_class("no_such_msgs/Thing")


def test_messages_are_checked_as_they_come() -> None:
    native = native_class("sensor_msgs/JointState")(name=["a", "b"], position=[1.0, 2.0])
    assert JointState.from_tree(tree_of(native)).position.tolist() == [1.0, 2.0]
    native.position.append(3.0)
    with pytest.raises(MessageError, match="3 values of position for 2 names"):
        JointState.from_tree(tree_of(native))


class Server:
    """rclpy's action server. Its goals are taken, and do what the test says."""

    def __init__(self, node: Any, kind: Any, name: str) -> None:
        self.taken, self.ending, self.result = list[Any](), "succeed", kind.Result()
        self._server = ActionServer(
            node, kind, name, self._execute, cancel_callback=lambda _: CancelResponse.ACCEPT,
            goal_callback=lambda _: GoalResponse.REJECT if self.ending == "reject" else GoalResponse.ACCEPT,
            handle_accepted_callback=self.taken.append,
        )  # fmt: skip

    def _execute(self, handle: Any) -> Any:
        getattr(handle, self.ending)()
        return self.result

    def close(self) -> None:
        self._server.destroy()


@pytest.mark.parametrize("goal", GOALS, ids=lambda g: type(g).__name__)
def test_an_action_of_each_type(pair: tuple[Any, Any], goal: Message) -> None:
    (transport, node), name = pair, goal.TYPE.replace("/action/", "/").removesuffix("_Goal")
    kind = native_class(name, "action")
    server, action = Server(node, kind, f"/{kind.__name__}"), transport.action(f"/{kind.__name__}", ACTIONS[name])
    until(lambda: action.ready, node)
    for ending, status in (("succeed", "succeeded"), ("abort", "aborted"), ("canceled", "canceled")):
        server.ending = ending
        sent = action.send(goal)
        assert sent.status == "pending"
        if ending == "canceled":
            action.cancel(sent)  # before the server has it
        until(lambda sent=sent: sent.status == "active" and server.taken, node)
        handle = server.taken.pop()
        np.testing.assert_equal(type(goal).from_tree(tree_of(handle.request)).tree(), goal.tree())
        if ending == "canceled":
            until(lambda handle=handle: handle.is_cancel_requested, node)
        else:
            until(lambda sent=sent, h=handle: h.publish_feedback(kind.Feedback()) or sent.feedback, node)
        if hasattr(server.result, "stalled"):
            server.result.stalled = True
        else:
            server.result.error_string = "too far"
        handle.execute()
        until(lambda sent=sent: sent.is_over, node)
        assert sent.status == status
        assert getattr(sent.result, "stalled", sent.text == "too far"), sent
    server.ending = "reject"
    sent = action.send(goal)
    until(lambda: sent.is_over, node)
    assert sent.status == "rejected"
    server.close()
    until(lambda: not action.ready, node)


UNCLOSED = """
import sys, time
from real_robot.transports.base import QosConfig
from real_robot.transports.messages import Bool
from real_robot.transports.rclpy_node import RclpyConfig
transport, heard = RclpyConfig().open("unclosed"), []
transport.subscribe("/busy", Bool, QosConfig(), heard.append)
while not heard:
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_process_that_does_not_close_its_transport_ends_as_it_says(pair: tuple[Any, Any]) -> None:
    publish = pair[0].advertise("/busy", Bool, QosConfig())
    ended = [subprocess.Popen([sys.executable, "-c", UNCLOSED]) for _ in range(4)]
    until(lambda: publish(Bool(data=True)) or all(e.poll() is not None for e in ended))
    assert [e.returncode for e in ended] == [3] * 4


def test_our_control_msgs_has_the_published_ones_hashes() -> None:
    folder = Path(control_msgs.msg.__file__).parents[1]
    for name, published in HASHES.items():
        hashes = json.loads((folder / f"{name}.json").read_text())["type_hashes"]
        assert {h["type_name"]: h["hash_string"] for h in hashes}[f"control_msgs/{name}"] == f"RIHS01_{published}"


def test_a_package_is_built_once_and_again_when_its_definitions_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, told = {"own_msgs": {"msg/Pair.msg": "std_msgs/Header header\nfloat64[2] pair\n"}}, list[str]()
    monkeypatch.setattr(ros2_messages, "ros2_packages", lambda: packages)
    monkeypatch.syspath_prepend(tmp_path)
    for text, times in (("", 1), ("", 1), ("uint8 LEFT=1\n", 2)):
        packages["own_msgs"]["msg/Pair.msg"] += text
        assert ros2_messages.install(tmp_path, told.append) == ["own_msgs"] and len(told) == times
    kind = native_class("own_msgs/Pair")
    assert kind.LEFT == 1 and kind(pair=[1.0, 2.0]).pair.tolist() == [1.0, 2.0]

    packages["own_msgs"]["msg/Pair.msg"] = "float64 Pair\n"  # no name of a field
    with pytest.raises(RosInstallError, match=r"own_msgs: rosidl's generators failed: .*Pair"):
        ros2_messages.install(tmp_path, told.append)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RosInstallError, match=r"a C compiler \(cc\) is not here.* apt install gcc"):
        ros2_messages.install(tmp_path, told.append)
