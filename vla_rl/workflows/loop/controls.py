"""Controls of the closed loop: negative controls of its RL, and RL in the real simulator."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.child_process import end_child
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.config import dump_yaml
from vla_rl.evaluation.gate import GateConfig
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.recipe.runs import LoopRecipe
from vla_rl.training.run import run_steps
from vla_rl.training.train import train
from vla_rl.workflows.jobs import FINAL, Job
from vla_rl.workflows.loop.rounds import Round
from vla_rl.workflows.sweep import summarize


def run_beside_controls(
    recipe: TrainRecipe,
    controls: Sequence[str],
    done: Round,
    before: Round | None,
    program: Sequence[str],
    show: Callable[[str], None],
) -> None:
    """RL, and each negative control in a process of its own, at the same time, each with its share of the cores.

    Args:
        before: the round before this one; a control goes on from its own policy of that round.
        program: how `vla-rl` is started.
    """
    if controls and not recipe.num_threads:
        share = max(1, (os.cpu_count() or 1) // (1 + len(controls)))
        recipe = recipe.model_copy(update={"num_threads": share})
    write_text_atomic(done.folder / "train.yaml", dump_yaml(recipe))
    with ExitStack() as stack:
        processes: dict[str, subprocess.Popen[bytes]] = {}

        def check_controls() -> None:
            for name, process in processes.items():
                _raise_if_failed(process, name, done.control(name))

        for name in controls:
            if not RunFolder(done.control(name)).evaluation(FINAL).is_file():
                own = [f"train.control={name}", "train.evaluate=after", "gate.every=0"]
                own += ["train.validate_every=0", "train.keep=last", "train.allow_no_success=true"]
                own += [f"policy.path={RunFolder(before.control(name)).policy}"] if before else []
                processes[name] = _start(recipe, done.folder / "train.yaml", done.control(name), own, program)
                stack.callback(end_child, processes[name])  # Stopped half-way, it would meet the next start's.
        if not done.finished:
            resume = RunFolder(done.run).exists
            train(recipe, open_run(recipe, done.run, resume), resume, on_iteration=check_controls)
        for name, process in processes.items():
            show(f"waiting for the control {name}")
            _wait(process, name, done.control(name))
    for run in (done.run, *map(done.control, controls)):
        _conclude(recipe, run)


def run_online(recipe: LoopRecipe, folder: Path, num_episodes: int, program: Sequence[str]) -> int:
    """The recipe's RL in the real simulator, from the recipe's policy, with at most `num_episodes` episodes.

    Returns:
        how many it takes: groups x group size x iterations.
    """
    online = online_recipe(recipe, num_episodes)
    if not RunFolder(folder).evaluation(FINAL).is_file():
        file = folder.with_suffix(".yaml")
        write_text_atomic(file, dump_yaml(online))
        process = _start(online, file, folder, [], program)
        try:
            _wait(process, "online_grpo", folder)
        finally:
            end_child(process)
    _conclude(online, folder)
    size = online.algo.rollouts_per_group(online.train.group_size)
    return online.train.iterations * online.train.groups * size


def online_recipe(recipe: LoopRecipe, num_episodes: int) -> TrainRecipe:
    """What `run_online` runs: iterations of about `train.groups` groups."""
    size = recipe.algo.rollouts_per_group(recipe.train.group_size)
    groups = max(1, min(recipe.train.groups, num_episodes // size))
    iterations = max(1, num_episodes // (groups * size))
    groups = max(1, num_episodes // (iterations * size))  # The rest, spread over the iterations.
    decay = {"decay_iterations": iterations if recipe.algo.decay_iterations else 0}
    changes = {"iterations": iterations, "groups": groups, "evaluate": "after", "keep": "last"}
    changes |= {"validate_every": 0, "resample_budget": 0, "allow_no_success": True}
    return recipe.training(
        env=recipe.acting_env,
        real_env=None,
        algo=recipe.algo.model_copy(update=decay),
        gate=GateConfig(),
        sampling=recipe.sampling.model_copy(update={"keyframe_share": 0.0, "keyframes": None}),
        train=recipe.train.model_copy(update=changes),
    )


def summarize_controls(recipe: LoopRecipe, run: Path, base: Evaluation, after: dict[str, Evaluation]) -> None:
    """Put into the report of `run`: real success before and after, of RL and of what it is set against."""
    result = summarize(recipe.name, base, {name: [one] for name, one in after.items()}, (recipe.seed,))
    write_text_atomic(RunFolder(run).ablation, result.model_dump_json(indent=1) + "\n")
    write_report(run)


def evaluations(recipe: LoopRecipe, done: Round) -> dict[str, Evaluation]:
    """Real success after the RL run ("none") and each of its negative controls."""
    runs = {"none": done.run} | {name: done.control(name) for name in recipe.loop.negative_controls}
    return {name: Evaluation.load(RunFolder(run).evaluation(FINAL)) for name, run in runs.items()}


def _start(
    recipe: TrainRecipe, file: Path, folder: Path, overrides: Sequence[str], program: Sequence[str]
) -> subprocess.Popen[bytes]:
    arguments = ["train", str(file), *overrides, "--output", str(folder)]
    threads = recipe.num_threads or int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    return Job(folder, tuple(arguments)).start(program, threads)


def _conclude(recipe: TrainRecipe, run: Path) -> None:
    """A run that was killed between its last evaluation and its report gets that now; only videos may be missing."""
    run_steps(RunFolder(run), recipe.train, show=False, write=True).conclude()


def _wait(process: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    process.wait()
    _raise_if_failed(process, name, folder)


def _raise_if_failed(process: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    if process.poll():
        raise RuntimeError(f"the control {name} failed; its output is in {folder.with_suffix('.log')}")
