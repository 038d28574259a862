"""`vla-rl deploy`: builds robot, policy client, supervisor and loop from one contract, and runs them."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TextIO

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
from real_robot.deploy.notices import CameraAnswers, HeldTicks, Repetition
from real_robot.deploy.options import DeployOptions, check_fit, check_options, prepare_results
from real_robot.deploy.policy_gate import hold_on_change, open_gate
from real_robot.failure.watch import DetectorThread, FailureWatch, Overseer, load_detector
from real_robot.guard.robot_guard import through_guard
from real_robot.guard.robot_lock import RobotLock, claim
from real_robot.operator.console.operator import ConsoleOperator, ConsoleState
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
from vla_rl.data.lerobot_assembly import load_lerobot
from vla_rl.types import EpisodeSpec

_log = logging.getLogger(__name__)
Say = Callable[[str], None]
WARM_UP = 300.0  # seconds that a policy's very first actions may take, of a server that compiles


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
    if options.record is not None:
        load_lerobot()
    with Shutdown(say) as shutdown, ExitStack() as stack:
        parts = _Deployment(options, contract, shutdown.say, stack)
        recordings = stack.enter_context(ExitStack())
        observers, seconds_left = parts.observers(recordings)
        robot, operator = parts.robot, TopicOperator(contract.operator, parts.robot.transport)
        loop = ControlLoop(
            robot,
            parts.actions,
            parts.supervisor,
            Operators([shutdown, operator, *parts.operators, *([parts.lock] if parts.lock else [])]),
            parts.pacer,
            needs_new=contract.pace == "reference",
            silence=contract.silence,
            observers=observers,
            why=lambda missing: (missing == "action" and parts.why_no_action()) or robot.why_no_observation(),
            warms_up=parts.warms_up,
        )
        shutdown.say(f"{contract.name}: waiting for {', '.join(robot.missing() + robot.unheard()) or 'nothing'}")
        shutdown.run(loop)
        shutdown.finish(recordings, seconds_left)
        if robot.dropped:
            shutdown.say(f"messages refused: {json.dumps(robot.dropped)}")
        results = parts.report()
    if parts.lock is not None:
        parts.lock.check_held()
    shutdown.exit(is_complete=parts.episodes is None)
    check_complete(results)
    return results


def _open_robot(
    options: DeployOptions, contract: RobotContract, stack: ExitStack, say: Say
) -> tuple[TopicRobot, RobotLock | None]:
    """The robot, claimed, with the contract's services called; it is left when `stack` closes."""
    transport = contract.open_transport("deploy")
    stack.callback(transport.close)
    is_guarded = options.guarded or contract.guard.required
    told = through_guard(contract) if is_guarded else contract
    lock = claim(contract, transport, "guarded deploy" if is_guarded else "deploy", say, stack)
    robot = TopicRobot(told, transport, options.instruction)
    stack.callback(robot.close)
    if lock is not None:
        robot.is_silent = lambda: lock.is_silent
        stack.callback(lock.close)  # before the robot, which leaves the graph: others hear that it is free
    if not options.dry_run:
        robot.call_services()
    return robot, lock


class _Deployment:
    """The parts of one run of deploy, made in this order; what is to be closed is, when `stack` closes.

    Attributes:
        operators, watching: who watches over the robot, and which of them observe the loop's ticks.
        overseer: hears of a detector's alarms. labels: says how episodes end, where anybody does.
        hold: called with a reason, lets the policy rest until a person, or the next episode, goes on.
        console: of a person at one.
    """

    overseer: Overseer
    operators: list[Operator]
    watching: list[Callable[[Tick], None]]
    labels: EpisodeLabels | None = None
    hold: Callable[[str], object]
    console: ConsoleOperator | None = None

    def __init__(self, options: DeployOptions, contract: RobotContract, say: Say, stack: ExitStack) -> None:
        self.options, self.contract, self.say, self.stack = options, contract, say, stack
        self.client = client = self._connect()
        detector = load_detector(options.detector, client.address, client.metadata) if options.detector else None
        self.detector = detector
        self.robot, self.lock = _open_robot(options, contract, stack, say)
        self.console_state = ConsoleState(contract, detector.kind if detector else "")
        self.supervisor = self._supervisor()
        self.gate = open_gate(client, contract, detector, options.allow_policy_change)
        self.episodes = self._episodes() if options.episodes else None
        if options.console is not None:
            self._watch_from_console()
        elif self.episodes is not None:
            self.overseer = self.labels = self.episodes
            self.operators, self.watching = [self.episodes], [self.episodes]
            self.hold = partial(self.episodes.void, ends=True)
        else:
            self._watch_from_keys()
        self.watch = self._failure_watch()
        self.actions, self.pacer = self._actions()
        stack.callback(self.actions.close)

    def tell(self, text: str) -> None:
        """A line in the terminal and on the console."""
        self.say(text)
        self.console_state.notice(text)

    def _tell_of(self, what: str, text: str) -> None:
        self.say(f"{what}: {text}")
        self.console_state.notice(text)

    def _on_event(self, event: SafetyEvent) -> None:
        """Tell what the supervisor did.

        Not that the robot held because it was asked to, as between two chunks, nor what comes again and again: several
        times a second, it would drown the rest. The page shows the mode all the time, `HeldTicks` tells the share.
        """
        if event.text == f"{HOLDING}: {ASKED_TO_HOLD}" or event.text == self._told == RUNNING:
            return
        self._told = event.text
        if event.text.startswith((RUNNING, HOLDING)) and self._repetition.is_over(event.text):
            return
        self._tell_of("safety", event.text)

    # --- policy server and robot --------------------------------------------------------------

    def _connect(self) -> PolicyClient:
        """A client of a server that is ready, and whose policy fits the robot."""
        options, timeout = self.options, self.contract.execution.infer_timeout
        token = read_token(options.token_file) if options.token_file else None
        client = PolicyClient(options.server, token, infer_timeout=timeout, ca=options.ca, warm_up=WARM_UP)
        self.stack.callback(client.close)
        self._await_server(client)
        check_fit(self.contract, client.metadata)
        return client

    def _await_server(self, client: PolicyClient) -> None:
        """Connect; a server that is not there yet, or still loads its policy, has `--wait` seconds."""
        deadline = time.monotonic() + self.options.wait
        told = False
        while True:
            try:
                client.connect()
                return
            except ServerUnavailable as error:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    self.say(f"waiting for the policy server: {error}")
                    told = True
                time.sleep(0.6)

    def _supervisor(self) -> Supervisor:
        """The supervisor, with the robot's own checks, and that against its model where the contract names one."""
        contract, robot = self.contract, self.robot
        safety = contract.safety.model_copy(update={"dry_run": True}) if self.options.dry_run else contract.safety
        checks = []
        if contract.model is not None:
            from real_robot.kinematics.check import ModelCheck  # with MuJoCo, which robots without a model do without

            checks = [ModelCheck(contract, robot.transport)]
            self.say(f"model: {checks[0].summary()}")
        state_checks = [*checks, *robot.state_checks]
        self._told, self._repetition = "", Repetition()  # the supervisor's last event; what was told of late
        return Supervisor(safety, time.monotonic, self._on_event, checks, state_checks, robot.why_no_observation)

    # --- who watches over the robot -----------------------------------------------------------

    def _watch_from_console(self) -> None:
        """A person at a console."""
        options, contract = self.options, self.contract
        assert options.console is not None, "checked by the caller"
        intervention = self._intervention()
        console = self.console = self._console_operator(intervention, options.console.link_timeout)
        if options.start:
            intervention.begin("deploy --start")
        self.overseer = self.labels = intervention
        self.hold = partial(intervention.alarm, who="policy server")
        self.watching = [intervention]
        if options.results is not None:
            results = EpisodeLog(options.results, intervention, contract.rate)
            self.stack.callback(results.close)
            self.watching.append(results)
        rest = partial(intervention.alarm, who="scene")
        operator = self._around(Operators([console, intervention]), intervention, rest, self.tell)
        console.scene = operator if isinstance(operator, SceneReset) else None
        self.operators = [operator]
        server = ConsoleServer(options.console, console, self.supervisor)
        self.stack.enter_context(server.running())
        self.say(f"console: {server.url}")

    def _watch_from_keys(self) -> None:
        """A person at the terminal."""
        keys = KeyOperator(active=self.options.start, say=self.say)
        operator = self._around(keys, keys, keys.alarm, self.say)
        keys.on_scene = operator.reset if isinstance(operator, SceneReset) else None
        self.say(f"{KEYS}; {SCENE_KEY}" if keys.on_scene else KEYS)
        self.overseer, self.operators, self.watching, self.hold = keys, [operator], [], keys.alarm

    def _around(self, person: Operator, episode: Ending, hold: Callable[[str], object], tell: Say) -> Operator:
        """The person's operator, with what the contract has around episodes: an outcome sensor, scene services."""
        if topic := self.contract.operator.outcome:
            OutcomeTopic(topic, self.robot.transport, episode, tell)
        if self.options.dry_run:
            return person
        return with_scene_reset(person, self.contract.episode, self.robot, hold, tell) or person

    def _intervention(self) -> Intervention:
        def on_transition(change: Transition) -> None:
            text = f"{change.event.replace('_', ' ')} ({change.who}{': ' + change.reason if change.reason else ''})"
            self._tell_of("episode", text)

        safety = self.contract.safety
        kinds: list[Kind] = [d.kind for d in safety.dimensions]
        timeout = min(self.contract.teleop.timeout, safety.command_timeout)
        return Intervention(kinds, command_timeout=timeout, on_transition=on_transition)

    def _console_operator(self, intervention: Intervention, link_timeout: float) -> ConsoleOperator:
        """The operator of a console, with the person's device where the contract names one."""
        config, safety = self.contract.teleop, self.contract.safety
        teleoperation, device, leader = Teleoperation(config, safety), None, None
        if config.device is not None:
            opened = open_device(config.device, self.contract, teleoperation.moves)
            self.stack.callback(opened.close)
            if isinstance(opened, LeaderArm):
                within, drive = config.device.align_within, None
                if config.device.align == "drive_leader":
                    drive = LeaderDrive(opened, safety, within, config.device.align_speed, self.tell)
                timeout = min(config.timeout, safety.command_timeout)
                leader = LeaderFollowing(opened, safety, within, timeout, self.tell, drive=drive)
            else:
                device = opened
        return ConsoleOperator(intervention, teleoperation, self.console_state, link_timeout, device, leader)

    def _episodes(self) -> SimEpisodes:
        def stopped() -> str:
            mode, reason = self.supervisor.state
            return reason if mode == STOPPED else ""

        options, gate = self.options, self.gate
        tasks = options.tasks
        specs = [EpisodeSpec(tasks[i % len(tasks)], options.split, i // len(tasks)) for i in range(options.episodes)]
        facts = RunFacts(lambda: str(gate.policy), lambda: gate.trouble, stopped, self.contract.silence, self.warms_up)
        return SimEpisodes(self.robot.transport, self.robot, specs, rules=options.void_rules, facts=facts)

    # --- the policy's actions -----------------------------------------------------------------

    def _failure_watch(self) -> FailureWatch | None:
        """The detector in its thread; None where there is none."""
        if self.detector is None:
            return None
        identity = self.detector.identity
        thread = self.stack.enter_context(DetectorThread(self.detector))
        self.say(
            f"failure detector: {self.detector.kind}, fitted on {identity.policy_name} {identity.policy_hash[:12]}"
        )
        return FailureWatch(
            thread,
            identity.every,
            identity.policy_hash,
            self.gate.act,
            lambda: {"policy_hash": self.client.identity.hash},
            self.overseer,
            self.contract.failure,
            self.console_state.score,
            self.tell,
        )

    def _actions(self) -> tuple[ActionSource, Pacer]:
        """The policy's actions, and the pacer that goes with them."""
        contract, watch, gate = self.contract, self.watch, self.gate
        pacer: Pacer = ClockPacer(contract.rate)
        if contract.pace == "reference":
            pacer = ReferencePacer(self.robot, contract.pace_timeout or 2 / contract.rate)

        def infer(observation: RobotObservation, **continuation: Any) -> np.ndarray:
            if watch is not None:
                return watch.infer(observation, **continuation)
            return gate.act(observation, **continuation)["actions"]

        def infer_now(observation: RobotObservation) -> np.ndarray | None:
            try:
                return infer(observation)
            except PolicyClientError as error:
                _log.warning("no actions: %s", error)
                return None

        self._executor: ChunkExecutor | None = None
        if self.options.synchronous:
            actions = SynchronousActions(InferenceThread(infer_now))
            pacer = SynchronousPacer(pacer, actions, contract.rate)
        else:
            actions = self._executor = ChunkExecutor(infer, contract.execution, silence=lambda: self.client.silence)
        return watch.around(actions) if watch else actions, pacer

    def why_no_action(self) -> str:
        """Why the policy has none; empty where nothing is wrong."""
        return self.gate.trouble or (self._executor.trouble if self._executor else "")

    def warms_up(self) -> bool:
        """Whether the policy's very first actions are still waited for, and nothing is wrong."""
        return not (self.gate.has_answered or self.gate.trouble) and self.client.silence < math.inf

    # --- what is written ----------------------------------------------------------------------

    def observers(self, recordings: ExitStack) -> tuple[list[Callable[[Tick], None]], Callable[[], float] | None]:
        """Who is called with each tick, in order; and about how long `recordings` takes to close, where any is made."""
        on_change = hold_on_change(self.gate, self.hold, self._on_policy_change, is_watched=self.episodes is None)
        telling = (HeldTicks(self.supervisor, self.warms_up, self.tell), CameraAnswers(self.contract.safety, self.tell))
        heeding = (self.lock, *self.watching, on_change, self.watch, self.console_state, *telling)
        observers: list[Callable[[Tick], None]] = [observer for observer in heeding if observer is not None]
        if self.options.log is not None:
            observers.append(self.stack.enter_context(TickLog(self.options.log, self.watch)))
        if self.options.record is None or self.labels is None:
            return observers, None
        recorder = self._recorder(self.options.record, self.labels, recordings)
        if self.console is not None:
            self.console.comparisons = comparisons = Comparisons(recorder)
            recordings.callback(comparisons.close)
        observers.append(self.episodes.recorded(recorder) if self.episodes else recorder)
        if self.episodes:
            recordings.callback(self.episodes.leave, recorder)
        return observers, recorder.seconds_left

    def _on_policy_change(self, text: str) -> None:
        self._tell_of("policy", text)
        if self.episodes is not None:
            self.episodes.void(text, ends=False)

    def _recorder(self, folder: Path, labels: EpisodeLabels, recordings: ExitStack) -> Recorder:
        """Writes the labeled episodes as a dataset; it is finished when `recordings` closes."""
        contract, watch, tell = self.contract, self.watch, self.console_state.notice
        names = contract.observation.state_names, contract.action_names
        recording = recordings.enter_context(Recording(folder, contract.rate, contract.name, tell, *names))
        scores = (lambda: watch.score) if watch else None
        recorder = Recorder(
            recording, labels, lambda: self.gate.policy.version, self.options.round, failure_score=scores
        )
        recordings.callback(recorder.close)
        return recorder

    def report(self) -> list[EpisodeResult]:
        """Tell and write how the simulated episodes ended; none where there are none."""
        if self.episodes is None:
            return []
        results = self.episodes.all_results()
        for line in report(results, self.options.detector is not None):
            self.say(line)
        if self.options.results:
            write_text_atomic(self.options.results, json.dumps([r.as_json() for r in results], indent=1) + "\n")
        return results


class TickLog:
    """Every tick as a JSON line: what was asked, what was sent, why. Written line by line, whole after a crash."""

    def __init__(self, path: Path, watch: FailureWatch | None = None) -> None:
        self._path, self._watch = path, watch
        self._file: TextIO | None = None

    def __enter__(self) -> TickLog:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", buffering=1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __call__(self, tick: Tick) -> None:
        assert self._file is not None, "used as a context manager"
        sent, requested = tick.sent, tick.requested
        line = {
            "time": tick.time,
            "step": tick.step,
            "stamp": tick.observation.stamp if tick.observation else None,
            "source": requested.source if requested else None,
            "requested": _plain(requested.values) if requested else None,
            "sent": _plain(sent.values) if sent and sent.values is not None else None,
            "mode": sent.mode if sent else "waiting" if tick.operator_command.active else "inactive",
            "limited": list(sent.limited) if sent else [],
            "late": round(tick.late, 6),
            "latency": round(tick.latency, 6),
        }
        if self._watch is not None:
            line["failure"] = self._watch.score
        self._file.write(json.dumps(line) + "\n")


def _plain(values: np.ndarray) -> list[float | str]:
    """JSON has no NaN."""
    return [float(v) if np.isfinite(v) else str(v) for v in values]
