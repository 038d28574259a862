"""The lock's protocol: late messages and starts at any moment over a bus in memory."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from representatives import slow_but_for
from virtual_time import VirtualTime

from real_robot.contract.load import load_contract
from real_robot.control.robot_loop import OperatorCommand, Tick
from real_robot.deploy.deploy import _open_robot
from real_robot.deploy.options import DeployOptions
from real_robot.guard import robot_lock
from real_robot.guard.robot_lock import TOPIC, Lease, RobotBusyError, RobotLock, Role, new_lease, read_lease
from real_robot.transports.base import Graph, GraphConnection, Handler, Publisher, QosConfig, TransportError
from real_robot.transports.messages import Message, String, TwistStamped
from real_robot.transports.ros1 import Ros1Transport


class Bus:
    """Carries messages between members, each after a time of its own; two find each other after up to `discovery`."""

    def __init__(self, virtual: VirtualTime, delay: float = 0.0) -> None:
        self.virtual, self.delay, self.discovery, self.members = virtual, delay, 0.0, list[Member]()
        self.slow = 0.0  # seconds that the graph's answer may take, who publishes
        self.has_master = False  # which knows at once who is there, as ROS 1's does
        self.found: dict[frozenset[str], float] = {}

    def member(self) -> Member:
        new = Member(self, f"/node{len(self.members)}")
        for other in self.members:
            self.found[frozenset((new.name, other.name))] = (
                self.virtual.now + self.virtual.rng.choice((1, self.virtual.rng.random())) * self.discovery
            )
        self.members.append(new)
        return new

    def know(self, one: Member, other: Member) -> bool:
        return self.virtual.now >= self.found.get(frozenset((one.name, other.name)), 0.0)


class Member:
    fault, unreadable = None, dict[str, int]()

    def __init__(self, bus: Bus, name: str) -> None:
        self.bus, self.name, self.is_deaf = bus, name, False
        self.discovery = Ros1Transport.discovery if bus.has_master else GraphConnection.discovery
        self.handlers: dict[str, list[Handler]] = defaultdict(list)
        self.topics: set[str] = set()

    def subscribe(self, topic: str, message_type: type[Message], qos: QosConfig, handler: Handler) -> None:
        self.handlers[topic].append(handler)

    def advertise(self, topic: str, message_type: type[Message], qos: QosConfig) -> Publisher:
        self.topics.add(topic)

        def publish(message: Message) -> None:
            if isinstance(message, String) and '"leaves"' in message.data:
                self.topics.clear()  # as its process ends
            for member in [m for m in self.bus.members if self.bus.know(self, m)]:
                wait = self.bus.virtual.rng.random() * self.bus.delay
                if wait:
                    self.bus.virtual.Timer(wait, member.hear, (topic, message)).start()
                else:
                    member.hear(topic, message)

        return publish

    def hear(self, topic: str, message: Message) -> None:
        for handler in [] if self.is_deaf else self.handlers[topic]:
            handler(message)

    def other_publishers(self, topic: str) -> list[str] | None:
        others = [m for m in self.bus.members if m is not self and topic in m.topics]
        found = [m.name for m in others if self.bus.has_master or self.bus.know(self, m)]
        self.bus.virtual.sleep(self.bus.virtual.rng.random() * self.bus.slow)
        return found

    def has_listener(self, topic: str) -> bool:
        return True

    def joints_of(self, topic: str) -> tuple[str, ...] | None:
        return None

    def close(self) -> None:
        self.bus.members.remove(self)


@pytest.fixture
def bus(virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch) -> Bus:
    virtual.install(monkeypatch, "real_robot.guard")
    return Bus(virtual)


def lock(
    bus: Bus, role: Role = "deploy", topics: tuple[str, ...] = ("/twist",), others: tuple[str, ...] = ()
) -> RobotLock:
    member = bus.member()
    assert isinstance(member, Graph)
    return RobotLock(member, new_lease(role, "arm", topics), topics, others)


def tick(done: OperatorCommand) -> Tick:
    return Tick(0, 0.0, None, False, None, None, 0.0, 0.0, done)


@pytest.mark.parametrize("virtual", range(20), indirect=True)
def test_exactly_one_of_many_whenever_they_start_and_however_late_words_are(bus: Bus) -> None:
    """Words take up to a third of the time that a claim waits for others."""
    outcomes, virtual, settle = list[bool](), bus.virtual, GraphConnection.discovery
    bus.delay = settle / 3

    def start(wait: float) -> None:
        virtual.sleep(wait)
        with suppress(RobotBusyError):
            lock(bus).acquire()
            outcomes.append(True)

    threads = [virtual.Thread(start, (virtual.rng.random() * 3 * settle,)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True]


@pytest.mark.parametrize("virtual", slow_but_for((0,), range(5)), indirect=True)
@pytest.mark.parametrize("roles", [("deploy", "deploy"), ("robot guard", "deploy")], ids=" and ".join)
@pytest.mark.parametrize("has_master", [False, True], ids=["dds", "ros1"])
def test_pairs_that_find_each_other_after_five_seconds(bus: Bus, has_master: bool, roles: tuple[Role, Role]) -> None:
    """Ten pairs a test, one after the other or at once. The graph's own answers take up to half a second."""
    virtual, bus.discovery, bus.slow, bus.has_master = bus.virtual, 5.0, 0.5, has_master
    for pair in range(10):
        held = list[Role]()

        def start(role: Role, wait: float, topics: tuple[str, ...], held: list[Role] = held) -> None:
            virtual.sleep(wait)
            with suppress(RobotBusyError):
                lock(bus, role, topics).acquire()
                held.append(role)

        waits = (0.0, virtual.rng.choice((0.0, 20.0, virtual.rng.random() * 8.0)))
        threads = [virtual.Thread(start, (r, w, (f"/{pair}",))) for r, w in zip(roles, waits, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1, (pair, waits, held)


def test_robots_with_no_topic_in_common_are_two(bus: Bus) -> None:
    lock(bus).acquire()
    lock(bus, topics=("/other",)).acquire()
    with pytest.raises(RobotBusyError, match="arm is driven already"):
        lock(bus, topics=("/gripper", "/other")).acquire()


def test_a_guard_goes_with_a_guarded_deploy_alone(bus: Bus) -> None:
    with pytest.raises(TransportError, match="no vla-rl robot guard of these topics"):
        lock(bus, "guarded deploy").acquire()
    guard = lock(bus, "robot guard")
    guard.acquire()
    with pytest.raises(RobotBusyError, match=r"vla-rl robot guard on .* give --guarded"):
        lock(bus).acquire()
    driver = lock(bus, "guarded deploy")
    driver.acquire()
    with pytest.raises(RobotBusyError, match=r"driven already .* vla-rl deploy on"):
        lock(bus, "guarded deploy").acquire()
    assert driver.poll(None).stop is None
    guard.close()
    assert driver.poll(None).stop == "the robot's guard is gone"


def test_a_member_that_is_not_heard_is_not_taken_for_absent(bus: Bus) -> None:
    mute = bus.member()
    mute.advertise(TOPIC, String, QosConfig())
    with pytest.raises(RobotBusyError, match="/node0 announces a driver"):
        lock(bus).acquire()


def test_another_publisher_must_be_named_in_the_contract(bus: Bus) -> None:
    bus.member().advertise("/twist", TwistStamped, QosConfig())
    with pytest.raises(RobotBusyError, match="/twist has another publisher, /node0"):
        lock(bus).acquire()
    for others in (("/node0",), ("*",)):
        taken = lock(bus, others=others)
        taken.acquire()
        taken.close()


def test_stops_and_resets_travel_and_no_stop_of_the_lock_itself_does(bus: Bus) -> None:
    guard, driver = lock(bus, "robot guard"), lock(bus, "guarded deploy")
    guard.acquire()
    driver.acquire()

    def act(one: RobotLock, done: OperatorCommand) -> None:
        one(tick(done))

    act(driver, OperatorCommand(stop="keyboard"))
    command = guard.poll(None)
    assert command.stop is not None and command.stop.startswith("keyboard, at vla-rl deploy on")
    act(guard, command)  # the guard's loop tells its observers of what it obeyed
    act(driver, OperatorCommand(stop="keyboard"))  # a button that is held
    assert guard.poll(None) == driver.poll(None) == OperatorCommand()
    late = lock(bus, "guarded deploy", ("/twist",))
    bus.virtual.sleep(2 * robot_lock.PERIOD)
    assert late.poll(None).stop is not None, "one that comes later is stopped too"
    late.close()
    act(guard, OperatorCommand(reset="Ann"))
    command = driver.poll(None)
    assert command.reset is not None and command.reset.startswith("reset, at vla-rl robot guard on")
    act(driver, command)
    assert guard.poll(None) == OperatorCommand()
    guard.close()
    command = driver.poll(None)
    act(driver, command)
    assert command.stop == "the robot's guard is gone" and not driver._lease.stopped


def test_two_that_hold_it_after_the_graph_was_cut_in_two(bus: Bus) -> None:
    """The younger one sends nothing from then on, not even zeros, and ends; which that is both know."""
    first = lock(bus)
    first.acquire()
    bus.members[0].is_deaf = True
    second = lock(bus)
    second._tell(state="holds")
    bus.members[0].is_deaf = False
    bus.virtual.sleep(2 * robot_lock.PERIOD)
    assert first.poll(None).stop is None
    told = second.poll(None)
    assert str(told.stop).startswith("another driver: vla-rl deploy on") and told.finished
    assert (first.is_silent, second.is_silent) == (False, True)
    first.check_held()
    bus.members.pop(0)  # the other one ends
    bus.virtual.sleep(2 * robot_lock.EXPIRY)
    with pytest.raises(RobotBusyError, match=r"arm: another driver: .*; this process sends nothing any more"):
        second.check_held()


def test_one_that_stood_still_stops_and_has_become_the_younger_one(bus: Bus) -> None:
    held = lock(bus)
    before = held._lease.id
    bus.virtual.now += 60
    assert "stood still for 60.0 s" in str(held.poll(None).stop)
    assert held._lease.id > before
    assert held.is_silent, "whoever has taken the robot since is heard first"
    bus.virtual.sleep(robot_lock.LISTEN)
    assert not held.is_silent, "nobody has: it brakes"
    held.close()


def test_one_that_stood_still_does_not_take_its_own_late_word_for_another_driver(bus: Bus) -> None:
    held = lock(bus)
    held.acquire()
    word = String(data=held._lease.model_dump_json())  # on its way while the process stands still
    bus.virtual.now += 3.2
    assert "stood still for 3.2 s" in str(held.poll(None).stop)
    bus.members[0].hear(TOPIC, word)
    assert held.poll(None) == OperatorCommand()
    held.check_held()
    held.close()


def test_one_process_of_a_machine_has_a_robot_whatever_the_graph_knows() -> None:
    def claimed(role: Role, *topics: str, graph: str = f"test {os.getpid()}") -> ExitStack | None:
        return robot_lock.claim_host(graph, new_lease(role, "arm", topics))

    def is_free(role: Role, *topics: str) -> bool:
        if (got := claimed(role, *topics)) is not None:
            got.close()
        return got is not None

    guard = claimed("robot guard", "/twist", "/gripper")
    assert guard is not None and not is_free("robot guard", "/twist") and not is_free("deploy", "/gripper")
    assert is_free("deploy", "/other") and claimed("deploy", "/twist", graph="another one") is not None
    driver = claimed("guarded deploy", "/twist", "/gripper")
    assert driver is not None and not is_free("guarded deploy", "/twist", "/more")
    guard.close()
    assert is_free("robot guard", "/twist") and not is_free("deploy", "/twist")
    driver.close()
    assert is_free("deploy", "/twist", "/gripper")


def test_deploy_gives_the_robot_back_before_it_leaves_the_graph(bus: Bus) -> None:
    """Else the next one would be told for two seconds that the robot is driven."""
    heard, member, closed = list[str](), bus.member(), list[bool]()
    bus.member().subscribe(TOPIC, String, QosConfig(), lambda m: heard.append(json.loads(m.data)["state"]))  # type: ignore[attr-defined]
    member.close = lambda: closed.append("leaves" in heard)  # type: ignore[method-assign]
    transport = SimpleNamespace(open=lambda: member)
    contract = load_contract("sim_robot").model_copy(update={"transport": transport})
    with ExitStack() as stack:
        _, claimed = _open_robot(DeployOptions("sim_robot"), contract, stack, print)
        assert claimed is not None and heard[-1] == "holds"
    assert closed and all(closed)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"id": "x"}', "\x00", '{"id": 3, "epoch": 1e400}', "{" * 1000])
def test_what_is_no_lease_is_ignored(bus: Bus, text: str) -> None:
    assert read_lease(text) is None
    one = lock(bus)
    bus.member().advertise(TOPIC, String, QosConfig())(String(data=text))
    assert one.poll(None) == OperatorCommand()
    one.close()


def test_a_lease_is_what_was_written() -> None:
    lease = new_lease("deploy", "arm" * 100, ["twist", "/x"])
    assert read_lease(lease.model_dump_json()) == lease and lease.topics == ("/twist", "/x")
    assert isinstance(lease, Lease) and str(os.getpid()) in lease.describe()
