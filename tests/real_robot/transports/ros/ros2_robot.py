"""A robot of ROS 2's wire with action servers in plain cyclonedds, in a process of its own: ros2_robot.py LOG DOMAIN.

It serves at a line of standard input; at each later one its joints are at zero. Another client's goals (identity 7) are
answered too, to be ignored.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dds_types as t
from action_joints import JOINTS, PERIOD, Joints, outcome
from cyclonedds.core import Policy, Qos
from cyclonedds.domain import DomainParticipant
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration

SUCCEEDED, CANCELED, ABORTED = 4, 5, 6  # of action_msgs/GoalStatus
QOS = Qos(
    Policy.Reliability.Reliable(duration(milliseconds=100)),
    Policy.History.KeepLast(10),
    Policy.DataRepresentation(use_cdrv0_representation=True),
)


class Graph:
    """A DDS participant with ROS 2's names."""

    def __init__(self, domain: int) -> None:
        self._participant = DomainParticipant(domain)

    def writer(self, topic: str, kind: Any) -> DataWriter:
        return DataWriter(self._participant, Topic(self._participant, topic, kind), QOS)

    def serve(self, name: str, request: Any, response: Any, handle: Callable[..., dict[str, Any] | None]) -> Any:
        """Answer requests with what `handle` makes of them; it may answer later with what is returned here."""
        reader = DataReader(self._participant, Topic(self._participant, f"rq/{name}Request", request), QOS)
        writer = self.writer(f"rr/{name}Reply", response)

        def answer(asked: Any, **fields: Any) -> None:
            writer.write(response(asked.client ^ 7, asked.number, **fields))  # another's: to be ignored
            writer.write(response(asked.client, asked.number, **fields))

        def run() -> None:
            while True:
                for sample in reader.take_iter(timeout=duration(seconds=10)):
                    fields = handle(sample)
                    if fields is not None:
                        answer(sample, **fields)

        threading.Thread(target=run, daemon=True).start()
        return answer


class ActionServer:
    """One goal at a time; a newer one preempts it. `execute(goal, canceled)` returns status and result."""

    def __init__(self, graph: Graph, joints: Joints, name: str, server: str, kinds: tuple[Any, ...]) -> None:
        self.joints, self.server = joints, server
        self._current: bytes | None = None
        self._canceled: set[bytes] = set()
        self._ended: dict[bytes, dict[str, Any]] = {}
        self._asked: dict[bytes, Any] = {}
        send, sent, get, got, feedback = kinds
        self._feedback = graph.writer(f"rt/{name}/_action/feedback", feedback)
        graph.serve(f"{name}/_action/send_goal", send, sent, self._on_send)
        self._answer = graph.serve(f"{name}/_action/get_result", get, got, self._on_get)
        graph.serve(f"{name}/_action/cancel_goal", t.CancelRequest, t.CancelResponse, self._on_cancel)

    def accepts(self, goal: Any) -> bool | None:
        return True

    def execute(self, goal: Any, is_canceled: Callable[[], bool], feedback: Callable[[Any], None]) -> tuple[int, Any]:
        raise NotImplementedError

    def _on_send(self, request: Any) -> dict[str, Any] | None:
        key = bytes(request.goal_id.uuid)
        accepted = self.accepts(request.goal)
        if accepted is None:
            return None
        if accepted:
            self._current = key
            threading.Thread(target=self._run, args=(request.goal_id, request.goal), daemon=True).start()
        return {"accepted": accepted, "stamp": t.Time()}

    def _run(self, goal_id: Any, goal: Any) -> None:
        key = bytes(goal_id.uuid)
        status, result = self.execute(
            goal,
            lambda: key in self._canceled or key != self._current,
            lambda told: self._feedback.write(told(goal_id)),
        )
        self._ended[key] = {"status": status, "result": result}
        if (asked := self._asked.pop(key, None)) is not None:
            self._answer(asked, **self._ended[key])

    def _on_get(self, request: Any) -> dict[str, Any] | None:
        key = bytes(request.goal_id.uuid)
        self._asked[key] = request
        ended = self._ended.get(key)
        return ended if ended is not None and self._asked.pop(key, None) is not None else None

    def _on_cancel(self, request: Any) -> dict[str, Any]:
        self.joints.tell("cancel", server=self.server)
        self._canceled.add(bytes(request.goal_info.goal_id.uuid))
        return {"return_code": 0, "goals_canceling": [request.goal_info]}


class Gripper(ActionServer):
    def accepts(self, goal: Any) -> bool | None:
        command = goal.command
        self.joints.tell("goal", server="gripper", position=command.position, max_effort=command.max_effort)
        return {"reject": False, "ignore": None}.get(outcome(command.position), True)

    def execute(self, goal: Any, is_canceled: Callable[[], bool], feedback: Callable[[Any], None]) -> tuple[int, Any]:
        target = goal.command.position
        what = outcome(target)
        if what != "move":
            status = CANCELED if what == "cancel" else ABORTED
            return status, t.GripperResult(stalled=what == "stall")
        while not is_canceled():
            if self.joints.step({"finger": target}):
                return SUCCEEDED, t.GripperResult(position=target, reached_goal=True)
            here = t.GripperFeedback(position=self.joints.positions["finger"])
            feedback(lambda goal_id, here=here: t.GripperFeedbackMessage(goal_id, here))
        return CANCELED, t.GripperResult(position=self.joints.positions["finger"])


class Arm(ActionServer):
    def execute(self, goal: Any, is_canceled: Callable[[], bool], feedback: Callable[[Any], None]) -> tuple[int, Any]:
        point = goal.trajectory.points[0]
        targets = dict(zip(goal.trajectory.joint_names, point.positions, strict=True))
        seconds = point.time_from_start.sec + point.time_from_start.nanosec / 1e9
        self.joints.tell("goal", server="arm", targets=targets, seconds=seconds)
        while not is_canceled():
            if self.joints.step(targets):
                return SUCCEEDED, t.ArmResult()
        return CANCELED, t.ArmResult()


def main() -> None:
    joints, graph = Joints(Path(sys.argv[1])), Graph(int(sys.argv[2]))
    publisher = graph.writer("rt/joint_states", t.JointState)

    def publish() -> None:
        while True:
            now = time.time_ns()
            header = t.Header(t.Time(now // 10**9, now % 10**9), "")
            publisher.write(t.JointState(header, list(JOINTS), [joints.positions[j] for j in JOINTS], [], []))
            time.sleep(PERIOD)

    threading.Thread(target=publish, daemon=True).start()
    print("up", flush=True)
    sys.stdin.readline()

    def start(request: Any) -> dict[str, Any]:
        joints.tell("service", name="start")
        return {"success": True, "message": ""}

    def suction(request: Any) -> dict[str, Any]:
        joints.tell("service", name="suction", data=request.data)
        return {"success": True, "message": "as you like"}

    gripper = (t.GripperSend, t.GripperSent, t.GripperGet, t.GripperGot, t.GripperFeedbackMessage)
    arm = (t.ArmSend, t.ArmSent, t.ArmGet, t.ArmGot, t.ArmFeedbackMessage)
    servers = (
        Gripper(graph, joints, "gripper_cmd", "gripper", gripper),
        Arm(graph, joints, "arm_controller/follow_joint_trajectory", "arm", arm),
    )
    trigger = (t.TriggerRequest, t.TriggerResponse)
    graph.serve("start", *trigger, start)
    graph.serve("suction", t.SetBoolRequest, t.SetBoolResponse, suction)
    graph.serve("refuse", *trigger, lambda request: {"success": False, "message": "not today"})
    print("serving", flush=True)
    joints.obey(sys.stdin)
    del servers


if __name__ == "__main__":
    main()
