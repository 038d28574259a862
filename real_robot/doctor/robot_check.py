"""`vla-rl doctor ROBOT.yaml`: a contract checked against the live graph.

It subscribes and looks around. It advertises nothing and sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from real_robot.bridge.robot import sizes_of
from real_robot.contract.channels import AlignConfig, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.doctor.listen import Findings, listen
from real_robot.doctor.topics import check_sink, check_source, near, unless_busy
from real_robot.transports.base import Endpoint, TransportError
from real_robot.transports.lerobot import ACTION, OBSERVATION, LeRobotConfig, device_values
from real_robot.transports.lerobot_devices import DeviceError, camera_names, make_device, number_names
from real_robot.transports.messages import Bool, String, WrenchStamped
from real_robot.transports.ros.install import RosInstallError
from vla_rl.common.tables import Check
from vla_rl.config import ConfigError

COMPLETE, POOR = 0.95, 0.5  # shares of ticks with an observation that are well, and wrong


def check_unconnected(contract: RobotContract, transport: LeRobotConfig) -> list[Check]:
    """Settings, names of joints and cameras, port, calibration: all that can be known without connecting."""
    try:
        device = make_device("robots", transport.robot, device_values(transport), transport.modules)
    except DeviceError as error:
        return [Check("transport", "wrong", str(error), "mend the transport section")]
    checks = [Check("transport", "ok", f"lerobot: {transport.robot}, its settings are understood")]
    if transport.port:
        checks.append(_check_port(transport.port))
    checks.append(_check_calibration(device, transport))
    numbers = {
        OBSERVATION: number_names(device.observation_features),
        ACTION: number_names(device.action_features),
    }
    for part in (*contract.observation.state, *contract.action):
        checks.append(_check_names(part.topic, part.joints, numbers))
    cameras = camera_names(device.observation_features)
    for source in contract.observation.images.values():
        if source.camera is not None:
            continue  # of this machine, not the robot's: looked at with --connect
        known = source.topic in cameras
        found = "a camera of the robot's" if known else f"the robot has no such camera{near(source.topic, cameras)}"
        fix = "" if known else f"one of: {', '.join(cameras)}"
        checks.append(Check(source.topic, "ok" if known else "wrong", found, fix))
    fix = "with the arm at rest, look again with --connect"
    return [*checks, Check("live", "warning", "not connected: LeRobot turns the motors on then", fix)]


def _check_port(port: str) -> Check:
    if Path(port).exists():
        return Check("transport.port", "ok", port)
    return Check("transport.port", "wrong", f"{port} is not there", "plug it in, or find it: lerobot-find-port")


def _check_calibration(device: Any, transport: LeRobotConfig) -> Check:
    path = Path(device.calibration_fpath)
    if path.is_file():
        return Check("calibration", "ok", str(path))
    robot = f"--robot.type={transport.robot} --robot.port={transport.port} --robot.id={transport.id}"
    fix = f"where this robot has one: lerobot-calibrate {robot}"
    return Check("calibration", "warning", f"none: {path} is not there", fix)


def _check_names(topic: str, joints: tuple[str, ...], numbers: Mapping[str, tuple[str, ...]]) -> Check:
    known = numbers.get(topic)
    if known is None:
        return Check(topic, "wrong", f"no such topic; there are: {', '.join(numbers)}", "mend the contract")
    wrong = [name for name in joints if name not in known]
    left_out = [name for name in known if name not in joints] if topic == ACTION else []
    if wrong:
        return Check(topic, "wrong", f"no {wrong[0]!r}{near(wrong[0], known)}", f"one of: {', '.join(known)}")
    if left_out:
        return Check(topic, "wrong", f"{left_out[0]!r} is left out", "an action names all of the robot's joints")
    return Check(topic, "ok", f"{len(joints)} of {len(known)} numbers")


def check_robot(contract: RobotContract, seconds: float = 5.0, connect: bool = False) -> list[Check]:
    """Every check of a robot's contract, in the contract's order.

    Args:
        seconds: how long is listened; up to as long again until each topic has been heard.
        connect: connect also to a robot of LeRobot's, which turns its motors on; else it is checked from outside.
    """
    return [*check_model(contract), *_check_graph(contract, seconds, connect)]


def check_model(contract: RobotContract) -> list[Check]:
    """Whether the robot's URDF or MJCF can be used, with all its meshes, and what is not kept apart."""
    if contract.model is None:
        return []
    from real_robot.kinematics.check import ModelCheck  # with MuJoCo

    try:
        return [Check("model", "ok", ModelCheck(contract).summary())]
    except ConfigError as error:
        return [Check("model", "wrong", str(error), "deploy would not start")]


def _check_graph(contract: RobotContract, seconds: float, connect: bool) -> list[Check]:
    if isinstance(contract.transport, LeRobotConfig) and not connect:
        return check_unconnected(contract, contract.transport)
    try:
        transport = contract.open_transport("doctor")
    except (TransportError, RosInstallError) as error:
        return [Check("transport", "wrong", str(error), "everything else waits for this")]
    try:
        findings = listen(contract, transport, seconds)
    except TransportError as error:
        return [Check("contract", "wrong", str(error), "mend the contract, then look again")]
    finally:
        transport.close()
    return judge(contract, findings)


def judge(contract: RobotContract, findings: Findings) -> list[Check]:
    """The lines of the report, of what was heard and seen."""
    observation = contract.observation
    checks = [_check_transport(contract, findings)]
    for name, source in observation.images.items():
        checks += check_source(f"observation.images.{name}", source, name, findings)
    for number, source in enumerate(observation.state):
        checks += check_source(f"observation.state[{number}]", source, source.topic, findings)
    checks += [*_check_wrench(contract, findings), _check_complete(findings)]
    checks += _check_instruction(contract, findings)
    for number, sink in enumerate(contract.action):
        checks += check_sink(f"action[{number}]", sink, contract, findings)
    return [*checks, *_check_operator(contract, findings), *_check_limits(contract, findings)]


def _check_transport(contract: RobotContract, findings: Findings) -> Check:
    if findings.fault is not None:
        return Check("transport", "wrong", findings.fault, "everything else waits for this")
    graph = findings.graph
    seen = "" if graph is None else f", {len({e.topic for e in graph})} topics of {len({e.node for e in graph})} nodes"
    return Check("transport", "ok", f"{contract.transport.kind}{seen}")


def _check_wrench(contract: RobotContract, findings: Findings) -> list[Check]:
    """Whether the force and torque that are limited are measured, often enough, and within their limits."""
    limits, timeout = contract.safety.wrench, contract.safety.observation_timeout
    if limits is None:
        return []
    align = AlignConfig(timeline="receive", strategy="hold")  # its age is all that counts
    source = StateSource(topic=limits.topic, type="geometry_msgs/WrenchStamped", qos=limits.qos, align=align)
    checks = check_source("safety.wrench", source, limits.topic, findings)
    heard = findings.heard.get(limits.topic)
    if heard is None or not isinstance(heard.newest, WrenchStamped):
        return checks
    if heard.gap > timeout:
        found = f"gaps of {heard.gap * 1e3:.0f} ms (95 %); beyond safety.observation_timeout it holds"
        checks.append(Check("safety: wrench", "wrong", found, unless_busy(findings.load, "raise the driver's rate")))
    elif trouble := limits.trouble(*sizes_of(heard.newest)):
        fix = "tell the driver what the gripper weighs, zero the sensor, or mend the limit"
        checks.append(Check("safety: wrench", "wrong", trouble, fix))
    return checks


def _check_complete(findings: Findings) -> Check:
    found = f"whole at {findings.complete:.0%} of the control ticks"
    if findings.complete >= COMPLETE:
        return Check("observation", "ok", found)
    reasons = ", ".join(f"{key}: {n} {why}" for key, whys in findings.refused.items() for why, n in whys.items())
    status = "wrong" if findings.complete < POOR else "warning"
    fix = unless_busy(findings.load, "mend the topics above; else raise align.tolerance or observation.max_age")
    return Check("observation", status, found + (f"; refused: {reasons}" if reasons else ""), fix)


def _check_instruction(contract: RobotContract, findings: Findings) -> list[Check]:
    topic = contract.observation.instruction_topic
    if not topic or findings.graph is None:
        return []
    if any(e.publishes and e.topic == topic for e in findings.graph):
        return [Check(topic, "ok", "the instruction has a publisher")]
    return [Check(topic, "warning", "nobody publishes the instruction", "give deploy --instruction")]


def _check_operator(contract: RobotContract, findings: Findings) -> list[Check]:
    """Whether the stop button, the reset and the pedal that the contract names are there."""
    if findings.graph is None:
        return []
    checks = []
    for name, kind in (("stop", Bool.TYPE), ("reset", String.TYPE), ("deadman", Bool.TYPE)):
        topic = getattr(contract.operator, name)
        if not topic:
            continue
        is_needed = name == "deadman" and contract.safety.deadman
        there = [e for e in findings.graph if e.publishes and e.topic.lstrip("/") == topic.lstrip("/")]
        if there and (unheard := _why_unheard(there, kind)):
            checks.append(Check(f"operator.{name}", "wrong", f"{topic}: {unheard[0]}", unheard[1]))
        elif there:
            checks.append(Check(f"operator.{name}", "ok", f"{topic} has a publisher"))
        else:
            found = f"nobody publishes {topic}" + (", so the robot will never move" if is_needed else "")
            fix = "start the pedal's node" if is_needed else "nothing, where a person stops it otherwise"
            checks.append(Check(f"operator.{name}", "wrong" if is_needed else "warning", found, fix))
    return checks


def _why_unheard(publishers: list[Endpoint], kind: str) -> tuple[str, str] | None:
    """Why none of them is heard, and what to do; None where one is."""
    if not any(e.type in (kind, "") for e in publishers):
        other = publishers[0]
        return f"{other.node} publishes {other.type}, which is not heard: deploy reads {kind}", f"have it say {kind}"
    if all(e.reliability == "best_effort" for e in publishers):
        found = f"{publishers[0].node} is best_effort, which deploy, a reliable reader, never hears"
        return found, "make that publisher reliable"
    return None


def _check_limits(contract: RobotContract, findings: Findings) -> list[Check]:
    """Where the robot is, against where the contract lets it be."""
    state, safety = findings.state, contract.safety
    if state is None:
        return []
    measured = [(d, float(state[d.state])) for d in safety.dimensions if d.state is not None and d.state < len(state)]
    outside = [(d, value) for d, value in measured if not d.low <= value <= d.high]
    checks = [
        Check(
            f"safety: {d.name}",
            "wrong",
            f"measured {value:.4g}, outside {d.low:g} to {d.high:g}",
            "move it by hand, or mend the limits, the state's order or its unit (convert)",
        )
        for d, value in outside
    ]
    if measured and not outside:
        checks.append(Check("safety: limits", "ok", f"all {len(measured)} measured positions are within"))
    if (box := safety.workspace) is not None and max(box.state) < len(state):
        place = [float(state[i]) for i in box.state]
        is_in = all(low <= v <= high for low, v, high in zip(box.low, place, box.high, strict=True))
        found = f"the end effector is at {', '.join(f'{v:.3f}' for v in place)}"
        fix = "move it into the box by hand, or mend safety.workspace (`vla-rl calibrate workspace`)"
        checks.append(
            Check("safety: workspace", "ok", f"{found}, inside")
            if is_in
            else Check("safety: workspace", "wrong", f"{found}, outside {list(box.low)} to {list(box.high)}", fix)
        )
    return checks
