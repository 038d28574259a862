"""Which of two recorded episodes a person found better: asked at the console, kept with the recording.

    comparisons = Comparisons(recorder)
    comparisons.compare(better=True, who="anna")   # the episode that has just ended, with the one before it

Each choice is a line of `PREFERENCES`, first in the folder of the unfinished recording, by the numbers of its shards,
then (`numbered`) in the dataset, by those of its episodes: for `offline.method=preferences`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from real_robot.operator.intervention import InterventionError
from vla_rl.common.atomic import write_text_atomic
from vla_rl.data.lerobot_io import PREFERENCES

if TYPE_CHECKING:
    from real_robot.operator.recorder import Recorder

Choice = dict[str, Any]  # "better", "worse": two episodes. "by": who said so.


class Comparisons:
    """A person's choices between the episode that has just ended and the one of its instruction before it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def can_compare(self) -> bool:
        """Two episodes of one instruction are stored, and the later one has just ended, with a label."""
        return self._pair() is not None

    def compare(self, better: bool, who: str) -> None:
        """The last episode is better, or worse, than the one before it. Said again, the later word counts.

        Raises:
            InterventionError: there are no two to compare, or their choice cannot be written.
        """
        pair = self._pair()
        if pair is None:
            raise InterventionError(
                "better, worse: possible between episodes, once two of the same instruction are labeled and recorded"
            )
        earlier, last = pair
        choice = {"better": last, "worse": earlier} if better else {"better": earlier, "worse": last}
        file = self._recorder.recording.staging / PREFERENCES
        try:
            kept = [one for one in read_choices(file) if {one["better"], one["worse"]} != set(pair)]
            write_text_atomic(file, choices_text([*kept, {**choice, "by": who}]))
        except (OSError, ValueError) as error:
            raise InterventionError(f"better, worse: not kept: {error}") from error

    def _pair(self) -> tuple[int, int] | None:
        """The shards of the episode before and of the last one."""
        stored, labels = list(self._recorder.stored), self._recorder.labels
        if not stored or labels.state != "ended" or stored[-1].number != labels.summary.number:
            return None
        last = stored[-1]
        before = [one.shard for one in stored[:-1] if one.instruction == last.instruction]
        return (before[-1], last.shard) if before else None


def read_choices(file: Path) -> list[Choice]:
    """The choices in a file; none where there is no file.

    Raises:
        ValueError: it is damaged.
    """
    lines = file.read_text().splitlines() if file.is_file() else []
    choices = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(choice, dict) and {"better", "worse"} <= choice.keys() for choice in choices):
        raise ValueError(f'{file}: a line has no "better" and "worse"')
    return choices


def numbered(choices: Sequence[Choice], episodes: Mapping[int, int]) -> list[Choice]:
    """The same of a dataset. `episodes`: shard -> episode; choices of shards that are not there are left out."""
    return [
        {**choice, "better": episodes[choice["better"]], "worse": episodes[choice["worse"]]}
        for choice in choices
        if choice["better"] in episodes and choice["worse"] in episodes
    ]


def choices_text(choices: Sequence[Choice]) -> str:
    """A line for each, as a file has them."""
    return "".join(json.dumps(choice) + "\n" for choice in choices)
