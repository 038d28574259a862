"""A robot behind its topics: observations assembled, actions sent, force and torque checked, as its contract says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from real_robot.bridge.alignment import HeaderClock, Sample, Track
from real_robot.bridge.cameras import Camera, LocalCamera, OpenCamera
from real_robot.bridge.codec import check_frame, read_image, read_state, write_action, write_goal
from real_robot.bridge.goals import GoalSender, call_and_wait, open_goals
from real_robot.checks import Newest, StateCheck
from real_robot.contract.channels import ActionSink, ImageSource, StateSource
from real_robot.contract.contract import RobotContract
from real_robot.contract.safety import WrenchLimits
from real_robot.transports.action_types import SERVICES, SetBoolRequest, TriggerRequest
from real_robot.transports.actions import graph_of
from real_robot.transports.base import Publisher, QosConfig, Transport, TransportError
from real_robot.transports.messages import Message, MessageError, String, WrenchStamped
from real_robot.types import RobotObservation

LATCHED = QosConfig(durability="transient_local")


def sizes_of(wrench: WrenchStamped) -> np.ndarray:
    """How long force and torque are, (2,) in N and Nm."""
    return np.array([np.linalg.norm(wrench.force), np.linalg.norm(wrench.torque)])


class WrenchCheck:
    """A state check of the supervisor: the wrench is known, and within its limits.

    It comes more often than observations, and a blow is short: what counts is the largest since it was asked last.

    Args:
        timeout: seconds without a wrench after which it is not known. Messages that are not finite count as none.
    """

    name = "wrench"

    def __init__(
        self,
        limits: WrenchLimits,
        timeout: float,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._timeout = limits, timeout
        self._newest = Newest[np.ndarray](limits.topic, "force and torque", clock)
        self._lock = threading.Lock()
        self._last = self._most = np.zeros(2)  # N, Nm: of the newest message, and largest since it was asked
        transport.subscribe(limits.topic, WrenchStamped, limits.qos, self._receive)

    def _receive(self, message: Message) -> None:
        assert isinstance(message, WrenchStamped)
        sizes = sizes_of(message)
        if not np.isfinite(sizes).all():
            return self._newest.refuse("NaN or infinity")
        with self._lock:
            self._last, self._most = sizes, np.maximum(self._most, sizes)
        return self._newest.show(sizes)

    def trouble(self, observation: RobotObservation, sent: np.ndarray | None) -> str | None:
        if trouble := self._newest.trouble(self._timeout):
            return trouble
        with self._lock:
            most, self._most = self._most, self._last
        return self._limits.trouble(*most)

    def restart(self) -> None:
        with self._lock:
            self._most = self._last


class TopicRobot:
    """A robot behind topics, by its contract. Messages arrive, and are decoded, on the transport's threads.

    Attributes:
        header_clock: how stamps are taken; `flush` takes the clocks anew.
        is_silent: whether nothing may be sent now, not even zeros.

    Raises:
        TransportError: the contract names a topic or joint that the robot, as far as the transport knows it, lacks.
    """

    def __init__(
        self,
        contract: RobotContract,
        transport: Transport,
        instruction: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
        open_camera: OpenCamera = LocalCamera,
    ) -> None:
        self.contract, self.transport, self.instruction = contract, transport, instruction
        self.is_silent: Callable[[], bool] = lambda: False
        self._clock, self._wall = clock, wall
        self._arrived = threading.Condition()
        self._last_reference = float("-inf")
        self.header_clock = HeaderClock(clock, wall)
        config = contract.observation
        self._tracks: dict[str, Track] = {}
        self._cameras: list[Camera] = []
        for name, source in [*config.images.items(), *((s.topic, s) for s in config.state)]:
            track = Track(source.align, config.max_age, self.header_clock)
            self._tracks[name] = track
            receive = self._receiver(source, track)
            if isinstance(source, ImageSource) and source.camera is not None:
                self._cameras.append(open_camera(name, source.camera, receive))
            else:
                transport.subscribe(source.topic, source.message_type, source.qos, receive)
        if config.instruction_topic:
            transport.subscribe(config.instruction_topic, String, LATCHED, self._receive_instruction)
        self._publish: list[tuple[ActionSink, Publisher]] = []
        self._goals: list[tuple[ActionSink, GoalSender]] = []
        for sink in contract.action:
            if sink.is_goal:
                graph = graph_of(transport, f"action {sink.topic} ({sink.type})")
                self._goals.append((sink, open_goals(graph, sink.topic, sink.type, sink.goal)))
            else:
                self._publish.append((sink, transport.advertise(sink.topic, sink.message_type, sink.qos)))
        wrench, timeout = contract.safety.wrench, contract.safety.observation_timeout
        self._wrench = [] if wrench is None else [WrenchCheck(wrench, timeout, transport, clock)]
        for part in (*config.state, *contract.action):
            if (known := transport.joints_of(part.topic)) is not None:
                _check_joints(part, known)

    def _receiver(self, source: ImageSource | StateSource, track: Track) -> Callable[[Message], None]:
        def receive(message: Message) -> None:
            arrival = self._clock()
            moment = track.time_of(message.stamp, arrival)
            if moment is None:
                return
            try:
                check_frame(source, message)
                value = read_image(source, message) if isinstance(source, ImageSource) else read_state(source, message)
            except MessageError as error:
                track.refuse(error, arrival)
                return
            track.add(Sample(value, moment, arrival))
            with self._arrived:
                self._arrived.notify_all()

        return receive

    def _receive_instruction(self, message: Message) -> None:
        assert isinstance(message, String)
        self.instruction = message.data

    def read(self) -> RobotObservation | None:
        now = self._clock()
        config = self.contract.observation
        reference = now
        if config.reference:
            newest = self._tracks[config.reference].newest()
            if newest is None:
                return None
            reference = newest.time
        picked = {name: track.pick(reference) for name, track in self._tracks.items()}
        samples = {name: sample for name, sample in picked.items() if sample is not None}
        if len(samples) < len(picked):
            return None
        aged = [s.time for name, s in samples.items() if self._tracks[name].has_age] or [reference]
        stamp = min(aged)
        if now - stamp > config.max_age:
            return None
        for name, sample in samples.items():
            self._tracks[name].use(sample)
        self._last_reference = reference
        parts = [samples[s.topic].value for s in config.state]
        return RobotObservation(
            images={name: samples[name].value for name in config.images},
            state=np.concatenate(parts) if parts else np.zeros(0, np.float32),
            instruction=self.instruction,
            stamp=min(stamp, now),  # Another machine's clock may be ahead a little.
        )

    def wait(self, timeout: float) -> bool:
        """As `Robot.wait`; with all other parts that belong to the reference's message where they come in time."""
        config = self.contract.observation

        def is_new() -> bool:
            newest = self._tracks[config.reference].newest()
            if newest is None or newest.time <= self._last_reference:
                return False
            return all(track.pick(newest.time) is not None for track in self._tracks.values())

        with self._arrived:
            return self._arrived.wait_for(is_new, timeout)

    def call_services(self) -> None:
        """Call the services of the contract's `start`, and wait for each.

        Raises:
            TransportError: one is not there, does not answer, or refuses.
        """
        for call in self.contract.start:
            graph = graph_of(self.transport, f"start: {call.service}")
            request = TriggerRequest() if call.type == "std_srvs/Trigger" else SetBoolRequest(data=call.data)
            client = graph.service(call.service, SERVICES[call.type])
            if (trouble := call_and_wait(client, call.service, request)) is not None:
                raise TransportError(f"start: {trouble}")

    def send(self, values: np.ndarray, moves: bool = True) -> None:
        if self.is_silent():
            return self.halt()
        stamp = self._wall()
        for sink, publish in self._publish:
            publish(write_action(sink, values, stamp))
        if not moves:
            self.halt()
            return
        for sink, sender in self._goals:
            sender.follow(write_goal(sink, values))
        return None

    def halt(self) -> None:
        for _, sender in self._goals:
            sender.halt()

    def flush(self, before: float = float("inf")) -> None:
        """As `Robot.flush`. The clocks are taken anew when everything is forgotten."""
        if before == float("inf"):
            self.header_clock.reset()
        for track in self._tracks.values():
            track.clear(before)
        self._last_reference = float("-inf")

    def monotonic(self, stamp: int) -> float:
        """Seconds on the monotonic clock of a header's stamp, ns since the epoch."""
        return self.header_clock.to_monotonic(stamp)

    @property
    def fault(self) -> str | None:
        return self.transport.fault or next((c.fault for c in self._cameras if c.fault), None)

    @property
    def state_checks(self) -> list[StateCheck]:
        """What the supervisor must heed of this robot: goals that fail, and its wrench."""
        return [*(sender for _, sender in self._goals), *self._wrench]

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Topic or camera -> reason -> messages refused since the start."""
        counts = {name: dict(track.dropped) for name, track in self._tracks.items() if track.dropped}
        for topic, count in self.transport.unreadable.items():
            counts.setdefault(topic, {})["unreadable"] = count
        return counts

    @property
    def last_errors(self) -> dict[str, str]:
        """Camera or topic -> what was wrong with the last message that could not be decoded."""
        return {name: track.last_error for name, track in self._tracks.items() if track.last_error}

    def unheard(self) -> list[str]:
        """Action topics that nobody listens to, and actions without a server."""
        topics = [sink.topic for sink, _ in self._publish if not self.transport.has_listener(sink.topic)]
        return topics + [sink.topic for sink, sender in self._goals if not sender.ready]

    def missing(self) -> list[str]:
        """Cameras and topics without a message younger than the contract's `max_age`."""
        limit = self._clock() - self.contract.observation.max_age
        newest = {name: track.newest() for name, track in self._tracks.items()}
        return [name for name, sample in newest.items() if sample is None or sample.time < limit]

    def why_no_observation(self) -> str:
        """Which camera or topic `read` lacks, and why; empty where it lacks none."""
        now, config = self._clock(), self.contract.observation
        found = {name: trouble for name, track in self._tracks.items() if (trouble := track.trouble(now))}
        newest = self._tracks[config.reference].newest() if config.reference else None
        if not found and (newest is not None or not config.reference):
            reference = now if newest is None else newest.time
            away = [name for name, track in self._tracks.items() if track.pick(reference) is None]
            found = {name: f"no message within align.tolerance of {config.reference or 'now'}" for name in away}
        return "; ".join(f"{name}: {trouble}" for name, trouble in found.items())

    def close(self) -> None:
        for _, sender in self._goals:
            sender.close()
        for camera in self._cameras:
            camera.close()
        self.transport.close()


def _check_joints(part: StateSource | ActionSink, known: tuple[str, ...]) -> None:
    """
    Raises:
        TransportError: a name that the robot does not have, or an action that leaves one of the robot's out.
    """
    if wrong := [name for name in part.joints if name not in known]:
        raise TransportError(f"{part.topic}: joints: the robot has no {wrong[0]!r}; it has: {', '.join(known)}")
    left_out = [name for name in known if name not in part.joints]
    if left_out and isinstance(part, ActionSink):
        raise TransportError(
            f"{part.topic}: joints: {left_out[0]!r} is left out; the robot takes all of: {', '.join(known)}"
        )
