"""Episode recorder: who was in control at each step, as a LeRobotDataset v3.

    with Recording(folder, rate=20, robot="sim_robot") as recording:
        recorder = Recorder(recording, intervention, policy_version="base 1a2b")
        loop = ControlLoop(..., observers=[intervention, recorder])
        loop.run()

The control tick only puts references into a bounded queue; a thread encodes the images and writes each finished
episode as a whole (a folder that appears by a rename). A crash loses at most the episode under way: `Recording` on
the same folder goes on after the last whole one, `finish` makes the dataset of what is there.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from real_robot.control.robot_loop import Tick
from real_robot.control.supervisor import RUNNING
from real_robot.operator.intervention import EpisodeSummary
from real_robot.operator.recording_folder import RecordingError, RecordingLock, finish, read_settings
from real_robot.types import RobotObservation
from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.lerobot_io import (
    FAILURE_FEATURES,
    RECORDING_SETTINGS,
    RecordedEpisode,
    dataset_features,
    encode_png,
    list_shards,
    robot_features,
    staging_folder,
    write_shard,
)
from vla_rl.types import CONTROL_SOURCES, EpisodeSpec, Split

_log = logging.getLogger(__name__)
ASSEMBLING = 0.5  # of what it takes to store an episode, an episode's share of making the dataset
NO_SCORE = (float("nan"), float("nan"))


class EpisodeLabels(Protocol):
    """Who says when an episode ends, and how it went: `Intervention`, or a script of simulated episodes."""

    @property
    def state(self) -> str:
        """ "idle" or "ended" between episodes."""
        ...

    @property
    def summary(self) -> EpisodeSummary:
        """What is known of the present (or last) episode."""
        ...

    def summary_of(self, number: int) -> EpisodeSummary | None:
        """Of the episode with this `EpisodeSummary.number`; None of one that is forgotten."""
        ...


@dataclass(frozen=True)
class _Frame:
    observation: RobotObservation
    requested: np.ndarray
    sent: np.ndarray
    source: str
    time: float
    policy: str
    failure: tuple[float, float] | None = None


@dataclass(frozen=True)
class _End:
    """What is known when an episode is over. `keep`: store it."""

    spec: EpisodeSpec | None
    final: RobotObservation
    summary: EpisodeSummary
    round: int
    cut: bool
    keep: bool = True


@dataclass(frozen=True)
class StoredEpisode:
    """An episode of the recording. number: by its labels. shard: its folder's number."""

    number: int
    shard: int
    instruction: str


@dataclass
class _Open:
    """The episode under way, in the writer's thread."""

    png: dict[str, list[bytes]] = field(default_factory=dict)
    frames: list[_Frame] = field(default_factory=list)  # without their images


class Recording:
    """A folder into which recorders write episodes; becomes the dataset when it is closed without an error.

    Args:
        folder: of the LeRobotDataset v3; must not exist yet. Until then episodes are in `.NAME.recording` beside it.
        rate: control ticks per second, the dataset's fps. robot: its name.
        on_problem: called with what a person should know (from any thread).
        state_names, action_names: of the numbers of the state and of an action; where none are given, they are counted.

    Raises:
        RecordingError: the folder exists, cannot be written or holds another recording; another process records there.
    """

    def __init__(
        self,
        folder: Path,
        rate: float,
        robot: str,
        on_problem: Callable[[str], None] = lambda text: _log.warning("%s", text),
        state_names: Sequence[str] = (),
        action_names: Sequence[str] = (),
    ) -> None:
        self.folder, self.on_problem = Path(folder), on_problem
        self._state_names, self._action_names = state_names, action_names
        if self.folder.exists():
            raise RecordingError(f"{self.folder} exists already; record into another folder")
        if rate <= 0 or abs(rate - round(rate)) > 1e-6:
            raise RecordingError(f"rate: {rate}; a LeRobotDataset has a whole number of frames per second")
        self._settings: dict[str, Any] = {"rate": round(rate), "robot": robot}
        self._lock = threading.Lock()
        self.staging = staging_folder(self.folder)
        self._features: dict[str, Any] | None = None
        self._open_staging()
        self._next = 1 + max((int(s.name.removeprefix("shard_")) for s in self.staging.glob("shard_*")), default=-1)

    def _open_staging(self) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self._held = RecordingLock(self.staging)
            self.staging.mkdir(exist_ok=True)
            if not (self.staging / RECORDING_SETTINGS).is_file():
                write_text_atomic(self.staging / RECORDING_SETTINGS, json.dumps(self._settings))
        except OSError as error:
            raise RecordingError(
                f"{self.folder}: nothing can be recorded there ({error.strerror}: {error.filename}); give --record a "
                "folder that can be written"
            ) from error
        found = read_settings(self.staging)
        if {key: found.get(key) for key in self._settings} != self._settings:
            raise RecordingError(
                f"{self.staging} holds a recording of {found.get('robot')} at {found.get('rate')} Hz that was not "
                "finished; finish it (`vla-rl import`), or record into another folder"
            )
        self._features = found.get("features")

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        self._held.close()

    def add(self, episode: RecordedEpisode, image_sizes: Mapping[str, tuple[int, int]]) -> int:
        """Store an episode, whole or not at all. May be called from several threads; episodes appear in order.

        Returns:
            Its shard's number.

        Raises:
            RecordingError: other cameras or sizes than the episodes before. DiskFullError: no room.
        """
        if len(set(image_sizes.values())) > 1:
            raise RecordingError(
                f"cameras of different sizes, {dict(image_sizes)}: set `size` in the contract's images"
            )
        size = next(iter(image_sizes.values()), (0, 0))
        state, action = self._state_names or episode.state.shape[1], self._action_names or episode.actions.shape[1]
        features = robot_features(dataset_features(tuple(episode.png), size, state, action))
        if episode.failure_score is not None:
            features |= FAILURE_FEATURES
        with self._lock:
            if self._features is None:
                settings = json.dumps({**self._settings, "features": features})
                write_text_atomic(self.staging / RECORDING_SETTINGS, settings)
                self._features = json.loads(settings)["features"]  # Only now: without them nothing can be finished.
            elif self._features != json.loads(json.dumps(features)):
                raise RecordingError(
                    "an episode has other cameras, image sizes, states or actions than those before it, or a failure "
                    "detector where they have none"
                )
            number, self._next = self._next, self._next + 1
            write_shard(self.staging / f"shard_{number:05d}", [episode], [], features)
        return number

    @property
    def num_episodes(self) -> int:
        """Whole episodes stored."""
        return len(list_shards(self.staging))

    def close(self) -> dict[str, int]:
        """Make the dataset. Returns {"episodes", "frames"}; with no episode there is no dataset."""
        with self._held:
            if self.num_episodes:
                return finish(self.folder)
            shutil.rmtree(self.staging)
            return {"episodes": 0, "frames": 0}


class _MeanSeconds:
    """What something takes, on average."""

    def __init__(self) -> None:
        self.mean, self._count = 0.0, 0

    def note(self, seconds: float) -> None:
        self._count += 1
        self.mean += (seconds - self.mean) / self._count


class Recorder:
    """Observes the ticks of one robot. Stands behind its labels' source (the `Intervention`) in the loop's observers.

    A frame is recorded where the robot followed a command: the observation before it, what the supervisor sent
    (`action`), what was asked (`action.requested`), who asked, which policy was in force, and when (`time`). Where the
    robot held there is no frame, and `time` shows how long. Otherwise an episode has no gap: should the queue or
    `max_frames` be full, it is cut there, and counts as failed.

    Args:
        recording: where to. One recording may serve several recorders.
        labels: when episodes end, and how.
        policy_version: written with each frame; a function says which policy acts now.
        round: written with each episode; may be changed between episodes.
        capacity: frames that may wait for the writer. max_frames: longest episode.
        wait: wait for the writer in place of cutting: for simulators, whose time stands still.
        failure_score: a failure detector's (score, threshold) now, None where it has none; recorded with each frame.

    Attributes:
        stored: the episodes stored so far, oldest first.
    """

    def __init__(
        self,
        recording: Recording,
        labels: EpisodeLabels,
        policy_version: str | Callable[[], str] = "",
        round: int = 0,
        capacity: int = 256,
        max_frames: int = 36_000,
        wait: bool = False,
        failure_score: Callable[[], tuple[float, float] | None] | None = None,
    ) -> None:
        self._failure_score = failure_score
        self.recording, self.labels = recording, labels
        self._policy = policy_version if callable(policy_version) else lambda: policy_version
        self.round = round
        self.stored: list[StoredEpisode] = []
        self.spec: EpisodeSpec | None = None  # of the next episode, where it has one (simulators)
        self._max_frames, self._wait = max_frames, wait
        self._num_frames, self._number, self._cut = 0, 0, False
        self._last: RobotObservation | None = None
        self._final: RobotObservation | None = None
        self._summary: EpisodeSummary | None = None
        self._frames, self._episodes = _MeanSeconds(), _MeanSeconds()
        self._queue: queue.Queue[_Frame | _End | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    # --- the control tick ---------------------------------------------------------------------

    def __call__(self, tick: Tick) -> None:
        if tick.operator_command.begin:
            self.end()  # One that nobody has labeled, or only since the last tick.
            self._number = self.labels.summary.number
        rests = self.labels.state in ("idle", "ended") and not tick.operator_command.active  # No command was sent.
        if self._num_frames and tick.observation is not None and self._final is None and rests:
            self._final = tick.observation
        if tick.sent is not None and tick.sent.mode == RUNNING and tick.sent.allowed is not None:
            self._take(tick)
        self._look()
        if self._final is not None and self._summary is not None and self._summary.outcome is not None:
            self._end_episode()

    def _take(self, tick: Tick) -> None:
        requested, sent = tick.requested, tick.sent
        assert sent is not None and sent.allowed is not None, "checked by the caller"
        if tick.observation is None or requested is None or requested.source not in CONTROL_SOURCES or self._cut:
            return
        failure = self._failure_score() or NO_SCORE if self._failure_score else None
        source, policy = requested.source, self._policy()
        frame = _Frame(tick.observation, requested.values, sent.allowed, source, tick.time, policy, failure)
        if self._num_frames >= self._max_frames or not self._put(frame):
            self._cut = True
            self.recording.on_problem(f"recording: episode cut after {self._num_frames} frames; the writer is too slow")
            return
        self._num_frames += 1
        self._last = tick.observation

    def _put(self, item: _Frame | _End) -> bool:
        try:
            self._queue.put(item, block=self._wait)
        except queue.Full:
            return False
        return True

    def _look(self) -> None:
        """Keep what the labels say of the episode recorded here; they may have gone on to the next one."""
        self._summary = self.labels.summary_of(self._number) or self._summary

    def _end_episode(self, keep: bool = True) -> None:
        """Hand the episode to the writer; nothing where none has a frame."""
        if self._num_frames and self._last is not None and self._summary is not None:
            final = self._final or self._last
            end = _End(self.spec, final, self._summary, self.round, self._cut, keep)
            self._put_end(end)
        self._num_frames, self._cut, self._final, self._last, self._summary = 0, False, None, None, None

    def _put_end(self, end: _End | None) -> None:
        """An end must not be lost: here, where the robot rests, it may wait for the writer."""
        while self._thread.is_alive():
            try:
                self._queue.put(end, timeout=0.1)
                return
            except queue.Full:
                continue
        self.recording.on_problem("recording: the writer has ended; nothing is recorded any more")

    def end(self) -> None:
        """The episode is over, and this is all there is to know of it: for loops that tick no further."""
        self._look()
        self._end_episode()

    def discard(self) -> None:
        """Forget the episode under way."""
        self._look()
        self._end_episode(keep=False)

    def finalize(self, observation: RobotObservation) -> None:
        """The observation after the last action, where no further tick brings it; ends the episode."""
        self._final = observation
        self.end()

    def seconds_left(self) -> float:
        """About how long it takes to write what waits, and to make the dataset of all, earlier runs' too."""
        waiting = list(self._queue.queue)
        ends = sum(isinstance(item, _End) for item in waiting)
        num_episodes = ends + bool(self._num_frames) + ASSEMBLING * self.recording.num_episodes
        return (len(waiting) - ends) * self._frames.mean + num_episodes * self._episodes.mean

    def close(self) -> None:
        """Write what waits, an episode under way included, and end the thread. Before the recording is closed."""
        if self._num_frames:
            self.end()
        self._put_end(None)
        self._thread.join()

    # --- the writer's thread ------------------------------------------------------------------

    def _write(self) -> None:
        episode = _Open()
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Frame):
                begun, images = time.monotonic(), item.observation.images
                for camera, image in images.items():
                    episode.png.setdefault(camera, []).append(encode_png(image))
                bare = RobotObservation({}, item.observation.state, item.observation.instruction, 0.0)
                episode.frames.append(replace(item, observation=bare))
                self._frames.note(time.monotonic() - begun)
                continue
            if not item.keep:
                episode = _Open()
                continue
            begun = time.monotonic()
            try:
                sizes = {camera: image.shape[:2] for camera, image in item.final.images.items()}
                recorded = _episode(episode, item, self.recording.num_episodes)
                shard = self.recording.add(recorded, sizes)
                self._episodes.note(time.monotonic() - begun)
                self.stored.append(StoredEpisode(item.summary.number, shard, recorded.instruction))
            except (ValueError, OSError) as error:  # The robot goes on; a person must know.
                self.recording.on_problem(f"recording: an episode of {len(episode.frames)} frames is lost: {error}")
            episode = _Open()


def _episode(episode: _Open, end: _End, number: int) -> RecordedEpisode:
    frames, summary = episode.frames, end.summary
    success = summary.outcome == "success" and not end.cut
    instruction = frames[0].observation.instruction
    split: Split = "train" if end.spec is None else end.spec.split
    scores = [f.failure for f in frames]
    sent = _float32([f.sent for f in frames])
    reward = np.zeros(len(frames), np.float32)
    reward[-1] = float(success)
    return RecordedEpisode(
        task=instruction if end.spec is None else end.spec.task,
        split=split,
        index=number if end.spec is None else end.spec.index,
        instruction=instruction,
        png=episode.png,
        state=np.stack([f.observation.state for f in frames]).astype(np.float32),
        actions=sent,
        executed_actions=sent,
        requested_actions=_float32([f.requested for f in frames]),
        time=np.array([f.time - frames[0].time for f in frames]),
        reward=reward,
        success=success,
        control_source=[f.source for f in frames],
        policy_version=[f.policy for f in frames],
        final_png={camera: encode_png(image) for camera, image in end.final.images.items()},
        final_state=np.asarray(end.final.state, np.float32),
        interventions=summary.interventions,
        recoveries=summary.recoveries,
        round=end.round,
        continued=int(end.spec is not None and end.spec.keyframe is not None),
        failure_score=None if scores[0] is None else np.asarray(scores, np.float32),
    )


def _float32(rows: list[np.ndarray]) -> np.ndarray:
    """Rows in one array; a number beyond float32 is infinite in it."""
    with np.errstate(over="ignore"):
        return np.stack(rows).astype(np.float32)
