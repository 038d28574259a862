"""The outer loop on the dummy environment, every part real and tiny: what it leaves, and that a stopped one goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import save_policy

from vla_rl import commands, loop
from vla_rl.collect import CollectConfig
from vla_rl.config import ConfigError, apply_overrides, validate
from vla_rl.evaluation import Evaluation
from vla_rl.recipe import Recipe

REAL = {"kind": "dummy", "num_envs": 8, "tasks": ["reach_red"], "horizon": 40}
STAGE = {"steps": 2, "batch_size": 4, "warmup_steps": 1}
FIT = {
    "kind": "latent_video",
    "model": {
        "autoencoder": {"channels": [4, 8], "blocks": [1, 1], "latent_channels": 4},
        "dynamics": {"width": 32, "depth": 1, "heads": 2, "patch": 4, "memory": 2},
        "success": {"width": 32, "depth": 1},
        "frame_steps": 4,
    },
    "clip_frames": 3,
    "holdout": 0.5,
    "autoencoder": STAGE,
    "dynamics": STAGE,
    "success": STAGE,
    "max_false_success": 0.99,
    "min_failures": 1,
    "measure": {"inverse_updates": 2, "num_clips": 1},
}
RECIPE: dict[str, Any] = {
    "name": "tiny_loop",
    "num_threads": 1,
    "env": {"kind": "world_model", "first_frames": REAL, "num_envs": 8, "trust": {"ignore": True}},
    "real_env": REAL,
    "algo": {"kind": "grpo", "lr": 1e-3, "minibatch_size": 24},
    "sampling": {"first_state": 7, "train_states": 2},
    "train": {"iterations": 1, "groups": 2, "group_size": 4, "allow_no_success": True},
    "loop": {"episodes": 24, "held_out": 24, "steps_after_success": 4, "controls": ["shuffled_rewards"]},
    "world_model": FIT,
    "eval": {"episodes_per_task": 4, "videos": 0},
    "log": {"tensorboard": False, "console": False},
}


def make_recipe(folder: Path, *overrides: str) -> Recipe:
    """With a policy that moves at random and a world model fitted in two updates a stage."""
    policy = save_policy(folder / "policy")
    values = RECIPE | {"policy": {"kind": "openvla", "path": str(policy)}}
    recipe = validate(Recipe, values | {"env": REAL, "real_env": None})
    episodes = folder / "episodes"
    config = CollectConfig(source="policy", dataset=str(episodes), episodes_per_task=24)
    commands.collect(recipe, config, lambda _: None)
    world_model = commands.fit_world_model(recipe, folder / "fit", [episodes])
    values["env"] = RECIPE["env"] | {"path": str(world_model)}
    values["world_model"] = {**FIT, "model": None, "autoencoder": {"steps": 0}}
    return validate(Recipe, apply_overrides(values, overrides))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    return make_recipe(tmp_path_factory.mktemp("loop"))


def test_a_round_goes_from_real_episodes_to_a_real_evaluation(recipe, tmp_path, monkeypatch):
    trained: list[Path] = []
    monkeypatch.setattr(loop, "train", lambda recipe, folder, resume: trained.append(folder) or 1 / 0)
    with pytest.raises(ZeroDivisionError):  # Stopped at the start of RL.
        loop.loop(recipe, tmp_path, lambda _: None)
    monkeypatch.undo()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "round_1" / "fit").rglob("*.safetensors")}
    assert kept and trained == [tmp_path / "round_1" / "train"]

    done = loop.loop(recipe, tmp_path, lambda _: None)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "the world model was not fitted again"
    trust = json.loads((done.world_model / "trust.json").read_text())
    assert trust["figures"]["agreement"]["n"] == 24
    admission = json.loads((done.run / "admission.json").read_text())
    assert Path(admission["report"]) == done.world_model / "trust.json" and admission["ignored"]
    base = Evaluation.load(done.run / "evaluations" / "base.json")
    assert base.meta.env == "dummy", "evaluated in the real environment"
    assert set(loop.evaluations(recipe, done)) == {"none", "shuffled_rewards"}
    report = (done.run / "report.html").read_text()
    assert "Not trusted" in report and "over shuffled rewards" in report


def test_an_untrusted_world_model_stops_the_loop(recipe, tmp_path):
    values = recipe.model_dump(mode="json")
    values["env"]["trust"]["ignore"] = False
    with pytest.raises(ValueError, match="cannot be trusted enough"):
        loop.loop(validate(Recipe, values), tmp_path, lambda _: None)


def test_a_recipe_without_its_sections_is_refused(recipe, tmp_path):
    with pytest.raises(ConfigError, match="real_env, world_model and algo"):
        loop.loop(recipe.model_copy(update={"world_model": None}), tmp_path, lambda _: None)
