"""Going on with an earlier run: what may differ from how it was started, and the record of what did."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import Config, ConfigError, dump_yaml, read_yaml, validate

if TYPE_CHECKING:
    from vla_rl.common.run_folder import RunFolder

# Shell patterns of the options that a resumed run may change: they cannot change its result so far.
FREE = (
    *("description", "log.*"),
    *("device", "*.device", "num_threads", "*.num_workers", "*.render_devices", "*.step_timeout", "*.start_timeout"),
    *("*.num_hosts", "env.hosts", "real_env.hosts", "*.token_file", "*.devices"),  # of kind remote and robotwin
    *("*.assets_path", "*.max_scenes"),  # of kind libero
    *("distributed.*", "algo.micro_batch_size", "sft.grad_accumulation", "sft.num_threads", "sft.cache_folder"),
    *("rollout.address", "rollout.hosts", "rollout.host_*", "rollout.worker_*", "rollout.*timeout_s"),
    *("rollout.object_store_mb", "*.save_every", "*.keep_checkpoints", "*.log_every", "*.max_bad_steps"),
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


def command_line() -> str:
    """How this process was started: `vla-rl train ...`, or where our program is not what runs, `python SCRIPT ...`."""
    program = Path(sys.argv[0])
    is_ours = program.stem == "vla-rl" or program.parts[-2:] in (("vla_rl", "__main__.py"), ("cli", "__main__.py"))
    return shlex.join(["vla-rl", *sys.argv[1:]] if is_ours else ["python", *sys.argv])


def differences(run: RunFolder, recipe: Config) -> Changed:
    """Option, dotted -> its value in the run's recipe and in `recipe`, where the two differ.

    Raises:
        ConfigError: the run's recipe cannot be read.
    """
    # Validated, so that options which are newer than the run are there with their defaults.
    file = run.config
    saved = validate(type(recipe), read_yaml(file), prefix=str(file))
    there, here = _flat(saved.model_dump(mode="json")), _flat(recipe.model_dump(mode="json"))
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
        _check_length(name, changed[name], _flat(recipe.model_dump(mode="json")), run)


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


def change_texts(run: RunFolder) -> list[str]:
    """What was changed when a run was resumed, a line each time, for its report."""
    lines = []
    for change in read_changes(run):
        parts = (f"{name} from {pair['from']} to {pair['to']}" for name, pair in change["changed"].items())
        lines.append(f"{change['time'].replace('T', ' ')}, after step {change['after'] or 0}: {', '.join(parts)}")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
