"""A node that plays the driver of a contract: publishes what the contract reads, listens to what it sends.

    python played_robot.py CONTRACT.yaml FAULTS.json TRANSPORT.json

FAULTS: topic -> what is wrong with it there:
    {"/joint_states": {"type": "std_msgs/Bool", "rename": {"elbow": "elbow_joint"}, "skew": -3, "rate": 2,
                       "frame": "world", "size": [48, 64], "encoding": "bayer_rggb8", "value": 9, "topic": "/states",
                       "qos": {"reliability": "best_effort"}, "absent": true}}
For an action's topic: `absent` (nobody listens), `type`, `rival` (somebody else publishes there).
It stands where the contract's limits have their middle. It prints what it is commanded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from real_robot.bridge.codec import to_quaternion
from real_robot.bridge.contract import ImageSource, RobotContract, SourceConfig, StateSource, load_contract
from real_robot.bridge.images import encode_image
from real_robot.bridge.messages import (
    MESSAGES,
    Bool,
    CompressedImage,
    Float64MultiArray,
    Image,
    JointState,
    Message,
    PoseStamped,
)
from real_robot.bridge.transports.base import Publisher, QosConfig, Transport
from real_robot.bridge.transports.configs import Ros1Config, Ros2Config
from vla_rl.config import validate

CAMERA = (480, 640)
_NONE = np.zeros(0)


def standing(contract: RobotContract) -> np.ndarray:
    """A state (S,) in which the robot is where it may be."""
    state = np.zeros(contract.observation.state_dim)
    for limits in contract.safety.dimensions:
        if limits.state is not None:
            state[limits.state] = (limits.low + limits.high) / 2
    if (box := contract.safety.workspace) is not None:
        state[list(box.state)] = (np.array(box.low) + np.array(box.high)) / 2
    return state


def message_of(source: SourceConfig, state: np.ndarray, fault: dict[str, Any]) -> Callable[[int], Message]:
    """A function from a stamp to the message that the driver sends then. `state`: the source's part, (N,)."""
    kind = fault.get("type", source.type)
    frame = fault.get("frame", source.frame)
    if isinstance(source, ImageSource):
        height, width = fault.get("size", CAMERA)
        picture = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
        if kind == CompressedImage.TYPE:
            data = encode_image(picture, "jpeg", 60)
            return lambda stamp: CompressedImage(stamp=stamp, frame_id=frame, format="jpeg", data=data)
        raw, encoding = picture.tobytes(), fault.get("encoding", "rgb8")
        return lambda stamp: Image(
            stamp=stamp, frame_id=frame, height=height, width=width, encoding=encoding, step=3 * width, data=raw
        )
    assert isinstance(source, StateSource)
    values = (state - np.asarray(source.convert.offset)) / np.asarray(source.convert.scale)
    if "value" in fault:
        values = np.full_like(values, fault["value"])
    if kind == JointState.TYPE:
        names = tuple(fault.get("rename", {}).get(j, j) for j in source.joints) or ("joint",)
        parts = {q: _NONE for q in ("position", "velocity", "effort")} | {source.quantity: values}
        return lambda stamp: JointState(stamp=stamp, frame_id=frame, name=names, **parts)
    if kind == PoseStamped.TYPE:
        down = to_quaternion(np.array([np.pi, 0, 0]))
        return lambda stamp: PoseStamped(stamp=stamp, frame_id=frame, position=values[:3], orientation=down)
    if kind == Float64MultiArray.TYPE:
        return lambda stamp: Float64MultiArray(data=values)
    return lambda stamp: Bool(data=bool(values[0] > 0.5))


class Stream:
    """One topic that is published at its rate."""

    def __init__(self, transport: Transport, source: SourceConfig, state: np.ndarray, fault: dict[str, Any]) -> None:
        qos = QosConfig(**{**source.qos.model_dump(), **fault.get("qos", {})})
        kind = MESSAGES[fault.get("type", source.type)]
        self.publish: Publisher = transport.advertise(fault.get("topic", source.topic), kind, qos)
        self.make = message_of(source, state, fault)
        self.period = 1 / fault.get("rate", source.rate or 30.0)
        self.skew = round(fault.get("skew", 0.0) * 1e9)
        self.due = time.monotonic()

    def step(self) -> None:
        if time.monotonic() >= self.due:
            self.due = max(self.due + self.period, time.monotonic() - self.period)
            self.publish(self.make(time.time_ns() + self.skew))


def open_streams(contract: RobotContract, transport: Transport, faults: dict[str, dict[str, Any]]) -> list[Stream]:
    """Every topic of the contract that is not `absent`."""
    state, at, streams = standing(contract), 0, []
    for source in contract.observation.images.values():
        if not faults.get(source.topic, {}).get("absent"):
            streams.append(Stream(transport, source, state, faults.get(source.topic, {})))
    for source in contract.observation.state:
        part, at = state[at : at + source.num_values], at + source.num_values
        if not faults.get(source.topic, {}).get("absent"):
            streams.append(Stream(transport, source, part, faults.get(source.topic, {})))
    for sink in contract.action:
        fault = faults.get(sink.topic, {})
        kind = MESSAGES[fault.get("type", sink.type)]
        if not fault.get("absent"):
            transport.subscribe(sink.topic, kind, sink.qos, lambda m: print("commanded", m, flush=True))
        if fault.get("rival"):
            transport.advertise(sink.topic, kind, sink.qos)
    return streams


def main() -> None:
    name, faults, transport = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    contract = load_contract(name)
    config = validate(Ros1Config if transport["kind"] == "ros1" else Ros2Config, transport) if transport else None
    opened = (config or contract.transport).open()
    streams = open_streams(contract, opened, faults)
    print("ready", flush=True)
    while True:
        for stream in streams:
            stream.step()
        time.sleep(0.002)


if __name__ == "__main__":
    main()
