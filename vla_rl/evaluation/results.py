"""Evaluation results: every episode's outcome, success rates with intervals, JSON, table.

evaluation = Evaluation.load("runs/x/evaluations/final.json")
evaluation.rate("sampled")               # all tasks: rate, n, 95 % interval
evaluation.rate("greedy", "pick_place")  # one task
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
from pydantic import Field, ValidationError
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.saved import Saved
from vla_rl.common.tables import console_table, short_names
from vla_rl.config import Config
from vla_rl.evaluation.statistics import Interval, clustered_wilson_interval
from vla_rl.types import Episode, EpisodeSpec, Split

# Color-blind-safe (Okabe & Ito), shared with the report.
MODE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


class EvaluationError(ValueError):
    """An evaluation that cannot be read or used; the message names the file and what to do."""


class EpisodeRecord(Config):
    """One evaluated episode.

    Attributes:
        mode: "greedy", "sampled", ...: how actions were drawn.
        task, split, index: the initial state.
        sample: which repetition of that state, from 0.
        success: the task was solved.
        steps: control steps executed.
        lost: broken by its worker in every try; not counted.
    """

    mode: str
    task: str
    split: Split
    index: int
    sample: int
    success: bool
    steps: int
    lost: bool = False

    @classmethod
    def of(cls, mode: str, spec: EpisodeSpec, sample: int, episode: Episode) -> Self:
        """What is kept of an episode that has run."""
        return cls(
            mode=mode,
            task=spec.task,
            split=spec.split,
            index=spec.index,
            sample=sample,
            success=episode.success,
            steps=episode.length,
            lost=episode.lost,
        )


class EvaluationMeta(Config):
    """How an evaluation was made, enough to repeat it.

    Attributes:
        name: what was evaluated, for people ("base", "final").
        policy: its path, and policy_hash the SHA-256 of its files; None for one that lives in memory.
        env: kind of the environment. env_config: its config, when known. suite, labels, groups: see `EnvSpec`.
        temperatures: mode -> temperature.
        horizon: task -> control steps. image_size: (height, width).
        num_envs: of each of num_processes, which shared the episodes.
        protocol: in words. config: the EvalConfig used.
        num_retried: episodes run again because their worker broke.
        official_states: the states are the benchmark's official ones, not drawn at random; None: written before this
            was recorded.
        official: what of the benchmark's protocol -> (as it was here, as the benchmark has it); empty: no benchmark.
        latency: with planning, milliseconds of a decision; see `world_model.env.planning.Planner.latency`.
    """

    name: str
    policy: str | None = None
    policy_hash: str | None = None
    env: str
    env_config: dict[str, Any] | None = None
    suite: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    groups: dict[str, tuple[str, int]] = Field(default_factory=dict)
    split: Split
    seed: int
    temperatures: dict[str, float]
    horizon: dict[str, int]
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    num_envs: int
    num_processes: int = 1
    protocol: str
    config: dict[str, Any]
    created: str
    wall_seconds: float
    num_retried: int = 0
    official_states: bool | None = None
    official: dict[str, tuple[str, str]] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    latency: dict[str, float] = Field(default_factory=dict)

    @property
    def env_title(self) -> str:
        """What headings call the environment: its kind and suite; of older files, the suite of its config."""
        suite = self.suite or (self.env_config or {}).get("suite", "")
        return f"{self.env}/{suite}" if suite else self.env


@dataclass(frozen=True)
class SuccessRate:
    """A success rate with what is needed to judge it.

    Attributes:
        mode: how actions were drawn. task: None for all tasks together.
        num_episodes: n, lost ones excluded. num_successes: of them. num_states: distinct initial states.
        rate: successes / n; NaN when n = 0.
        interval: 95 % Wilson interval (n reduced by the design effect when states were sampled several times).
        mean_steps_to_success: control steps, over the successes; NaN without any.
        num_lost: episodes excluded because their worker broke.
    """

    mode: str
    task: str | None
    num_episodes: int
    num_successes: int
    num_states: int
    rate: float
    interval: Interval
    mean_steps_to_success: float
    num_lost: int

    @classmethod
    def of(cls, mode: str, task: str | None, chosen: Sequence[EpisodeRecord]) -> Self:
        """The rate of some episodes of a mode; task: theirs, None if they are of several."""
        counted = [e for e in chosen if not e.lost]
        outcomes = np.array([e.success for e in counted], bool)
        states = np.array([f"{e.task}/{e.index}" for e in counted])
        steps = [e.steps for e in counted if e.success]
        return cls(
            mode=mode,
            task=task,
            num_episodes=len(counted),
            num_successes=int(outcomes.sum()),
            num_states=len(set(states)),
            rate=float(outcomes.mean()) if counted else math.nan,
            interval=clustered_wilson_interval(outcomes, states, np.array([e.task for e in counted])),
            mean_steps_to_success=float(np.mean(steps)) if steps else math.nan,
            num_lost=len(chosen) - len(counted),
        )

    def text(self) -> str:
        """For people: "42.5 % [37.7, 47.4], n = 400"."""
        if self.num_episodes == 0:
            return "no episode"
        return f"{100 * self.rate:.1f} % {self.interval.percent()}, n = {self.num_episodes}"


class Evaluation(Saved):
    """Every episode of an evaluation and how it was made."""

    WHAT = "evaluation"
    ERROR = EvaluationError
    AGAIN = "Evaluate with `vla-rl eval`."
    FOR_READERS = ("rates",)
    meta: EvaluationMeta
    episodes: tuple[EpisodeRecord, ...]

    @property
    def modes(self) -> list[str]:
        """Modes, in the order evaluated."""
        return list(dict.fromkeys(e.mode for e in self.episodes))

    @property
    def tasks(self) -> list[str]:
        """Tasks, in the order evaluated."""
        return list(dict.fromkeys(e.task for e in self.episodes))

    @property
    def labels(self) -> dict[str, str]:
        """Task -> what tables and plots call it; without the environment's numbers in files that lack them."""
        return self.meta.labels or dict(zip(self.tasks, short_names(self.tasks), strict=True))

    def select(self, mode: str, task: str | None = None) -> list[EpisodeRecord]:
        """The episodes of a mode, and of a task unless None, lost ones included."""
        return [e for e in self.episodes if e.mode == mode and task in (None, e.task)]

    def rate(self, mode: str, task: str | None = None) -> SuccessRate:
        """Success rate of a mode, for one task or for all.

        Raises:
            EvaluationError: the evaluation holds no such mode or task.
        """
        if mode not in self.modes or task not in (None, *self.tasks):
            raise EvaluationError(
                f"no episodes of mode {mode!r}, task {task!r}; modes: {', '.join(self.modes)}; "
                f"tasks: {', '.join(self.tasks)}"
            )
        return SuccessRate.of(mode, task, self.select(mode, task))

    def rates(self) -> list[SuccessRate]:
        """Per mode: each task, then all tasks together."""
        return [self.rate(mode, task) for mode in self.modes for task in [*self.tasks, None]]

    def save(self, path: Path) -> None:
        """Write JSON, atomically: how it was made, the rates (for readers), one line per episode."""
        head = {
            "schema_version": self.schema_version,
            "meta": self.meta.model_dump(mode="json"),
            "rates": [_rate_as_json(r, self.labels) for r in self.rates()],
        }
        lines = ",\n".join("  " + json.dumps(e.model_dump(mode="json")) for e in self.episodes)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(Path(path), json.dumps(head, indent=1)[:-2] + f',\n "episodes": [\n{lines}\n ]\n}}\n')

    def table(self) -> Table:
        """A table for the console, 80 columns wide where labels are short: a row per task and one for all, per mode."""
        title = f"{self.meta.name} on {self.meta.env_title}, {self.meta.split} split"
        has_lost = any(e.lost for e in self.episodes)
        head = ["mode", "task", "success", "95 % interval", "n", "states", "steps", *(["lost"] if has_lost else [])]
        table = console_table(title, head, ("mode", "task"), "steps: of the successes, on average")
        for rate in self.rates():
            row = [
                rate.mode,
                self.labels[rate.task] if rate.task else "all",
                f"{100 * rate.rate:.1f} %",
                f"{100 * rate.interval.low:.1f} - {100 * rate.interval.high:.1f}",
                str(rate.num_episodes),
                str(rate.num_states),
                "-" if math.isnan(rate.mean_steps_to_success) else f"{rate.mean_steps_to_success:.0f}",
            ] + ([str(rate.num_lost)] if has_lost else [])
            table.add_row(*row, style="bold" if rate.task is None else None, end_section=rate.task is None)
        return table


def shorten(text: str, length: int) -> str:
    """The text, its middle left out where it is longer than `length`."""
    return text if len(text) <= length else f"{text[: length // 2 - 1]}…{text[len(text) - length // 2 :]}"


def _rate_as_json(rate: SuccessRate, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "mode": rate.mode,
        "task": rate.task or "all",
        "label": labels[rate.task] if rate.task else "all",
        "success_rate": None if math.isnan(rate.rate) else round(rate.rate, 6),
        "low": round(rate.interval.low, 6),
        "high": round(rate.interval.high, 6),
        "num_episodes": rate.num_episodes,
        "num_successes": rate.num_successes,
        "num_states": rate.num_states,
        "mean_steps_to_success": None if math.isnan(rate.mean_steps_to_success) else rate.mean_steps_to_success,
        "num_lost": rate.num_lost,
    }


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
