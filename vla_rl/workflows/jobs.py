"""`vla-rl` commands as processes of their own, side by side; those that are finished are not repeated."""

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


@dataclass(frozen=True)
class Job:
    """One `vla-rl train` or `vla-rl eval`.

    Attributes:
        folder: the run's; its output goes into a .log beside it.
        arguments: of `vla-rl`.
    """

    folder: Path
    arguments: tuple[str, ...]

    @property
    def result(self) -> Path:
        """The evaluation that it ends with."""
        return RunFolder(self.folder).evaluation(BASE if self.arguments[0] == "eval" else FINAL)

    @property
    def log(self) -> Path:
        """The file of its output."""
        return self.folder.with_suffix(".log")

    def start(self, program: Sequence[str], threads: int) -> subprocess.Popen[bytes]:
        """Start it as a child process with `threads` CPU threads.

        Args:
            program: how `vla-rl` is started.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with open(self.log, "ab") as out:
            return start_child([*program, *self.arguments], stdout=out, stderr=out, env=environment)


def job(command: str, recipe_name: str, overrides: Sequence[str], folder: Path) -> Job:
    """`vla-rl train` or `eval` of a recipe into a folder; what is there already must be of the same recipe.

    Raises:
        ConfigError: the folder holds a run of another recipe.
    """
    recipe = load_recipe(recipe_name, overrides)
    arguments = [command, recipe_name, *overrides, "--output", str(folder)]
    if command == "eval":
        arguments += ["--name", BASE]
    if RunFolder(folder).exists:
        open_run(recipe, folder, resume=True)
        if command == "train":
            arguments.append("--resume")
    return Job(folder, tuple(arguments))


def run_jobs(jobs: Sequence[Job], side_by_side: int, program: Sequence[str], show: Callable[[str], None]) -> None:
    """Run all jobs, so many at a time, each with its share of the cores; tells `show` of each that ends.

    Raises:
        RuntimeError: one failed; its log is named.
    """
    threads = max(1, (os.cpu_count() or 1) // side_by_side)
    with ThreadPoolExecutor(side_by_side) as pool:
        for number, text in enumerate(pool.map(lambda one: _run(one, program, threads), jobs), start=1):
            show(f"{number} of {len(jobs)}: {text}")


def _run(one: Job, program: Sequence[str], threads: int) -> str:
    if one.result.is_file():
        return f"{one.folder.name}, found finished"
    started = time.monotonic()
    code = one.start(program, threads).wait()
    if code != 0:
        raise RuntimeError(
            f"`vla-rl {' '.join(one.arguments)}` failed with exit code {code}; its output is in {one.log}"
        )
    return f"{one.folder.name}, {(time.monotonic() - started) / 60:.1f} minutes"
