"""Figures and names that a rearrangement must not change: commands' flags, recipes' options, a short run's metrics.

`python tests/test_golden.py` writes the files anew, for a change that is meant; the diff is then part of its review.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "vla_rl"))
sys.path.append(str(HERE.parent))

from tiny_run import make_recipe, metrics, save_policy  # noqa: E402

from vla_rl.cli import app as cli  # noqa: E402
from vla_rl.common.run_folder import open_run  # noqa: E402
from vla_rl.config import KINDS, RUNS, Config, resolve_kind  # noqa: E402
from vla_rl.training.train import train  # noqa: E402

FRESH = ("sampling.kind=vade", "sampling.first_state=0", "sampling.train_states=null")
PLAIN = ("algo.optim.lr=5e-6", "algo.minibatch_size=512")
SHORT_RUNS = {
    "grpo": ("algo.kl_coef=0.01", "algo.optim.name=muon", "train.resample_budget=2", *FRESH),
    "mc_grpo": (*PLAIN, "algo.kind=mc_grpo", "algo.epochs=2", "algo.loss_reduction=trajectory_mean"),
    "rloo": (*PLAIN, "algo.kind=rloo", "algo.ratio_level=chunk", "algo.clip.dual=3", "train.control=shuffled_rewards"),
    "ppo": (*PLAIN, "algo.kind=ppo", "policy.value_head=true", "algo.advantage_level=action", "algo.entropy_coef=0.01"),
}


def flags() -> dict[str, Any]:
    """Every command's parameters: how they are given, their default, whether they are required."""

    def walk(command: Any, path: str) -> dict[str, Any]:
        rows = {
            parameter.name: {
                "given": [*parameter.opts, *parameter.secondary_opts],
                "default": repr(parameter.default),
                "required": parameter.required,
            }
            for parameter in command.params
        }
        found = {path: rows}
        for name, inner in sorted(getattr(command, "commands", {}).items()):
            found |= walk(inner, f"{path} {name}")
        return found

    return walk(cli.program(), "vla-rl")


def options() -> dict[str, dict[str, Any]]:
    """Every option of every section and kind, with its default."""
    classes: dict[str, type[Config]] = {f"run {run}": resolve_kind("run", run) for run in RUNS} | {
        f"{s} {k}": resolve_kind(s, k) for s, kinds in KINDS.items() for k in kinds
    }
    shared = resolve_kind("run", "eval").model_fields.keys() - {"run"}
    found = {}
    for name, config_class in classes.items():
        schema = config_class.model_json_schema()
        for inner, definition in {name: schema, **schema.get("$defs", {})}.items():
            fields = definition.get("properties", {})
            known = shared if inner.startswith("run ") and inner != "run eval" else ()
            found[inner] = {
                field: about.get("default", "required") for field, about in fields.items() if field not in known
            }
    return found


def short_runs() -> dict[str, list[dict[str, Any]]]:
    """What two iterations of each algorithm log in the dummy environment."""
    torch.manual_seed(0)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder) / "base")
        for name, overrides in SHORT_RUNS.items():
            recipe = make_recipe(policy, "train.iterations=2", "train.save_every=2", *overrides)
            run = open_run(recipe, Path(folder) / name, False)
            train(recipe, run, False)
            found[name] = metrics(run)
    return found


GOLDEN: dict[str, Callable[[], Any]] = {"flags": flags, "options": options, "short_runs": short_runs}


def frozen(name: str) -> Any:
    return json.loads((HERE / "golden" / f"{name}.json").read_text(encoding="utf-8"))


def differences(now: Any, before: Any, place: str = "") -> list[str]:
    """Where two JSON values differ; numbers may by the rounding of another processor."""
    if isinstance(now, dict) and isinstance(before, dict):
        lost = [f"{place}/{key}: is gone" for key in before if key not in now]
        return lost + [
            text for key in now if key in before for text in differences(now[key], before[key], f"{place}/{key}")
        ]
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True))
        return [text for i, pair in pairs for text in differences(*pair, f"{place}/{i}")]
    if isinstance(now, float) and isinstance(before, float):
        same = math.isclose(now, before, rel_tol=5e-4, abs_tol=1e-6)
    else:
        same = now == before
    return [] if same else [f"{place}: {before!r} became {now!r}"]


@pytest.mark.parametrize("name", GOLDEN)
def test_nothing_frozen_has_changed(name: str) -> None:
    now = json.loads(json.dumps(GOLDEN[name]()))
    assert not differences(now, frozen(name)), "\n".join(differences(now, frozen(name)))


def test_a_changed_figure_and_a_lost_name_are_seen() -> None:
    before = {"a": [{"x": 1.0, "y": 2}], "gone": 0}
    now = {"a": [{"x": 1.001, "y": 2}], "new": 0}
    assert differences(now, before) == ["/gone: is gone", "/a/0/x: 1.0 became 1.001"]


if __name__ == "__main__":
    for golden, make in GOLDEN.items():
        text = json.dumps(make(), indent=1, sort_keys=True) + "\n"
        (HERE / "golden" / f"{golden}.json").write_text(text, encoding="utf-8")
