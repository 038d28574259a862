"""RECAP: decisions get their words, a policy learns what these mean and acts on the positive one; guidance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import make_recipe, metrics, save_policy
from torch import nn

from sim.dummy import DummyConfig
from vla_rl.algorithms.offpolicy.transitions import Transitions
from vla_rl.common.run_folder import open_run
from vla_rl.config import ConfigError, build_component
from vla_rl.interfaces import Policy, PolicyOutput
from vla_rl.methods.offline.recap import RecapConfig, advantages, improves
from vla_rl.methods.policy.advantage_conditioned import AdvantageConditionedPolicy, condition, with_words
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.guided import GuidablePolicy
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.load import describe, load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.recipe.recipe import read_recipe
from vla_rl.training.train import train
from vla_rl.types import ActionChunk, Observation

SPEC = DummyConfig(image_size=32).env_spec()


def logged() -> Transitions:
    """Two episodes of three decisions of 4 steps; the first succeeds, the second is a person's from decision 4 on."""
    return Transitions(
        embedding=np.zeros((6, 1), np.float32),
        chunk=np.zeros((6, 4, 7), np.float32),
        num_steps=np.array([4, 4, 2, 4, 4, 4]),
        following=np.array([1, 2, -1, 4, 5, -1]),
        elapsed=np.array([0, 4, 8, 0, 4, 8]),
        remaining=np.array([10, 6, 2, 12, 8, 4]),
        episode=np.array([0, 0, 0, 1, 1, 1]),
        success=np.array([True, False]),
        task=np.array([0, 0]),
        initial_state=np.array([0, 1]),
    )


def test_an_advantage_is_what_came_later_less_what_was_expected() -> None:
    v = np.array([0.5, 0.6, 0.9, 0.5, 0.2, 0.1], np.float32)
    two = advantages(logged(), v, 0.9)
    np.testing.assert_allclose(
        two, [0.9**8 * 0.9 - 0.5, 0.9**6 - 0.6, 0.9**2 - 0.9, 0.9**8 * 0.1 - 0.5, -0.2, -0.1], rtol=1e-5
    )


def test_the_best_share_of_each_task_and_corrections_get_the_positive_word() -> None:
    data = replace(logged(), task=np.array([0, 1]))
    advantage = np.array([0.1, 0.2, 0.3, -0.3, -0.2, -0.1])
    none = np.zeros(6, bool)
    assert list(improves(RecapConfig(positive=0.4), data, advantage, none)) == [False, False, True, False, False, True]
    corrected = np.array([False, False, False, True, False, False])
    found = improves(RecapConfig(positive=0.4), data, advantage, corrected)
    assert list(found) == [False, False, True, True, False, True]


def small(kind: str) -> Policy:
    torch.manual_seed(0)
    if kind in ("parallel", "autoregressive", "l1"):
        policy = OpenVLAConfig.model_validate(
            {"preset": "tiny", "decoder": kind, "chunk_size": 2, "image_size": 32, "precision": "fp32"}
        ).build(SPEC)
    else:
        policy = LeRobotConfig.model_validate(
            {"type": kind, "preset": "tiny", "image_size": 32, "chunk_size": 2}
        ).build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy.eval()


@pytest.mark.parametrize("kind", ["parallel", "autoregressive", "smolvla", "pi0_fast"])
def test_guidance_goes_from_the_plain_instruction_over_the_word_and_beyond(kind: str) -> None:
    base, obs = small(kind), fake_observation(SPEC, 3)

    def drawn(policy: Policy, obs: Observation) -> ActionChunk:
        return policy.act(obs, torch.Generator().manual_seed(0), 1.0)

    plain, told = drawn(base, obs), drawn(base, with_words(obs, True))
    np.testing.assert_array_equal(drawn(condition(base), obs).actions, told.actions)
    for weight, same in ((0.0, plain), (1.0, told)):
        chunk = base.act_guided(with_words(obs, True), [obs], weight, torch.Generator().manual_seed(0), 1.0)  # type: ignore[attr-defined]
        np.testing.assert_allclose(chunk.log_prob, same.log_prob, atol=1e-4)
        np.testing.assert_allclose(chunk.actions, same.actions, atol=1e-5)
    beyond = drawn(condition(base, 30.0), obs)
    assert not np.allclose(
        np.append(beyond.log_prob, beyond.actions), np.append(told.log_prob, told.actions), atol=1e-3
    )
    np.testing.assert_array_equal(beyond.actions, drawn(condition(base, 30.0), obs).actions)


def test_what_cannot_be_guided_is_refused_and_a_guided_one_has_no_likelihood() -> None:
    with pytest.raises(ConfigError, match="l1 decoder regresses actions"):
        condition(small("l1"), 2.0)
    guided = condition(small("parallel"), 2.0)
    assert guided.no_rl_reason is not None and "policy.guidance=1" in guided.no_rl_reason
    obs = fake_observation(SPEC, 2)
    with pytest.raises(ValueError, match=r"policy\.guidance=1"):
        guided.evaluate(obs, guided.act(obs, torch.Generator().manual_seed(0)))


def test_by_the_word_alone_it_is_a_policy_that_rl_can_train() -> None:
    policy, obs = condition(small("parallel")), fake_observation(SPEC, 4)
    assert policy.no_rl_reason is None
    chunk = policy.act(obs, torch.Generator().manual_seed(0), 1.3)
    output = policy.evaluate(obs, chunk, 1.3)
    np.testing.assert_allclose(output.log_prob.detach().numpy(), chunk.log_prob, atol=1e-5)
    assert output.log_prob.requires_grad


def test_what_its_base_prepares_stands_for_the_observation_with_and_without_the_word() -> None:
    base, obs = small("parallel"), fake_observation(fake_env_spec(image_size=100), 3)
    for policy in (condition(base), condition(base, 1.7)):
        inputs = policy.prepare(obs)
        assert inputs.is_prepared and policy.prepare(inputs) is inputs
        drawn = [policy.act(seen, torch.Generator().manual_seed(0)) for seen in (obs, inputs)]
        np.testing.assert_array_equal(drawn[0].log_prob, drawn[1].log_prob)
    log_probs = [condition(base).evaluate(seen, drawn[0]).log_prob for seen in (obs, inputs)]
    assert torch.equal(*log_probs)


def test_a_run_of_rl_begins_with_ratios_of_one_and_saves_the_word_with_the_policy(tmp_path: Path) -> None:
    base = load_policy(save_policy(tmp_path / "base"))
    condition(base).save(tmp_path / "policy")
    section = {"kind": "advantage_conditioned", "path": str(tmp_path / "policy")}
    values = make_recipe(tmp_path / "policy").model_dump(mode="json") | {"policy": section}
    recipe = read_recipe(values | {"train": values["train"] | {"iterations": 1}})
    train(recipe, open_run(recipe, tmp_path / "run", False), False)
    [first, *_] = metrics(tmp_path / "run")
    assert first["update/ratio_max"] == pytest.approx(1, abs=1e-4) and first["rollout/log_prob_gap"] < 1e-4
    trained = load_policy(tmp_path / "run" / "policy")
    assert isinstance(trained, AdvantageConditionedPolicy)
    before = dict(base.named_parameters())
    assert any(not torch.equal(before[name], value) for name, value in trained.base.named_parameters())
    guided = read_recipe(values | {"policy": section | {"guidance": 2.0}})
    with pytest.raises(ValueError, match=r"guidance=2\).*policy\.guidance=1"):
        train(guided, open_run(guided, tmp_path / "guided", False), False)


@pytest.mark.parametrize("guidance", [1.0, 1.7])
def test_it_is_saved_and_loaded_by_its_folder(guidance: float, tmp_path: Path) -> None:
    policy, obs = condition(small("parallel"), guidance), fake_observation(SPEC, 2)
    policy.save(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert isinstance(again, AdvantageConditionedPolicy) and again.guidance == guidance
    np.testing.assert_array_equal(again.act(obs, None, 0.0).actions, policy.act(obs, None, 0.0).actions)
    info = describe(tmp_path / "policy")
    assert info.kind == "advantage_conditioned" and bool(info.rl) == (guidance == 1)
    section = {"kind": "advantage_conditioned", "path": str(tmp_path / "policy"), "guidance": 0.0}
    without = build_component("policy", section).build(SPEC)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(without.act(obs, None, 0.0).actions, policy.base.act(obs, None, 0.0).actions)
    with pytest.raises(ConfigError, match=r"made by `run: offline` with offline\.kind=recap"):
        build_component("policy", {"kind": "advantage_conditioned"}).build(SPEC)  # type: ignore[attr-defined]


def test_real_time_chunking_gets_the_word_too() -> None:
    from vla_rl.interfaces import ContinuingPolicy

    base = small("smolvla")
    assert isinstance(condition(base), ContinuingPolicy)
    assert not isinstance(condition(base, 2.0), ContinuingPolicy), "there it would not be guided"


class Table(nn.Module, GuidablePolicy):
    """Logits of two chunks for each instruction: what cloning counts is all that there is."""

    chunk_size, action_dim, cameras, uses_state = 1, 1, (), False

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, np.ndarray] = {}

    def learn(self, instruction: list[str], action: np.ndarray) -> None:
        for text, chosen in zip(instruction, action, strict=True):
            self.counts.setdefault(text, np.full(2, 0.5))[chosen] += 1

    def probability(self, text: str) -> np.ndarray:
        return self.counts[text] / self.counts[text].sum()

    def act_guided(self, obs, plain, weight, generator, temperature) -> ActionChunk:
        logits = np.log([self.probability(text) for text in obs.instruction])
        if plain:
            others = np.log([self.probability(text) for text in plain[0].instruction])
            logits = others + weight * (logits - others)
        return ActionChunk(logits.argmax(1).astype(np.float32)[:, None, None], log_prob=logits[:, :, None])

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        raise NotImplementedError


def test_the_positive_word_picks_the_better_of_two_behaviors_that_were_logged() -> None:
    """Four in five logged episodes do 0, of which a tenth succeeds; the others do 1, of which nine in ten do."""
    rng = np.random.default_rng(0)
    count = 2000
    action = (rng.random(count) < 0.2).astype(int)
    success = rng.random(count) < np.where(action == 1, 0.9, 0.1)
    one, each = np.ones(count, np.int64), np.arange(count)
    data = Transitions(
        np.zeros((count, 1), np.float32), np.zeros((count, 1, 1), np.float32), one, -one, 0 * one, one, each,
        success, 0 * one, each,
    )  # fmt: skip
    v = np.full(count, success.mean(), np.float32)
    positive = improves(RecapConfig(positive=0.25), data, advantages(data, v, 0.99), np.zeros(count, bool))
    np.testing.assert_array_equal(positive, success)
    policy = Table()
    obs = Observation({}, np.zeros((count, 0), np.float32), ["do it"] * count)
    dropped = rng.random(count) < 0.3
    told = with_words(obs, positive).instruction
    policy.learn([plain if d else text for plain, text, d in zip(obs.instruction, told, dropped, strict=True)], action)
    asked = obs.select([0])
    assert policy.act(asked).actions[0, 0, 0] == 0, "as most of the episodes do"
    assert condition(policy).act(asked).actions[0, 0, 0] == 1
    margins = []
    for weight in (0.0, 1.0, 2.0):
        logits = condition(policy, weight).act(asked).log_prob
        assert logits is not None
        margins.append(float(logits[0, 1, 0] - logits[0, 0, 0]))
    assert margins[0] < 0 < margins[1] < margins[2]
    assert margins[2] - margins[1] == pytest.approx(margins[1] - margins[0])
