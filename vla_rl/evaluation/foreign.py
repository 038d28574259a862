"""Import of other programs' evaluations: LeRobot, vla-eval, RLinf, SimpleVLA-RL, or a table (CSV).

    theirs = read_evaluation(Path("eval_info.json"))   # which program's is recognized by its content
    comparison = compare_any(theirs, ours)             # paired where both name their initial states, else unpaired

A format is a reader of a few lines in `_READERS`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy  # Its `stats` come with the first use.

from vla_rl.common.tables import libero_instruction
from vla_rl.evaluation.compare import Comparison, PairedResult, compare
from vla_rl.evaluation.results import EpisodeRecord, Evaluation, EvaluationError, EvaluationMeta
from vla_rl.evaluation.statistics import clustered_wilson_interval, unpaired_difference_interval

AS_RUN = "as run"  # The mode of episodes of which nobody says how their actions were drawn.
_COUNT = re.compile(r"(.+)@(\d+)$")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RLINF_EPISODE = re.compile(r"\[libero eval\] task_id=(\d+), trial_id=(\d+), success=(True|False)")
_RLINF_SECTION, _RLINF_CELL = re.compile(r"├─+ (.+?) ─+┤"), re.compile(r"(\w+)=([^│\s]+)")
_VIDEO = re.compile(r"step=(\d+)--task=(.+?)_trial_(\d+)(?:_seed_\d+)?--success=(True|False)")
_SCORE = re.compile(r"test_score/all['\"]?\s*:\s*(?:np\.float64\()?([\d.]+(?:e-?\d+)?)")
_SUCCESS = ("success", "succeeded", "is_success", "outcome")
_STATE = ("index", "state", "init_state", "initial_state", "trial_id", "trial", "seed")
_TRUE, _FALSE = ("1", "1.0", "true", "yes", "success"), ("0", "0.0", "false", "no", "failure")


class _Read(NamedTuple):
    """Episodes of a file: (task, state, success), what a state's number is, and what to know of them.

    The number is "official" (the benchmark's own), "seed ..." (of that program), "any" (the user says so), or empty:
    it names nothing. Numbers of other kinds do not pair.
    """

    episodes: list[tuple[str, int, bool]]
    naming: str
    notes: tuple[str, ...] = ()


def file_of(path: Path) -> tuple[Path, int | None]:
    """The file that FILE or FILE@N names, which need not be there, and N."""
    found = None if path.exists() else _COUNT.match(str(path))
    return (Path(found[1]), int(found[2])) if found else (path, None)


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation of ours or of another program.

    Args:
        path: a file; FILE@N where it has a success rate and does not say of how many episodes.

    Raises:
        EvaluationError: not readable, or of no known program.
    """
    file, count = file_of(path)
    try:
        text = _COLOR.sub("", file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise EvaluationError(f"{file}: not text; give an evaluation's JSON, CSV or log") from None
    try:
        values = json.loads(text) if text.lstrip().startswith("{") else None
    except json.JSONDecodeError:
        values = None
    if isinstance(values, dict) and "schema_version" in values:
        return Evaluation.load(file)
    for program, (is_its, read) in _READERS.items():
        if is_its(values if isinstance(values, dict) else {}, text):
            try:
                return _evaluation(file, program, read(values, text, count))
            except (KeyError, TypeError, ValueError) as error:
                raise EvaluationError(f"{file}: looks like {program}'s, but cannot be read: {error}") from None
    raise EvaluationError(
        f"{file}: of no known program; read are: vla-rl's evaluations/NAME.json, LeRobot's eval_info.json, vla-eval's "
        f"JSON, logs of RLinf and SimpleVLA-RL, CSV with a column 'success' (and 'task', 'state')"
    )


def is_foreign(evaluation: Evaluation) -> bool:
    """Whether another program wrote it."""
    return "read_from" in evaluation.meta.config


def _evaluation(file: Path, program: str, read: _Read) -> Evaluation:
    if not read.episodes:
        raise ValueError("no episode in it")
    seen: dict[tuple[str, int], int] = {}
    records = []
    for task, index, success in read.episodes:
        sample = seen[task, index] = seen.get((task, index), -1) + 1
        values = {"mode": AS_RUN, "split": "eval", "sample": sample, "steps": 0}
        records.append(EpisodeRecord(task=task, index=index, success=success, **values))
    named = "names its initial states" if read.naming else "does not name its initial states"
    meta = EvaluationMeta(
        name=file.stem,
        env=f"as {program} ran it",
        split="eval",
        seed=0,
        temperatures={},
        horizon={},
        cameras=(),
        image_size=(0, 0),
        num_envs=1,
        protocol=f"read from {program}'s {file.name}, which {named}",
        config={"read_from": program, "naming": read.naming, "notes": list(read.notes)},
        created="",
        wall_seconds=0.0,
    )
    return Evaluation(meta=meta, episodes=tuple(records))


def _lerobot(values: dict[str, Any], text: str, count: int | None) -> _Read:
    if "per_task" in values:
        tasks = [(f"{row['task_group']}/{row['task_id']}", row["metrics"]["successes"]) for row in values["per_task"]]
        return _Read([(task, i, bool(ok)) for task, outcomes in tasks for i, ok in enumerate(outcomes)], "")
    rows = values["per_episode"]
    named = all(row.get("seed") is not None for row in rows)
    return _Read(
        [("all", row["seed"] if named else i, bool(row["success"])) for i, row in enumerate(rows)], "seed" * named
    )


def _vla_eval(values: dict[str, Any], text: str, count: int | None) -> _Read:
    rows = [(task["task"], row) for task in values["tasks"] for row in task["episodes"]]
    errors = sum(bool(row.get("failure_reason")) for _, row in rows)
    notes = [f"{errors} episodes ended by an error and count as failures, as vla-eval counts them"] if errors else []
    if values.get("partial"):
        notes.append("it was cut off: not all of its episodes ran")
    episodes = [(task, int(row["episode_id"]), bool(row["metrics"].get("success"))) for task, row in rows]
    naming = "official" if "libero" in values["benchmark"].lower() else f"seed {values.get('seed')} + episode"
    return _Read(episodes, naming, tuple(notes))


def _rlinf(values: None, text: str, count: int | None) -> _Read:
    last: dict[tuple[str, int], bool] = {}
    for task, trial, success in _RLINF_EPISODE.findall(text):
        if (task, int(trial)) in last:  # Another evaluation of the same run begins.
            last = {}
        last[task, int(trial)] = success == "True"
    if last:
        return _Read([(*key, success) for key, success in last.items()], "official")
    section, cells = "", {}
    for line in text.splitlines():
        if title := _RLINF_SECTION.search(line):
            section = title[1]
        elif section == "Evaluation":
            cells |= dict(_RLINF_CELL.findall(line))
    return _of_rate(float(cells["success_once"]), int(cells["num_trajectories"]))


def _simplevla(values: None, text: str, count: int | None) -> _Read:
    videos = _VIDEO.findall(text)
    if videos:
        last = max(int(step) for step, *_ in videos)
        episodes = {
            (task.replace("_task_", "/"), int(trial)): success == "True"
            for step, task, trial, success in videos
            if int(step) == last
        }
        naming = "official" if "libero" in videos[0][1] else "seed"
        return _Read([(*key, success) for key, success in episodes.items()], naming, (f"of step {last}, its last",))
    rate = float(_SCORE.findall(text)[-1])
    if count is None:
        raise ValueError(
            f"it says a rate, {100 * rate:.1f} %, and not of how many episodes. Write FILE@EPISODES, like run.log@500, "
            "or give the console's output, whose lines 'Saved rollout MP4' name every episode"
        )
    return _of_rate(rate, count)


def _csv(values: None, text: str, count: int | None) -> _Read:
    rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    column = next(name for name in _SUCCESS if name in rows[0])
    state = next((name for name in _STATE if name in rows[0]), None)
    episodes = []
    for number, row in enumerate(rows):
        word = (row[column] or "").strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError(f"row {number + 1}: {column} is {row[column]!r}; allowed: {', '.join(_TRUE + _FALSE)}")
        episodes.append((row.get("task") or "all", int(row[state]) if state else number, word in _TRUE))
    return _Read(episodes, "any" if state else "")


def _of_rate(rate: float, count: int) -> _Read:
    successes = round(rate * count)
    return _Read([("all", i, i < successes) for i in range(count)], "")


_READERS: Mapping[str, tuple[Callable[[dict[str, Any], str], Any], Callable[[Any, str, int | None], _Read]]] = {
    "LeRobot": (lambda values, _: "per_task" in values or "per_episode" in values, _lerobot),
    "vla-eval": (lambda values, _: "tasks" in values and "benchmark" in values, _vla_eval),
    "RLinf": (lambda _, text: "[libero eval] task_id=" in text or "success_once=" in text, _rlinf),
    "SimpleVLA-RL": (lambda _, text: "test_score/all" in text or _VIDEO.search(text), _simplevla),
    "CSV": (lambda _, text: bool({*_SUCCESS} & {*re.split(r"\s*,\s*", text.partition("\n")[0].strip())}), _csv),
}


def compare_any(a: Evaluation, b: Evaluation) -> Comparison:
    """`compare`, also of evaluations that other programs wrote.

    Tasks are matched by name, by a LIBERO task's words, or by their number in the suite; a mode that is not said is
    compared with greedy episodes where there are some.

    Raises:
        EvaluationError: see `compare`.
    """
    if not is_foreign(a) and not is_foreign(b):
        return compare(a, b)
    a, b = (_renamed(a, b), b) if is_foreign(a) else (a, _renamed(b, a))
    warnings = [f"{e.meta.name}: {note}" for e in (a, b) for note in e.meta.config.get("notes", ())]
    warnings += [f"{e.meta.name} does not say how its actions were drawn" for e in (a, b) if is_foreign(e)]
    mode = next(mode for mode in a.modes if mode in b.modes)
    keys_a, keys_b = ({(r.task, r.index) for r in e.select(mode)} for e in (a, b))
    naming = {_naming(e) for e in (a, b)} - {"any"}
    if len(naming) < 2 and "" not in naming and keys_a & keys_b:
        found = compare(a, b)
        how = "paired: both name their initial states"
    else:
        found = _unpaired(a, b, mode)
        without = " and ".join(e.meta.name for e in (a, b) if not _naming(e))
        why = f"{without} names no initial states" if without else "they have no initial state in common"
        how = f"not paired: {why}; each was taken by itself, which needs more episodes to tell"
    parts = [how, found.population] if found.population else [how]
    return found.model_copy(update={"population": ". ".join(parts), "warnings": (*warnings, *found.warnings)})


def _renamed(theirs: Evaluation, other: Evaluation) -> Evaluation:
    """Their evaluation with the other's names of tasks and mode, and of the environment, which they do not say."""
    names = {}
    for task in theirs.tasks:
        keys = _keys(theirs, task)
        names[task] = next((name for name in other.tasks if keys & _keys(other, name)), task)
    mode = AS_RUN if AS_RUN in other.modes else "greedy" if "greedy" in other.modes else other.modes[0]
    episodes = tuple(
        e.model_copy(update={"task": names[e.task], "mode": mode, "split": other.meta.split}) for e in theirs.episodes
    )
    meta = theirs.meta.model_copy(update={"env": other.meta.env, "split": other.meta.split})
    return Evaluation(meta=meta, episodes=episodes)


def _keys(evaluation: Evaluation, task: str) -> set[str]:
    """What a task may be called by: its words, and its number in its suite."""
    words = libero_instruction(task).lower()
    number = (
        re.fullmatch(r"(?:.*/)?(\d+)", task) if is_foreign(evaluation) else re.match(r"(\d+) ", evaluation.labels[task])
    )
    return {words, *([f"#{number[1]}"] if number else [])}


def _naming(evaluation: Evaluation) -> str:
    """What the numbers of its initial states are; see `_Read`."""
    ours = "vla-rl's own" if evaluation.meta.official_states is False else "official"
    return evaluation.meta.config["naming"] if is_foreign(evaluation) else ours


def _unpaired(a: Evaluation, b: Evaluation, mode: str) -> Comparison:
    common = [task for task in a.tasks if task in b.tasks]
    warnings = []
    if not common:
        warnings.append("no task of one is known by name to the other: all episodes of each are taken together")
    elif left_out := sorted({*a.tasks, *b.tasks} - {*common}):
        warnings.append(f"tasks of one alone are left out: {', '.join(left_out)}")
    rows = [[r for r in e.select(mode) if not r.lost and (not common or r.task in common)] for e in (a, b)]
    if not all(rows):
        raise EvaluationError(f"cannot compare: no episode in mode {mode!r} of both")
    tasks = [*(common if len(common) > 1 else ()), None]
    results = [_apart(mode, t, *([r for r in side if t in (None, r.task)] for side in rows)) for t in tasks]
    shares = [{t: sum(r.task == t for r in side) / len(side) for t in common} for side in rows]
    if any(abs(shares[0][t] - shares[1][t]) > 0.01 for t in common):
        warnings.append("tasks have other shares of the episodes in a than in b, which moves the rates of all together")
    return Comparison(
        name_a=a.meta.name,
        name_b=b.meta.name,
        policy_a=a.meta.policy,
        policy_b=b.meta.policy,
        env=(b if is_foreign(a) else a).meta.env_title,
        labels=a.labels | b.labels,
        split=a.meta.split,
        results=tuple(results),
        warnings=tuple(warnings),
    )


def _apart(mode: str, task: str | None, a: Iterable[EpisodeRecord], b: Iterable[EpisodeRecord]) -> PairedResult:
    sides = []
    for records in map(list, (a, b)):
        outcomes = np.array([r.success for r in records], float)
        sides.append((outcomes, np.array([f"{r.task}/{r.index}" for r in records])))
    (first, states_a), (second, states_b) = sides
    table = []  # Each initial state counts once, as if its samples were alike.
    for outcomes, states in sides:
        count = len(set(states))
        successes = round(count * outcomes.mean())
        table.append([successes, count - successes])
    return PairedResult(
        mode=mode,
        task=task,
        num_pairs=0,
        num_states=min(map(sum, table)),
        apart=(len(first), len(second)),
        rate_a=first.mean(),
        interval_a=clustered_wilson_interval(first, states_a),
        rate_b=second.mean(),
        interval_b=clustered_wilson_interval(second, states_b),
        gained=0,
        lost=0,
        difference=second.mean() - first.mean(),
        bootstrap=unpaired_difference_interval(first, second, states_a, states_b),
        p_value_by_state=float(scipy.stats.fisher_exact(table).pvalue),
    )
