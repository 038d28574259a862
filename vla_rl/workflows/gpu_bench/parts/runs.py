"""Real runs of the program on the device: GRPO that is stopped and resumed, and cloning that learns."""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from sim.dummy import DummyConfig
from vla_rl.config import build_component, find_recipe, read_yaml, validate
from vla_rl.data.dataset import BCBatch
from vla_rl.policies.fake_input import fake_observation
from vla_rl.recipe.checks import PLAN
from vla_rl.recipe.recipe import check, read_recipe
from vla_rl.training.bc_trainer import BCTrainer
from vla_rl.training.config import SFTConfig
from vla_rl.training.train import train
from vla_rl.workflows.collect import clone, collect
from vla_rl.workflows.gpu_bench import policy_matrix
from vla_rl.workflows.gpu_bench.record import Target
from vla_rl.workflows.gpu_bench.sheet import LeftOutError, Sheet

SIMULATOR = ("mujoco",)
DATASETS = ("mujoco", "lerobot", "pyarrow", "cv2")
SAME = 1e-3  # Of the weights of a resumed run; a GPU's sums need not come in the same order twice.


class StoppedError(Exception):
    """Ends a run in its middle, as a kill would."""


def measure(sheet: Sheet) -> None:
    """Each run must do what it does on a CPU."""
    sheet.run(
        [
            ("GRPO, stopped and resumed", lambda: _grpo(sheet)),
            ("cloning of made-up demonstrations", lambda: _clone_made_up(sheet)),
            ("collecting and cloning on the tabletop", lambda: _clone_tabletop(sheet)),
        ]
    )


def _need(packages: tuple[str, ...]) -> None:
    if missing := [name for name in packages if find_spec(name) is None]:
        raise LeftOutError(f"needs {', '.join(missing)}, which this Python lacks")


def _grpo(sheet: Sheet) -> None:
    has_simulator = all(find_spec(name) is not None for name in SIMULATOR)
    if not has_simulator:
        sheet.leave_out("GRPO on the tabletop: needs mujoco; the toy environment `dummy` takes its place")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        recipe = _tabletop(sheet) if has_simulator and sheet.is_full else _toy(sheet, root / "base")
        whole = _trained(sheet, recipe, root / "whole", stop_after=None)
        resumed = _trained(sheet, recipe, root / "resumed", stop_after=recipe["train"]["iterations"] - 1)
        gap = max(float((whole[name].float() - resumed[name].float()).abs().max()) for name in whole)
    sheet.add(
        f"GRPO on {recipe['env']['kind']}: a resumed run's weights",
        gap,
        "from the whole run's",
        Target(SAME, required=True),
    )


def _tabletop(sheet: Sheet) -> dict[str, Any]:
    values = read_yaml(find_recipe("tabletop_grpo"))
    values["train"] = values["train"] | {"iterations": 3, "groups": 20, "save_every": 1, "evaluate": "never"}
    return values | {"device": str(sheet.device), "log": {"tensorboard": False, "console": False}}


def _toy(sheet: Sheet, base: Path) -> dict[str, Any]:
    """A run of a minute's fraction: a dot that moves at random solves it now and then."""
    options = {"image_size": 32, "action_bins": 5, "chunk_size": 4, "precision": "fp32"}
    config = build_component("policy", {"kind": "openvla", **options})
    policy = config.build(DummyConfig().env_spec(), "cpu", 0)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    policy.save(base)
    return {
        "name": "bench_toy",
        "device": str(sheet.device),
        "env": {"kind": DummyConfig().kind, "num_envs": 8, "tasks": ["reach_red"], "horizon": 8},
        "sampling": {"first_state": 7, "train_states": 2},
        "policy": {"kind": "openvla", "path": str(base)},
        "algo": {"kind": "grpo", "optim": {"lr": 1e-3}, "minibatch_size": 24},
        "train": {"iterations": 2, "groups": 2, "group_size": 4, "save_every": 1, "evaluate": "never",
                  "allow_no_success": True},
        "log": {"tensorboard": False, "console": False},
    }  # fmt: skip


def _trained(sheet: Sheet, values: dict[str, Any], folder: Path, stop_after: int | None) -> dict[str, torch.Tensor]:
    """Weights after the run, on the CPU; with `stop_after` it is stopped after so many iterations and resumed."""
    recipe = check(read_recipe({"run": "train", **values}), PLAN)
    done = 0

    def stop() -> None:
        nonlocal done
        done += 1
        if done == stop_after:
            raise StoppedError

    try:
        policy = train(recipe, folder, on_iteration=stop)
    except StoppedError:
        policy = train(recipe, folder, resume=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if stop_after is None:
        kind = values["env"]["kind"]
        sheet.add(f"GRPO on {kind}: success in the first and last rollout", rows[-1]["train/success"], "of 1",
                  note=f"first {rows[0]['train/success']:.3g}")  # fmt: skip
        for name in ("simulation", "inference", "forward_backward", "optimizer", "total"):
            if (seconds := rows[-1].get(f"time/{name}")) is not None:
                sheet.add(f"GRPO on {kind}: an iteration's {name}", seconds, "s")
    return load_file(policy / "model.safetensors")


def _clone_made_up(sheet: Sheet) -> None:
    """Updates on one made-up batch, whose loss must fall."""
    policy = policy_matrix.build("openvla-parallel", sheet.device)
    size, steps = (64, 50) if sheet.is_full else (4, 3)
    config = validate(
        SFTConfig, {"datasets": "none", "steps": steps, "batch_size": size, "optim": {"warmup_steps": 1, "lr": 1e-3}}
    )
    shape = (size, policy.demonstration_size or policy.chunk_size, policy.action_dim)
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, shape).astype(np.float32)
    batch = BCBatch(fake_observation(policy_matrix.SPEC, size), actions, np.ones(shape[:2], bool), None)
    trainer = BCTrainer(policy, config)
    losses = [trainer.step(batch)["loss"] for _ in range(steps)]
    sheet.add(
        "cloning made-up demonstrations: loss at the end",
        losses[-1] / losses[0],
        "of the first",
        Target(1.0, required=True),
    )


def _clone_tabletop(sheet: Sheet) -> None:
    """The expert's episodes, recorded and cloned by the program's own workflows."""
    _need(DATASETS)

    if not sheet.is_full:
        raise LeftOutError("takes too long at tiny size; the program's own tests run it on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/demonstrations"
        recipe = read_recipe({
            "run": "sft",
            "name": "bench_cloning",
            "device": str(sheet.device),
            "env": {"kind": "tabletop", "num_envs": 8, "num_workers": 4},
            "policy": {"kind": "openvla"},
            "collect": {"dataset": data, "episodes_per_task": 10},
            "sft": {"datasets": data, "steps": 200, "batch_size": 64, "optim": {"lr": 1e-3}, "log_every": 20},
            "log": {"tensorboard": False, "console": False},
        })  # fmt: skip
        assert recipe.collect is not None, "it is given above"
        found = collect(recipe, recipe.collect, print)
        sheet.add("collecting on the tabletop", float(found["frames"]), "frames")
        cloned = clone(recipe, Path(folder) / "run")
    sheet.add(
        "cloning the tabletop's expert: loss after 200 updates", float(cloned["loss"]), "", Target(5.0, required=True)
    )
    sheet.add("cloning the tabletop's expert", float(cloned["samples_per_second"]), "samples/s")
