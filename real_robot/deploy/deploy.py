"""`vla-rl deploy`: builds robot, policy client, supervisor and loop from one contract, and runs them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from real_robot.bridge.robot import TopicRobot
from real_robot.client_package.vla_rl_client import PolicyClientError, ServerUnavailable
from real_robot.contract.contract import RobotContract
from real_robot.contract.load import load_contract
from real_robot.control.chunk_executor import ChunkExecutor
from real_robot.control.playback import InferenceThread, SynchronousActions, SynchronousPacer
from real_robot.control.robot_loop import ActionSource, ClockPacer, ControlLoop, Operator, Pacer, ReferencePacer, Tick
from real_robot.control.shutdown import Shutdown
from real_robot.control.supervisor import ASKED_TO_HOLD, HOLDING, RUNNING, STOPPED, SafetyEvent, Supervisor
from real_robot.deploy.options import DeployOptions, check_fit, check_options, prepare_results
from real_robot.deploy.policy_gate import PolicyGate, hold_on_change, open_gate
from real_robot.deploy.tick_log import TickLog
from real_robot.failure.detector import FailureDetector
from real_robot.failure.watch import DetectorThread, FailureWatch, Overseer, load_detector
from real_robot.guard.robot_guard import through_guard
from real_robot.guard.robot_lock import RobotLock, claim
from real_robot.operator.console.console_state import ConsoleState
from real_robot.operator.console.operator import ConsoleOperator
from real_robot.operator.console.server import ConsoleServer
from real_robot.operator.devices import LeaderArm, device_overrides, open_device
from real_robot.operator.episode_log import Comparisons, EpisodeLog
from real_robot.operator.intervention import Intervention, Kind, Transition
from real_robot.operator.leader import LeaderDrive, LeaderFollowing
from real_robot.operator.operators import KEYS, SCENE_KEY, Ending, KeyOperator, Operators, OutcomeTopic, TopicOperator
from real_robot.operator.recorder import EpisodeLabels, Recorder, Recording
from real_robot.operator.scene_reset import SceneReset, with_scene_reset
from real_robot.operator.sim_episodes import EpisodeResult, RunFacts, SimEpisodes, check_complete, report
from real_robot.operator.teleop import Teleoperation
from real_robot.serving.client import PolicyClient
from real_robot.serving.network import read_token
from real_robot.types import RobotObservation
from vla_rl.common.atomic import write_text_atomic
from vla_rl.types import EpisodeSpec

_log = logging.getLogger(__name__)
Say = Callable[[str], None]


def deploy(options: DeployOptions, say: Say) -> list[EpisodeResult]:
    """Run the control loop until the operator ends it. Returns the simulated episodes' results, if any were asked for.

    Raises:
        ConfigError: a bad contract. TransportError: the robot's graph cannot be reached.
        PolicyClientError: the policy server is not there, or serves a policy that does not fit the robot.
        DeviceError: the person's device is missing, or does not fit the robot's commands.
        DetectorError: the failure detector is missing, or was fitted on another policy.
        EpisodesIncomplete: simulated episodes are void, or were not run; the results are written all the same.
    """
    contract = load_contract(options.robot, (*device_overrides(options.teleop), *options.overrides))
    check_options(options, contract)
    if options.results is not None:
        prepare_results(options.results)
    with Shutdown(say) as shutdown, ExitStack() as stack:
        say = shutdown.say
        client = _connect(options, contract, stack, say)
        detector = load_detector(options.detector, client.address, client.metadata) if options.detector else None
        robot, lock = _open_robot(options, contract, stack, say)
        console_state = ConsoleState(contract, detector.kind if detector else "")
        supervisor = _supervisor(options, contract, robot, _Events(say, console_state), say)
        gate = open_gate(client, contract, detector, options.allow_policy_change)
        episodes = _episodes(options, contract, robot, gate, supervisor) if options.episodes else None
        watchers = _watchers(options, contract, robot, console_state, supervisor, episodes, say, stack)
        watch = _watch(detector, contract, client, gate, watchers.overseer, console_state, say, stack)
        actions, pacer, why_not = _actions(options, contract, client, gate, watch, _pacer(contract, robot))
        stack.callback(actions.close)
        recordings, seconds_left = stack.enter_context(ExitStack()), None
        on_change = hold_on_change(gate, watchers.hold, watchers.hear_of_change, is_watched=episodes is None)
        heeding = (lock, *watchers.observers, on_change, watch, console_state)
        observers: list[Callable[[Tick], None]] = [observer for observer in heeding if observer is not None]
        if options.log is not None:
            observers.append(stack.enter_context(TickLog(options.log, watch)))
        if options.record is not None and watchers.labels is not None:
            recorder = _recorder(options, contract, watchers.labels, gate, watch, recordings, console_state.notice)
            if watchers.console is not None:
                watchers.console.comparisons = comparisons = Comparisons(recorder)
                recordings.callback(comparisons.close)
            seconds_left = recorder.seconds_left
            observers.append(episodes.recorded(recorder) if episodes else recorder)
            if episodes:
                recordings.callback(episodes.leave, recorder)
        claimed = [lock] if lock else []
        loop = ControlLoop(
            robot,
            actions,
            supervisor,
            Operators([shutdown, TopicOperator(contract.operator, robot.transport), *watchers.operators, *claimed]),
            pacer,
            needs_new=contract.pace == "reference",
            silence=contract.silence,
            observers=observers,
            why=lambda missing: (missing == "action" and why_not()) or robot.why_no_observation(),
        )
        say(f"{contract.name}: waiting for {', '.join(robot.missing() + robot.unheard()) or 'nothing'}")
        shutdown.run(loop)
        shutdown.finish(recordings, seconds_left)
        if robot.dropped:
            say(f"messages refused: {json.dumps(robot.dropped)}")
        results = _report(episodes, options, say) if episodes else []
    shutdown.exit(is_complete=episodes is None)
    check_complete(results)
    return results


def _open_robot(
    options: DeployOptions, contract: RobotContract, stack: ExitStack, say: Say
) -> tuple[TopicRobot, RobotLock | None]:
    """The robot, claimed, with the contract's services called; it is left when `stack` closes."""
    transport = contract.transport.open()
    stack.callback(transport.close)
    is_guarded = options.guarded or contract.guard.required
    told = through_guard(contract) if is_guarded else contract
    lock = claim(contract, transport, "guarded deploy" if is_guarded else "deploy", say, stack)
    robot = TopicRobot(told, transport, options.instruction)
    stack.callback(robot.close)
    if lock is not None:
        stack.callback(lock.close)  # before the robot, which leaves the graph: others hear that it is free
    if not options.dry_run:
        robot.call_services()
    return robot, lock


@dataclass(frozen=True)
class _Watchers:
    """Who watches over the robot.

    Attributes:
        overseer: hears of a detector's alarms. labels: says how episodes end, where anybody does.
        hold: called with a reason, lets the policy rest until a person, or the next episode, goes on.
        hear_of_change: called with a change of the policy. console: of a person at one.
    """

    overseer: Overseer
    operators: list[Operator]
    observers: list[Callable[[Tick], None]]
    labels: EpisodeLabels | None
    hold: Callable[[str], object]
    hear_of_change: Callable[[str], object]
    console: ConsoleOperator | None = None


def _watchers(
    options: DeployOptions,
    contract: RobotContract,
    robot: TopicRobot,
    console_state: ConsoleState,
    supervisor: Supervisor,
    episodes: SimEpisodes | None,
    say: Say,
    stack: ExitStack,
) -> _Watchers:
    """A person at a console or at the terminal, or a script of simulated episodes."""

    def hear(text: str) -> None:
        say(f"policy: {text}")
        console_state.notice(text)
        if episodes is not None:
            episodes.void(text, ends=False)

    if options.console is not None:
        tell = _teller(say, console_state)
        console, intervention = _console(contract, console_state, say, options.console.link_timeout, stack)
        if options.start:
            intervention.begin("deploy --start")
        hold = partial(intervention.alarm, who="policy server")
        observers: list[Callable[[Tick], None]] = [intervention]
        if options.results is not None:
            book = EpisodeLog(options.results, intervention, contract.rate)
            stack.callback(book.close)
            observers.append(book)
        person, rest = Operators([console, intervention]), partial(intervention.alarm, who="scene")
        operator = _around(options, contract, robot, person, intervention, rest, tell)
        console.scene = operator if isinstance(operator, SceneReset) else None
        _serve(ConsoleServer(options.console, console, supervisor), say, stack)
        return _Watchers(intervention, [operator], observers, intervention, hold, hear, console)
    if episodes is not None:
        return _Watchers(episodes, [episodes], [episodes], episodes, partial(episodes.void, ends=True), hear)
    keys = KeyOperator(active=options.start, say=say)
    operator = _around(options, contract, robot, keys, keys, keys.alarm, say)
    keys.on_scene = operator.reset if isinstance(operator, SceneReset) else None
    say(f"{KEYS}; {SCENE_KEY}" if keys.on_scene else KEYS)
    return _Watchers(keys, [operator], [], None, keys.alarm, hear)


def _around(
    options: DeployOptions,
    contract: RobotContract,
    robot: TopicRobot,
    person: Operator,
    episode: Ending,
    hold: Callable[[str], object],
    tell: Say,
) -> Operator:
    """The person's operator, with what the contract has around episodes: a sensor that ends them, scene services."""
    if topic := contract.operator.outcome:
        OutcomeTopic(topic, robot.transport, episode, tell)
    if options.dry_run:
        return person
    return with_scene_reset(person, contract.episode, robot, hold, tell) or person


class _Events:
    """Tells what the supervisor did, in the terminal and on the console.

    Not that the robot held because it was asked to, as between two chunks: several times a second, it would drown the
    rest; the page shows the mode all the time, and the episode's events are told apart from these.
    """

    def __init__(self, say: Say, console_state: ConsoleState) -> None:
        self._say, self._console_state = say, console_state
        self._told = ""

    def __call__(self, event: SafetyEvent) -> None:
        if event.text == f"{HOLDING}: {ASKED_TO_HOLD}" or event.text == self._told == RUNNING:
            return
        self._told = event.text
        self._say(f"safety: {event.text}")
        self._console_state.notice(event.text)


def _teller(say: Say, console_state: ConsoleState) -> Say:
    """What tells a line in the terminal and on the console."""

    def tell(text: str) -> None:
        say(text)
        console_state.notice(text)

    return tell


def _connect(options: DeployOptions, contract: RobotContract, stack: ExitStack, say: Say) -> PolicyClient:
    """A client of a server that is ready, and whose policy fits the robot; closed with `stack`."""
    token = read_token(options.token_file) if options.token_file else None
    client = PolicyClient(options.server, token, infer_timeout=contract.execution.infer_timeout, ca=options.ca)
    stack.callback(client.close)
    _await_server(client, options.wait, say)
    check_fit(contract, client.metadata)
    return client


def _await_server(client: PolicyClient, seconds: float, say: Say) -> None:
    """Connect; a server that is not there yet, or still loads its policy, has that long."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            client.connect()
            return
        except ServerUnavailable as error:
            if time.monotonic() > deadline:
                raise
            if not told:
                say(f"waiting for the policy server: {error}")
                told = True
            time.sleep(0.6)


def _supervisor(
    options: DeployOptions, contract: RobotContract, robot: TopicRobot, on_event: _Events, say: Say
) -> Supervisor:
    """The supervisor, with the robot's own checks, and that against its model where the contract names one."""
    safety = contract.safety.model_copy(update={"dry_run": True}) if options.dry_run else contract.safety
    checks = []
    if contract.model is not None:
        from real_robot.kinematics.check import ModelCheck  # with MuJoCo, which robots without a model do without

        checks = [ModelCheck(contract, robot.transport)]
    for check in checks:
        say(f"model: {check.summary()}")
    why_stale, state_checks = robot.why_no_observation, [*checks, *robot.state_checks]
    return Supervisor(safety, on_event=on_event, motion_checks=checks, state_checks=state_checks, why_stale=why_stale)


def _watch(
    detector: FailureDetector | None,
    contract: RobotContract,
    client: PolicyClient,
    gate: PolicyGate,
    overseer: Overseer,
    console_state: ConsoleState,
    say: Say,
    stack: ExitStack,
) -> FailureWatch | None:
    """The detector in its thread, which ends when `stack` closes; None where there is none."""
    if detector is None:
        return None

    tell, identity = _teller(say, console_state), detector.identity
    thread = stack.enter_context(DetectorThread(detector))
    say(f"failure detector: {detector.kind}, fitted on {identity.policy_name} {identity.policy_hash[:12]}")
    return FailureWatch(
        thread,
        identity.every,
        identity.policy_hash,
        gate.act,
        lambda: {"policy_hash": client.identity.hash},
        overseer,
        contract.failure,
        console_state.score,
        tell,
    )


def _actions(
    options: DeployOptions,
    contract: RobotContract,
    client: PolicyClient,
    gate: PolicyGate,
    watch: FailureWatch | None,
    pacer: Pacer,
) -> tuple[ActionSource, Pacer, Callable[[], str]]:
    """The policy's actions, the pacer that goes with them, and what says why there are none."""

    def infer(observation: RobotObservation, **continuation: Any) -> np.ndarray:
        return watch.infer(observation, **continuation) if watch else gate.act(observation, **continuation)["actions"]

    def infer_now(observation: RobotObservation) -> np.ndarray | None:
        try:
            return infer(observation)
        except PolicyClientError as error:
            _log.warning("no actions: %s", error)
            return None

    def why_not() -> str:
        return gate.trouble or (actions.trouble if isinstance(actions, ChunkExecutor) else "")

    if options.synchronous:
        actions = SynchronousActions(InferenceThread(infer_now))
        pacer = SynchronousPacer(pacer, actions, contract.rate)
    else:
        actions = ChunkExecutor(infer, contract.execution, silence=lambda: client.silence)
    return watch.around(actions) if watch else actions, pacer, why_not


def _pacer(contract: RobotContract, robot: TopicRobot) -> ClockPacer | ReferencePacer:
    if contract.pace == "clock":
        return ClockPacer(contract.rate)
    return ReferencePacer(robot, contract.pace_timeout or 2 / contract.rate)


def _console(
    contract: RobotContract, console_state: ConsoleState, say: Say, link_timeout: float, stack: ExitStack
) -> tuple[ConsoleOperator, Intervention]:
    """Build the operator of a console, and the intervention that it commands."""

    def on_transition(change: Transition) -> None:
        text = f"{change.event.replace('_', ' ')} ({change.who}{': ' + change.reason if change.reason else ''})"
        say(f"episode: {text}")
        console_state.notice(text)

    kinds: list[Kind] = [d.kind for d in contract.safety.dimensions]
    timeout = min(contract.teleop.timeout, contract.safety.command_timeout)
    intervention = Intervention(kinds, command_timeout=timeout, on_transition=on_transition)
    teleoperation = Teleoperation(contract.teleop, contract.safety)
    device, leader = None, None
    if contract.teleop.device is not None:
        tell, config, safety = _teller(say, console_state), contract.teleop.device, contract.safety
        opened = open_device(config, contract, teleoperation.moves)
        stack.callback(opened.close)
        if isinstance(opened, LeaderArm):
            drive = None
            if config.align == "drive_leader":
                drive = LeaderDrive(opened, safety, config.align_within, config.align_speed, tell)
            leader = LeaderFollowing(opened, safety, config.align_within, timeout, tell, drive=drive)
        else:
            device = opened
    return ConsoleOperator(intervention, teleoperation, console_state, link_timeout, device, leader), intervention


def _serve(server: ConsoleServer, say: Say, stack: ExitStack) -> None:
    stack.enter_context(server.running())
    say(f"console: {server.url}")


def _recorder(
    options: DeployOptions,
    contract: RobotContract,
    labels: EpisodeLabels,
    gate: PolicyGate,
    watch: FailureWatch | None,
    stack: ExitStack,
    tell: Say,
) -> Recorder:
    """Writes the labeled episodes as a dataset; it is finished when `stack` closes."""
    assert options.record is not None, "checked by the caller"
    recording = stack.enter_context(
        Recording(
            options.record,
            contract.rate,
            contract.name,
            tell,
            contract.observation.state_names,
            contract.action_names,
        )
    )
    scores = (lambda: watch.score) if watch else None
    recorder = Recorder(recording, labels, lambda: gate.policy.version, options.round, failure_score=scores)
    stack.callback(recorder.close)
    return recorder


def _episodes(
    options: DeployOptions, contract: RobotContract, robot: TopicRobot, gate: PolicyGate, supervisor: Supervisor
) -> SimEpisodes:
    def stopped() -> str:
        mode, reason = supervisor.state
        return reason if mode == STOPPED else ""

    tasks = options.tasks
    specs = [EpisodeSpec(tasks[i % len(tasks)], options.split, i // len(tasks)) for i in range(options.episodes)]
    facts = RunFacts(lambda: str(gate.policy), lambda: gate.trouble, stopped, contract.silence)
    return SimEpisodes(robot.transport, robot, specs, rules=options.void_rules, facts=facts)


def _report(episodes: SimEpisodes, options: DeployOptions, say: Say) -> list[EpisodeResult]:
    results = episodes.all_results()
    for line in report(results, options.detector is not None):
        say(line)
    if options.results:
        write_text_atomic(options.results, json.dumps([r.as_json() for r in results], indent=1) + "\n")
    return results
