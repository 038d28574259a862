"""A whole robot side in this process, for tests of the console: loop, supervisor, console server, and a robot of ours.

The robot is a point that moves as the twists say, seen by two drawn cameras; its topics are in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from memory_transport import MemoryTransport

from real_robot.bridge.codec import encode_image, to_quaternion
from real_robot.bridge.robot import TopicRobot
from real_robot.contract.load import load_contract
from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ControlLoop, OperatorCommand, ReferencePacer, Tick
from real_robot.control.supervisor import Supervisor
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.console.operator import ConsoleOperator, ConsoleState
from real_robot.operator.console.server import ConsoleServer
from real_robot.operator.intervention import Intervention
from real_robot.operator.operators import Operators
from real_robot.operator.teleop import Teleoperation
from real_robot.transports.messages import CompressedImage, JointState, Message, PoseStamped, TwistStamped
from real_robot.types import RobotObservation

RATE = 10.0
PATIENT = [
    f"rate={RATE}",
    "observation.max_age=2",
    "safety.observation_timeout=2",
    "safety.command_timeout=2",
    "silence=30",
]

ROWS, COLUMNS = np.ogrid[0:360, 0:480]
SCENE = np.full((360, 480, 3), (46, 52, 58), np.uint8)  # a table from above, a zone and a block
SCENE[30:330, 40:440] = (176, 152, 120)
SCENE[90:150, 300:380] = (104, 160, 112)
SCENE[210:240, 180:210] = (190, 60, 52)


class PointRobot:
    """Publishes 10 times a second where it is; moves as it is told."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.position = np.array([0.0, 0.0, 0.15])
        self.twist = np.zeros(3)
        self.grip = 0.0
        self.ended = threading.Event()
        transport.handlers["/twist_command"].append(self._on_twist)
        transport.handlers["/gripper/command"].append(self._on_gripper)

    def _on_twist(self, message: Message) -> None:
        assert isinstance(message, TwistStamped)
        self.twist = np.asarray(message.linear)

    def _on_gripper(self, message: Message) -> None:
        assert isinstance(message, JointState)
        self.grip = float(message.position[0])

    def run(self) -> None:
        while not self.ended.wait(1 / RATE):
            self.position += self.twist / RATE
            self.publish()

    def publish(self) -> None:
        stamp = time.time_ns()
        orientation = to_quaternion(np.array([np.pi, 0, 0]))
        width = 0.02 if self.grip > 0 else 0.04
        pose = PoseStamped(stamp=stamp, frame_id="table", position=self.position.copy(), orientation=orientation)
        fingers = JointState(
            stamp=stamp,
            name=("finger_left", "finger_right"),
            position=np.array([width, -width]),
            velocity=np.zeros(0),
            effort=np.zeros(0),
        )
        self.transport.deliver("/end_effector_pose", pose)
        self.transport.deliver("/joint_states", fingers)
        image = CompressedImage(stamp=stamp, format="jpeg", data=encode_image(self.draw(), "jpeg"))
        self.transport.deliver("/agentview/image/compressed", image)

    def draw(self) -> np.ndarray:
        """The scene, and the gripper."""
        picture = SCENE.copy()
        x, y = 240 - 550 * self.position[1], 180 - 450 * self.position[0]
        distance = np.hypot(COLUMNS - x, ROWS - y)
        picture[(distance < 16) & (distance > 9)] = (35, 40, 48)
        return picture


@dataclass
class ConsoleBench:
    """What a test looks at."""

    port: int
    robot: PointRobot
    console_state: ConsoleState
    intervention: Intervention
    supervisor: Supervisor
    console: ConsoleOperator
    ticks: list[Tick]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def sources(self) -> set[str]:
        """Who has moved the robot so far."""
        moved = [t for t in self.ticks if t.sent and t.sent.mode == "running" and t.requested]
        return {t.requested.source for t in moved if t.requested}

    def last_twist(self) -> list[float]:
        return [round(float(x), 3) for x in self.robot.twist]


class _Ends:
    def __init__(self) -> None:
        self.finished = False

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return OperatorCommand(finished=self.finished)


@contextmanager
def console_bench(*overrides: str, **config: Any) -> Iterator[ConsoleBench]:
    """Everything running. `config`: of the `ConsoleConfig`; no silence counts, where it does not say which."""
    contract = load_contract("sim_robot", [*PATIENT, *overrides])
    transport = MemoryTransport()
    point = PointRobot(transport)
    robot = TopicRobot(contract, transport, "push the red block to the green zone")
    console_state = ConsoleState(contract)
    supervisor = Supervisor(contract.safety, on_event=lambda event: console_state.notice(event.text))
    timeout = min(contract.teleop.timeout, contract.safety.command_timeout)
    intervention = Intervention(
        [d.kind for d in contract.safety.dimensions],
        command_timeout=timeout,
        on_transition=lambda t: console_state.notice(f"{t.event.replace('_', ' ')} ({t.who})"),
    )
    settings = ConsoleConfig(**{"port": 0, "link_timeout": 30.0, **config})
    console = ConsoleOperator(
        intervention, Teleoperation(contract.teleop, contract.safety), console_state, settings.link_timeout
    )
    angle = [0.0]

    def infer(observation: RobotObservation) -> np.ndarray:
        angle[0] += 0.15
        away = float(np.hypot(*observation.state[:2]))
        console_state.score(0.25 + 3 * away + 0.03 * np.sin(9 * angle[0]), 0.8)
        return np.array([[0.12 * np.cos(angle[0]), 0.12 * np.sin(angle[0]), 0, 0, 0, 0, -1]], np.float32)

    ends, ticks = _Ends(), []
    loop = ControlLoop(
        robot,
        SynchronousActions(infer),
        supervisor,
        Operators([console, intervention, ends]),
        ReferencePacer(robot, 0.5),
        needs_new=True,
        silence=contract.silence,
        observers=[intervention, console_state, ticks.append],
    )
    threads = [threading.Thread(target=run, daemon=True) for run in (point.run, loop.run)]
    with ConsoleServer(settings, console, supervisor).running() as port:
        for thread in threads:
            thread.start()
        try:
            yield ConsoleBench(port, point, console_state, intervention, supervisor, console, ticks)
        finally:
            ends.finished = True
            threads[1].join(20)
            point.ended.set()
            threads[0].join(20)
