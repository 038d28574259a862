"""The learner with the real policy and a real environment: the rollout's log-probabilities are the trainer's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_values import PlantedValuesConfig

from sim.dummy import DummyConfig
from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.methods.algo.dr_grpo import DRGRPOConfig
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.rollout.runner import collect
from vla_rl.rollout.task_sampling import SamplingConfig

TEMPERATURE = 1.2


@pytest.fixture(scope="module", params=["parallel", "autoregressive"])
def rollout(request):
    """A fresh policy with a critic, and 2 groups of 4 episodes."""
    env = DummyConfig(num_envs=8, horizon=4).build()
    config = OpenVLAConfig(
        image_size=32, action_bins=5, chunk_size=2, decoder=request.param, value_head=True, precision="fp32"
    )
    policy = config.build(env.spec)
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    specs = SamplingConfig().build(list(env.spec.tasks)).draw(2)
    episodes = collect(
        policy,
        env,
        [spec for spec in specs for _ in range(4)],
        temperature=TEMPERATURE,
        groups=[i for i in range(2) for _ in range(4)],
    )
    env.close()
    for number, episode in enumerate(episodes):  # Outcomes are made up, so that every group has both.
        episode.success = number % 2 == 0
        episode.reward[-1, 0] = float(episode.success)
        episode.terminated[-1, 0] = episode.success
    return policy, episodes


DR = DRGRPOConfig(optim={"lr": 1e-4}, values=PlantedValuesConfig(), candidates=3, coefficients=(0.2, 0.2))


@pytest.mark.parametrize(
    "config", [GRPOConfig(optim={"lr": 1e-4}), PPOConfig(optim={"lr": 1e-4}), DR], ids=["grpo", "ppo", "dr_grpo"]
)
def test_rollout_and_trainer_agree_and_an_update_favors_success(rollout, config):
    policy, episodes = rollout
    start = {n: t.clone() for n, t in policy.state_dict().items()}
    learner = config.build(policy, temperature=TEMPERATURE)
    batch = learner.prepare(episodes)
    assert batch.chunks.log_prob is not None
    np.testing.assert_allclose(batch.old_log_prob, batch.chunks.log_prob, atol=2e-4)
    metrics = learner.update(batch)
    assert metrics["update/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert np.isfinite(list(metrics.values())).all()

    with torch.no_grad():
        log_prob = policy.evaluate(batch.observations(np.arange(batch.size)), batch.chunks, TEMPERATURE).log_prob
    gained = (log_prob.numpy() - batch.old_log_prob).mean(-1)
    assert (gained * batch.advantage)[batch.valid].mean() > 0
    policy.load_state_dict(start)


def test_values_of_rollout_and_trainer_agree(rollout):
    policy, episodes = rollout
    batch = PPOConfig().build(policy, temperature=TEMPERATURE).prepare(episodes)
    assert batch.chunks.value is not None
    np.testing.assert_allclose(batch.old_value, batch.chunks.value, atol=2e-4)
