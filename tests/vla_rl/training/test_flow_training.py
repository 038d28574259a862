"""LeRobot's policies in the ordinary RL run: they learn, and a resumed run equals an uninterrupted one."""

from pathlib import Path

import pytest
import torch
from tiny_run import RECIPE, metrics

from sim.dummy import DummyConfig
from vla_rl.config import apply_overrides
from vla_rl.policies.fake_input import fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.load import load_policy
from vla_rl.recipe.recipe import Recipe, load_recipe, read_recipe
from vla_rl.training.train import train

pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")
GRPO = {"kind": "grpo", "optim": {"lr": 1e-4}, "minibatch_size": 24, "ratio_level": "action"}
DR_GRPO = GRPO | {"kind": "dr_grpo", "values": {"kind": "planted_values:PlantedValuesConfig"}, "candidates": 2}
DR_GRPO |= {"coefficients": (0.5, 0.5)}
PPO = {"kind": "ppo", "optim": {"lr": 1e-4}, "minibatch_size": 24, "ratio_level": "action"}


def save_policy(policy_type: str, folder: Path, **options) -> Path:
    config = LeRobotConfig(type=policy_type, preset="tiny", image_size=32, chunk_size=4, **options)
    policy = config.build(DummyConfig().env_spec())
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(folder)
    return folder


def recipe_of(folder: Path, algo: dict, *overrides: str) -> Recipe:
    values = {**RECIPE, "policy": {"kind": "lerobot", "path": str(folder)}, "algo": algo}
    return read_recipe(apply_overrides(values, ["train.allow_no_success=true", "env.horizon=16", *overrides]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy_type", "algo", "options"),
    [
        ("smolvla", GRPO, {}),
        ("smolvla", DR_GRPO, {}),
        ("smolvla", PPO, {"value_head": True}),
        ("pi0", GRPO, {"sampling": {"joint": True}}),
        ("pi0", PPO, {"value_head": True, "sampling": {"method": "flow_noise"}}),
        ("xvla", PPO, {"value_head": True}),
        ("diffusion", PPO, {"value_head": True}),
        ("act", PPO, {"value_head": True, "sampling": {"method": "flow_noise"}}),
        ("pi0_fast", GRPO | {"ratio_level": "chunk"}, {}),
        ("pi0_fast", PPO | {"ratio_level": "chunk"}, {"value_head": True}),
    ],
)
def test_a_run_trains_and_resumes(policy_type, algo, options, tmp_path):
    start = save_policy(policy_type, tmp_path / "start", **options)
    train(recipe_of(start, algo, "train.iterations=2"), tmp_path / "whole")
    train(recipe_of(start, algo, "train.iterations=1"), tmp_path / "cut")
    train(recipe_of(start, algo, "train.iterations=2"), tmp_path / "cut", resume=True)
    rows = metrics(tmp_path / "whole")
    assert rows == metrics(tmp_path / "cut")
    assert all(row["rollout/log_prob_gap"] < 1e-4 for row in rows)
    before, after = load_policy(start), load_policy(tmp_path / "whole" / "policy")
    resumed = load_policy(tmp_path / "cut" / "policy")
    changed = [n for n, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[n])]
    assert any(name.startswith("core.") for name in changed)
    assert all(torch.equal(value, resumed.state_dict()[n]) for n, value in after.state_dict().items())


@pytest.mark.parametrize("name", ["smolvla_tabletop", "pi0_tabletop", "smolvla_libero_grpo", "pi0_libero_grpo"])
def test_shipped_recipes_are_valid(name):
    assert load_recipe(name).policy.kind == "lerobot"  # type: ignore[attr-defined]
