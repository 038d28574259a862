"""Preferences of episodes: which are paired, the loss and its gradient against numbers by hand, a person's file."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reach_policy import log_episodes
from tiny_run import save_policy

from sim.dummy import DummyConfig
from vla_rl.algorithms.offpolicy.offline import LoggedRun
from vla_rl.algorithms.offpolicy.transitions import logged_transitions
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import BCDataset, DataNeeds, open_dataset
from vla_rl.methods.offline.preferences import (
    PreferenceDataset,
    Preferences,
    PreferencesConfig,
    PreferenceTrainer,
    choose_pairs,
    episode_batch,
    pair_up,
    read_pairs,
    reference_log_probs,
)
from vla_rl.policies.fake_input import fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.load import load_policy
from vla_rl.training.config import SFTConfig
from vla_rl.types import ActionChunk

ENV = DummyConfig(num_envs=4, image_size=32, horizon=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """8 episodes a task of a policy that is too slow for half of the states; decisions of 4 steps."""
    return log_episodes(ENV, tmp_path_factory.mktemp("preferences") / "logged", 8)


@pytest.fixture
def data(folder: Path) -> BCDataset:
    needs = DataNeeds(cameras=("agentview",), action_dim=7, state_dim=8)
    return BCDataset([open_dataset(DatasetConfig(path=str(folder)), needs)], 4)


def test_successes_are_preferred_to_failures_of_the_same_task_and_initial_state_first(data: BCDataset) -> None:
    found = logged_transitions(None, data)
    better, worse = pair_up(found, np.zeros(len(found.success), np.int64), 0)
    assert found.success[better].all() and not found.success[worse].any()
    np.testing.assert_array_equal(found.task[better], found.task[worse])
    twice = BCDataset([data.parts[0], data.parts[0]], 4)
    both = logged_transitions(None, twice)
    both.success[: len(found.success)] ^= True  # In the first copy each ends the other way.
    better, worse = pair_up(both, np.zeros(len(both.success), np.int64), 0)
    assert (both.initial_state[better] == both.initial_state[worse]).all(), "each has its counterpart"
    better, worse = pair_up(both, np.repeat([0, 1], len(found.success)), 0)
    np.testing.assert_array_equal(better < len(found.success), worse < len(found.success))


def test_an_episode_is_cut_into_chunks_that_do_not_overlap(data: BCDataset) -> None:
    part = data.parts[0]
    batch = episode_batch(data, 3)
    start, length = part.starts[3], part.lengths[3]
    assert batch.valid.sum() == length
    np.testing.assert_array_equal(batch.actions[batch.valid], part.actions[start : start + length])


def policy_of(tmp_path: Path):
    return load_policy(save_policy(tmp_path / "policy")).eval()


def test_the_summed_cloning_loss_is_the_likelihood_that_rl_computes(data: BCDataset, tmp_path: Path) -> None:
    policy = policy_of(tmp_path)
    batch = episode_batch(data, 0)
    tokens = policy.action_tokenizer.encode(policy._from_env(batch.actions, policy._stats()))
    twin = np.where(tokens <= 1, 1 - tokens, tokens)  # 0 and 1 are one action.
    own, other = (policy.evaluate(batch.obs, ActionChunk(batch.actions, tokens=t)).log_prob for t in (tokens, twin))
    expected = np.where(tokens <= 1, np.logaddexp(own.detach(), other.detach()), own.detach())
    assert (tokens <= 1).any()
    [found] = reference_log_probs(policy, data, np.array([0]), 2)[:1]
    assert found == pytest.approx(expected[batch.valid].sum(), rel=1e-4)


@pytest.fixture(autouse=True)
def beta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_rl.methods.offline.preferences.BETA", 0.05)


def trainer_of(policy, data: BCDataset, **options: float) -> tuple[PreferenceTrainer, PreferenceDataset]:
    sft = SFTConfig.model_validate(
        {"datasets": ["x"], "optim": {"lr": 1e-4, "warmup_steps": 0}, "batch_size": 2, "steps": 50}
    )
    numbers = np.flatnonzero(data.parts[0].success)[:1], np.flatnonzero(~data.parts[0].success)[:1]
    reference = reference_log_probs(policy, data, np.concatenate(numbers), 2)
    config = PreferencesConfig.model_validate({"pairs": 1} | options)
    return PreferenceTrainer(policy, sft), PreferenceDataset(data, Preferences(*numbers, reference), config)


def test_the_loss_and_its_gradient_are_those_of_dpo_by_hand(data: BCDataset, tmp_path: Path) -> None:
    policy = policy_of(tmp_path)
    trainer, pairs = trainer_of(policy, data)
    reference = pairs.preferences.reference
    good, bad = int(pairs.preferences.better[0]), int(pairs.preferences.worse[0])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def whole(number: int) -> torch.Tensor:
        batch = episode_batch(data, number)
        return -policy.bc_loss(batch.obs, batch.actions, batch.valid)[0] * int(batch.valid.sum()) * 7

    margin = 0.05 * ((whole(good) - reference[good]) - (whole(bad) - reference[bad]))
    loss = -torch.nn.functional.logsigmoid(margin)
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    wanted = torch.autograd.grad(loss, [dict(policy.named_parameters())[n] for n in names], allow_unused=True)
    found = trainer._pair(pairs, 0)
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found["margin"] == pytest.approx(margin.item(), rel=1e-3, abs=1e-4)
    for name, gradient in zip(names, wanted, strict=True):
        got = dict(policy.named_parameters())[name].grad
        assert (
            (got is None or not got.any()) if gradient is None else torch.allclose(got, gradient, rtol=1e-3, atol=1e-5)
        )


def test_at_first_the_loss_is_log_two_and_then_the_preferred_episode_becomes_likelier(
    data: BCDataset, tmp_path: Path
) -> None:
    policy = policy_of(tmp_path)
    trainer, pairs = trainer_of(policy, data, cloning=0.1)
    first = trainer._pair(pairs, 0)
    assert first["margin"] == pytest.approx(0, abs=1e-3) and first["gain_of_better"] == pytest.approx(0, abs=1e-2)
    plain, _ = trainer_of(policy, data)
    assert plain._pair(pairs, 0)["loss"] > math.log(2)
    policy.zero_grad()
    for _ in range(12):
        last = trainer.learn(pairs, 0)
    assert last["gain_of_better"] > 1 and last["gain_of_worse"] < last["gain_of_better"]
    assert last["margin"] > 0 and last["told_apart"] == 1


def test_a_flow_policy_learns_preferences_by_its_own_cloning_loss(
    data: BCDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.methods.offline.preferences.BETA", 0.01)
    options = {"type": "smolvla", "preset": "tiny", "image_size": 32, "chunk_size": 4}
    policy = LeRobotConfig.model_validate(options).build(ENV.env_spec())
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    trainer, pairs = trainer_of(policy.eval(), data)
    assert trainer._pair(pairs, 0)["margin"] == pytest.approx(0, abs=1e-4), "with the same noise as the reference"
    policy.zero_grad()
    for _ in range(8):
        last = trainer.learn(pairs, 0)
    assert last["gain_of_better"] > last["gain_of_worse"]


def test_a_persons_choices_are_read_from_a_file(data: BCDataset, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "preferences.jsonl"
    lines = [{"better": 3, "worse": 1}, {"better": 0, "worse": 3, "dataset": str(folder)}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    better, worse = read_pairs(str(file), data.parts)
    assert list(better) == [3, 0] and list(worse) == [1, 3]
    config = PreferencesConfig(file=str(file))
    sft = SFTConfig.model_validate({"datasets": [str(folder)], "batch_size": 4})
    found, figures = choose_pairs(
        config, policy_of(tmp_path), data, LoggedRun(tmp_path, sft, 0, ENV.env_spec(), lambda *_: None, lambda _: None)
    )
    assert figures["pairs"] == 2 and list(np.flatnonzero(np.isfinite(found.reference))) == [0, 1, 3]
    for wrong, message in (
        ('{"better": 3}', r"line 1: needs"),
        ('{"better": 3, "worse": 16}', r"0 to 15"),
        ('{"better": 3, "worse": 3}', r"two different episodes"),
        ('{"better": 3, "worse": 1, "dataset": "elsewhere"}', r"dataset 'elsewhere' is not one of"),
        ("", r"holds no pair"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            read_pairs(str(file), data.parts)
    with pytest.raises(ConfigError, match="not found"):
        read_pairs(str(tmp_path / "nowhere.jsonl"), data.parts)


def test_what_the_console_kept_in_the_datasets_is_read_from_all_of_them(data: BCDataset, tmp_path: Path) -> None:
    parts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        parts.append(replace(data.parts[0], path=tmp_path / name))
    with pytest.raises(ConfigError, match=r"recorded, but no dataset has a preferences\.jsonl: .*one, .*two"):
        read_pairs("recorded", parts)
    (tmp_path / "one/preferences.jsonl").write_text('{"better": 3, "worse": 1, "by": "anna"}\n')
    (tmp_path / "two/preferences.jsonl").write_text('{"better": 0, "worse": 2}\n')
    count = len(parts[0].starts)
    better, worse = read_pairs("recorded", parts)
    assert list(better) == [3, count] and list(worse) == [1, count + 2]
    better, _ = read_pairs(str(tmp_path / "two/preferences.jsonl"), parts)
    assert list(better) == [count], "a file in a dataset's folder speaks of that dataset"
