"""Recipes that start from a checkpoint in OpenVLA's published layout: RL, behavior cloning of it, evaluation."""

import pytest
from tiny_run import RECIPE

from vla_rl.common.run_folder import open_run
from vla_rl.config import apply_overrides
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.recipe.recipe import read_recipe
from vla_rl.training.train import train

CASES = {
    "base, full": ("base", {"decoder": "autoregressive"}, "grpo"),
    "discrete, adapters": (
        "discrete",
        {"decoder": "parallel", "chunk_size": 4, "lora": {"rank": 2}, "trainable": "lora"},
        "grpo",
    ),
    "l1 with a scale head, critic": (
        "l1",
        {"chunk_size": 4, "laplace": {}, "value_head": True, "cameras": ["agentview"]},
        "ppo",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_recipe_trains_and_saves_it(case, tmp_path):
    variant, chosen, algo = CASES[case]
    folder = write_checkpoint(tmp_path / "download", variant)
    policy = {"kind": "openvla", "path": str(folder), "precision": "fp32", **chosen}
    values = {**RECIPE, "policy": policy, "algo": {"kind": algo, "minibatch_size": 24, "optim": {"lr": 1e-3}}}
    overrides = [
        "train.iterations=1", "train.groups=2", "train.group_size=2", "train.allow_no_success=true", "env.num_envs=4",
        "algo.epochs=1",
    ]  # fmt: skip
    recipe = read_recipe(apply_overrides(values, overrides))
    trained = load_policy(train(recipe, open_run(recipe, tmp_path / "run", False), False))
    assert isinstance(trained, OpenVLAPolicy) and trained.published is not None
    assert trained.config.decoder == {"base": "autoregressive", "discrete": "parallel", "l1": "l1"}[variant]
    assert (trained.config.lora is not None) == ("lora" in chosen)
