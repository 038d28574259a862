"""Job runner: `vla-rl` commands as processes side by side; finished ones are not repeated."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vla_rl.common.child_process import start_child
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.recipe.recipe import load_recipe

BASE, FINAL = "base", "final"  # evaluations that jobs leave
MAX_ATTEMPTS = 5  # of a job on a cluster whose machines are lost


@dataclass(frozen=True)
class Job:
    """One `vla-rl train` or `vla-rl eval`.

    Attributes:
        folder: the run's; its output goes into a .log beside it.
        arguments: of `vla-rl`, but for --resume.
    """

    folder: Path
    arguments: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments as they must be now: a run that was cut off goes on."""
        goes_on = self.arguments[0] == "train" and RunFolder(self.folder).exists
        return (*self.arguments, "--resume") if goes_on else self.arguments

    @property
    def result(self) -> Path:
        """The evaluation that it ends with."""
        return RunFolder(self.folder).evaluation(BASE if self.arguments[0] == "eval" else FINAL)

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def start(self, program: Sequence[str], threads: int) -> subprocess.Popen[bytes]:
        """Start it as a child process with `threads` CPU threads.

        Args:
            program: how `vla-rl` is started.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with open(self.log, "ab") as out:
            return start_child([*program, *self.command], stdout=out, stderr=out, env=environment)


def job(command: str, recipe_name: str, overrides: Sequence[str], folder: Path) -> Job:
    """`vla-rl train`, `offline` or `eval` of a recipe into a folder; what is there already must be of the same recipe.

    Raises:
        ConfigError: the folder holds a run of another recipe.
    """
    recipe = load_recipe(recipe_name, overrides)
    arguments = [command, recipe_name, *overrides, "--output", str(folder)]
    if command == "eval":
        arguments += ["--name", BASE]
    if RunFolder(folder).exists:
        open_run(recipe, folder, resume=True)
    return Job(folder, tuple(arguments))


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster whose machines run jobs in place of this one.

    Attributes:
        address: auto, or HOST:PORT.
        cpus, gpus: that each job reserves.
    """

    address: str
    cpus: int
    gpus: float


def run_jobs(
    jobs: Sequence[Job],
    side_by_side: int,
    program: Sequence[str],
    show: Callable[[str], None],
    cluster: Cluster | None = None,
) -> None:
    """Run all jobs, so many at a time; tells `show` of each that ends. Here, each has its share of the cores.

    Raises:
        RuntimeError: one failed; its log is named.
        ConfigError: the cluster is not there, or none of its machines can run a job.
    """
    if cluster is None:
        threads = max(1, (os.cpu_count() or 1) // side_by_side)
        _run_all(jobs, side_by_side, lambda one: one.start(program, threads).wait(), show)
        return
    from vla_rl.rollout.actors.programs import LostError, Programs

    folder = Path(os.path.commonpath([one.folder.parent for one in jobs]))
    place = Programs(cluster.address, folder, cluster.cpus, cluster.gpus)

    def run(one: Job) -> int:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return place.run([*program, *one.command], one.log)
            except LostError as error:
                if place.is_over or attempt == MAX_ATTEMPTS:
                    raise
                show(f"{one.folder.name}: {error}; it goes on elsewhere")
        raise AssertionError("the last attempt returns or raises")

    try:
        _run_all(jobs, side_by_side, run, show, place.stop)
    finally:
        place.close()


def _run_all(
    jobs: Sequence[Job],
    side_by_side: int,
    run: Callable[[Job], int],
    show: Callable[[str], None],
    stop: Callable[[], None] = lambda: None,
) -> None:
    """Run jobs in threads; `stop`: called when a person stops all, who has stopped those on this machine already."""
    with ThreadPoolExecutor(side_by_side) as pool:
        try:
            for number, text in enumerate(pool.map(lambda one: _run(one, run), jobs), start=1):
                show(f"{number} of {len(jobs)}: {text}")
        except KeyboardInterrupt:
            stop()
            raise


def _run(one: Job, run: Callable[[Job], int]) -> str:
    if one.result.is_file():
        return f"{one.folder.name}, found finished"
    started = time.monotonic()
    code = run(one)
    if code != 0:
        raise RuntimeError(
            f"`vla-rl {' '.join(one.arguments)}` failed with exit code {code}; its output is in {one.log}"
            + _last(one.log)
        )
    return f"{one.folder.name}, {(time.monotonic() - started) / 60:.1f} minutes"


def _last(log: Path) -> str:
    """The last line of a job's output, which says why it failed; empty where there is none."""
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    said = [line.strip() for line in lines if line.strip()]
    return f", which ends with: {said[-1][:1000]}" if said else ""
