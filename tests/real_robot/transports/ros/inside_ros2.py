"""The rclpy transport on a real rclpy; run by test_rclpy_graph.py with the Python of ROS 2's environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import rclpy
from std_srvs.srv import SetBool, Trigger
from test_messages import EXAMPLES

from real_robot.transports.action_types import SERVICES, SetBoolRequest, TriggerRequest
from real_robot.transports.base import QosConfig, TransportError
from real_robot.transports.messages import Message
from real_robot.transports.rclpy_node import RclpyConfig, RclpyTransport, native_class

INSTALLED = [m for m in EXAMPLES if not m.TYPE.startswith(("control_msgs", "interbotix"))]


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


@pytest.mark.parametrize("message", INSTALLED, ids=lambda m: type(m).__name__)
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
    from real_robot.transports.messages import String

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

    from real_robot.transports.messages import String

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
