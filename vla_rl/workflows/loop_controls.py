"""What the outer loop is set against: negative controls beside RL, and RL in the real simulator at the end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.run_folder import open_run
from vla_rl.config import dump_yaml
from vla_rl.evaluation.gate import GateConfig
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.recipe import Recipe
from vla_rl.report.report import write_report
from vla_rl.training.train import train
from vla_rl.workflows.ablate import summarize
from vla_rl.workflows.loop_rounds import Round

FINAL = Path("evaluations") / "final.json"
PR_SET_PDEATHSIG = 1  # of Linux' prctl


def run_beside_controls(recipe: Recipe, done: Round, before: Round | None, show: Callable[[str], None]) -> None:
    """RL, and each negative control in a process of its own, at the same time, each with its share of the cores.

    Args:
        before: the round before this one; a control goes on from its own policy of that round.
    """
    controls = recipe.loop.negative_controls
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
            if not (done.control(name) / FINAL).is_file():
                own = [f"train.control={name}", "train.evaluate=after", "gate.every=0"]
                own += ["train.validate_every=0", "train.keep=last"]
                own += [f"policy.path={before.control(name) / 'policy'}"] if before else []
                processes[name] = _start(recipe, done.folder / "train.yaml", done.control(name), own)
                stack.callback(_end, processes[name])  # Stopped half-way, it would meet the next start's.
        if not done.finished:
            resume = (done.run / "config.yaml").is_file()
            train(recipe, open_run(recipe, done.run, resume), resume, on_iteration=check_controls)
        for name, process in processes.items():
            show(f"waiting for the control {name}")
            _wait(process, name, done.control(name))


def run_online(recipe: Recipe, folder: Path, num_episodes: int) -> int:
    """The recipe's RL in the real simulator, from the recipe's policy, with at most `num_episodes` episodes.

    Returns:
        how many it takes: groups x group size x iterations.
    """
    online = online_recipe(recipe, num_episodes)
    if not (folder / FINAL).is_file():
        file = folder.with_suffix(".yaml")
        write_text_atomic(file, dump_yaml(online))
        process = _start(online, file, folder, [])
        try:
            _wait(process, "online_grpo", folder)
        finally:
            _end(process)
    size = online.algo.rollouts_per_group(online.train.group_size)  # type: ignore[union-attr]
    return online.train.iterations * online.train.groups * size


def online_recipe(recipe: Recipe, num_episodes: int) -> Recipe:
    """What `run_online` runs: iterations of about `train.groups` groups (or `loop.online_groups`)."""
    size = recipe.algo.rollouts_per_group(recipe.train.group_size)  # type: ignore[union-attr]
    groups = max(1, min(recipe.loop.online_groups or recipe.train.groups, num_episodes // size))
    iterations = max(1, num_episodes // (groups * size))
    if recipe.loop.online_groups is None:
        groups = max(1, num_episodes // (iterations * size))  # The rest, spread over the iterations.
    changes = {"iterations": iterations, "groups": groups, "evaluate": "after", "keep": "last"}
    changes |= {"validate_every": 0, "resample_budget": 0, "allow_no_success": True}
    return recipe.model_copy(
        update={
            "env": recipe.acting_env,
            "real_env": None,
            "gate": GateConfig(),
            "sampling": recipe.sampling.model_copy(update={"keyframe_share": 0.0, "keyframes": None}),
            "train": recipe.train.model_copy(update=changes),
        }
    )


def summarize_controls(recipe: Recipe, run: Path, base: Evaluation, after: dict[str, Evaluation]) -> None:
    """Put into the report of `run`: real success before and after, of RL and of what it is set against."""
    result = summarize(recipe.name, base, {name: [one] for name, one in after.items()}, (recipe.seed,))
    write_text_atomic(run / "ablation.json", result.model_dump_json(indent=1) + "\n")
    write_report(run)


def evaluations(recipe: Recipe, done: Round) -> dict[str, Evaluation]:
    """Real success after the RL run ("none") and each of its negative controls."""
    runs = {"none": done.run} | {name: done.control(name) for name in recipe.loop.negative_controls}
    return {name: Evaluation.load(run / FINAL) for name, run in runs.items()}


def _start(recipe: Recipe, file: Path, folder: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    arguments = ["train", str(file), *overrides, "--output", str(folder)]
    if (folder / "config.yaml").is_file():
        arguments.append("--resume")
    threads = recipe.num_threads or os.environ.get("OMP_NUM_THREADS") or os.cpu_count()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with open(folder.with_suffix(".log"), "a") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "vla_rl.cli", *arguments],
            stdout=out,
            stderr=out,
            env=environment,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 (it only asks the kernel)
        )


def _die_with_parent() -> None:
    """A loop that is killed outright cannot end its controls, which would then meet those of the next start."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    process.wait()
    _raise_if_failed(process, name, folder)


def _raise_if_failed(process: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    if process.poll():
        raise RuntimeError(f"the control {name} failed; its output is in {folder.with_suffix('.log')}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
