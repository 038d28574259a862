"""What is told where an observation is missing: which stream, and what is wrong with it."""

from __future__ import annotations

import numpy as np
import pytest
from memory_transport import MemoryTransport
from test_alignment import WALL, Clocks

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.control.supervisor import HOLDING, SafetyEvent, Supervisor
from real_robot.transports.messages import JointState, PoseStamped
from vla_rl.config import validate

NEAR = {"tolerance": 0.07}
VALUES = {
    "name": "arm",
    "observation": {
        "max_age": 0.25,
        "state": [
            {"topic": "/joints", "type": "sensor_msgs/JointState", "joints": ["a", "b"], "align": NEAR},
            {
                "topic": "/pose",
                "type": "geometry_msgs/PoseStamped",
                "parts": ["position"],
                "frame": "base",
                "align": NEAR,
            },
        ],
    },
    "action": [{"topic": "/goal", "type": "std_msgs/Float64MultiArray", "indices": [0]}],
    "safety": {
        "control_hz": 20,
        "dimensions": [{"name": "a", "kind": "position", "low": -1, "high": 1, "max_velocity": 1, "start": 0}],
    },
    "execution": {"control_hz": 20},
}


class Streams:
    """A robot's two topics, fed by hand; its supervisor, and what that told."""

    def __init__(self) -> None:
        self.clocks, self.transport = Clocks(), MemoryTransport()
        contract = validate(RobotContract, VALUES)
        self.robot = TopicRobot(contract, self.transport, "go", self.clocks.monotonic, self.clocks.wall)
        self.told: list[SafetyEvent] = []
        self.supervisor = Supervisor(
            contract.safety, self.clocks.monotonic, self.told.append, why_stale=self.robot.why_no_observation
        )

    def stamp(self, lead: float = 0.0) -> int:
        return WALL + round((self.clocks.now - 100.0 + lead) * 1e9)

    def joints(self, lead: float = 0.0, names: tuple[str, ...] = ("a", "b"), a: float = 0.0) -> None:
        position, none = np.array([a, *[0.0] * (len(names) - 1)]), np.zeros(0)
        message = JointState(name=names, position=position, velocity=none, effort=none, stamp=self.stamp(lead))
        self.transport.deliver("/joints", message)

    def pose(self, frame: str = "base", lead: float = 0.0) -> None:
        message = PoseStamped(
            position=np.zeros(3), orientation=np.array([0.0, 0, 0, 1]), stamp=self.stamp(lead), frame_id=frame
        )
        self.transport.deliver("/pose", message)

    def tick(self) -> None:
        if (observation := self.robot.read()) is not None:
            self.supervisor.observe(observation)
        self.supervisor.filter(None)
        self.clocks.now += 0.05


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lambda s: s.joints(lead=0.12), "/joints: its messages are refused: stamped +0.12 s from this machine's clock"),
        (lambda s: s.joints(lead=-0.4), "/joints: its messages are refused: stamped -0.40 s from this machine's clock"),
        (lambda s: s.joints(a=float("nan")), "/joints: its messages are refused: NaN or infinity in a"),
        (lambda s: s.joints(names=("a", "c")), "/joints: its messages are refused: "),
        (lambda s: None, "/joints: silent for "),
    ],
)
def test_a_stale_observation_names_its_stream_and_what_is_wrong(fault, reason: str) -> None:
    streams = Streams()
    for _ in range(3):
        streams.joints()
        streams.pose()
        streams.tick()
    for _ in range(12):
        fault(streams)
        streams.pose()
        streams.tick()
    mode, told = streams.supervisor.state
    assert mode == HOLDING and told.startswith(f"observations are stale: {reason}"), told
    stale = [event for event in streams.told if "stale" in event.text]
    assert len(stale) <= 2, "told once, not at each tick"


def test_what_never_came_is_named_too() -> None:
    streams = Streams()
    for _ in range(3):
        streams.joints()
        streams.pose(frame="world")
        streams.tick()
    why = "/pose: its messages are refused: frame 'world', expected 'base'"
    assert streams.supervisor.state.reason == f"no observation yet: {why}"
    assert Streams().robot.why_no_observation() == "/joints: no message yet; /pose: no message yet"


def test_parts_that_do_not_belong_together_are_named() -> None:
    streams = Streams()
    streams.joints()
    streams.clocks.now += 0.1
    streams.pose()
    assert streams.robot.read() is None
    assert streams.robot.why_no_observation() == "/joints: no message within align.tolerance of now"
