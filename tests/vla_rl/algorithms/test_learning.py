"""Each algorithm raises success on a toy problem, and the shuffled control does not."""

from __future__ import annotations

from functools import cache

import pytest
from toy_problem import ToyPolicy, roll_out, success_rate

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.algorithms.grpo import GRPOConfig, RLOOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.reinforce_pp import ReinforcePPConfig
from vla_rl.methods.algo.mc_grpo import MCGRPOConfig

COMMON = {"optim": {"lr": 0.02}, "minibatch_size": 256, "micro_batch_size": 256, "epochs": 2}
CONFIGS: dict[str, AlgoConfig] = {
    "grpo": GRPOConfig(**COMMON),
    "mc_grpo": MCGRPOConfig(**COMMON),
    "rloo": RLOOConfig(**COMMON),
    "reinforce_pp": ReinforcePPConfig(**COMMON),
    "ppo": PPOConfig(**COMMON, value_lr=0.03, gamma=0.95, critic_warmup=1),
    "ppo_action": PPOConfig(**COMMON, value_lr=0.03, gamma=0.97, advantage_level="action", ratio_level="action"),
    "grpo_muon": GRPOConfig(
        **COMMON | {"optim": {"lr": 0.06, "name": "muon"}}, ratio_level="chunk", loss_reduction="trajectory_mean"
    ),
}


@cache
def train(name: str, control: str = "none", iterations: int = 10, seed: int = 0) -> tuple[float, float]:
    """Success before and after."""
    config = CONFIGS[name]
    policy = ToyPolicy(critic=config.uses_critic, seed=seed)
    learner = config.build(policy, seed=seed, control=control)
    before = success_rate(policy)
    group_size = config.rollouts_per_group(8)
    for iteration in range(iterations):
        learner.update(learner.prepare(roll_out(policy, 12, group_size, seed=1000 * seed + iteration)))
    return before, success_rate(policy)


@pytest.mark.parametrize("name", CONFIGS)
def test_algorithm_raises_success(name):
    before, after = train(name)
    assert before < 0.3
    assert after > 0.65


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_shuffled_control_does_not(name):
    _, true = train(name)
    _, shuffled = train(name, control="shuffled_rewards")
    assert shuffled < true - 0.25
