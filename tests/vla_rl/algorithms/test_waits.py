"""How often the host waits for the device in `prepare` and `update`, counted on a device that is not there."""

from __future__ import annotations

import pytest
import torch
from pretend_device import counting, install, pretending
from toy_problem import ToyPolicy, roll_out

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.learner import KeptWeights
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.common.progress import Stopwatch

install()  # When tests are collected: torch must know of all devices before its first backward pass.

CONFIGS = {
    "grpo": GRPOConfig(
        optim={"lr": 0.01}, minibatch_size=40, micro_batch_size=40, epochs=2, kl_coef=0.1, clip={"dual": 3.0}
    ),
    "ppo": PPOConfig(optim={"lr": 0.01}, minibatch_size=40, micro_batch_size=40, entropy_coef=0.01),
}


@pytest.mark.parametrize("micro_batch_size", [40, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_waits_once_a_step_and_once_at_its_end(name, micro_batch_size):
    config = CONFIGS[name].model_copy(update={"micro_batch_size": micro_batch_size})
    critic = config.uses_critic
    episodes = roll_out(ToyPolicy(critic), 8, 4, seed=1)
    here = config.build(ToyPolicy(critic))
    expected = here.update(here.prepare(episodes))
    with pretending() as device:
        learner = config.build(ToyPolicy(critic).to(device), stopwatch=Stopwatch())  # As `log.exact_times: false`.
        with counting() as preparing:
            batch = learner.prepare(episodes)
        with counting() as updating:
            metrics = learner.update(batch)
    steps = metrics["update/num_steps"]
    assert steps >= 2
    assert updating.totals["syncs"] == steps + 1, updating.places()
    # One read of log-probabilities for the batch and one for the reference, or with a critic also of each's values.
    assert preparing.totals["syncs"] <= (4 if critic else 2), preparing.places()
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_bad_step_is_skipped_at_the_same_price():
    with pretending() as device:
        policy = ToyPolicy().to(device)
        learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=1000, micro_batch_size=5).build(policy)
        batch = learner.prepare(roll_out(ToyPolicy(), 8, 4, seed=1))
        before = {n: p.detach().cpu().clone() for n, p in policy.named_parameters()}
        policy.out.bias.register_hook(lambda gradient: gradient * float("nan"))
        with counting() as counts:
            metrics = learner.update(batch)
        assert metrics["update/num_bad_steps"] == 1 and counts.totals["syncs"] == 2, counts.places()
        assert all(torch.equal(before[n], p.cpu()) for n, p in policy.named_parameters())


def test_weights_are_kept_without_waiting_and_come_back():
    with pretending() as device:
        weight = torch.arange(6.0).to(device)
        kept = KeptWeights([weight])
        with counting() as counts:
            kept.keep()
        weight.zero_()
        kept.restore()
        assert counts.totals["syncs"] == 0 and counts.totals["downloads"] == 1
        assert weight.cpu().tolist() == list(range(6))
