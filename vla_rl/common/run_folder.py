"""A run's folder: the names of its files, opening it, and what identifies the run."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config, ConfigError, dump_yaml, read_yaml, validate

PACKAGES = ("vla-rl", "torch", "transformers", "timm", "peft", "accelerate", "lerobot", "mujoco", "robosuite",
            "hf-libero", "numpy")  # fmt: skip

_ABSENT = "(nothing)"
_FREE = ("num_threads",)  # May differ in a resumed run: the machine's, not the run's.


@dataclass(frozen=True)
class _Inside:
    """The path of a file or folder with this name inside a run's folder."""

    name: str

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The names of a run's files; a run leaves those that its command makes.

    Attributes:
        path: the folder.
    """

    path: Path

    # What identifies a run, written before its first step: the resolved recipe, the command line, the packages' and
    # project's versions.
    config = _Inside("config.yaml")
    command = _Inside("command.txt")
    versions = _Inside("versions.json")
    # What it writes on the way: one JSON object per logged step, the folder of what it resumes from, the policies
    # that the gate found better, the one that the gate sent back, the one before an update that diverged, and the
    # best by validation so far.
    metrics = _Inside("metrics.jsonl")
    checkpoints = _Inside("checkpoints")
    confirmed = _Inside("confirmed")
    rejected = _Inside("rejected")
    last_good = _Inside("last_good")
    best = _Inside("best")
    # What it ends with: a policy, or a fit's world model.
    policy = _Inside("policy")
    world_model = _Inside("world_model")
    # What it found, as JSON: the gate's checks, what trust said of the world model that the run is in, a closed loop's
    # rounds, what the run gained beside its controls.
    gate = _Inside("gate.json")
    admission = _Inside("admission.json")
    rounds = _Inside("rounds.json")
    ablation = _Inside("ablation.json")
    evaluations = _Inside("evaluations")
    # What to look at: a few filmed episodes, and the page.
    videos = _Inside("videos")
    report = _Inside("report.html")

    def evaluation(self, name: str) -> Path:
        """Return one evaluation's JSON file; "base" and "final" are those before and after training."""
        return self.evaluations / f"{name}.json"

    @property
    def exists(self) -> bool:
        """Whether a run was opened here."""
        return self.config.is_file()


def open_run(
    recipe: Config, folder: Path | None, resume: bool, root: Path = Path("runs"), free: Sequence[str] = ()
) -> Path:
    """Create a run's folder (or use one whose run never began) and write what identifies it, or open one to resume.

    Args:
        folder: where; by default `root/<name>-<date>-<time>`, with `resume` the newest of these.
        resume: resume the run in `folder`, which must hold the same resolved recipe, except for num_threads.
        free: further fields, dotted, that may differ then: those that only matter to what is still to be done.

    Raises:
        ConfigError: a folder in use without `resume`, nothing to resume, or another recipe in it.
    """
    name = getattr(recipe, "name", "run")
    if resume:
        return _reopen(recipe, folder or _newest_run(name, root), free)
    folder = folder or root / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    _check_unused(folder)
    _describe(folder, recipe)
    return folder


def _check_unused(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not _has_not_begun(folder):
        found = "is not empty" if folder.is_dir() else "is a file"
        again = ", or add --resume to resume it" if RunFolder(folder).exists else ""
        raise ConfigError(f"{folder} {found}. Choose another --output{again}.")


def _reopen(recipe: Config, folder: Path, free: Sequence[str]) -> Path:
    if not RunFolder(folder).exists:
        raise ConfigError(f"--resume: {folder} holds no earlier run (no config.yaml); see --output")
    if _difference_to(folder, recipe):
        difference = _difference_to(folder, recipe, free)
        if difference and not _has_not_begun(folder):
            raise ConfigError(
                f"{folder} was made by another recipe: {difference}. "
                "Resume with the recipe and overrides it was started with, or choose another --output."
            )
        _describe(folder, recipe)
    return folder


def _describe(folder: Path, recipe: Config) -> None:
    """Write what identifies a run."""
    run = RunFolder(folder)
    for inner in (run.checkpoints, run.evaluations, run.videos):
        inner.mkdir(parents=True, exist_ok=True)
    run.command.write_text(shlex.join(["vla-rl", *sys.argv[1:]]) + "\n")
    run.versions.write_text(json.dumps(versions(), indent=1))
    write_text_atomic(run.config, dump_yaml(recipe))


def _has_not_begun(folder: Path) -> bool:
    """Whether a run's folder holds what `_describe` writes and nothing else: no step, checkpoint or evaluation."""
    run = RunFolder(folder)
    return run.exists and {path for path in folder.rglob("*") if not path.is_dir()} <= {
        run.config,
        run.command,
        run.versions,
    }


def _newest_run(name: str, root: Path) -> Path:
    """The newest `root/<name>-<date>-<time>` that the same command made.

    Raises:
        ConfigError: there is none.
    """
    own = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
    command = _command(sys.argv[1:])
    for folder in sorted(root.glob(f"{glob.escape(name)}-*"), reverse=True):
        if own.fullmatch(folder.name) and RunFolder(folder).exists:
            written = RunFolder(folder).command
            if not written.is_file() or _command(shlex.split(written.read_text())[1:]) == command:
                print(f"--resume: resuming the newest run, {folder}", file=sys.stderr)
                return folder
    raise ConfigError(
        f"--resume: no run {root / name}-DATE-TIME of this command is here; name the run's folder with --output"
    )


def _command(arguments: Sequence[str]) -> str:
    """The command in a program's arguments: `train`, `eval`, ..."""
    return next((word for word in arguments if not word.startswith("-")), "")


def versions() -> dict[str, str | int | None]:
    """Return the packages' versions, Python's, the machine and this project's git commit."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "git_commit": git_commit(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" where files differ from it; None outside git."""
    is_ours = _git("ls-files", Path(__file__).name)  # Not of a repository that only surrounds us.
    return _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes") if is_ours else None


def _git(*arguments: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _difference_to(folder: Path, recipe: Config, free: Sequence[str] = ()) -> str:
    """How a run's recipe differs from `recipe`, but for the fields that are `free`; empty where they are the same."""
    # Validated, so that options which are newer than the run are there with their defaults.
    file = RunFolder(folder).config
    saved = validate(type(recipe), read_yaml(file), prefix=str(file))
    return _difference(saved.model_dump(mode="json"), recipe.model_dump(mode="json"), free)


def _difference(found: Mapping[str, Any], asked: Mapping[str, Any], free: Sequence[str]) -> str:
    """The first few fields in which two recipes differ, with both values; empty where they are the same."""
    there, here = _flat(found), _flat(asked)
    ignored = {*_FREE, *free}
    names = [n for n in there | here if n not in ignored and there.get(n, _ABSENT) != here.get(n, _ABSENT)]
    parts = [
        f"there {name}: {there.get(name, _ABSENT)!r}, here {name}: {here.get(name, _ABSENT)!r}" for name in names[:3]
    ]
    return "; ".join(parts) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
