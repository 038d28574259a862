"""Topic checks against a contract: missing, of another type, slow, late, misnamed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from real_robot.bridge.alignment import MAX_LEAD
from real_robot.bridge.codec import decode_image, read_state
from real_robot.contract.channels import ActionSink, ImageSource, SourceConfig, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.doctor.listen import Findings, Heard, camera_key
from real_robot.transports.action_types import SERVICES
from real_robot.transports.base import Endpoint
from real_robot.transports.messages import CompressedImage, Image, JointState, MessageError
from vla_rl.common.tables import Check

SLOW = 0.8  # a stream at less than this share of its rate is wrong
SAME_SHAPE = 0.02  # by how much the sides' ratio may differ before a picture is squeezed


def near(name: str, known: Iterable[str]) -> str:
    """ " (near: ...)" with the known names most like one; "" without any."""
    found = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.5)
    return f" (near: {', '.join(found)})" if found else ""


def check_source(place: str, source: ImageSource | StateSource, key: str, findings: Findings) -> list[Check]:
    """Every check of a topic that is read.

    Args:
        place: where it stands in the contract, such as observation.images.front. key: the camera's name, or the topic.
    """
    camera = source.camera if isinstance(source, ImageSource) else None
    if camera is not None:
        source = source.model_copy(update={"topic": camera_key(key), "rate": source.rate or camera.fps})
    heard = findings.heard.get(source.topic)
    if camera is not None and (heard is None or not heard.times):
        found = findings.closed.get(key, "it is open, and gives no frame")
        return [Check(source.topic, "wrong", found, f"plug it in, or mend {place}.camera")]
    if heard is None or not heard.times:
        return [_check_silent(place, source, findings)]
    checks = [_check_rate(source, heard, findings.load), *_check_clock(source, heard)]
    if source.frame and heard.newest is not None:
        checks.append(_check_frame(place, source, heard))
    if isinstance(source, ImageSource):
        checks.append(_check_picture(place, source, heard))
    else:
        checks.append(_check_numbers(place, source, heard))
    if (count := findings.refused.get(key, {}).get("undecodable")) and checks[-1].status == "ok":
        checks.append(Check(source.topic, "wrong", f"{count} messages unusable: {findings.errors.get(key, '')}"))
    return checks


def _check_silent(place: str, source: SourceConfig, findings: Findings) -> Check:
    """Why nothing came, as far as the graph tells."""
    if findings.graph is None:
        return Check(source.topic, "wrong", "nothing came", f"start its driver, or set {place}.topic")
    publishers = [e for e in findings.graph if e.publishes]
    here = [e for e in publishers if e.topic == source.topic]
    if not here:
        others = near(source.topic, (e.topic for e in publishers if e.type == source.type)) or near(
            source.topic, (e.topic for e in publishers)
        )
        return Check(source.topic, "wrong", f"nobody publishes it{others}", f"start its driver, or set {place}.topic")
    types = {e.type for e in here}
    if source.type not in types:
        return Check(
            source.topic,
            "wrong",
            f"{here[0].node} publishes {', '.join(sorted(types))}; the contract reads {source.type}",
            _type_advice(place, source, types, publishers),
        )
    if source.qos.reliability == "reliable" and {e.reliability for e in here} == {"best_effort"}:
        return Check(
            source.topic,
            "wrong",
            "its publisher is best_effort, which a reliable reader never hears",
            f"set {place}.qos.reliability: best_effort",
        )
    unreadable = findings.refused.get(source.topic, {}).get("unreadable")
    what = f"{unreadable} messages not readable" if unreadable else f"nothing came, though {here[0].node} announces it"
    return Check(source.topic, "wrong", what, "is the device on, and does the network let data through (ROS_IP)?")


def _type_advice(place: str, source: SourceConfig, types: set[str], publishers: list[Endpoint]) -> str:
    compressed = f"{source.topic}/compressed"
    if source.type == CompressedImage.TYPE and any(e.topic == compressed for e in publishers):
        return f"set {place}.topic: {compressed}"
    if isinstance(source, ImageSource) and types <= {Image.TYPE, CompressedImage.TYPE}:
        return f"set {place}.type: {min(types)}"
    return f"set {place}.topic to one of type {source.type}"


def unless_busy(load: float, fix: str) -> str:
    """What to do about a stream that comes late: on a machine with too much to do, look there first."""
    if load <= 1:
        return fix
    return f"this machine is overloaded ({load:.1f} programs a processor): end others and look again; else {fix}"


def _check_rate(source: SourceConfig, heard: Heard, load: float) -> Check:
    found = f"{heard.rate:.1f} a second, gaps of {heard.gap * 1e3:.0f} ms at most (95 %)"
    if source.rate is not None and heard.rate < SLOW * source.rate:
        return Check(
            source.topic,
            "wrong",
            f"{found}; its driver should send {source.rate:g}",
            unless_busy(load, "look at its driver, or the network"),
        )
    align = source.align
    limit = source.align.tolerance if align.strategy != "hold" else float("inf")
    if heard.gap > limit:
        return Check(
            source.topic,
            "wrong",
            f"{found}: longer than align.tolerance, {limit * 1e3:.0f} ms, so that observations are missing",
            unless_busy(load, "raise the driver's rate, or align.tolerance"),
        )
    return Check(source.topic, "ok", found)


def _check_clock(source: SourceConfig, heard: Heard) -> list[Check]:
    """The header's stamp against this machine's clock."""
    if source.align.timeline == "receive":
        return []
    name, lag = f"{source.topic}: clock", heard.lag
    if heard.unstamped:
        return [Check(name, "wrong", "messages without a stamp", "set align.timeline: receive for this topic")]
    sync = "synchronize the two machines' clocks (chrony), then start again"
    if lag < -MAX_LEAD:
        return [Check(name, "wrong", f"stamps are {-lag:.2f} s ahead of this machine's clock", sync)]
    limit = source.align.tolerance if source.align.strategy != "hold" else float("inf")
    if lag > limit:
        return [
            Check(
                name,
                "wrong",
                f"stamps are {lag:.2f} s old on arrival; {limit:.2f} s are allowed (align.tolerance)",
                sync,
            )
        ]
    status = "warning" if abs(lag) > min(limit, 2 * MAX_LEAD) / 2 else "ok"
    return [Check(name, status, f"stamps are {lag * 1e3:.0f} ms old on arrival", sync if status == "warning" else "")]


def _check_frame(place: str, source: SourceConfig, heard: Heard) -> Check:
    name, frame = f"{source.topic}: frame", heard.newest.frame_id if heard.newest else ""
    if frame.lstrip("/") == source.frame.lstrip("/"):
        return Check(name, "ok", frame)
    return Check(name, "wrong", f"{frame!r}; the contract says {source.frame!r}", f"set {place}.frame, or the driver's")


def _check_picture(place: str, source: ImageSource, heard: Heard) -> Check:
    message, name = heard.newest, f"{source.topic}: picture"
    assert isinstance(message, Image | CompressedImage)
    kind = message.encoding if isinstance(message, Image) else message.format
    try:
        height, width = decode_image(message).shape[:2]
    except MessageError as error:
        return Check(name, "wrong", str(error), "set the driver's encoding to rgb8, or publish JPEG")
    found = f"{height} x {width} (height x width) {kind}"
    if source.size is None:
        return Check(name, "ok", found)
    rows, columns = source.size
    if height < rows or width < columns:
        return Check(
            name,
            "wrong",
            f"{found}, smaller than the {rows} x {columns} that the contract makes of it",
            f"raise the camera's resolution, or set {place}.size",
        )
    if abs(width * rows / (height * columns) - 1) > SAME_SHAPE:
        return Check(
            name,
            "warning",
            f"{found}, squeezed into {rows} x {columns}",
            "nothing, where the training data were squeezed alike",
        )
    return Check(name, "ok", f"{found}, resized to {rows} x {columns}")


def _check_numbers(place: str, source: StateSource, heard: Heard) -> Check:
    message = heard.newest
    assert message is not None
    if isinstance(message, JointState) and (missing := [j for j in source.joints if j not in heard.names]):
        return Check(
            f"{source.topic}: joints",
            "wrong",
            f"no joint {missing[0]!r}{near(missing[0], heard.names)}; there are: {', '.join(sorted(heard.names))}",
            f"set {place}.joints",
        )
    name = f"{source.topic}: {'joints' if source.joints else 'numbers'}"
    try:
        values = read_state(source, message)
    except MessageError as error:
        extra = " in some messages; another node publishes here too?" if source.joints else ""
        return Check(name, "wrong", f"{error}{extra}", f"set {place} to what the driver sends")
    return Check(name, "ok", " ".join(f"{v:.3g}" for v in values[:8]) + (" ..." if len(values) > 8 else ""))


def check_sink(place: str, sink: ActionSink, contract: RobotContract, findings: Findings) -> list[Check]:
    """Whether somebody takes these commands, of this type, and nobody else gives them."""
    checks = _check_joint_names(place, sink, contract, findings)
    if findings.graph is None:
        return [Check(sink.topic, "ok", f"{sink.type}; who listens cannot be seen through this transport"), *checks]
    if sink.is_goal:
        return [_check_server(place, sink, contract, findings.graph), *checks]
    listeners = [e for e in findings.graph if e.topic == sink.topic and not e.publishes]
    rivals = [e.node for e in findings.graph if e.topic == sink.topic and e.publishes]
    takers = {e.topic for e in findings.graph if not e.publishes}
    fix = f"start the controller, or set {place}.topic"
    if not listeners:
        checks.insert(0, Check(sink.topic, "wrong", f"nobody listens{near(sink.topic, takers)}", fix))
    elif sink.type not in (types := {e.type for e in listeners}):
        found = f"{listeners[0].node} listens for {', '.join(sorted(types))}; the contract sends {sink.type}"
        checks.insert(0, Check(sink.topic, "wrong", found, f"set {place}.type, or {place}.topic"))
    elif sink.qos.reliability == "best_effort" and {e.reliability for e in listeners} == {"reliable"}:
        found = "its listener is reliable, and never hears a best_effort sender"
        checks.insert(0, Check(sink.topic, "wrong", found, f"set {place}.qos.reliability: reliable"))
    else:
        checks.insert(0, Check(sink.topic, "ok", f"{listeners[0].node} listens for {sink.type}"))
    if rivals:
        found = f"{', '.join(rivals)} publishes here too: two drivers of one robot"
        checks.append(Check(f"{sink.topic}: others", "wrong", found, "end the other one before you deploy"))
    return checks


def _check_server(place: str, sink: ActionSink, contract: RobotContract, graph: list[Endpoint]) -> Check:
    """Whether an action's or a service's server is there."""
    if contract.transport.kind == "ros1" and sink.type in SERVICES:
        return Check(sink.topic, "ok", f"{sink.type}; services of ROS 1 are not looked for")
    ends = ("Request",) if sink.type in SERVICES else ("/goal", "/_action/send_goalRequest")  # what it listens to
    servers = {
        e.topic.removeprefix("rq").removesuffix(end): e
        for e in graph
        for end in ends
        if e.topic.endswith(end) and not e.publishes
    }
    if sink.topic in servers:
        if servers[sink.topic].unspoken:
            reason, _, fix = servers[sink.topic].unspoken.partition("; ")
            return Check(sink.topic, "wrong", reason, fix)
        # ROS 1: .../GripperCommandActionGoal; ROS 2: ...::GripperCommand_SendGoal_Request
        kind = re.split(r"/|::", servers[sink.topic].type)[-1]
        if kind and not re.match(sink.type.rpartition("/")[2] + r"(Action|_)", kind):
            fix = f"set {place}.type"
            return Check(sink.topic, "wrong", f"its server takes {kind}; the contract sends {sink.type}", fix)
        return Check(sink.topic, "ok", f"a server of {sink.type} is there")
    found = f"no server of {sink.type}{near(sink.topic, servers)}"
    return Check(sink.topic, "wrong", found, f"start the controller, or set {place}.topic")


def _check_joint_names(place: str, sink: ActionSink, contract: RobotContract, findings: Findings) -> list[Check]:
    """Joints that are commanded are among those that are measured, where any of them is."""
    measured = set().union(
        *(findings.heard[s.topic].names for s in contract.observation.state if s.topic in findings.heard)
    )
    unknown = [j for j in sink.joints if j not in measured]
    if not sink.joints or not measured or not unknown:
        return []
    name, found = (
        f"{sink.topic}: joints",
        f"{unknown[0]!r} is not among the measured joints{near(unknown[0], measured)}",
    )
    if len(unknown) < len(sink.joints) or near(unknown[0], measured):
        return [Check(name, "wrong", found, f"set {place}.joints")]
    return [Check(name, "warning", found, f"compare {place}.joints with the controller's")]
