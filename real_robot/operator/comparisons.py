"""Which of two recorded episodes a person found better: asked at the console, kept with the recording.

    comparisons = Comparisons(recorder)
    comparisons.compare(better=True, who="anna")   # the episode that has just ended, with the one before it
    comparisons.close()                            # before the recorder and the recording

For `offline.method=preferences`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from real_robot.operator.intervention import InterventionError
from real_robot.operator.recorder import Recorder
from real_robot.operator.recording_folder import Choice, choices_text, read_choices
from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.lerobot_io import PREFERENCES


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
