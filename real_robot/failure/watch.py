"""The failure watch beside the loop: embeddings come with the policy's answers, alarms go to who watches the robot.

    watch = FailureWatch(detector_thread, every, policy_hash, client.act, lambda: client.metadata, overseer)
    loop = ControlLoop(robot, watch.around(ChunkExecutor(watch.infer, ...)), ..., observers=[intervention, watch])

A detector is fitted on embeddings `every` control steps apart. So the embedding is asked for with the first chunk that
begins in each such stretch of the steps that the policy has driven, and scored in a `DetectorThread`. The control
tick hands over numbers and looks at the newest score; it waits for neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from real_robot.contract.sections import WatchConfig
from real_robot.control.robot_loop import ActionSource, Tick
from real_robot.control.supervisor import RUNNING
from real_robot.failure.detector import DetectorError, FailureDetector, Score
from real_robot.types import Command, RobotObservation


class _Task:
    """Work for the thread: chunk `number`'s embedding, or (embedding None) to forget that chunk and all after it."""

    def __init__(self, episode: int, instruction: str, number: int, embedding: np.ndarray | None) -> None:
        self.episode, self.instruction, self.number, self.embedding = episode, instruction, number, embedding
        self.asked = time.monotonic()


class DetectorThread:
    """One thread, one place in its queue: a newer embedding takes the place of one that was not yet looked at.

    A detector that raises, and an embedding with NaN, are alarms: `latest` says so until the next `reset`.

    Args:
        detector: used by the thread alone from now on.
    """

    def __init__(self, detector: FailureDetector) -> None:
        self._detector = detector
        self._changed = threading.Condition()
        self._waiting: _Task | None = None
        self._waits_since = 0.0  # when the place in the queue was taken, by whatever stands there now
        self._running: _Task | None = None
        self._closed = False
        self._episode, self._number, self._instruction = 0, 0, ""
        self._latest: Score | None = None
        self._thread = threading.Thread(target=self._run, name="failure-detector", daemon=True)
        self._thread.start()

    def reset(self, instruction: str) -> None:
        """A new episode begins; scores of the old one are discarded. Does not wait."""
        with self._changed:
            self._episode, self._number, self._instruction = self._episode + 1, 0, instruction
            self._waiting, self._latest = None, None

    def submit(self, embedding: np.ndarray, number: int | None = None) -> int:
        """Hand over a chunk's embedding, float (D,); returns its number in the episode. Does not wait.

        Args:
            number: None: the next. Those left out, and those that a newer one replaced, it stands for too.
        """
        copied = np.array(embedding, np.float32)
        with self._changed:
            number = self._number if number is None else number
            self._put(number, copied)
            self._number = number + 1
            return number

    def rewind(self, num_kept: int) -> None:
        """Forget all chunks of the episode but the first `num_kept`; `latest` will be the last one's. Does not wait."""
        with self._changed:
            self._put(num_kept, None)
            self._number = num_kept

    def latest(self) -> Score | None:
        """The newest score of the current episode; None before the first."""
        with self._changed:
            return self._latest

    def seconds_behind(self) -> float:
        """How long the oldest work of this episode has waited; 0 where there is none. Large: the detector hangs."""
        with self._changed:
            running, waiting = self._running, self._waiting
            since = [self._waits_since] if waiting is not None else []
            since += [running.asked] if running is not None and running.episode == self._episode else []
            return time.monotonic() - min(since) if since else 0.0

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is left to do; False after `timeout` seconds. Not for a control loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._running is None, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, number: int, embedding: np.ndarray | None) -> None:
        if self._closed:
            raise RuntimeError("the detector's thread was closed")
        task = _Task(self._episode, self._instruction, number, embedding)
        self._waits_since = task.asked if self._waiting is None else self._waits_since
        self._waiting = task
        self._changed.notify_all()

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        episode, broken = -1, ""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting is not None)
                if self._closed:
                    return
                task, self._waiting = self._waiting, None
                self._running = task
            assert task is not None, "woken with work"
            score = None
            try:
                if task.episode != episode:
                    self._detector.reset(task.instruction)
                    episode, broken = task.episode, ""
                if not broken:
                    score = self._score(task)
                    broken = score.reason if score is not None else ""
            except Exception as error:  # The thread's edge: a person must hear of it, and the robot must not go on.
                broken = f"{type(error).__name__}: {error}"
            if broken:
                score = Score(float("nan"), float("nan"), True, task.number, broken)
            with self._changed:
                if task.episode == self._episode:
                    self._latest = score
                self._running = None
                self._changed.notify_all()

    def _score(self, task: _Task) -> Score | None:
        if (surplus := self._detector.num_chunks - task.number) > 0:
            score = self._detector.rewind(surplus)
            if task.embedding is None:
                return score
        if task.embedding is None:
            return self.latest()
        return self._detector.update(task.embedding, number=task.number)


class Overseer(Protocol):
    """Who hears of an alarm: `Intervention`, or an operator without a console."""

    def alarm(self, reason: str) -> bool:
        """Make the policy pause. False where it does not drive."""
        ...

    def all_clear(self) -> bool:
        """The score is quiet again: end a rewind. False where none runs."""
        ...


@dataclass(frozen=True)
class _Placed(RobotObservation):
    """An observation and where it stands: `number` is its stretch of `every` steps; `generation`, see FailureWatch."""

    generation: int
    number: int


class FailureWatch:
    """See the module. `infer` is the policy, called by the executor; the watch itself observes the loop's ticks.

    What ended with a new episode, a rewind or a reset has an older `generation`: its embeddings are not used.

    Args:
        every: control steps from one embedding to the next that the detector was fitted on.
        policy_hash: of the checkpoint that it was fitted on.
        act: `PolicyClient.act`. facts: the server's metadata, which change when another server answers.
        show: called at each new score with (score, threshold). tell: called with what a person should know.
    """

    def __init__(
        self,
        thread: DetectorThread,
        every: int,
        policy_hash: str,
        act: Callable[..., dict[str, Any]],
        facts: Callable[[], Mapping[str, Any]],
        overseer: Overseer,
        config: WatchConfig | None = None,
        show: Callable[[float, float], None] = lambda score, threshold: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config or WatchConfig()
        self._thread, self._every, self._policy_hash = thread, every, policy_hash
        self._act, self._facts = act, facts
        self._overseer, self._show, self._tell = overseer, show, tell
        self._lock = threading.Lock()  # of what the executor's thread shares
        self._generation, self._asked, self._fault = 0, -1, ""
        self._clear()

    def _clear(self) -> None:
        self._position = 0  # steps that the policy has driven, less those rewound
        self._is_new = True  # the detector has not heard of this episode yet
        self._shown: Score | None = None
        self._alarmed = False  # the score has risen above its threshold, and not been quiet since
        self._told = self._said = ""  # what the overseer and the console have heard of

    @property
    def score(self) -> tuple[float, float] | None:
        """(score, threshold) of this episode's newest chunk; None before the first, and after an error."""
        shown = self._shown
        return None if shown is None or shown.reason else (shown.value, shown.threshold)

    # --- the policy's side: the executor's thread ---------------------------------------------

    def infer(self, observation: RobotObservation, **continuation: Any) -> np.ndarray:
        """The policy's chunk, float32 (H, A); its embedding, where one is due, goes to the detector."""
        due = isinstance(observation, _Placed) and self._is_due(observation)
        answer = self._act(observation, embedding=due, **continuation)
        if isinstance(observation, _Placed) and due:
            self._take(observation, answer.get("embedding"))
        return answer["actions"]

    def _is_due(self, observation: _Placed) -> bool:
        with self._lock:
            return observation.generation == self._generation and observation.number > self._asked

    def _take(self, observation: _Placed, embedding: object) -> None:
        served = str(self._facts().get("policy_hash", ""))
        with self._lock:
            if observation.generation != self._generation:
                return
            if served != self._policy_hash:
                self._fault = (
                    f"the policy server now serves {served[:12] or 'an unknown policy'}, the failure detector was "
                    f"fitted on {self._policy_hash[:12]}; serve that one again, or restart deploy with another detector"
                )
            elif not isinstance(embedding, np.ndarray):
                self._fault = "the policy server sent no embedding"
            else:
                self._fault = ""
                self._asked = observation.number
                self._thread.submit(embedding, observation.number)

    # --- the control loop's side --------------------------------------------------------------

    def around(self, actions: ActionSource) -> ActionSource:
        """The action source through which observations must go, so that they know where in the episode they stand."""
        return _Placing(actions, self)

    def place(self, observation: RobotObservation) -> RobotObservation:
        """The observation with its place in the episode."""
        if self._is_new:
            self._is_new = False
            self._thread.reset(observation.instruction)
        seen = observation
        number = self._position // self._every
        return _Placed(seen.images, seen.state, seen.instruction, seen.stamp, self._generation, number)

    def outdate(self) -> None:
        """What is being computed belongs to the past."""
        with self._lock:
            self._generation += 1

    def __call__(self, tick: Tick) -> None:
        """Note where the episode stands, and act on the newest score."""
        if tick.operator_command.begin:
            self._clear()
            with self._lock:
                self._generation, self._asked, self._fault = self._generation + 1, -1, ""
        self._count(tick)
        if not self._is_new and tick.operator_command.active:  # Else the score is of an episode that is over.
            self._look()

    def _count(self, tick: Tick) -> None:
        if tick.sent is None or tick.requested is None or tick.sent.mode != RUNNING:
            return
        if tick.requested.source == "policy":
            self._position += 1
        elif tick.requested.source == "rewind" and self._position > 0:
            self._position -= 1
            num_kept = self._position // self._every + 1
            with self._lock:
                self._generation += 1
                if num_kept <= self._asked:
                    self._asked = num_kept - 1
                    self._thread.rewind(num_kept)

    def _look(self) -> None:
        score = self._thread.latest()
        if score is not None and score is not self._shown:
            self._shown = score
            self._show(score.value, score.threshold)
            if score.alarm:
                self._alarmed = True
            elif self._alarmed and score.is_quiet(self.config.quiet):
                self._alarmed = False
                self._overseer.all_clear()
        if trouble := self._trouble(score):
            self._raise(trouble, f"failure detector: {trouble}")
            if trouble != self._said:
                self._said = trouble
                self._tell(f"failure detector: {trouble}")
        elif score is not None and score.alarm:
            self._raise("score", f"failure score {score.value:.3g} above its threshold {score.threshold:.3g}")
        else:
            self._told = ""

    def _raise(self, what: str, reason: str) -> None:
        """Once for each time that the score rises above: a person who lets the policy go on has heard of it."""
        if what != self._told and self._overseer.alarm(reason):
            self._told = what

    def _trouble(self, latest: Score | None) -> str:
        """Why there is no score to rely on; empty where there is nothing wrong."""
        with self._lock:
            fault = self._fault
        if fault:
            return fault
        if latest is not None and latest.reason:
            return f"{latest.reason}; without a detector until the next episode"
        if self._thread.seconds_behind() > self.config.patience:
            return f"no answer for {self.config.patience:g} s"
        return ""


class _Placing:
    """An action source whose observations know their place."""

    def __init__(self, inner: ActionSource, watch: FailureWatch) -> None:
        self._inner, self._watch = inner, watch

    def submit(self, observation: RobotObservation, step: int) -> None:
        self._inner.submit(self._watch.place(observation), step)

    def next_action(self, step: int) -> Command | None:
        return self._inner.next_action(step)

    def reset(self) -> None:
        self._watch.outdate()
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


def load_detector(folder: Path, server: str, facts: Mapping[str, Any]) -> FailureDetector:
    """The detector in a folder, for the policy that a server serves, ready for its first embedding.

    Raises:
        DetectorError: missing, damaged, fitted on another checkpoint, or the server cannot give what it needs.
        ConfigError: it needs a package that is not installed.
    """
    if not facts.get("policy_hash") or not facts.get("embedding"):
        raise DetectorError(
            f"the policy server at {server} gives no embeddings, or does not tell its policy's hash: a failure "
            "detector needs both. Serve the policy with this version's `vla-rl serve`, or leave --detector out"
        )
    detector = FailureDetector.load(folder, str(facts["policy_hash"]))
    detector.update(np.zeros(detector.identity.dim, np.float32))  # The first call imports what it needs: seconds.
    detector.reset("")
    return detector
