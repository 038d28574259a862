"""The learner: what must not change the gradient, NaN, resume, regularizers, critic."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_problem import ToyPolicy, make_episode, observation, roll_out

from vla_rl.algorithms import losses
from vla_rl.algorithms.grpo import GRPOConfig, RLOOConfig
from vla_rl.algorithms.learner import Learner, TrainingDivergedError
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.reinforce_pp import ReinforcePPConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.methods.algo.mc_grpo import MCGRPOConfig

CONFIGS = {
    "grpo": GRPOConfig(optim={"lr": 0.01}, minibatch_size=40, micro_batch_size=16, epochs=2, kl_coef=0.1),
    "mc_grpo": MCGRPOConfig(optim={"lr": 0.01}, minibatch_size=40, epochs=2),
    "rloo_muon": RLOOConfig(optim={"lr": 0.01, "name": "muon", "weight_decay": 0.1}),
    "reinforce_pp": ReinforcePPConfig(optim={"lr": 0.01}, minibatch_size=40, loss_reduction="trajectory_mean"),
    "ppo": PPOConfig(optim={"lr": 0.01}, minibatch_size=40, critic_warmup=1, entropy_coef=0.01),
}


def weights(policy: ToyPolicy) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in policy.named_parameters()}


def step_once(config, seed: int = 0, groups: int = 8, **build) -> tuple[ToyPolicy, Learner, dict[str, float]]:
    policy = ToyPolicy(critic=config.uses_critic)
    learner = config.build(policy, seed=seed, **build)
    metrics = learner.update(learner.prepare(roll_out(policy, groups, 4, seed=1)))
    return policy, learner, metrics


def first_gradient(config) -> dict[str, torch.Tensor]:
    """The gradient of the first step."""
    policy, _, _ = step_once(config)
    return {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean"])
@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_skipping_zero_advantages_gives_the_same_gradient(level, reduction, monkeypatch):
    options = {"filter_groups": False, "ratio_level": level, "loss_reduction": reduction, "optim": {"grad_clip": None}}
    skipping = first_gradient(RLOOConfig(**options))
    monkeypatch.setattr(RLOOConfig, "skips_zero_advantage", False)
    whole = first_gradient(RLOOConfig(**options))
    assert any(g.abs().max() > 1e-3 for g in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(skipping[name], gradient, rtol=1e-4, atol=1e-7)


def test_skipping_spends_fewer_forward_passes(monkeypatch):
    seen = []
    for skip in (True, False):
        monkeypatch.setattr(GRPOConfig, "skips_zero_advantage", skip)
        config = GRPOConfig(filter_groups=False)
        policy = ToyPolicy()
        rows = []
        evaluate = policy.evaluate
        policy.evaluate = lambda obs, *a, e=evaluate, r=rows: (r.append(obs.batch_size), e(obs, *a))[1]  # type: ignore[method-assign]
        learner = config.build(policy)
        learner.update(learner.prepare(roll_out(policy, 8, 4, seed=1)))
        seen.append(sum(rows))
    assert seen[0] < seen[1]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_gradient_accumulation_equals_the_whole_minibatch(config):
    big = {"minibatch_size": 1000, "optim": {"grad_clip": None}, "epochs": 1, "critic_warmup": 0}
    options = config.model_dump() | {k: v for k, v in big.items() if k in type(config).model_fields}
    whole = first_gradient(type(config)(**options | {"micro_batch_size": 1000}))
    cut = first_gradient(type(config)(**options | {"micro_batch_size": 7}))
    assert any(g.abs().max() > 1e-3 for g in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-3, atol=1e-6)


def test_first_step_has_ratio_one():
    _, _, metrics = step_once(GRPOConfig(optim={"lr": 1e-3}))
    assert metrics["update/num_steps"] == 1
    assert metrics["update/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["update/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["update/approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["update/clip_fraction"] == 0.0
    assert 1.4 < metrics["update/entropy"] <= np.log(5)


def test_later_steps_move_the_ratio():
    _, _, metrics = step_once(GRPOConfig(optim={"lr": 0.05}, epochs=4))
    assert metrics["update/approx_kl"] > 1e-3
    assert metrics["update/clip_fraction"] > 0.01
    assert metrics["update/ratio_max"] > 1.28


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_resume_to_the_bit(config):
    def run(policy, learner, iterations):
        return [
            learner.update(learner.prepare(roll_out(policy, 8, 4, seed=learner.iteration))) for _ in range(iterations)
        ]

    policy = ToyPolicy(critic=config.uses_critic)
    learner = config.build(policy, seed=3)
    run(policy, learner, 2)
    tensors, state = learner.state()
    saved = {n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(state)), weights(policy)
    expected = run(policy, learner, 2)

    resumed = ToyPolicy(critic=config.uses_critic, seed=99)
    resumed.load_state_dict(saved[2])
    other = config.build(resumed, seed=3)
    other.load_state(saved[0], saved[1])
    assert run(resumed, other, 2) == expected
    for name, weight in weights(policy).items():
        assert torch.equal(weight, weights(resumed)[name]), name


def test_same_seed_same_result_other_seed_other_order():
    options = {"minibatch_size": 20, "optim": {"lr": 0.01}}
    one, two, other = (weights(step_once(GRPOConfig(**options), seed=s)[0]) for s in (0, 0, 1))
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not all(torch.equal(one[n], other[n]) for n in one)


class PoisonedPolicy(ToyPolicy):
    """Gives NaN at the evaluations with gradient whose numbers are in `bad`; with `rot`, its weights turn NaN too."""

    def __init__(self, bad: set[int], rot: bool = False):
        super().__init__()
        self.bad, self.rot, self.calls = bad, rot, 0

    def evaluate(self, obs, chunk, temperature=1.0):
        out = super().evaluate(obs, chunk, temperature)
        if torch.is_grad_enabled():
            if self.calls in self.bad:
                out = replace(out, log_prob=out.log_prob * float("nan"))
                if self.rot:
                    self.out.weight.data.fill_(float("nan"))
            self.calls += 1
        return out


def test_nan_loss_is_skipped_and_counted():
    policy = PoisonedPolicy({1})
    learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=10).build(policy)
    metrics = learner.update(learner.prepare(roll_out(policy, 8, 4, seed=1)))
    assert metrics["update/num_bad_steps"] == 1
    assert metrics["update/num_steps"] == policy.calls - 1 >= 2
    assert all(torch.isfinite(p).all() for p in policy.parameters())
    assert all(np.isfinite(v) for v in metrics.values())


def test_nan_gradient_is_skipped():
    policy = ToyPolicy()
    learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=1000).build(policy)
    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    before = weights(policy)
    policy.out.bias.register_hook(lambda g: g * float("nan"))
    assert learner.update(batch)["update/num_bad_steps"] == 1
    assert all(torch.equal(before[n], p) for n, p in policy.named_parameters())


def test_too_many_bad_steps_restore_the_last_good_weights(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "max_bad_steps", 3)
    policy = PoisonedPolicy({1}, rot=True)
    learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=10).build(policy)
    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    good = weights(policy)
    with pytest.raises(TrainingDivergedError, match=r"3 steps .* NaN or infinite loss.*smaller algo.optim.lr"):
        for _ in range(3):
            learner.update(batch)
    assert learner.num_bad_steps == 3
    assert all(torch.equal(good[n], p) for n, p in policy.named_parameters())


def test_a_bad_streak_lasts_over_updates_and_keeps_the_earlier_weights(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "max_bad_steps", 3)
    policy = PoisonedPolicy({1, 2, 3})
    learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=1000, micro_batch_size=1000).build(policy)
    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    learner.update(batch)
    good = weights(policy)
    learner.update(batch)
    learner.update(batch)
    with pytest.raises(TrainingDivergedError):
        learner.update(batch)
    assert all(torch.equal(good[n], p) for n, p in policy.named_parameters())


def test_weights_that_turn_nan_are_undone_at_once():
    policy = PoisonedPolicy({1}, rot=True)
    learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=1000, micro_batch_size=1000).build(policy)
    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    learner.update(batch)
    good = weights(policy)
    with pytest.raises(TrainingDivergedError, match="weights NaN"):
        learner.update(batch)
    assert all(torch.equal(good[n], p) for n, p in policy.named_parameters())


def test_warm_up_makes_the_first_step_smaller_in_proportion():
    # Adam's first step moves every weight by lr, whatever the gradient's size.
    moved = {}
    for warmup in (0, 4):
        policy = ToyPolicy()
        before = weights(policy)
        learner = GRPOConfig(optim={"lr": 0.01, "warmup_steps": warmup}, minibatch_size=1000).build(policy)
        learner.update(learner.prepare(roll_out(policy, 8, 4, seed=1)))
        moved[warmup] = max(float((p - before[n]).abs().max()) for n, p in policy.named_parameters())
    assert moved[0] == pytest.approx(0.01, rel=1e-3)
    assert moved[4] == pytest.approx(0.0025, rel=1e-3)


def test_rates_fall_linearly_to_0_over_the_run():
    learner = GRPOConfig(optim={"lr": 0.01}, minibatch_size=1000, decay_iterations=4).build(ToyPolicy())
    rates = []
    for seed in range(5):
        learner.update(learner.prepare(roll_out(learner.policy, 8, 4, seed=seed)))
        rates.append(learner.optimizers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0])


def test_the_policys_warm_up_begins_after_the_critics():
    policy = ToyPolicy(critic=True)
    before = weights(policy)
    config = PPOConfig(optim={"lr": 0.01, "warmup_steps": 4}, minibatch_size=1000, epochs=4, critic_warmup=1)
    learner = config.build(policy)
    learner.update(learner.prepare(roll_out(policy, 8, 4, seed=1)))  # Four steps: a warm-up's worth.
    assert learner.optimizers[0].param_groups[-1]["lr"] == config.value_lr
    learner.config = config.model_copy(update={"epochs": 1})
    learner.update(learner.prepare(roll_out(policy, 8, 4, seed=2)))
    policy_moved = {n: float((p - before[n]).abs().max()) for n, p in policy.named_parameters() if "value" not in n}
    assert max(policy_moved.values()) == pytest.approx(0.0025, rel=1e-3)


def test_a_good_step_ends_the_streak(monkeypatch):
    monkeypatch.setattr(GRPOConfig, "max_bad_steps", 3)
    policy = PoisonedPolicy({0, 1, 3, 4, 6, 7})
    learner = GRPOConfig(optim={"lr": 1e-3}, minibatch_size=5).build(policy)
    metrics = learner.update(learner.prepare(roll_out(policy, 8, 4, seed=1)))
    assert policy.calls > 8
    assert metrics["update/num_bad_steps"] == 6


def test_critic_warmup_moves_the_value_head_only():
    policy, learner, _ = step_once(PPOConfig(critic_warmup=1, optim={"lr": 0.01}))
    fresh = weights(ToyPolicy(critic=True))
    moved = {n for n, w in weights(policy).items() if not torch.equal(w, fresh[n])}
    assert moved == {"value_head.weight", "value_head.bias"}
    learner.update(learner.prepare(roll_out(policy, 8, 4, seed=2)))
    assert {n for n, w in weights(policy).items() if not torch.equal(w, fresh[n])} == set(fresh)


def test_critic_learns_the_returns():
    # The frozen policy succeeds far more often from 0.75 than from -0.5 when the target is at 1.
    policy = ToyPolicy(critic=True)
    learner = PPOConfig(critic_warmup=100, value_lr=0.05, value_clip=None, minibatch_size=30, epochs=4).build(policy)

    def margin() -> float:
        obs = observation(np.array([[0.75, 1], [-0.5, 1]]))
        near, far = policy._read(obs, 1.0)[1].tolist()
        return near - far

    before = margin()
    for i in range(10):
        learner.update(learner.prepare(roll_out(policy, 40, 1, seed=i)))
    assert before < 0
    assert margin() > 0.1


def test_kl_is_zero_at_the_start_and_holds_the_policy_back():
    _, _, metrics = step_once(GRPOConfig(optim={"lr": 1e-3}, kl_coef=0.1))
    assert metrics["update/kl_reference"] == pytest.approx(0.0, abs=1e-6)

    def drift(kl_coef: float) -> float:
        policy = ToyPolicy()
        start = ToyPolicy()
        learner = GRPOConfig(optim={"lr": 0.02}, epochs=4, kl_coef=kl_coef, clip={"high": 5.0, "low": 0.99}).build(
            policy
        )
        for i in range(3):
            learner.update(learner.prepare(roll_out(policy, 8, 4, seed=i)))
        obs = observation(np.array([[0, 1], [0, -1]]))
        now, then = policy._read(obs, 1.0)[0], start._read(obs, 1.0)[0]
        return (now.exp() * (now - then)).sum(-1).mean().item()

    assert drift(5.0) < 0.3 * drift(0.0)


def test_entropy_bonus_keeps_entropy_up():
    def entropy(coef: float) -> float:
        policy = ToyPolicy()
        learner = GRPOConfig(optim={"lr": 0.02}, epochs=4, entropy_coef=coef).build(policy)
        for i in range(5):
            metrics = learner.update(learner.prepare(roll_out(policy, 8, 4, seed=i)))
        return metrics["update/entropy"]

    assert entropy(0.5) > entropy(0.0) + 0.05


def test_an_entropy_bonus_is_refused_where_the_noise_is_fixed(monkeypatch):
    evaluate = ToyPolicy.evaluate

    def fixed(self, *args):
        out = evaluate(self, *args)
        return replace(out, entropy=out.entropy.detach())

    monkeypatch.setattr(ToyPolicy, "evaluate", fixed)
    step_once(GRPOConfig())
    with pytest.raises(ValueError, match=r"algo\.entropy_coef: got 0\.1, but .* does nothing: .*flow_noise"):
        step_once(GRPOConfig(entropy_coef=0.1))


def test_bc_anchor():
    with pytest.raises(ValueError, match="no demonstrations are given"):
        step_once(GRPOConfig(bc_coef=0.1))
    policy = ToyPolicy()
    learner = GRPOConfig(optim={"lr": 0.01}, bc_coef=1.0, minibatch_size=40).build(policy)
    calls = []

    def pull_to_first_move() -> tuple[torch.Tensor, dict]:
        calls.append(1)
        return -policy._read(observation(np.zeros((1, 2))), 1.0)[0][..., 0].mean(), {}

    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    first = learner.update(batch, pull_to_first_move)
    for _ in range(10):
        last = learner.update(batch, pull_to_first_move)
    assert last["loss/bc"] < first["loss/bc"] - 0.2
    assert len(calls) == 11 * last["update/num_steps"]


def test_every_trajectory_weighs_the_same_over_an_epoch(monkeypatch):
    # Long and short episodes over minibatches of six decisions; an episode is known by its advantage.
    lengths = [1, 2, 8, 1, 5, 8, 3, 1]
    episodes = [make_episode(np.zeros((k, 2)), [2] * k, group=0, seed=i) for i, k in enumerate(lengths)]
    config = RLOOConfig(loss_reduction="trajectory_mean", minibatch_size=6, filter_groups=False)
    learner = config.build(ToyPolicy())
    batch = learner.prepare(episodes)
    batch.advantage[:] = 1 + batch.episode[:, None]
    found = np.zeros(len(lengths))
    plain = losses.policy_loss

    def record(config, log_prob, old_log_prob, advantage, weight, *behavior):
        np.add.at(found, advantage[:, 0].long() - 1, weight.sum(1).numpy())
        return plain(config, log_prob, old_log_prob, advantage, weight, *behavior)

    monkeypatch.setattr(losses, "policy_loss", record)
    num_steps = learner.update(batch)["update/num_steps"]
    assert num_steps == 5
    np.testing.assert_allclose(found, num_steps / len(lengths), rtol=1e-5)


def test_a_ratio_that_ran_away_does_not_drop_the_step():
    policy = ToyPolicy()
    learner = GRPOConfig(clip={"dual": 3.0}, minibatch_size=1000).build(policy)
    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    batch.old_log_prob[np.flatnonzero(batch.advantage[:, 0] < 0)[0]] -= 100
    before = weights(policy)
    metrics = learner.update(batch)
    assert metrics["update/num_bad_steps"] == 0
    assert all(np.isfinite(v) for v in metrics.values())
    assert not all(torch.equal(before[n], p) for n, p in policy.named_parameters())


def test_minibatches_are_even_and_near_the_size_asked(monkeypatch):
    policy = ToyPolicy()
    monkeypatch.setattr(RLOOConfig, "skips_zero_advantage", False)
    learner = RLOOConfig(filter_groups=False, minibatch_size=25).build(policy)
    batch = learner.prepare(roll_out(policy, 8, 4, seed=1))
    assert learner.update(batch)["update/num_steps"] == learner.num_steps(batch) == round(batch.size / 25)


def test_timing():
    _, learner, _ = step_once(GRPOConfig())
    assert set(learner.stopwatch.seconds) == {"forward_backward", "optimizer"}
    assert all(seconds > 0 for seconds in learner.stopwatch.seconds.values())


def test_load_state_of_another_setup_is_refused():
    _, adamw, _ = step_once(GRPOConfig())
    tensors, state = adamw.state()
    with pytest.raises(ValueError, match=r"algo\.optim\.name: the checkpoint holds 1 optimizers, this run needs 2"):
        GRPOConfig(optim={"name": "muon"}).build(ToyPolicy()).load_state(tensors, state)
    with pytest.raises(ValueError, match=r"algo\.kl_coef: above 0, but the checkpoint holds no reference"):
        GRPOConfig(kl_coef=0.1).build(ToyPolicy()).load_state(tensors, state)


def test_config_errors():
    with pytest.raises(ConfigError, match=r"algo\.ratio_level: got 'chunk' with advantage_level 'action'"):
        build_component("algo", {"kind": "ppo", "ratio_level": "chunk", "advantage_level": "action"})
    with pytest.raises(ConfigError, match=r"algo\.clip\.hihg: unknown key.*Did you mean 'high'"):
        build_component("algo", {"kind": "grpo", "clip": {"hihg": 0.3}})
    with pytest.raises(ConfigError, match=r"algo\.clip\.dual: got 0\.5"):
        build_component("algo", {"kind": "rloo", "clip": {"dual": 0.5}})
    with pytest.raises(ConfigError, match=r"algo\.gamma: unknown key"):
        build_component("algo", {"kind": "grpo", "gamma": 0.9})


def test_configs_import_no_torch():
    modules = ", ".join(f"vla_rl.algorithms.{name}" for name in ("grpo", "ppo", "reinforce_pp"))
    modules += ", vla_rl.methods.algo.mc_grpo, vla_rl.rollout.task_sampling"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
