"""Metric loggers: metrics.jsonl always; console, TensorBoard and Weights & Biases as asked.

    with MetricLogger(folder, LogConfig(wandb="offline")) as logger:
        logger.log(3, {"train/success": 0.4, "loss/policy": -0.01})

Names are "group/name". The same step may be logged several times (training, then validation).
"""

from __future__ import annotations

import fnmatch
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

import rich
from pydantic import Field
from rich.console import Console

from vla_rl.common.atomic import disk_full, is_disk_full, write_text_atomic
from vla_rl.common.run_folder import RunFolder, whole_lines
from vla_rl.config import Config

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter
    from wandb import Run

    from vla_rl.evaluation.results import Evaluation

_WANDB_ID_FILE = "wandb_id.txt"

CONSOLE_KEYS = (  # What is printed of each step, as shell patterns, in this order.
    *("train/success*", "validation/sampled", "validation/greedy", "loss/*", "update/*kl*", "update/clip_fraction"),
    *("time/total", "time/episodes_per_second"),
)


class LogConfig(Config):
    """Who is told the numbers, besides metrics.jsonl."""

    wandb: Literal["disabled", "offline", "online"] = Field(
        default="disabled", description="Weights & Biases; offline writes files for `wandb sync`."
    )
    project: str = Field(default="vla-rl", description="Weights & Biases project.")
    entity: str | None = Field(default=None, description="Its user or team; null: the one that is logged in.")
    group: str | None = Field(default=None, description="Runs that belong together there, such as seeds of one recipe.")
    tags: tuple[str, ...] = Field(default=(), description="Words to find the run by there.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard files into the run's folder.")
    console: bool = Field(default=True, description="Print a line per step.")
    exact_times: bool = Field(
        default=False,
        description="Wait for the GPU where a stage begins and ends, so that time/... are each stage's own; slower. "
        "Else a stage's time is that in which the host hands it over, and waiting counts where a result is read.",
    )


class WandbRun:
    """A run's folder shown on Weights & Biases; begun with the first thing logged. The same folder is the same run.

    Args:
        folder: the run's folder. config: its project, entity, group, tags and mode.
        run_config: the resolved recipe, shown beside the run.
    """

    def __init__(self, folder: Path, config: LogConfig, run_config: Mapping[str, Any] | None = None):
        self._folder, self._config, self._run_config = Path(folder), config, dict(run_config or {})
        self._run: Run | None = None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send one step's numbers, or what wandb shows besides."""
        if self._run is None:
            self._run = self._start()
        self._run.log({**values, "step": step})

    def log_evaluation(self, step: int, evaluation: Evaluation, videos: Sequence[Path]) -> None:
        """Send success as evaluation/NAME/MODE, with the ends of its interval and by task, and videos/NAME."""
        import wandb

        shown: dict[str, Any] = {}
        for rate in evaluation.rates():
            key = f"evaluation/{evaluation.meta.name}/{rate.mode}"
            if rate.task is not None:
                shown[f"{key}/{evaluation.labels[rate.task]}"] = rate.rate
                continue
            shown |= {key: rate.rate, f"{key}_low": rate.interval[0], f"{key}_high": rate.interval[1]}
            shown[f"{key}_n"] = rate.num_episodes
        shown |= {f"videos/{file.stem}": wandb.Video(str(file), format="mp4") for file in videos}
        self.log(step, shown)

    def close(self) -> None:
        """Finish the run, if one was begun. May be called twice."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> Run:
        import wandb

        id_file = self._folder / _WANDB_ID_FILE
        if not id_file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12])
        run = wandb.init(
            **self._config.model_dump(include={"project", "entity", "group", "tags"}),
            name=self._folder.name,
            id=id_file.read_text().strip(),
            dir=str(self._folder),
            mode=self._config.wandb,
            resume="allow",  # The same id, so that a resumed run goes on where it is shown already.
            config=self._run_config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Our own axis, since a resumed run logs some steps again.
        run.define_metric("*", step_metric="step")
        return run


class MetricLogger:
    """Writes each step's numbers to every writer asked for.

    Args:
        folder: the run's folder. A metrics.jsonl already there is continued.
        config: which writers.
        resume_step: forget what was logged after this step, as a resumed run logs it again, and a
            last line that a kill cut off. None for a new run.
        run_config: the resolved recipe, shown by Weights & Biases.
        num_iterations: of the run, where a step is an iteration of RL: the console then says so.
    """

    def __init__(
        self,
        folder: Path,
        config: LogConfig,
        *,
        resume_step: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        num_iterations: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.config = config
        self._resume_step, self._num_iterations = resume_step, num_iterations
        self._file: TextIO | None = None
        self._tensorboard: SummaryWriter | None = None
        self._wandb = WandbRun(self.folder, config, run_config) if config.wandb != "disabled" else None
        path = RunFolder(self.folder).metrics
        if resume_step is not None and path.exists():
            kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= resume_step]
            write_text_atomic(path, "".join(line + "\n" for line in kept))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one step's numbers: Python, numpy or torch scalars. NaN and infinity become null in JSON.

        Raises:
            ValueError: a value that is no number, named.
            OSError: the disk is full.
        """
        numbers = {key: _number(key, value) for key, value in values.items()}
        self._write_jsonl(step, numbers)
        if self.config.tensorboard:
            self._write_tensorboard(step, numbers)
        if self._wandb is not None:
            self._wandb.log(step, numbers)
        if self.config.console:
            self._print_step(step, numbers)

    def log_evaluation(self, step: int, evaluation: Evaluation, videos: Sequence[Path]) -> None:
        """Show an evaluation and its videos (MP4) on Weights & Biases, where that is on."""
        if self._wandb is not None:
            self._wandb.log_evaluation(step, evaluation, videos)

    def print(self, message: Any) -> None:
        """Show a text or a rich table on the console, where that is on."""
        if self.config.console:
            rich.print(message)

    def close(self) -> None:
        """Flush and close every writer. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.close()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_jsonl(self, step: int, numbers: dict[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        line = json.dumps({"step": step, **finite}) + "\n"
        path = RunFolder(self.folder).metrics
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a")
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            if is_disk_full(error):
                raise disk_full(path, "metrics") from error
            raise

    def _write_tensorboard(self, step: int, numbers: dict[str, float]) -> None:
        if self._tensorboard is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            purge = None if self._resume_step is None else self._resume_step + 1
            self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge)
        for key, value in numbers.items():
            self._tensorboard.add_scalar(key, value, step)
        self._tensorboard.flush()

    def _print_step(self, step: int, numbers: dict[str, float]) -> None:
        shown = dict.fromkeys(k for pattern in CONSOLE_KEYS for k in fnmatch.filter(numbers, pattern))
        if shown:
            of = self._num_iterations
            name = f"step {step:>5}" if of is None else f"iteration {step:>{len(str(of))}} of {of}"
            cells = (f"[dim]{key}[/] {numbers[key]:<9.4g}" for key in shown)
            Console().print(f"[bold]{name}[/]  " + " ".join(cells), soft_wrap=True)


class SilentLogger(MetricLogger):
    """Writes and shows nothing: for the processes of a run that do not write."""

    def __init__(self) -> None:
        super().__init__(Path(), LogConfig(tensorboard=False, console=False))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing."""

    def log_evaluation(self, step: int, evaluation: Evaluation, videos: Sequence[Path]) -> None:
        """Nothing."""


def _number(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch, several elements.
        raise ValueError(f"metric {key!r}: expected a number, got {type(value).__name__} {value!r:.60}") from None
    return int(value) if isinstance(value, (bool, int)) else number
