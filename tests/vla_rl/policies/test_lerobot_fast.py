"""pi0-FAST behind our policy: LeRobot's logits and actions, one likelihood a chunk, saved so that LeRobot loads it."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import validate
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig, describe
from vla_rl.policies.lerobot.fast_tokens import read_as_data
from vla_rl.policies.lerobot.tiny import tiny_pi
from vla_rl.policies.load import load_policy
from vla_rl.types import ActionChunk

SPEC = fake_env_spec()
CHUNK = 4


def make(**options):
    values = {"type": "pi0_fast", "preset": "tiny", "image_size": 32, "chunk_size": CHUNK, **options}
    policy = validate(LeRobotConfig, values, prefix="policy").build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


def demonstrations():
    time = np.linspace(0, 1, CHUNK)[None, :, None]
    start = np.random.default_rng(0).uniform(-0.8, 0.8, (3, 1, 7))
    return fake_observation(SPEC, 3), (start * (1 - 0.5 * time)).astype(np.float32)


@pytest.fixture(scope="module")
def policy():
    """One that has learned to write action tokens: LeRobot's own sampler fails on what does not begin with "Action"."""
    policy = make(value_head=True)
    obs, actions = demonstrations()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for _ in range(40):
        loss, _ = policy.bc_loss(obs, actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def theirs_as_it_is_built():
    stack = ExitStack()
    stack.enter_context(tiny_pi("pi0_fast", image_size=32))
    stack.enter_context(read_as_data())
    return stack


def test_greedy_is_lerobots_sampler(policy):
    obs, _ = demonstrations()
    chunk = policy.act(obs, temperature=0.0)
    batch = policy._batch(obs)
    for cached in (True, False):
        policy.core.config.use_kv_cache = cached
        theirs = policy.postprocessor(policy.core.predict_action_chunk(dict(batch))).numpy()
        np.testing.assert_allclose(chunk.actions, theirs, atol=1e-5)
    policy.core.config.use_kv_cache = True
    policy.core.reset()
    first = policy.postprocessor(policy.core.select_action(dict(batch))).numpy()
    np.testing.assert_allclose(chunk.actions[:, 0], first, atol=1e-5)
    lengths = (chunk.tokens >= 0).sum(1)
    assert lengths.min() > 4 and chunk.tokens.max() == policy.network.end
    assert np.abs(chunk.actions - chunk.actions[:1]).max() > 0.1, "they are chunks, and not one and the same"


def test_logits_are_lerobots(policy):
    """Those of each step of LeRobot's own sampler, which runs the whole sequence again for every token."""
    obs, _ = demonstrations()
    batch, seen = policy._batch(obs), []
    head = policy.network.towers.paligemma.lm_head
    hook = head.register_forward_hook(lambda module, inputs, output: seen.append(output[:, -1]))
    images, masks = policy.core._preprocess_images(batch)
    words, mask = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
    policy.core.model.sample_actions_fast(images, masks, words, mask, max_decoding_steps=12, temperature=0.0)
    hook.remove()
    given = len(policy.network.start)
    theirs = torch.stack(seen[given:], 1)[..., policy.network.ids]
    tokens = torch.from_numpy(policy.act(obs, temperature=0.0).tokens[:, : 12 - given])
    tokens = torch.where(tokens < 0, policy.network.end, tokens)
    with torch.no_grad():
        ours = policy.network.logits(policy.network.read(batch, tokens[:, :-1]).hidden)
    shortest = int((tokens != policy.network.end).sum(1).min()) + 1  # Behind the end LeRobot writes what it likes.
    assert shortest > 3
    np.testing.assert_allclose(ours[:, :shortest], theirs[:, :shortest], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_the_likelihood_of_a_chunk_is_of_all_its_tokens(policy, temperature):
    obs, _ = demonstrations()
    chunk = policy.act(obs, torch.Generator().manual_seed(1), temperature)
    assert len(set((chunk.tokens >= 0).sum(1))) > 1, "chunks of different lengths"
    together = policy.evaluate(obs, chunk, temperature)
    np.testing.assert_allclose(together.log_prob.detach(), chunk.log_prob, atol=1e-4)
    np.testing.assert_allclose(together.value.detach(), chunk.value, atol=1e-5)
    assert np.count_nonzero(chunk.log_prob[:, 0, 0]) == 3 == np.count_nonzero(chunk.log_prob)
    for i in range(3):
        tokens = torch.from_numpy(chunk.tokens[i : i + 1])
        tokens = tokens[:, : int((tokens >= 0).sum())]
        with torch.no_grad():
            hidden = policy.network.read(policy._batch(obs.select([i])), tokens[:, :-1]).hidden
        each = torch.log_softmax(policy.network.logits(hidden) / temperature, -1)[0]
        by_hand = sum(each[n, token].item() for n, token in enumerate(tokens[0]))
        assert chunk.log_prob[i, 0, 0] == pytest.approx(by_hand, abs=1e-3)
        alone = policy.evaluate(obs.select([i]), chunk.select([i]), temperature)
        np.testing.assert_allclose(alone.log_prob.detach()[0], together.log_prob.detach()[i], atol=1e-3)


def test_draws_come_as_often_as_their_likelihood_says(policy):
    obs = demonstrations()[0].select([0] * 150)
    chunk = policy.act(obs, torch.Generator().manual_seed(0), 2.0)
    first, counts = np.unique(chunk.tokens[:, 0], return_counts=True)
    with torch.no_grad():
        logits = policy.network.logits(policy.network.read(policy._batch(obs.select([0])), None).hidden)[0, 0]
    expected = torch.softmax(logits / 2.0, -1)[first].numpy()
    assert np.abs(counts / 150 - expected).max() < 0.1


def test_chunks_that_are_none(policy):
    """Too few or too many coefficients as LeRobot's rule has it; bytes that are no character: zeros, not nonsense."""
    from lerobot.policies.molmoact2.molmoact2_hf_model.action_tokenizer import UniversalActionProcessor

    network = policy.network
    short = network.actions(torch.tensor([[3, network.end, -1]]))
    assert torch.isfinite(short).all() and short.abs().max() > 0
    assert network.actions(torch.tensor([[5] * 60])).shape == (1, CHUNK, 7)
    before, end = policy.core.action_tokenizer, network.end
    rng = np.random.default_rng(0)
    wide = UniversalActionProcessor.fit(list(rng.uniform(-1, 1, (50, CHUNK, 7))), scale=100, vocab_size=1024)
    lead = next(n for n in range(1024) if "\ufffd" in wide.bpe_tokenizer.decode([n]))
    whole = wide(np.full((1, CHUNK, 7), 0.3))[0]
    policy.core.action_tokenizer, network.end = wide, 1024
    try:
        np.testing.assert_allclose(network.actions(torch.tensor([whole])), 0.3, atol=0.02)
        assert network.actions(torch.tensor([[lead, *whole]])).abs().max() == 0
    finally:
        policy.core.action_tokenizer, network.end = before, end


def test_the_cloning_loss_is_lerobots_and_the_end_is_held(policy):
    obs, actions = demonstrations()
    loss, metrics = policy.bc_loss(obs, actions)
    theirs, _ = policy.core.forward(policy._batch(obs, actions))
    assert float(loss.detach()) == float(theirs.detach()) == float(metrics["token_loss"])
    valid = np.ones((3, CHUNK), bool)
    valid[:, 2:] = False
    held = actions.copy()
    held[:, 2:] = held[:, 1:2]
    actions[:, 2:] = 0.9
    assert float(policy.bc_loss(obs, actions, valid)[0].detach()) == float(policy.bc_loss(obs, held)[0].detach())


def test_lerobot_loads_what_we_save_wherever_it_is_moved(policy, tmp_path, monkeypatch):
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    policy.save(tmp_path / "made" / "policy")
    folder = Path(shutil.move(tmp_path / "made" / "policy", tmp_path / "moved"))
    shutil.rmtree(tmp_path / "made")
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()]
    obs, _ = demonstrations()
    expected = policy.act(obs, temperature=0.0)
    monkeypatch.chdir(folder)  # Its names are relative, and LeRobot looks them up from the current folder.
    with theirs_as_it_is_built():
        theirs = get_policy_class("pi0_fast").from_pretrained(folder)
        own = {"action_tokenizer_processor": {"paligemma_tokenizer_name": "./tokenizer"}}  # LeRobot does not save it.
        before, after = make_pre_post_processors(theirs.config, pretrained_path=str(folder), preprocessor_overrides=own)
    for name, value in policy.core.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value), name
    batch = {"task": obs.instruction, "observation.state": torch.from_numpy(obs.state)}
    batch["observation.images.agentview"] = torch.from_numpy(obs.images["agentview"]).permute(0, 3, 1, 2) / 255
    np.testing.assert_allclose(expected.actions, after(theirs.predict_action_chunk(before(batch))), atol=1e-5)
    monkeypatch.chdir(tmp_path)
    again = load_policy(folder)
    np.testing.assert_array_equal(again.act(obs, temperature=0.0).tokens, expected.tokens)
    _, actions = demonstrations()
    assert float(again.bc_loss(obs, actions)[0].detach()) == float(policy.bc_loss(obs, actions)[0].detach())


def test_code_beside_the_tokenizer_is_not_run(policy, tmp_path):
    policy.save(tmp_path / "policy")
    file = tmp_path / "policy" / "action_tokenizer" / "processor_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "auto_map": {"AutoProcessor": "code.Processor"}}))
    (file.parent / "code.py").write_text("raise SystemExit('this was run')")
    again: Any = load_policy(tmp_path / "policy")
    assert again.network.end == policy.network.end


def test_tokenizers_that_are_not_at_hand_are_named(policy, tmp_path):
    policy.save(tmp_path / "policy")
    shutil.copytree(tmp_path / "policy" / "action_tokenizer", tmp_path / "fast")
    shutil.rmtree(tmp_path / "policy" / "action_tokenizer")
    with pytest.raises(ValueError, match=r"policy\.action_tokenizer=FOLDER"):
        load_policy(tmp_path / "policy")
    given = LeRobotConfig(path=str(tmp_path / "policy"), action_tokenizer=str(tmp_path / "fast"))
    again: Any = given.build(SPEC)
    assert again.network.end == policy.network.end


def test_what_it_is(policy, tmp_path):
    policy.save(tmp_path / "policy")
    info = describe(tmp_path / "policy")
    assert info is not None and "GRPO" in info.rl and "FAST" in info.facts["decoder"]
    assert "ratio_level: chunk" in info.rl_reason
    GRPOConfig(ratio_level="chunk").build(policy)
    with pytest.raises(ValueError, match=r"algo\.ratio_level: got 'token', but a chunk .* one likelihood"):
        GRPOConfig().build(policy)
    obs = demonstrations()[0]
    chunk = policy.act(obs)
    for tokens in (None, chunk.tokens[:, :5], np.full_like(chunk.tokens, policy.network.end + 1)):
        with pytest.raises(ValueError, match=r"chunk\.tokens"):
            policy.evaluate(obs, ActionChunk(chunk.actions, tokens=tokens))
