"""The control loop over the shipped contract of the simulated robot, with topics in memory and a clock of ours."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from memory_transport import MemoryTransport

from real_robot.bridge.codec import encode_image, to_quaternion
from real_robot.bridge.robot import TopicRobot
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.contract.safety import SafetyConfig
from real_robot.control.playback import SynchronousActions
from real_robot.control.robot_loop import ControlLoop, OperatorCommand, Tick
from real_robot.control.supervisor import SafetyEvent, Supervisor
from real_robot.operator.intervention import Intervention
from real_robot.operator.operators import KeyOperator, Operators, TopicOperator
from real_robot.transports.messages import Bool, CompressedImage, JointState, PoseStamped, String, TwistStamped
from real_robot.types import Command, RobotObservation

WALL = 1_700_000_000_000_000_000
TICK = 0.05


class Script:
    """An operator whose next commands are given."""

    def __init__(self) -> None:
        self.commands: list[OperatorCommand] = []

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        return self.commands.pop(0) if self.commands else OperatorCommand()


class Bench:
    """A robot that stands, whatever it is told, ticked by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *overrides: str, chunk: Callable | None = None) -> None:
        self.now, self.jump = 1000.0, 0.0
        monkeypatch.setattr(time, "monotonic", self.clock)
        self.contract: RobotContract = load_contract("sim_robot", ("safety.checks.motion_tolerance=0", *overrides))
        self.transport = MemoryTransport()
        self.robot = TopicRobot(self.contract, self.transport, "push", clock=self.clock, wall=self.wall)
        self.script = Script()
        operator = Operators([TopicOperator(self.contract.operator, self.transport, self.clock), self.script])
        self.asked: list[RobotObservation] = []
        self.ticks: list[Tick] = []
        self.loop = ControlLoop(
            self.robot,
            SynchronousActions(chunk or self.infer),
            Supervisor(self.contract.safety, clock=self.clock),
            operator,
            pacer=None,  # type: ignore[arg-type]
            needs_new=self.contract.pace == "reference",
            silence=self.contract.silence,
            observers=[self.ticks.append],
        )

    def clock(self) -> float:
        return self.now

    def wall(self) -> int:
        return WALL + round((self.now - 1000.0 + self.jump) * 1e9)

    def infer(self, observation: RobotObservation) -> np.ndarray:
        self.asked.append(observation)
        return np.arange(1, 9, dtype=np.float32)[:, None] * np.full(7, 0.1, np.float32)

    def show(self, age: float = 0.0, x: float = 0.0) -> None:
        """What the robot publishes at one step."""
        stamp = self.wall() - round(age * 1e9)
        orientation = to_quaternion(np.array([np.pi, 0, 0]))
        pose = PoseStamped(stamp=stamp, frame_id="table", position=np.array([x, 0, 0.1]), orientation=orientation)
        fingers = JointState(
            stamp=stamp,
            name=("finger_right", "finger_left"),
            position=np.array([-0.04, 0.04]),
            velocity=np.zeros(0),
            effort=np.zeros(0),
        )
        picture = np.full((64, 64, 3), (200, 10, 30), np.uint8)
        self.transport.deliver("/end_effector_pose", pose)
        self.transport.deliver("/joint_states", fingers)
        image = CompressedImage(stamp=stamp, format="png", data=encode_image(picture, "png"))
        self.transport.deliver("/agentview/image/compressed", image)

    def tick(self, show: bool = True, seconds: float = TICK) -> Tick:
        self.now += seconds
        if show:
            self.show()
        return self.loop.tick()

    def twists(self) -> list[float]:
        """x of every twist sent."""
        sent = self.transport.sent["/twist_command"]
        return [round(float(m.linear[0]), 4) for m in sent if isinstance(m, TwistStamped)]


def test_a_chunk_is_played_to_its_end_and_the_next_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for _ in range(10):
        bench.tick()
    assert bench.twists() == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.1, 0.2]
    assert len(bench.asked) == 2 and bench.loop.step == 10
    first = bench.asked[0]
    np.testing.assert_allclose(first.state, [0, 0, 0.1, np.pi, 0, 0, 0.04, -0.04], atol=1e-6)
    assert first.images["agentview"].shape == (64, 64, 3) and first.instruction == "push"
    message = bench.transport.sent["/twist_command"][-1]
    assert message.stamp == bench.wall() and message.frame_id == "table", "stamped with the time of sending"
    assert message.stamp == bench.transport.sent["/gripper/command"][-1].stamp


def test_each_observation_gives_one_action_however_often_the_loop_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.tick()
    second = bench.tick(show=False)
    assert second.requested is None and second.sent is not None
    assert bench.loop.step == 1


def test_by_the_clock_actions_go_on_between_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, "pace=clock")
    bench.tick()
    bench.tick(show=False)
    assert bench.twists() == [0.1, 0.2]


def test_without_observations_it_holds_then_stops_then_waits_for_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    for _ in range(3):
        bench.tick()
    silent = 0.0
    modes = []
    while silent < 3.0:
        tick = bench.tick(show=False)
        silent += TICK
        assert tick.sent is not None
        modes.append(tick.sent.mode)
        if silent > bench.contract.observation.max_age + TICK:
            assert bench.twists()[-1] == 0.0
    assert set(modes) == {"running", "holding", "stopped"} and modes[-1] == "stopped"
    assert modes.index("stopped") * TICK == pytest.approx(bench.contract.silence, abs=2 * TICK)
    for _ in range(5):
        assert bench.tick().sent.mode == "stopped"  # type: ignore[union-attr]
    assert bench.twists()[-1] == 0.0
    bench.script.commands = [OperatorCommand(reset="anna")]
    bench.tick()
    bench.tick()
    assert bench.twists()[-1] == 0.1, "a new chunk: the old one is not executed"


def test_a_hold_drops_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the supervisor forbade is not played later."""
    bench = Bench(monkeypatch, "safety.deadman=true", "operator.deadman=/deadman")
    bench.transport.deliver("/deadman", Bool(data=True))
    for _ in range(3):
        bench.tick()
    bench.transport.deliver("/deadman", Bool(data=False))
    bench.tick()
    assert bench.twists()[-1] == 0.0
    bench.transport.deliver("/deadman", Bool(data=True))
    bench.tick()
    assert bench.twists() == [0.1, 0.2, 0.3, 0.0, 0.1] and len(bench.asked) == 2


def test_the_stop_topic_latches(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.tick()
    bench.transport.deliver("/stop", Bool(data=True))
    assert bench.tick().sent.mode == "stopped"  # type: ignore[union-attr]
    bench.transport.deliver("/stop", Bool(data=False))
    assert bench.tick().sent.mode == "stopped", "releasing the button is no reset"  # type: ignore[union-attr]
    bench.transport.deliver("/reset", String(data="anna"))
    bench.tick()
    bench.tick()
    assert bench.twists()[-1] == 0.1


def test_a_fault_of_the_transport_stops_and_forbids_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.tick()
    bench.transport.fault = "the ROS master is gone"
    bench.script.commands = [OperatorCommand(), OperatorCommand(reset="anna")]
    bench.tick()
    assert bench.tick().sent.mode == "stopped"  # type: ignore[union-attr]
    assert "master" in bench.loop.supervisor.state.reason
    bench.transport.fault = None
    assert bench.tick().sent.mode == "stopped"  # type: ignore[union-attr]


def test_while_inactive_nothing_is_sent_after_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.tick()
    bench.script.commands = [OperatorCommand(active=False)] * 3
    ticks = [bench.tick() for _ in range(3)]
    assert bench.twists() == [0.1, 0.0]
    assert [t.sent is None for t in ticks] == [False, True, True]


class Joint:
    """A robot of one joint that is where it was told to be, unless it is moved by hand. Also the source of actions."""

    fault = None
    position, asked = 0.0, 0.5

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[float] = []
        self.script = Script()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        limits = {"name": "j", "kind": "position", "low": -2, "high": 2, "max_velocity": 1, "state": 0}
        safety = SafetyConfig.model_validate({"control_hz": 1 / TICK, "dimensions": [limits]})
        self.now, pacer = 1000.0, None
        self.events: list[SafetyEvent] = []
        self.supervisor = Supervisor(safety, clock=lambda: self.now, on_event=self.events.append)
        self.loop = ControlLoop(self, self, self.supervisor, self.script, pacer)  # type: ignore[arg-type]

    def read(self) -> RobotObservation:
        return RobotObservation({}, np.array([self.position], np.float32), "", self.now)

    def send(self, values: np.ndarray, moves: bool = True) -> None:
        self.position = float(values[0])
        self.sent.append(self.position)

    def next_action(self, step: int) -> Command:
        return Command(np.array([self.asked], np.float32), "policy", self.now)

    def submit(self, observation: RobotObservation, step: int) -> None: ...
    def reset(self) -> None: ...
    def halt(self) -> None: ...
    def flush(self, before: float = 0.0) -> None: ...

    def tick(self, *commands: OperatorCommand) -> Tick:
        for command in commands or (OperatorCommand(),):
            self.now += TICK
            self.script.commands = [command]
            tick = self.loop.tick()
        return tick


@pytest.mark.parametrize("begins", [True, False])
def test_a_robot_that_was_moved_while_it_was_inactive_is_not_driven_back(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """By hand, or by a service that drives it home: the first number that is sent is where it is measured to be."""
    robot = Joint(monkeypatch)
    robot.tick(OperatorCommand(begin=True), *[OperatorCommand()] * 4)
    assert robot.sent[-1] == pytest.approx(4 * TICK)
    robot.tick(*[OperatorCommand(active=False)] * 3)
    robot.position, num_sent = -1.5, len(robot.sent)
    robot.tick(OperatorCommand(active=False), OperatorCommand(begin=begins), *[OperatorCommand()] * 3)
    steps = np.diff([-1.5, *robot.sent[num_sent:]])
    assert len(steps) and (np.abs(steps) <= TICK + 1e-6).all()


def test_of_a_stop_and_a_reset_at_one_tick_the_stop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people, or a button and a page: a stop that came is not undone by a reset that was meant for an earlier."""
    robot = Joint(monkeypatch)
    robot.tick(OperatorCommand(begin=True), OperatorCommand())
    tick = robot.tick(OperatorCommand(stop="e-stop", reset="ben"))
    assert tick.operator_command.reset is None, "others on the graph do not hear of it either"
    assert "ben: no reset while it lasts: e-stop" in [event.text for event in robot.events]
    assert robot.tick(OperatorCommand()).sent.mode == "stopped"  # type: ignore[union-attr]


def test_a_person_takes_the_place_of_the_policy_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.tick()
    values = np.array([5, 0, 0, 0, 0, 0, 0], np.float32)
    bench.script.commands = [OperatorCommand(command=Command(values, "correction", bench.now + TICK))]
    tick = bench.tick()
    assert tick.requested is not None and tick.requested.source == "correction"
    assert bench.twists()[-1] == 1.0 and tick.sent is not None and tick.sent.limited


def test_a_new_episode_begins_with_a_new_observation_and_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.tick()
    bench.script.commands = [OperatorCommand(begin=True)]
    assert bench.tick().requested is None, "this observation may be from before"
    bench.tick()
    assert bench.twists()[-1] == 0.1 and bench.loop.step == 1


@pytest.mark.parametrize(("jump", "reason"), [(3600.0, "future"), (-3600.0, "stale")])
def test_after_a_clock_jump_it_holds_until_a_reset(monkeypatch: pytest.MonkeyPatch, jump: float, reason: str) -> None:
    """The wall clock of this machine, which is also the robot's, jumps."""
    bench = Bench(monkeypatch)
    bench.tick()
    bench.jump = jump
    for _ in range(60):
        tick = bench.tick()
    assert tick.sent is not None and tick.sent.mode == "stopped" and bench.twists()[-1] == 0.0
    assert bench.robot.dropped["agentview"][reason] > 10
    bench.script.commands = [OperatorCommand(reset="anna")]
    bench.tick()
    bench.tick()
    assert bench.twists()[-1] == 0.1


def test_a_policy_that_gives_a_wrong_shape_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, chunk=lambda observation: np.zeros(7))
    with pytest.raises(ValueError, match=r"shape \(7,\), expected \(H, A\)"):
        bench.tick()


def test_keys_start_stop_reset_and_end() -> None:
    import os

    read, write = os.pipe()
    with open(read) as stream, open(write, "w") as keyboard:
        operator = KeyOperator(stream)

        def after(keys: str) -> OperatorCommand:
            keyboard.write(keys)
            keyboard.flush()
            deadline = time.monotonic() + 5
            while not operator._pending and time.monotonic() < deadline:
                time.sleep(0.01)
            return operator.poll(None)

        assert not operator.poll(None).active
        assert after("\n") == OperatorCommand(active=True, begin=True)
        assert operator.poll(None) == OperatorCommand(active=True)
        assert after(" ") == OperatorCommand(active=False, stop="keyboard")
        assert after("r") == OperatorCommand(active=False, reset="keyboard")
        assert after("q").finished


def test_space_still_stops_after_a_byte_that_is_no_character() -> None:
    import os

    read, write = os.pipe()
    with open(read, encoding="utf-8") as stream, open(write, "wb", buffering=0) as keyboard:
        operator = KeyOperator(stream, active=True)
        keyboard.write(b"\xe9")
        time.sleep(0.1)
        keyboard.write(b" ")
        deadline = time.monotonic() + 5
        while (stop := operator.poll(None).stop) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop == "keyboard"


def with_intervention(bench: Bench) -> Intervention:
    """The bench's loop under an intervention, of whose episode some steps are done."""
    it = Intervention([d.kind for d in bench.contract.safety.dimensions], clock=bench.clock)
    bench.loop.operator = it
    bench.loop.observers.append(it)
    it.begin("ann")
    for _ in range(4):
        bench.tick()
    assert bench.twists() == [0.0, 0.1, 0.2, 0.3]  # The first tick begins the episode.
    return it


def test_a_person_may_take_their_time_while_the_robot_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    it = with_intervention(bench)
    it.alarm("score 3 above 2")
    for _ in range(round(2 * bench.contract.silence / TICK)):
        tick = bench.tick()
        assert tick.sent is not None and tick.sent.mode == "holding"
    assert bench.twists()[-1] == 0.0
    it.resume("ann")
    bench.tick()
    assert len(bench.asked) == 2 and bench.twists()[-1] == 0.1, "a fresh chunk, from its first action"


def test_a_whole_intervention_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    it = with_intervention(bench)
    it.rewind("ann")
    for _ in range(4):
        bench.tick()
    assert bench.twists()[4:] == [-0.3, -0.2, -0.1, 0.0] and it.state == "paused"
    it.take_over("ann")
    values = np.zeros(len(bench.contract.safety.dimensions))
    values[0] = 0.4
    it.give(values)
    bench.tick()
    it.recovery_done("ann")
    it.give(-values)
    bench.tick()
    assert bench.twists()[-2:] == [0.4, -0.4]
    it.success("ann")
    ticks = [bench.tick() for _ in range(3)]
    assert not ticks[-1].operator_command.active and bench.twists()[-1] == 0.0
    assert [t.requested.source for t in bench.ticks if t.requested][-3:] == ["hold", "recovery", "correction"]


@pytest.mark.parametrize("part", ["observer", "operator", "read", "send"])
def test_whatever_fails_the_robot_is_braked_first(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """One that cannot be told at one tick is told at the next."""
    bench = Bench(monkeypatch)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(bench, "now", bench.now + seconds))
    broken = {"left": 0}

    def fail(*_: object) -> None:
        if broken["left"]:
            broken["left"] -= 1
            raise OSError("broken")

    send, read, poll = bench.robot.send, bench.robot.read, bench.loop.operator.poll
    if part == "observer":
        bench.loop.observers.append(fail)
    elif part == "operator":
        monkeypatch.setattr(bench.loop.operator, "poll", lambda o: (fail(), poll(o))[1])
    elif part == "read":
        monkeypatch.setattr(bench.robot, "read", lambda: (fail(), read())[1])
    else:
        monkeypatch.setattr(bench.robot, "send", lambda v, moves=True: (fail(), send(v, moves))[1])

    class ThreeTicks:
        left = 3

        def wait(self, active: bool) -> float:
            self.left -= 1
            broken["left"] = 2 if self.left < 0 else 0
            bench.now += TICK
            bench.show()
            return 0.0

    bench.loop.pacer = ThreeTicks()
    with pytest.raises(OSError, match="broken"):
        bench.loop.run()
    assert bench.twists()[2] > 0 and not any(bench.twists()[-5:]), "told for 0.2 s: the last message may be lost"
