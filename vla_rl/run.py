"""A run's folder: what was asked, with what, and all that came of it.

config.yaml      the resolved recipe           command.txt    the command line
versions.json    packages, git commit, machine metrics.jsonl  one JSON object per step
checkpoints/     resume points                 policy/        the result (and best/, by validation)
evaluations/     one JSON per evaluation       videos/        a few episodes
report.html      the page to look at
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from vla_rl.config import Config, ConfigError, dump_yaml

PACKAGES = ("vla-rl", "torch", "transformers", "timm", "peft", "accelerate", "lerobot", "mujoco", "robosuite",
            "hf-libero", "numpy")  # fmt: skip


def open_run(recipe: Config, folder: Path | None, resume: bool, root: Path = Path("runs")) -> Path:
    """Create a run's folder and write what identifies it, or open an existing one to resume.

    Args:
        folder: where; by default `root/<name>-<date>-<time>`.
        resume: go on in `folder`, which must hold the same resolved recipe.

    Raises:
        ConfigError: a folder in use without `resume`, nothing to resume, or another recipe in it.
    """
    text = dump_yaml(recipe)
    if resume:
        if folder is None or not (folder / "config.yaml").is_file():
            raise ConfigError(f"--resume needs --output with an earlier run's folder; got {folder}")
        found = (folder / "config.yaml").read_text()
        if found != text:
            raise ConfigError(
                f"{folder} was made by another recipe: {_first_difference(found, text)}. "
                "Resume with the recipe and overrides it was started with, or choose another --output."
            )
        return folder
    if folder is None:
        folder = root / f"{getattr(recipe, 'name', 'run')}-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Choose another --output, or add --resume to go on in it.")
    for name in ("checkpoints", "evaluations", "videos"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "command.txt").write_text(shlex.join(["vla-rl", *sys.argv[1:]]) + "\n")
    (folder / "versions.json").write_text(json.dumps(versions(), indent=1))
    (folder / "config.yaml").write_text(text)
    return folder


def versions() -> dict[str, str | int | None]:
    """Package versions, Python, the machine and this project's git commit."""
    found: dict[str, str | int | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["platform"] = platform.platform()
    found["cpus"] = os.cpu_count()
    found["git_commit"] = git_commit()
    return found


def git_commit() -> str | None:
    """The commit of this checkout, with "+changes" where files differ from it; None outside git."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changed else "")


def _first_difference(found: str, asked: str) -> str:
    for old, new in zip(found.splitlines(), asked.splitlines(), strict=False):
        if old != new:
            return f"there {old.strip()!r}, here {new.strip()!r}"
    return "one has more sections than the other"
