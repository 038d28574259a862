"""Training-time real-time chunking: what the loss is of, what the network is told, what it learns, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError, build_component
from vla_rl.interfaces import ContinuingPolicy
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.load import describe, load_policy
from vla_rl.types import ActionPrefix

SPEC = fake_env_spec(image_size=32)
SMALL = {"kind": "openvla", "preset": "tiny", "image_size": 32, "precision": "fp32"}


def plain(folder: Path, **options: Any) -> Any:
    """A fresh OpenVLA policy, saved in the folder."""
    policy: Any = build_component("policy", SMALL | {"chunk_size": 4} | options).build(SPEC)
    policy.set_norm_stats(fake_statistics(7, gripper=False), fake_statistics(8, gripper=False))
    policy.save(folder)
    return policy.eval()


def told(folder: Path, **options: Any) -> Any:
    return build_component("policy", {"kind": "prefix_conditioned", "path": str(folder), **options}).build(SPEC).eval()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A plain policy, and the same that can be told."""
    folder = tmp_path_factory.mktemp("plain") / "policy"
    return plain(folder), told(folder, max_delay=2)


def actions_of(rows: int, length: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-0.9, 0.9, (rows, length, 7)).astype(np.float32)


def test_the_loss_is_of_the_actions_that_are_not_given(pair) -> None:
    """In evaluation mode rows are given 0, 1, 2, 0 actions: the loss is of 4, 3, 2 and 4 of them, 7 numbers each."""
    policy = pair[1]
    obs, actions = fake_observation(SPEC, 4), actions_of(4)
    with policy._telling(torch.tensor([0, 1, 2, 0])):
        _, losses, _, _ = policy._bc_terms(obs, policy._from_env(actions, policy.norm_stats))
    left = [losses[0], losses[1, 1:], losses[2, 2:], losses[3]]
    expected = torch.cat([each.reshape(-1) for each in left]).mean()
    loss, _ = policy.bc_loss(obs, actions)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    valid = np.ones((4, 4), bool)
    valid[1, 3] = valid[3] = False
    loss, _ = policy.bc_loss(obs, actions, valid)
    left = [losses[0], losses[1, 1:3], losses[2, 2:]]
    expected = torch.cat([each.reshape(-1) for each in left]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_in_training_how_many_are_given_is_drawn_evenly(pair, monkeypatch) -> None:
    policy, drawn, telling = pair[1], [], pair[1]._telling
    monkeypatch.setattr(policy, "_telling", lambda delays: drawn.append(delays) or telling(delays))
    monkeypatch.setattr(policy, "training", True)
    torch.manual_seed(0)
    policy.bc_loss(fake_observation(SPEC, 60), actions_of(60))
    counts = torch.bincount(drawn[0]).tolist()
    assert len(counts) == 3 and min(counts) > 10, "0 to max_delay, about 20 each"


def test_the_network_is_told_the_frozen_actions_and_no_others(pair, monkeypatch) -> None:
    """By the output layer's rows of their tokens, the vocabulary's last 256: the first is of 1, the last of -1."""
    policy, network, slots = pair[1], pair[1].network, []
    rest = np.repeat(np.array([[1.0], [-1.0], [0.0]], np.float32)[None], 7, 2)
    run = network._run
    monkeypatch.setattr(network, "_run", lambda prefix, given, *rest: slots.append(given) or run(prefix, given, *rest))
    chunk = policy.act_with_prefix(fake_observation(SPEC, 1), ActionPrefix(rest, 1)).actions
    policy.act_with_prefix(fake_observation(SPEC, 1), ActionPrefix(rest, 3))
    rows = network.language_model.lm_head.weight[policy.architecture.llm.vocab_size - 256 :]
    for given, tokens in zip(slots, ([0], [0, 255]), strict=True):
        added = (given - network.placeholders(1))[0].detach()
        assert len(added) == 29, "4 actions of 7 numbers, and </s>"
        expected = torch.zeros_like(added)
        expected[: 7 * len(tokens)] = rows[tokens].detach().repeat_interleave(7, 0)
        torch.testing.assert_close(added, expected, msg=f"told {tokens}: no more than in cloning")
    np.testing.assert_array_equal(chunk[:, :1], rest[:, :1])


def test_told_nothing_it_acts_as_any_other(pair) -> None:
    base, policy = pair
    obs, rest = fake_observation(SPEC, 2), actions_of(2, 3)
    assert isinstance(policy, ContinuingPolicy) and not isinstance(base, ContinuingPolicy)
    expected = base.act(obs, temperature=0.0).actions
    np.testing.assert_array_equal(policy.act(obs, temperature=0.0).actions, expected)
    np.testing.assert_array_equal(policy.act_with_prefix(obs, ActionPrefix(rest, 0)).actions, expected)


def test_it_learns_to_go_on_as_it_has_begun(tmp_path) -> None:
    """Demonstrations go left or right, by nothing that is seen: only what is under way tells which."""
    torch.manual_seed(0)
    plain(tmp_path / "plain", chunk_size=3)
    policy = told(tmp_path / "plain", max_delay=1).train()
    obs, side = fake_observation(SPEC, 8), np.array([-0.5, 0.5] * 4, np.float32)
    actions = np.broadcast_to(side[:, None, None], (8, 3, 7)).copy()
    seen = obs.select([0] * 8)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), 2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        policy.bc_loss(seen, actions)[0].backward()
        optimizer.step()
    policy.eval()
    chunk = policy.act_with_prefix(seen.select([0, 1]), ActionPrefix(actions[:2, :1], 1)).actions
    np.testing.assert_allclose(chunk, actions[:2], atol=0.02)


def test_it_is_kept(tmp_path) -> None:
    plain(tmp_path / "plain")
    policy = told(tmp_path / "plain", max_delay=3)
    policy.save(tmp_path / "told")
    again: Any = load_policy(tmp_path / "told")
    assert again.max_delay == 3 and told(tmp_path / "told", max_delay=2).max_delay == 2
    obs, prefix = fake_observation(SPEC, 2), ActionPrefix(actions_of(2, 2), 2)
    np.testing.assert_array_equal(
        again.act_with_prefix(obs, prefix).actions, policy.act_with_prefix(obs, prefix).actions
    )
    info = describe(tmp_path / "told")
    assert info.facts["longest delay"] == "3 actions" and info.rl == () and "RL would train it" in info.rl_reason
    (tmp_path / "told" / "config.json").write_text('{"kind": "prefix_conditioned"}')
    with pytest.raises(ValueError, match="max_delay is None"):
        load_policy(tmp_path / "told")


def test_refusals(tmp_path, pair) -> None:
    plain(tmp_path / "plain")
    plain(tmp_path / "one_by_one", decoder="autoregressive")
    with pytest.raises(ConfigError, match="starts from a cloned one"):
        build_component("policy", {"kind": "prefix_conditioned"}).build(SPEC)
    with pytest.raises(ConfigError, match="max_delay: got None, must be 1 to 3"):
        told(tmp_path / "plain")
    with pytest.raises(ConfigError, match="max_delay: got 4"):
        told(tmp_path / "plain", max_delay=4)
    with pytest.raises(ConfigError, match="decodes by 'autoregressive'"):
        told(tmp_path / "one_by_one", max_delay=1)
    for prefix, message in (
        (ActionPrefix(actions_of(1, 2), 1), "got shape"),
        (ActionPrefix(actions_of(2, 5), 1), "1 to 4 actions"),
        (ActionPrefix(actions_of(2, 2), 3), "num_frozen: got 3, must be 0 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            pair[1].act_with_prefix(fake_observation(SPEC, 2), prefix)
