"""The bridge's control loop, in a process of its own: loop.py CONTRACT LOG [KEY=VALUE ...] [--guarded], told by JSON.

{"action": [...]} is asked at each tick from then on; {"active": bool}, {"stop": reason} and {"reset": name} are the
operator's. The log has a line {"time", "mode", "reason"} for each change of the supervisor's state.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.load import load_contract
from real_robot.control.robot_loop import ClockPacer, ControlLoop, OperatorCommand, Tick
from real_robot.control.supervisor import Supervisor
from real_robot.guard.robot_guard import through_guard
from real_robot.transports.base import TransportError
from real_robot.types import Command, RobotObservation


class Script:
    """The policy and the operator, as standard input says."""

    def __init__(self, num_values: int) -> None:
        self.action: np.ndarray | None = None
        self.num_values = num_values
        self.active, self.finished = True, False
        self.once: dict[str, Any] = {}

    def read(self) -> None:
        for line in sys.stdin:
            told = json.loads(line)
            if "action" in told:
                self.action = None if told["action"] is None else np.array(told["action"], np.float32)
            elif "active" in told:
                self.active = told["active"]
            else:
                self.once = told

    def submit(self, observation: RobotObservation, step: int) -> None: ...

    def next_action(self, step: int) -> Command | None:
        return None if self.action is None else Command(self.action, "policy", time.monotonic())

    def reset(self) -> None: ...

    def close(self) -> None: ...

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        once, self.once = self.once, {}
        return OperatorCommand(active=self.active, finished=self.finished, **once)


def main() -> None:
    contract = load_contract(sys.argv[1], [word for word in sys.argv[3:] if word != "--guarded"])
    contract = through_guard(contract) if "--guarded" in sys.argv else contract
    log = Path(sys.argv[2])
    script = Script(contract.action_dim)
    signal.signal(signal.SIGTERM, lambda *_: setattr(script, "finished", True))
    try:
        robot = TopicRobot(contract, contract.transport.open(), "test")
        robot.call_services()
    except TransportError as error:
        sys.exit(f"error: {error}")
    supervisor = Supervisor(contract.safety, state_checks=robot.state_checks)
    last = [None]

    def watch(tick: Tick) -> None:
        state = supervisor.state
        if state != last[0]:
            last[0] = state
            with log.open("a") as file:
                file.write(json.dumps({"time": time.monotonic(), "mode": state.mode, "reason": state.reason}) + "\n")

    loop = ControlLoop(
        robot, script, supervisor, script, ClockPacer(contract.rate), silence=contract.silence, observers=[watch]
    )
    threading.Thread(target=script.read, daemon=True).start()
    print("ready", flush=True)
    loop.run()
    robot.close()


if __name__ == "__main__":
    main()
