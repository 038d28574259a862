"""A training run small enough for tests: the dummy environment, and a fresh OpenVLA policy of the smallest preset or
a policy of one small network."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from sim.dummy import DummyConfig
from vla_rl.config import RUNS, apply_overrides, resolve_kind
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.recipe.recipe import read_recipe

RECIPE: dict[str, Any] = {
    "run": "train",
    "name": "tiny",
    "seed": 3,
    "num_threads": 1,
    "env": {"kind": "sim.dummy:DummyConfig", "num_envs": 8, "tasks": ["reach_red"], "horizon": 8},
    # Two states from which a random walk succeeds now and then: the dot starts near the square.
    "sampling": {"first_state": 7, "train_states": 2},
    "algo": {"kind": "grpo", "optim": {"lr": 1e-3}, "minibatch_size": 24},
    "train": {"iterations": 4, "groups": 4, "group_size": 4, "save_every": 1, "evaluate": "never"},
    "eval": {"episodes_per_task": 4, "videos": 0},
    "log": {"tensorboard": False, "console": False},
}


def save_policy(folder: Path, seed: int = 0) -> Path:
    """A fresh policy, which moves at random: it solves some episodes by luck."""
    config = OpenVLAConfig(image_size=32, action_bins=5, chunk_size=4, precision="fp32", cameras=("agentview",))
    policy = config.build(DummyConfig().env_spec(), seed=seed)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    policy.save(folder)
    return folder


def save_small_policy(folder: Path, seed: int = 0) -> Path:
    """A fresh policy of the docs' example, which reads the state alone: for tests of a run, whatever it trains."""
    from my_policy import BinsConfig  # Of docs/examples, which not every process that imports this has on its path.

    BinsConfig().build(DummyConfig().env_spec(), seed=seed).save(folder)
    return folder


def tiny_values(policy: Path, *overrides: str, kind: str = "openvla") -> dict[str, Any]:
    """`RECIPE` for a saved policy, with `key=value` on top, without what the kind of run that they ask for has not."""
    values = apply_overrides({**deepcopy(RECIPE), "policy": {"kind": kind, "path": str(policy)}}, overrides)
    run = str(values["run"])
    sections = resolve_kind("run", run).model_fields if run in RUNS else values
    return {name: value for name, value in values.items() if name in sections or name not in RECIPE}


def make_recipe(policy: Path, *overrides: str, kind: str = "openvla") -> Any:
    """`tiny_values` as a recipe."""
    return read_recipe(tiny_values(policy, *overrides, kind=kind))


def small_recipe(policy: Path, *overrides: str) -> Any:
    """`make_recipe` for a policy of `save_small_policy`, which solves some half of the episodes from its two states."""
    own = ("env.horizon=16", "sampling.first_state=18")
    return make_recipe(policy, *own, *overrides, kind="my_policy:BinsConfig")


def metrics(folder: Path) -> list[dict[str, Any]]:
    """What a run logged, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]
