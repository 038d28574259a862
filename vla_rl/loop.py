"""The outer loop: real episodes, a world model fitted on them, its trust, RL in imagination, the truth. On one screen.

    vla-rl loop tabletop_imagination

Each stage leaves a folder that appears whole; stopped anywhere, the same command goes on from there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl import commands
from vla_rl.ablate import summarize
from vla_rl.atomic import write_text_atomic
from vla_rl.collect import CollectConfig
from vla_rl.config import ConfigError, dump_yaml
from vla_rl.evaluation import Evaluation
from vla_rl.gate import REJECTED
from vla_rl.recipe import Recipe
from vla_rl.report import write_report
from vla_rl.run import open_run
from vla_rl.train import train

TRUST_PAGE = "trust.html"  # the last file that measuring writes into a world model's folder
HELD_OUT_START = 500_000  # Initial states of the held-out episodes: none that RL or the fit could draw.


@dataclass(frozen=True)
class Round:
    """What one round made, all inside `folder`."""

    folder: Path

    @property
    def rollouts(self) -> Path:
        """Real episodes of the round's first policy, which the world model is fitted on."""
        return self.folder / "rollouts"

    @property
    def held_out(self) -> Path:
        """Real episodes of the same policy, which only trust sees."""
        return self.folder / "held_out"

    @property
    def explorer(self) -> Path:
        """Whose real episodes the next world model is fitted on: RL's last policy, even if the gate refused it."""
        rejected = self.run / REJECTED
        return rejected if rejected.is_dir() else self.run / "policy"

    @property
    def world_model(self) -> Path:
        return self.folder / "fit" / "world_model"

    @property
    def run(self) -> Path:
        """The RL run's folder."""
        return self.folder / "train"

    def control(self, name: str) -> Path:
        """The RL run's folder of a negative control."""
        return self.folder / f"train_{name}"


def loop(recipe: Recipe, folder: Path, show: Callable[[str], None] = print) -> Round:
    """Run all rounds of the recipe in its folder; each starts from the policy and world model of the one before.

    Raises:
        ConfigError: the recipe's env is no world model, or it lacks a section that a stage needs.
        ValueError: the world model cannot be trusted enough, and `env.trust.ignore` is not set.
    """
    config = recipe.loop
    if recipe.world_model is None or recipe.real_env is None or recipe.algo is None:
        raise ConfigError(
            "loop: the recipe needs an env of kind world_model, and sections real_env, world_model and algo; "
            "configs/tabletop_imagination.yaml has them"
        )
    policy, world_model = str(recipe.policy.path), str(recipe.env.path)  # type: ignore[attr-defined]
    done, explorer, rollouts = Round(folder), policy, []
    for number in range(1, config.rounds + 1):
        done = Round(folder / f"round_{number}")
        title = f"round {number} of {config.rounds}: " if config.rounds > 1 else ""
        acting = with_parts(recipe, policy=policy)
        show(f"{title}real episodes of {explorer}")
        first = config.first_state + (number - 1) * config.episodes
        collect(with_parts(recipe, policy=explorer), done.rollouts, config.episodes, first, show)
        rollouts.append(done.rollouts)
        collect(acting, done.held_out, config.held_out, HELD_OUT_START + (number - 1) * config.held_out, show)
        show(f"{title}fitting the world model from {world_model}")
        commands.fit_world_model(acting, done.folder / "fit", rollouts, start_from=world_model)
        if not (done.world_model / TRUST_PAGE).is_file():
            show(f"{title}how far it can be trusted")
            commands.measure_world_model(acting, done.world_model, [done.held_out], train=rollouts)
        imagining = with_parts(recipe, policy=policy, world_model=str(done.world_model))
        show(f"{title}RL in imagination")
        run_beside_controls(imagining, done, show)
        policy, world_model, explorer = str(done.run / "policy"), str(done.world_model), str(done.explorer)
    return done


def run_beside_controls(recipe: Recipe, done: Round, show: Callable[[str], None]) -> None:
    """RL, and each negative control in a process of its own, at the same time, each with its share of the cores."""
    if recipe.loop.controls and not recipe.num_threads:
        share = max(1, (os.cpu_count() or 1) // (1 + len(recipe.loop.controls)))
        recipe = recipe.model_copy(update={"num_threads": share})
    write_text_atomic(done.folder / "train.yaml", dump_yaml(recipe))
    controls: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in recipe.loop.controls:
            if not (done.control(name) / "evaluations" / "final.json").is_file():
                controls[name] = _start_control(recipe, done, name)
        if not (done.run / "evaluations" / "final.json").is_file():
            resume = (done.run / "config.yaml").is_file()
            train(recipe, open_run(recipe, done.run, resume), resume)
        for name, process in controls.items():
            show(f"waiting for the control {name}")
            if process.wait() != 0:
                raise RuntimeError(f"the control {name} failed; its output is in {done.control(name)}.log")
    finally:  # Stopped half-way, a control would go on and meet the one that the next start begins.
        for process in controls.values():
            process.terminate()
            process.wait()
    if recipe.loop.controls:
        summarize_controls(recipe, done)


def _start_control(recipe: Recipe, done: Round, name: str) -> subprocess.Popen[bytes]:
    folder = done.control(name)
    arguments = [
        "train",
        str(done.folder / "train.yaml"),
        f"train.control={name}",
        "train.evaluate=after",
        "gate.every=0",
    ]
    arguments += ["--output", str(folder)]
    if (folder / "config.yaml").is_file():
        arguments.append("--resume")
    environment = os.environ | {"OMP_NUM_THREADS": str(recipe.num_threads or os.cpu_count())}
    with open(folder.with_suffix(".log"), "a") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "vla_rl.cli", *arguments], stdout=out, stderr=out, env=environment
        )


def summarize_controls(recipe: Recipe, done: Round) -> None:
    """Put into the report: real success before and after, of the RL run and of its controls, on the same states."""
    base = Evaluation.load(done.run / "evaluations" / "base.json")
    after = {name: [evaluation] for name, evaluation in evaluations(recipe, done).items()}
    result = summarize(recipe.name, base, after, (recipe.seed,))
    write_text_atomic(done.run / "ablation.json", result.model_dump_json(indent=1) + "\n")
    write_report(done.run)


def evaluations(recipe: Recipe, done: Round) -> dict[str, Evaluation]:
    """Real success after the RL run ("none") and each of its controls."""
    runs = {"none": done.run} | {name: done.control(name) for name in recipe.loop.controls}
    return {name: Evaluation.load(run / "evaluations" / "final.json") for name, run in runs.items()}


def collect(recipe: Recipe, folder: Path, episodes: int, first_state: int, show: Callable[[str], None]) -> None:
    """Real episodes of the recipe's policy, sampled, from `train` states; nothing where they are there already."""
    if folder.is_dir():
        return
    config = CollectConfig(
        source="policy",
        dataset=str(folder),
        episodes_per_task=episodes,
        start_index=first_state,
        temperature=recipe.train.temperature,
    )
    real: Any = recipe.acting_env
    if "steps_after_success" in type(real).model_fields:
        real = real.model_copy(update={"steps_after_success": recipe.loop.steps_after_success})
    commands.collect(recipe.model_copy(update={"real_env": real}), config, show)


def with_parts(recipe: Recipe, policy: str, world_model: str | None = None) -> Recipe:
    """The recipe with another policy, and another world model where one is given."""
    changes: dict[str, Any] = {"policy": recipe.policy.model_copy(update={"path": policy})}
    if world_model is not None:
        changes["env"] = recipe.env.model_copy(update={"path": Path(world_model)})
    return recipe.model_copy(update=changes)
