"""Results of a person's episodes at a console (`--results`), and which of two was better (`--record`)."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from real_robot.control.robot_loop import Tick
from real_robot.control.supervisor import RUNNING
from real_robot.operator.intervention import Intervention, InterventionError
from real_robot.operator.recorder import Recorder
from real_robot.operator.recording_folder import Choice, choices_text, read_choices
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import ConfigError
from vla_rl.data.lerobot_io import PREFERENCES

LATE = 1.5  # control periods from one tick to the next above which the second one is late


@dataclass
class EpisodeEntry:
    """An episode, as far as it has come.

    Attributes:
        began: seconds since the epoch. seconds: from its begin to its end, of this machine's clock.
        outcome: success, failure, or None where nobody has said. by: who said so, or ended it.
        driven: who drove (policy, recovery, correction, demo, rewind), or hold -> seconds.
        ticks, late: of the control loop; those that came more than `LATE` periods after the one before.
    """

    instruction: str
    began: float
    seconds: float = 0.0
    outcome: str | None = None
    by: str = ""
    interventions: int = 0
    recoveries: int = 0
    alarms: int = 0
    driven: dict[str, float] = field(default_factory=dict)
    ticks: int = 0
    late: int = 0


class EpisodeLog:
    """Writes the file anew when an episode ends, or is labeled later. An observer of the loop's ticks.

    What an earlier run has written there stays before it. A thread of its own writes: no tick waits for the disk.
    Where the disk refuses, the next tick that writes raises.

    Args:
        file: a JSON list, an entry for each episode, a `EpisodeEntry`.
        rate: control ticks per second.

    Raises:
        ConfigError: the file holds something else.
    """

    def __init__(self, file: Path, episode: Intervention, rate: float) -> None:
        self._file, self._episode, self._period = file, episode, 1 / rate
        self._entries = _read_entries(file)
        self._open: EpisodeEntry | None = None
        self._number, self._known = 0, episode.summary  # of the episode booked last; 0: none yet
        self._last = 0.0  # time of the tick before
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="episode-book")
        self._writing: Future[None] | None = None
        self._write()
        self.flush()

    def __call__(self, tick: Tick) -> None:
        """Count the tick; write where an episode has ended."""
        if tick.operator_command.begin:
            self._settle()
            self._number = self._episode.summary.number
            instruction = "" if tick.observation is None else tick.observation.instruction
            self._open = EpisodeEntry(instruction, round(time.time(), 3))
        elif self._open is not None:
            self._count(self._open, tick, tick.time - self._last)
        self._last = tick.time
        if self._episode.state == "ended":
            self._settle()

    def _settle(self) -> None:
        """Write the episode that has ended, or a label that has come since."""
        if self._open is not None:
            self._end()
        elif self._number and self._entries[-1]["outcome"] != (ending := self._ending())["outcome"]:
            self._entries[-1] |= ending
            self._write()

    def _count(self, entry: EpisodeEntry, tick: Tick, gap: float) -> None:
        entry.instruction = entry.instruction or ("" if tick.observation is None else tick.observation.instruction)
        moves = tick.requested is not None and tick.sent is not None and tick.sent.mode == RUNNING
        who = tick.requested.source if moves and tick.requested is not None else "hold"
        entry.driven[who] = entry.driven.get(who, 0.0) + gap
        entry.seconds += gap
        entry.ticks += 1
        entry.late += gap > LATE * self._period

    def _ending(self) -> dict[str, Any]:
        summary = self._known = self._episode.summary_of(self._number) or self._known
        last = summary.transitions[-1].who if summary.transitions else ""
        return {
            "outcome": summary.outcome,
            "by": last,
            "interventions": summary.interventions,
            "recoveries": summary.recoveries,
            "alarms": summary.alarms,
        }

    def close(self) -> None:
        """Write the episode that is still open, if any, and wait for the file. May be called twice."""
        self._end()
        self.flush()

    def flush(self) -> None:
        """Wait until all is in the file.

        Raises:
            OSError: it cannot be written.
        """
        if self._writing is not None:
            self._writing.result()

    def _end(self) -> None:
        if self._open is None:
            return
        entry = asdict(self._open) | self._ending()
        entry["seconds"] = round(entry["seconds"], 3)
        entry["driven"] = {who: round(seconds, 3) for who, seconds in entry["driven"].items()}
        self._entries.append(entry)
        self._open = None
        self._write()

    def _write(self) -> None:
        if self._writing is not None and self._writing.done():
            self._writing.result()
        self._writing = self._writer.submit(_write_entries, self._file, [dict(entry) for entry in self._entries])


def _read_entries(file: Path) -> list[dict[str, Any]]:
    """What an earlier run has written; nothing where there is no file, or an empty one.

    Raises:
        ConfigError: something else is in it, which must not be lost.
    """
    try:
        text = file.read_text() if file.exists() else ""
        entries = json.loads(text) if text.strip() else []
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("not a list of episodes")
    except ValueError as error:
        raise ConfigError(
            f"--results: {file} holds something else ({error}); give a new file, or one of an earlier run"
        ) from error
    return entries


def _write_entries(file: Path, entries: list[dict[str, Any]]) -> None:
    write_text_atomic(file, json.dumps(entries, indent=1) + "\n")


class Comparisons:
    """A person's choices between the episode that has just ended and the one of its instruction before it.

    A thread of its own writes: who hears the emergency stop does not wait for the disk.

    Raises:
        RecordingError: the recording goes on, and what was chosen before is damaged.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._file = recorder.recording.staging / PREFERENCES
        self._choices = read_choices(self._file)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="comparisons")

    @property
    def can_compare(self) -> bool:
        """Two episodes of one instruction are stored, and the later one has just ended, with a label."""
        return self._pair() is not None

    def compare(self, better: bool, who: str) -> None:
        """The last episode is better, or worse, than the one before it. Said again, the later word counts.

        Raises:
            InterventionError: there are no two to compare.
        """
        pair = self._pair()
        if pair is None:
            raise InterventionError(
                "better, worse: possible between episodes, once two of the same instruction are labeled and recorded"
            )
        earlier, last = pair
        choice: Choice = {"better": last, "worse": earlier} if better else {"better": earlier, "worse": last}
        kept = [one for one in self._choices if {one["better"], one["worse"]} != set(pair)]
        self._choices = [*kept, {**choice, "by": who}]
        self._writer.submit(self._write, choices_text(self._choices))

    def close(self) -> None:
        """Wait until all is written. May be called twice."""
        self._writer.shutdown()

    def _write(self, text: str) -> None:
        try:
            write_text_atomic(self._file, text)
        except OSError as error:
            self._recorder.recording.on_problem(f"recording: which episodes are better is not kept: {error}")

    def _pair(self) -> tuple[int, int] | None:
        """The shards of the episode before and of the last one."""
        stored, labels = list(self._recorder.stored), self._recorder.labels
        if not stored or labels.state != "ended" or stored[-1].number != labels.summary.number:
            return None
        last = stored[-1]
        before = [one.shard for one in stored[:-1] if one.instruction == last.instruction]
        return (before[-1], last.shard) if before else None
