"""Doubly robust GRPO: no bias whatever the values are, less variance where they are good, GRPO itself at c = 0."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tabular_problem import PlantedConfig, TablePolicy, exact_gradient, roll_out

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.methods.algo.dr_grpo import CoefficientFit, Coefficients, Correction, DRGRPOConfig, DRLearner

GROUP_SIZE = 2
WHOLE = {"micro_batch_size": 4096}  # In one pass, which is faster here.
FIXED = {"coefficients": (0.8, 0.6), **WHOLE}
SAME = {"normalize_std": False, "filter_groups": False}


def config(which: str = "right", **options) -> DRGRPOConfig:
    values = {"kind": "tabular_problem:PlantedConfig", "which": which}
    made = build_component("algo", {"kind": "dr_grpo", "values": values, "candidates": 4} | options)
    assert isinstance(made, DRGRPOConfig)
    return made


def gradients(
    algo: GRPOConfig, batches: int = 40, groups: int = 24, size: int = GROUP_SIZE, control="none"
) -> np.ndarray:
    """The gradient that the learner hands to its optimizer, of each of several batches, (batches, parameters)."""
    found = []
    for seed in range(batches):
        policy = TablePolicy()
        learner = algo.build(policy, seed, control=control)
        batch = learner.prepare(roll_out(policy, groups, size, seed))
        assert learner.num_steps(batch) == 1

        def caught(losses, metrics, policy=policy):
            found.append(policy.logits.grad.flatten().numpy().copy())
            return {}

        learner._apply = caught
        learner.update(batch)
    return np.stack(found)


def error(found: np.ndarray, expected: np.ndarray | float) -> float:
    """How far the mean is from what it should be: the largest of all parameters', in standard errors."""
    spread = found.std(0, ddof=1) / np.sqrt(len(found))
    return float((np.abs(found.mean(0) - expected) / (spread + 1e-9)).max())


def expected() -> np.ndarray:
    """What the learner minimizes is a mean over three moves of minus what an episode gains over its group's mean."""
    return -exact_gradient().flatten().numpy() * (1 - 1 / GROUP_SIZE) / 3


VALUES = ("right", "wrong", "constant", "state")


@pytest.mark.parametrize(
    ("which", "level"),
    [
        *((w, "token") for w in VALUES),
        *(pytest.param(w, "chunk", marks=[pytest.mark.slow] * (w != "wrong")) for w in VALUES),
    ],
)
def test_the_gradient_is_unbiased_whatever_the_values_are(which, level):
    scale = 1.5 if level == "chunk" else 1.0  # A mean over two chunks there, over three moves here.
    algo = config(which, **FIXED, ratio_level=level)
    assert error(gradients(algo), scale * expected()) < 4.5


def test_an_episodes_own_weight_is_refused():
    # On this problem its gradient was off by 15 standard errors: the weight hangs on what was drawn.
    with pytest.raises(ValueError, match="loss_reduction"):
        config("right", loss_reduction="trajectory_mean")


def test_values_that_know_the_outcome_are_biased_and_seen():
    assert error(gradients(config("outcome", **FIXED)), expected()) > 10


def test_right_values_leave_less_variance_and_wrong_ones_more():
    def variance(which: str, c: float, d: float) -> float:
        algo = config(which, coefficients=(c, d), candidates=12, **WHOLE)
        return gradients(algo, 80, groups=6, size=4).var(0).sum()

    plain, of_chunks, of_both, wrong = (
        variance(*case) for case in (("right", 0, 0), ("right", 0.6, 0), ("right", 0.6, 0.6), ("wrong", 1, 1))
    )
    assert of_both < 0.9 * of_chunks < 0.9 * 0.95 * plain < plain < wrong


@pytest.mark.parametrize("options", [{}, {"ratio_level": "chunk"}])
def test_without_a_coefficient_it_is_grpo_to_the_digit(options):
    options = {"epochs": 2, "minibatch_size": 64, "optim": {"lr": 0.05}, "kl_coef": 0.1, **options}
    one, other = TablePolicy(), TablePolicy()
    plain = GRPOConfig(**SAME, **options).build(one, 3)
    fixed = config("wrong", coefficients=(0, 0), **options).build(other, 3)
    for seed in range(3):
        expected = plain.update(plain.prepare(roll_out(one, 30, GROUP_SIZE, seed)))
        found = fixed.update(fixed.prepare(roll_out(other, 30, GROUP_SIZE, seed)))
        assert found == expected | {"control_variate/chunk": 0.0, "control_variate/state": 0.0}
        torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=0)


def test_the_first_iteration_is_grpo_to_the_digit_and_the_second_is_not():
    one, other = TablePolicy(), TablePolicy()
    plain, learner = GRPOConfig(**SAME, optim={"lr": 0.05}).build(one, 3), config(optim={"lr": 0.05}).build(other, 3)
    for seed, same in ((0, True), (1, False)):
        episodes = roll_out(one, 30, GROUP_SIZE, seed)
        plain.update(plain.prepare(episodes))
        learner.update(learner.prepare(episodes))
        assert torch.equal(other.logits, one.logits) is same


def test_regularizers_are_of_the_executed_chunks_alone():
    """With values that say nothing, a KL and an entropy term pull as they do in GRPO."""
    options = {"kl_coef": 0.3, "entropy_coef": 0.2, "optim": {"lr": 0.05}, "epochs": 2}
    one, other = TablePolicy(), TablePolicy()
    plain = GRPOConfig(**SAME, **options).build(one, 3)
    tiny = config("wrong", coefficients=(1e-9, 0), **options).build(other, 3)
    episodes = roll_out(one, 30, GROUP_SIZE, 0)
    expected, found = (learner.update(learner.prepare(episodes)) for learner in (plain, tiny))
    torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=2e-3)  # Of steps of 0.05.
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0.01, abs=1e-3), name


def test_the_coefficient_is_of_earlier_batches_alone():
    policy = TablePolicy()
    learner = config().build(policy, 3)
    learner.update(learner.prepare(roll_out(policy, 200, GROUP_SIZE, 0)))
    earlier = learner.coefficients
    assert 0.3 < min(earlier) <= max(earlier) <= 1
    episodes = roll_out(policy, 200, GROUP_SIZE, 1)
    turned = [replace(e, reward=(e.terminated | e.truncated) & ~e.terminated, success=not e.success) for e in episodes]
    for batch in (learner.prepare(episodes), learner.prepare(turned)):
        assert (batch.metrics["control_variate/chunk"], batch.metrics["control_variate/state"]) == earlier
        assert learner.coefficients == earlier
    learner.update(batch)
    assert learner.coefficients.chunk < earlier.chunk - 0.2


def test_the_coefficients_are_those_of_the_least_mean_square():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4000, 5)) + rng.normal(size=(4000, 1))
    advantage = 0.9 * values[:, 0] - 0.3 * values[:, 1:].mean(1) + rng.normal(size=4000)
    correction = Correction.of(values[:, 0], values[:, 1:], np.zeros(4000))
    fit = CoefficientFit.of(advantage, correction)

    def left(c: float, d: float) -> float:
        rest = advantage - c * correction.executed - d * correction.state
        return float((rest**2).sum() + ((c * correction.candidates) ** 2).sum())

    found = fit.coefficients(Coefficients(0, 0))
    assert 0.3 < found.state < found.chunk < 0.9
    assert fit.left(float((advantage**2).sum()), found) == pytest.approx(left(*found))
    for c, d in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)):
        assert left(found.chunk + c, found.state + d) > left(*found)
    assert CoefficientFit.of(-advantage, correction).coefficients(Coefficients(0.5, 0.5)) == (0, 0)
    assert CoefficientFit.of(9 * advantage, correction).coefficients(Coefficients(0.5, 0.5)) == (1, 1)
    assert CoefficientFit().coefficients(Coefficients(0.5, 0.25)) == (0.5, 0.25)


def test_nothing_is_part_of_its_own_baseline():
    correction = Correction.of(np.array([0.9]), np.array([[0.1, 0.5, 0.6]]), np.array([0.25]))
    np.testing.assert_allclose(correction.executed, [0.9 - 0.4])
    np.testing.assert_allclose(correction.candidates, [[(0.1 - 0.55) / 3, (0.5 - 0.35) / 3, (0.6 - 0.3) / 3]])
    np.testing.assert_allclose(correction.state, [0.4 - 0.25])


def test_an_episode_alone_in_its_group_has_no_baseline_of_itself():
    policy = TablePolicy()
    episodes = roll_out(policy, 2, GROUP_SIZE, 0)[:3]
    learner = config("wrong", coefficients=(0, 0.5)).build(policy)
    before = learner.prepare(episodes).whole
    alone = replace(episodes[2], reward=1.0 - episodes[2].reward)  # Whatever came of it, its advantages stay.
    after = learner.prepare([*episodes[:2], alone]).whole
    assert before is not None and after is not None
    np.testing.assert_array_equal(after.advantage, before.advantage)


def test_a_resumed_run_goes_on_to_the_digit():
    def trained(policy: TablePolicy, learner: DRLearner, seeds: range) -> None:
        for seed in seeds:
            learner.update(learner.prepare(roll_out(policy, 30, GROUP_SIZE, seed)))

    whole, resumed = TablePolicy(), TablePolicy()
    learner, later = config(optim={"lr": 0.05}).build(whole, 3), config(optim={"lr": 0.05}).build(resumed, 3)
    trained(whole, learner, range(2))
    tensors, state = learner.state()
    resumed.load_state_dict(whole.state_dict())
    later.load_state({n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(state)))
    assert later.coefficients == learner.coefficients and learner.coefficients.chunk > 0
    trained(whole, learner, range(2, 4))
    trained(resumed, later, range(2, 4))
    torch.testing.assert_close(resumed.logits, whole.logits, rtol=0, atol=0)


def test_decisions_keep_their_chunks_in_one_minibatch():
    policy = TablePolicy()
    learner = config("wrong", coefficients=(0.5, 0), minibatch_size=8).build(policy)
    batch = learner.prepare(roll_out(policy, 8, GROUP_SIZE, 0))
    assert learner.num_steps(batch) == 4
    assert batch.size == 32 and batch.whole is not None
    assert batch.whole.size == 32 + 16 + 4 * 32  # The second decisions were cut short: a row more for each.
    assert learner.update(batch)["update/num_steps"] == 4


def test_faulty_values_are_named():
    class Faulty:
        def of(self, episodes, episode, chunk, actions):
            return np.full(actions.shape[:2], np.nan)

    policy = TablePolicy()
    learner = config().build(policy)
    learner.values = Faulty()
    with pytest.raises(ValueError, match=r"algo\.values: Faulty gave values .* 20 of them not finite"):
        learner.prepare(roll_out(policy, 1, GROUP_SIZE, 0))


def test_options_are_checked():
    with pytest.raises(ConfigError, match=r"values\.kind: got 'wrold_model'"):
        build_component("algo", {"kind": "dr_grpo", "values": {"kind": "wrold_model"}})
    with pytest.raises(ConfigError, match=r"algo\.filter_groups"):
        config(filter_groups=True)
    with pytest.raises(ConfigError, match=r"algo\.values: required"):
        build_component("algo", {"kind": "dr_grpo"})
    assert config().model_dump()["values"] == PlantedConfig().model_dump()
