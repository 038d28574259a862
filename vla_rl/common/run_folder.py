"""Run folder: its files' names, how it is opened or resumed, and what identifies the run."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.progress import read_status
from vla_rl.config import Config, ConfigError, dump_yaml, read_yaml, validate

PACKAGES = ("vla-rl", "torch", "transformers", "timm", "peft", "accelerate", "lerobot", "mujoco", "robosuite",
            "hf-libero", "numpy")  # fmt: skip
# Shell patterns of the options that a resumed run may change: they cannot change its result so far.
FREE = (
    *("description", "log.*"),
    *("device", "*.device", "num_threads", "*.num_workers", "*.render_devices", "*.step_timeout"),
    *("*.num_hosts", "env.hosts", "real_env.hosts", "*.token_file", "*.devices"),  # of kind remote and robotwin
    "*.assets_path",  # of kind libero
    *("hang_minutes", "algo.micro_batch_size", "sft.grad_accumulation"),
    *("*.address", "rollout.hosts", "rollout.host_*", "rollout.worker_*", "rollout.*timeout_s"),
    *("rollout.object_store_mb", "*.save_every", "*.keep_checkpoints", "*.log_every"),
)
# A run's length, which may change where something else has this value: option -> (that, the value, why).
LENGTHS = {
    "train.iterations": ("gate.every", 0, "the gate's error was shared out over the checks of all iterations"),
    "sft.steps": ("sft.final_lr_fraction", 1, "the learning rate so far has fallen towards the last step"),
}
Changed = Mapping[str, tuple[Any, Any]]  # Option, dotted -> its value in the run's recipe and in the one given now.
_ABSENT = "(nothing)"
_WHAT_MAY = (
    "Only what leaves the result so far as it is may change: log, device, threads, workers, time limits, "
    "micro-batches, checkpoints, more iterations."
)
_WITH_CHECKPOINTS = {"train", "sft"}  # Commands that each have checkpoints of their own.


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
    # What was changed when it was resumed.
    changes = _Inside("changes.json")
    # What it writes on the way: where it is, one JSON object per logged step, the folder of what it resumes from, the
    # policies that the gate found better, the one that the gate sent back, its checks' real episodes, the policy before
    # an update that diverged, and the best by validation so far.
    status = _Inside("status.json")
    metrics = _Inside("metrics.jsonl")
    checkpoints = _Inside("checkpoints")
    confirmed = _Inside("confirmed")
    rejected = _Inside("rejected")
    gate_episodes = _Inside("gate_episodes")
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
    perturbed = _Inside("perturbed")
    robustness = _Inside("robustness.json")
    suites = _Inside("suites.json")
    # Of a published result that is repeated: what it is to show, written before, and the row of docs/support.yaml.
    claim = _Inside("claim.json")
    row = _Inside("row.yaml")
    # What to look at: a few filmed episodes, and the page.
    videos = _Inside("videos")
    report = _Inside("report.html")

    def evaluation(self, name: str) -> Path:
        """Return one evaluation's JSON file; "base" and "final" are those before and after training."""
        return self.evaluations / f"{name}.json"

    def action_errors_of(self, name: str) -> Path:
        """Return the JSON file of a policy's action errors on recorded episodes."""
        return self.path / "action_errors" / f"{name}.json"

    def videos_of(self, name: str) -> list[Path]:
        """Return the MP4 files of one evaluation's filmed episodes."""
        return sorted(self.videos.glob(f"{glob.escape(name)}__*.mp4"))

    @property
    def exists(self) -> bool:
        """Whether a run was opened here."""
        return self.config.is_file()

    @property
    def result(self) -> Path | None:
        """The folder of the policy that it ended with, of a closed loop its last round's; None: it has none so far."""
        rounds = sorted(self.path.glob("round_*/train/policy"), key=lambda path: int(path.parts[-3].split("_")[1]))
        return next((path for path in (self.policy, *reversed(rounds)) if path.is_dir()), None)


def open_run(
    recipe: Config,
    folder: Path | None,
    resume: bool,
    root: Path = Path("runs"),
    free: Sequence[str] = (),
    check: Callable[[Any, RunFolder, Changed], None] | None = None,
    first: bool = False,
) -> Path:
    """Create a run's folder and write what identifies it, or open an earlier run's to resume it; return it.

    A ConfigError: the folder is in use (a run that never began is none), or there is nothing to resume in it.

    Args:
        folder: where; by default `root/<name>-<date>-<time>`, with `resume` the newest run of the name.
        resume: the run in `folder`, of the same recipe but for options that match `FREE` or `free`, patterns of names.
        check: called with recipe, run and what differs, before that is recorded; a ConfigError where it may not.
        first: by default `root/<name>`, where other recipes look for what this one makes, unless it is in use.
    """
    name = str(getattr(recipe, "name", "run"))
    if resume:
        return _reopen(recipe, folder or _newest_run(name, root), free, check)
    if folder is None:
        plain, dated = root / name, root / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        folder = plain if first and _is_unused(plain) and _at_work(RunFolder(plain)) is None else dated
    if folder.exists():
        _check_unused(folder)
    _describe(folder, recipe)
    return folder


def _is_unused(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir())) or _has_not_begun(folder)


def _check_unused(folder: Path) -> None:
    if not _is_unused(folder):
        raise _in_use(folder)
    if (process := _at_work(RunFolder(folder))) is not None:
        raise ConfigError(
            f"--output: in {folder} a run has just begun, as process {process} of this machine; two would spoil each "
            "other's files. End that one first, or choose another --output."
        )


def _in_use(folder: Path) -> ConfigError:
    found = "is not empty" if folder.is_dir() else "is a file"
    again = ", or add --resume to resume it" if RunFolder(folder).exists else ""
    return ConfigError(f"{folder} {found}. Choose another --output{again}.")


def _reopen(
    recipe: Config, folder: Path, free: Sequence[str], check: Callable[[Any, RunFolder, Changed], None] | None
) -> Path:
    run = RunFolder(folder)
    if not run.exists:
        raise ConfigError(f"--resume: {folder} holds no earlier run (no config.yaml); see --output")
    _check_command(run)
    if (process := _at_work(run)) is not None:
        raise ConfigError(
            f"--resume: {folder} is still running, as process {process} of this machine; two would spoil each other's "
            "files. End that one first, or choose another --output."
        )
    if changed := differences(run, recipe):
        if _has_not_begun(folder):
            _describe(folder, recipe)
        else:
            check_changes(run, recipe, changed, free)
            if check is not None:
                check(recipe, run, changed)
            record_changes(run, recipe, changed)
    return folder


def _at_work(run: RunFolder) -> int | None:
    """The number of another process of this machine that is at the run, as far as its status.json says."""
    try:
        status = read_status(run.status)
        return status.process if status is not None and status.is_anothers else None
    except ValueError:  # Of another version.
        return None


def _describe(folder: Path, recipe: Config) -> None:
    """Write what identifies a run."""
    run = RunFolder(folder)
    try:
        for inner in (run.checkpoints, run.evaluations, run.videos):
            inner.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written ({error.strerror}); choose another --output") from None
    run.command.write_text(command_line() + "\n")
    run.versions.write_text(json.dumps(versions(), indent=1))
    write_text_atomic(run.config, dump_yaml(recipe))


def _has_not_begun(folder: Path) -> bool:
    """Whether a run's folder holds what `_describe` writes and nothing else: no step, checkpoint or evaluation."""
    run = RunFolder(folder)
    return run.exists and {path for path in folder.rglob("*") if not path.is_dir()} <= {
        run.config,
        run.command,
        run.versions,
        run.status,
        run.claim,
    }


def _newest_run(name: str, root: Path) -> Path:
    """The newest `root/<name>-<date>-<time>` that the same command made, else its `root/<name>`.

    Raises:
        ConfigError: there is none.
    """
    own = re.compile(re.escape(name) + r"(-\d{8}-\d{6})?")
    command = _command(command_line())
    for folder in sorted(root.glob(f"{glob.escape(name)}*"), reverse=True):
        is_one = own.fullmatch(folder.relative_to(root).as_posix()) and RunFolder(folder).exists
        if is_one and command_of(RunFolder(folder)) in ("", command):
            print(f"--resume: resuming the newest run, {folder}", file=sys.stderr)
            return folder
    raise ConfigError(
        f"--resume: no run {root / name} or {name}-DATE-TIME of this command is here; name its folder with --output"
    )


def _check_command(run: RunFolder) -> None:
    """
    Raises:
        ConfigError: the run is another training command's, whose checkpoints are not this one's.
    """
    made_by, command = command_of(run), _command(command_line())
    if made_by != command and {made_by, command} <= _WITH_CHECKPOINTS:
        raise ConfigError(
            f"--resume: {run.path} is a run of `vla-rl {made_by}`, not of {command}. Resume it with that command, or "
            f"start a run of {command} from its result: policy.path={run.policy}, and another --output."
        )


def command_of(run: RunFolder) -> str:
    """The command that made a run; empty: it does not say."""
    return _command(run.command.read_text()) if run.command.is_file() else ""


def _command(line: str) -> str:
    """The command in a command line: `train`, `eval`, ...; from Python it is `train`, the API's only one with a run."""
    program, *arguments = shlex.split(line) or [""]
    return next((word for word in arguments if not word.startswith("-")), "") if program == "vla-rl" else "train"


def command_line() -> str:
    """How this process was started: `vla-rl train ...`, or where our program is not what runs, `python SCRIPT ...`."""
    program = Path(sys.argv[0])
    is_ours = program.stem == "vla-rl" or program.parts[-2:] in (("vla_rl", "__main__.py"), ("cli", "__main__.py"))
    return shlex.join(["vla-rl", *sys.argv[1:]] if is_ours else ["python", *sys.argv])


def versions() -> dict[str, str | int | None]:
    """Return the packages' versions, Python's, the machine and this project's git commit."""
    found: dict[str, str | int | None] = {"python": platform.python_version()} | dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"platform": platform.platform(), "cpus": os.cpu_count(), "git_commit": git_commit()}


def git_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" where files differ from it; None outside git."""
    here = Path(__file__).resolve()
    is_ours = ("ls-files", "--error-unmatch", here.name)  # Not of a repository that only surrounds us.
    described = ("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes")
    try:
        for command in (is_ours, described):
            said = subprocess.run(["git", *command], cwd=here.parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.strip()


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The rows of a metrics.jsonl, null as NaN; a last line cut off by a kill is left out.

    Raises:
        ValueError: a line that is not JSON, by number.
    """
    rows = []
    for line in whole_lines(Path(path)):
        rows.append({key: math.nan if value is None else value for key, value in json.loads(line).items()})
    return rows


def whole_lines(path: Path) -> list[str]:
    """The complete lines of a JSONL file."""
    lines = path.read_text(errors="replace").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error}). Remove the line to go on.") from None
    return lines


# --- what may change when a run is resumed ------------------------------------------------------


def differences(run: RunFolder, recipe: Config) -> Changed:
    """Option, dotted -> its value in the run's recipe and in `recipe`, where the two differ.

    Raises:
        ConfigError: the run's recipe cannot be read.
    """
    # Validated, so that options which are newer than the run are there with their defaults.
    file = run.config
    saved = validate(type(recipe), read_yaml(file), prefix=str(file))
    there, here = flat(saved.model_dump(mode="json")), flat(recipe.model_dump(mode="json"))
    pairs = {name: (there.get(name, _ABSENT), here.get(name, _ABSENT)) for name in there | here}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def is_free(name: str, free: Sequence[str] = ()) -> bool:
    """Whether a resumed run may change an option, by its dotted name; `free`: patterns besides `FREE`."""
    return any(fnmatchcase(name, pattern) for pattern in (*FREE, *free))


def check_changes(run: RunFolder, recipe: Config, changed: Changed, free: Sequence[str]) -> None:
    """Raise `ConfigError` where a resumed run may not change what differs.

    Args:
        changed: as `differences` gives it.
        free: patterns of options that may, besides `FREE`.
    """
    allowed = {name for name in changed if is_free(name, free)}
    if refused := {name: pair for name, pair in changed.items() if name not in allowed}:
        parts = [f"there {name}: {there!r}, here {name}: {here!r}" for name, (there, here) in list(refused.items())[:3]]
        more = f"; and {len(refused) - 3} more" if len(refused) > 3 else ""
        raise ConfigError(
            f"{run.path} was made by another recipe: {'; '.join(parts)}{more}. {_WHAT_MAY} Resume without that change "
            f"(`--resume --output {shlex.quote(str(run.path))}` alone reads the run's own recipe), or choose another "
            "--output."
        )
    for name in sorted(allowed & set(LENGTHS)):
        _check_length(name, changed[name], flat(recipe.model_dump(mode="json")), run)


def _check_length(name: str, change: tuple[Any, Any], recipe: Mapping[str, Any], run: RunFolder) -> None:
    condition, value, reason = LENGTHS[name]
    done = newest_step(run) or 0
    if recipe[condition] != value:
        problem = f"{condition} is {recipe[condition]}, and {reason}: set it back"
    elif change[1] < done:
        problem = f"{done} are done: give at least as many"
    else:
        return
    raise ConfigError(
        f"{name}: there {change[0]}, here {change[1]}; {problem}, or start a new run from policy.path={run.policy}"
    )


def newest_step(run: RunFolder) -> int | None:
    """The step that a run's newest checkpoint is named by; None without checkpoints."""
    names = (path.name.removeprefix("step_") for path in run.checkpoints.glob("step_*"))
    return max((int(name) for name in names if name.isdecimal()), default=None)


def record_changes(run: RunFolder, recipe: Config, changed: Changed) -> None:
    """Make `recipe` the run's, and add to its changes.json what changed, when, and after which iteration."""
    entry = {
        "after": newest_step(run),
        "time": datetime.now().isoformat(timespec="seconds"),
        "command": command_line(),
        "changed": {name: {"from": there, "to": here} for name, (there, here) in changed.items()},
    }
    write_text_atomic(run.changes, json.dumps([*read_changes(run), entry], indent=1) + "\n")
    write_text_atomic(run.config, dump_yaml(recipe))


def read_changes(run: RunFolder) -> list[dict[str, Any]]:
    """What was changed when a run was resumed, oldest first; each has `after`, `time`, `command` and `changed`."""
    file = run.changes
    return json.loads(file.read_text()) if file.is_file() else []


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
