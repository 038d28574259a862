"""docs/algorithms.md lists every option with its default, and its example of an own algorithm works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_problem import ToyPolicy, roll_out

from vla_rl.algorithms.grpo import GRPOConfig, RLOOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.reinforce_pp import ReinforcePPConfig
from vla_rl.config import Config, build_component
from vla_rl.methods.algo.dr_grpo import DRGRPOConfig
from vla_rl.methods.algo.mc_grpo import MCGRPOConfig
from vla_rl.rollout.task_sampling import SamplingConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "algorithms.md").read_text()


CONFIGS = (GRPOConfig, MCGRPOConfig, RLOOConfig, PPOConfig, ReinforcePPConfig, DRGRPOConfig, SamplingConfig)


def defaults(config: type[Config]) -> Iterator[tuple[str, Any]]:
    """Each option's name and default; those of sections with their section."""
    for name, info in config.model_fields.items():
        if name in ("optim", "clip"):
            yield from ((f"{name}.{inner}", value) for inner, value in info.default)
        else:
            yield name, info.default


@pytest.mark.parametrize("config", CONFIGS)
def test_every_option_is_listed_with_its_default(config: type[Config]):
    listed = set(re.findall(r"^\| `([\w.]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE))
    for name, default in defaults(config):
        own = name == "kind" and config is not SamplingConfig
        is_ppo_clip = config is PPOConfig and name == "clip.high"  # Given in the row's text.
        of_dr = config is DRGRPOConfig and name in (
            "values",
            "normalize_std",
            "filter_groups",
        )  # In the section's text.
        assert own or is_ppo_clip or of_dr or (name, str(default)) in listed, f"{name}={default} is not in the page"


def test_no_option_is_listed_that_does_not_exist():
    rows = re.findall(r"^\| `([\w.]+)` \| `", PAGE, re.MULTILINE)
    assert set(rows) <= {name for config in CONFIGS for name, _ in defaults(config)}


def test_the_example_of_an_own_algorithm(monkeypatch):
    (source,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class BestOfGroup" in text)
    scope: dict[str, Any] = {}
    exec(source, scope)
    module = type(np)("own_module")
    module.BestOfGroup = scope["BestOfGroup"]
    monkeypatch.setitem(__import__("sys").modules, "own_module", module)
    config = build_component("algo", {"kind": "own_module:BestOfGroup", "optim": {"lr": 0.01}})
    policy = ToyPolicy()
    learner = config.build(policy)
    assert learner.update(learner.prepare(roll_out(policy, 8, 4, seed=0)))["update/num_steps"] >= 1
