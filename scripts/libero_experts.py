"""Measures LIBERO's scripted experts, without rendering.

python scripts/libero_experts.py --suite libero_spatial --states 10
python scripts/libero_experts.py --update          # the table that decides where an expert is offered
python scripts/libero_experts.py --markdown        # that table, as docs/libero.md shows it
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sim.libero.env import LiberoConfig, LiberoEnv
from sim.libero.library import bddl_path, import_library, suite_tasks
from sim.libero.suites import EXPERT_TABLE, HORIZONS, OFFERED_FROM, is_offered, measured_experts
from vla_rl.common.atomic import write_text_atomic
from vla_rl.config import validate
from vla_rl.types import EpisodeSpec, Split

TABLE_STATES = 5  # train states of each task


@dataclass(frozen=True)
class ExpertResult:
    """One task: successes among `num_states` initial states, and the steps of each success."""

    task: str
    num_states: int
    failed: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def num_success(self) -> int:
        return len(self.steps)


def measure_experts(
    suite: str,
    num_states: int,
    tasks: Sequence[str] = (),
    split: Split = "eval",
    noise: float = 0.0,
    assets_path: Path | None = None,
) -> list[ExpertResult]:
    """Run the expert from the first `num_states` initial states of each task; prints a line a task and the total.

    Args:
        noise: standard deviation of Gaussian noise added to the six motion components.
    """
    env = _make(suite, tasks, assets_path)
    results = []
    for task in env.spec.tasks:
        result = _measure_task(env, task, num_states, split, noise)
        results.append(result)
        failed = f"  failed: {list(result.failed)}" if result.failed else ""
        print(_line(task, result.num_success, num_states, result.steps) + failed, flush=True)
    all_steps = [count for result in results for count in result.steps]
    print(_line(f"{suite}, {split}, noise {noise:g}", len(all_steps), num_states * len(results), all_steps), flush=True)
    return results


def update_table(
    suites: Sequence[str],
    num_states: int,
    tasks: Sequence[str] = (),
    assets_path: Path | None = None,
    table: Path = EXPERT_TABLE,
) -> None:
    """Measure the tasks that the table lacks, on `train` states; it is written after each, so that this can be stopped.

    Tasks whose goal the expert does not know are not in the table.
    """
    import_library(assets_path)
    found = json.loads(table.read_text()) if table.is_file() else {}
    for suite in suites:
        env = _make(suite, tasks, assets_path)
        for task in env.spec.tasks:
            if task in found.setdefault(suite, {}) or not _is_known_goal(bddl_path(suite, task)):
                continue
            result = _measure_task(env, task, num_states, "train", 0.0)
            found[suite][task] = [result.num_success, num_states]
            print(_line(task, result.num_success, num_states, result.steps), flush=True)
            write_text_atomic(table, _as_text(found))
        env.close()


def _as_text(found: dict[str, dict[str, list[int]]]) -> str:
    """JSON with a line a task."""
    suites = []
    for suite, tasks in found.items():
        lines = ",\n".join(f"  {json.dumps(task)}: {json.dumps(counts)}" for task, counts in tasks.items())
        suites.append(f" {json.dumps(suite)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(suites) + "\n}\n"


def _is_known_goal(bddl: Path) -> bool:
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    from sim.libero.experts import placed_object

    problem = robosuite_parse_problem(str(bddl))
    movable = {name for names in problem["objects"].values() for name in names}
    return placed_object(problem["goal_state"], movable) is not None


def markdown() -> str:
    """The table for docs/libero.md: by suite, where the expert is offered, and the tasks that it fails."""
    lines = ["| suite | offered, of all tasks | solved there | measured, and not offered (task: solved) |"]
    lines.append("|---|---|---|---|")
    for suite, tasks in measured_experts().items():
        numbers = {task: number for number, task in enumerate(suite_tasks(suite))}
        good = [counts for task, counts in tasks.items() if is_offered(suite, task)]
        bad = [f"{numbers[task]}: {solved}" for task, (solved, _) in tasks.items() if not is_offered(suite, task)]
        solved, of = (sum(counts[i] for counts in good) for i in range(2))
        lines.append(f"| {suite} | {len(good)} of {len(numbers)} | {solved} of {of} | {', '.join(bad) or 'none'} |")
    return "\n".join(lines)


def _make(suite: str, tasks: Sequence[str], assets_path: Path | None) -> LiberoEnv:
    values = {"suite": suite, "tasks": tuple(tasks), "assets_path": assets_path}
    return validate(LiberoConfig, values, prefix="env").make()


def _measure_task(env: LiberoEnv, task: str, num_states: int, split: Split, noise: float) -> ExpertResult:
    rng = np.random.default_rng(0)
    taken = [_run_expert(env, EpisodeSpec(task, split, index), noise, rng) for index in range(num_states)]
    failed = tuple(index for index, steps in enumerate(taken) if steps is None)
    return ExpertResult(task, num_states, failed, tuple(steps for steps in taken if steps is not None))


def _line(name: str, num_success: int, total: int, steps: Sequence[int]) -> str:
    mean = f"{np.mean(steps):.0f} steps" if steps else "-"
    return f"{num_success:4d} of {total:4d} ({num_success / total:6.1%})  {mean:>9s}  {name}"


def _run_expert(env: LiberoEnv, spec: EpisodeSpec, noise: float, rng: np.random.Generator) -> int | None:
    """Steps until success, None at the horizon. Renders nothing."""
    env.begin(spec)
    for step in range(env.horizon):
        action = env.loaded.expert.action()
        action[:6] += noise * rng.standard_normal(6)
        if env.apply(np.clip(action, -1, 1)):
            return step + 1
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=tuple(HORIZONS), help="libero_spatial; with --update, all if not given")
    parser.add_argument("--states", type=int, help=f"initial states a task: 10; with --update {TABLE_STATES}, of train")
    parser.add_argument("--tasks", nargs="*", default=[], help="names or numbers; all if none")
    parser.add_argument("--split", default="eval", choices=("train", "validation", "eval"))
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of action noise")
    parser.add_argument("--assets", type=Path, default=None, help="LIBERO's assets; else $LIBERO_ASSETS")
    parser.add_argument(
        "--update",
        action="store_true",
        help=f"measure the tasks that {EXPERT_TABLE.name} lacks; can be stopped and goes on",
    )
    parser.add_argument("--markdown", action="store_true", help=f"print it; offered from {OFFERED_FROM:.0%} on")
    args = parser.parse_args()
    if args.update:
        update_table(
            [args.suite] if args.suite else list(HORIZONS), args.states or TABLE_STATES, args.tasks, args.assets
        )
    elif args.markdown:
        print(markdown())
    else:
        suite = args.suite or "libero_spatial"
        measure_experts(suite, args.states or 10, args.tasks, args.split, args.noise, args.assets)


if __name__ == "__main__":
    main()
