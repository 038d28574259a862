"""Fits of the dummy environment's world model, a few updates a stage, stopped and killed where a test wants it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sim.dummy import DummyConfig
from vla_rl.training.trainer import Loss, Trainer
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.fit import fit as fit_module
from world_model.fit.config import FitConfig
from world_model.fit.fit import fit

ENV = DummyConfig(num_envs=8, tasks=("reach_red",), horizon=12, steps_after_success=4)
SPEC = ENV.env_spec()
MODEL = {
    "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
    "dynamics": {"width": 32, "depth": 1, "heads": 2, "patch": 4, "memory": 2},
    "success": {"width": 32, "depth": 1},
    "frame_steps": 4,
}
# Options of a fit on top of another that leaves its parts as they are.
KEPT = {"autoencoder": {"steps": 0}, "dynamics": {"steps": 0}, "success": {"steps": 0}, "model": None}
STAGE = {"steps": 3, "batch_size": 4, "optim": {"warmup_steps": 1}}


def collect(folder: Path, **options: Any) -> Path:
    collect_dataset(
        ENV, CollectConfig.model_validate({"dataset": str(folder), "episodes_per_task": 24, "keep": "all", **options})
    )
    return folder


def config(episodes: Path, **options: Any) -> FitConfig:
    values = {"model": MODEL, "datasets": str(episodes), "clip_frames": 4, "holdout": 0.5, "save_every": 2}
    values |= {"autoencoder": STAGE, "dynamics": STAGE, "success": STAGE, "precision": "fp32"}
    values |= {"max_false_success": 0.99, "min_failures": 1}
    return FitConfig.model_validate(values | options)


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def stop_fitting(monkeypatch: pytest.MonkeyPatch, updates: int) -> list[int]:
    """Fits stop after so many updates; the list's only entry is how many are left, and may be set."""
    take_step, budget = Trainer.step, [updates]

    def stopping(self: Trainer, loss: Loss) -> dict[str, float]:
        if budget[0] == 0:
            raise KeyboardInterrupt
        budget[0] -= 1
        return take_step(self, loss)

    monkeypatch.setattr(Trainer, "step", stopping)
    return budget


def keep_killed(monkeypatch: pytest.MonkeyPatch, run: Path, stage: str) -> None:
    """Keep a copy of the run's folder as a kill would have left it after the first checkpoint of a stage."""
    save = fit_module.save_checkpoint

    def keeping(path: Path, *state: Any) -> Path:
        saved = save(path, *state)
        if path.parent.name == stage and not (killed := run.with_name("killed")).exists():
            shutil.copytree(run, killed)
        return saved

    monkeypatch.setattr(fit_module, "save_checkpoint", keeping)


def fit_with_stops(options: FitConfig, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stopped in the middle of each stage in turn."""
    budget = stop_fitting(monkeypatch, 0)
    for tries in range(10):
        budget[0] = 2 if tries % 2 == 0 else 1
        try:
            result = fit(options, ENV.env_spec(), run, seed=1)
        except KeyboardInterrupt:
            continue
        assert tries == 7, "four stages of three updates, each stopped after two of them"
        return result
    raise AssertionError("never finished")
