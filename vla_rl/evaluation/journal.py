"""Journal of an evaluation under way: an episode a line, so that an interrupted one goes on where it was."""

from __future__ import annotations

import fcntl
import glob
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TextIO

from pydantic import ValidationError

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.evaluation.results import EpisodeRecord, EvaluationError
from vla_rl.types import EpisodeSpec


class EpisodeJournal:
    """JSON Lines files, one for each process: first what the episodes depend on, then each episode as it ended.

    What a killed process had half written is left out.

    Args:
        file: of the evaluation's result; the journals are FILE.0.jsonl, FILE.1.jsonl, ... beside it. None: nothing is
            kept.
        subject: JSON-able; what the episodes depend on.

    Raises:
        EvaluationError: episodes of another subject are there, or another process is at them.
    """

    def __init__(self, file: Path | None, subject: Mapping[str, Any], world: ProcessGroup) -> None:
        self._file, self._subject = file, dict(subject)
        records = world.broadcast_from_main(lambda: [r.model_dump(mode="json") for r in self._kept()])
        found = map(EpisodeRecord.model_validate, records)
        self._found = {(r.mode, r.task, r.index, r.sample): r for r in found}
        self._stream = None
        if file is not None:
            own = file.with_name(f"{file.name}.{world.rank}.jsonl")
            own.parent.mkdir(parents=True, exist_ok=True)
            _locked(own).close()
            write_text_atomic(own, "".join(json.dumps(line) + "\n" for line in [self._subject, *records]))
            self._stream = _locked(own)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def of(self, mode: str, spec: EpisodeSpec, sample: int) -> EpisodeRecord | None:
        """Return the episode that an earlier call kept, the same in every process; None where it kept none."""
        return self._found.get((mode, spec.task, spec.index, sample))

    def add(self, record: EpisodeRecord) -> None:
        """Keep an episode, whatever becomes of this process."""
        if self._stream is not None:
            self._stream.write(json.dumps(record.model_dump(mode="json")) + "\n")
            self._stream.flush()

    def _kept(self) -> Iterator[EpisodeRecord]:
        for path in journals(self._file) if self._file else []:
            subject, records = read_journal(path)
            if subject not in (None, self._subject):
                raise EvaluationError(
                    f"{path}: holds episodes of other weights or eval options; choose another name or folder for this "
                    "evaluation, or delete the file"
                )
            yield from records


def _locked(path: Path) -> TextIO:
    """Open a journal to append to it, as its only writer; the lock ends with the process."""
    stream = path.open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise EvaluationError(
            f"{path}: another process is at this evaluation; wait for its end, or choose another name or folder"
        ) from None
    return stream


def unfinished(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the evaluations in a folder that have not ended: name -> episodes kept, and wanted."""
    found: dict[str, tuple[int, int]] = {}
    for file in sorted({path.with_suffix("").with_suffix("") for path in folder.glob("*.jsonl")}):
        parts = [read_journal(path) for path in journals(file)]
        kept = {(r.mode, r.task, r.index, r.sample) for _, records in parts for r in records}
        found[file.stem] = len(kept), max((subject["num_episodes"] for subject, _ in parts if subject), default=0)
    return found


def journals(file: Path) -> list[Path]:
    """Return the journals of an evaluation that has not ended, by the file of its result."""
    return sorted(file.parent.glob(f"{glob.escape(file.name)}.*.jsonl"))


def read_journal(path: Path) -> tuple[dict[str, Any] | None, list[EpisodeRecord]]:
    """Return what a journal's episodes depend on, and the episodes; (None, []) where it was cut off in its first line.

    Raises:
        EvaluationError: it is none, or damaged elsewhere than at its end.
    """
    lines = path.read_text().split("\n")[:-1]  # Behind the last line break stands what was not written whole.
    try:
        head, *records = [json.loads(line) for line in lines] or [None]
        return head, [EpisodeRecord.model_validate(record) for record in records]
    except (json.JSONDecodeError, ValidationError) as error:
        raise EvaluationError(f"{path}: damaged: {error}; delete it to evaluate from the beginning") from None
