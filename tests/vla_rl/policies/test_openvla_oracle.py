"""Published OpenVLA checkpoints give the numbers of the reference implementation, at the fixtures' tolerances."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from openvla_oracle import arrays, as_images, close, load, observation, oracle

from vla_rl.policies.openvla.inputs import (
    apply_chain,
    center_crop,
    decode_jpeg,
    image_batch,
    jpeg_round_trip,
    lanczos_resize,
    prompt_batch,
)
from vla_rl.policies.openvla.network.network import token_positions
from vla_rl.policies.openvla.options import OPENVLA_CHAIN
from vla_rl.policies.openvla.tokenizer import ActionTokenizer, LlamaTokenizer, prompt_text
from vla_rl.policies.token_draws import decode
from vla_rl.types import ActionChunk

BASE, DISCRETE, L1 = "openvla_base", "openvla_oft_discrete", "openvla_oft_l1"
KEY = "libero_spatial_no_noops"
FIRST_ID = 31744


def to_chunk(ids: np.ndarray, horizon: int) -> ActionChunk:
    """Vocabulary ids (B, n) as a chunk."""
    tokens = (ids - FIRST_ID).reshape(len(ids), horizon, 7)
    return ActionChunk(np.zeros(tokens.shape, np.float32), tokens=tokens)


# --- the base model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case():
    return arrays(BASE, "case0.npz")


@pytest.fixture(scope="module")
def base(case):
    return load(BASE, {str(case["instruction"]): case["input_ids"].tolist()})


@pytest.fixture(scope="module")
def base_obs(case):
    return observation(case["image_224"][None, None], [str(case["instruction"])])


def test_pixels_are_normalized_for_each_tower(case, base):
    for tower, channels in zip(base.architecture.towers, (slice(0, 3), slice(3, 6)), strict=True):
        pixels = (case["image_224"] / 255 - np.array(tower.mean)) / np.array(tower.std)
        close(pixels.transpose(2, 0, 1), case["pixel_values"][0, channels], 1e-6)


@torch.no_grad()
def test_base_intermediates(case, base):
    images = torch.from_numpy(case["image_224"][None])
    features = base.network.vision_backbone(images, torch.float32)[0]
    close(features[:, :48], case["dino_patches"], 1e-5)
    close(features[:, 48:], case["siglip_patches"], 1e-5)
    close(base.network.projector(features), case["projected_patches"], 1e-5)


@torch.no_grad()
def test_base_greedy_tokens_logits_and_actions(case, base, base_obs):
    tokens, logits, _ = decode(base.network, [base._prefix(base_obs)], base.num_tokens, 0.0, None)
    np.testing.assert_array_equal(tokens[0].numpy() + FIRST_ID, case["action_tokens"])
    close(logits[0], case["action_logits"], 1e-4)
    chunk = base.act(base_obs, temperature=0.0)
    close(chunk.actions[0, 0], case["action_libero_env"], 1e-6)
    assert base.norm_stats is not None
    normalized = base.action_tokenizer.decode(tokens[0].numpy())
    close(normalized, case["action_normalized"], 1e-12)
    close(base.norm_stats.action.unnormalize_exact(normalized), case["action_unnormalized"], 1e-9)


@torch.no_grad()
def test_base_teacher_forced(case, base, base_obs):
    chunk = to_chunk(case["action_tokens"][None], 1)
    close(base.evaluate(base_obs, chunk).log_prob.flatten(), case["greedy_logprob_256"], 5e-5)
    prefix = base._prefix(base_obs)
    slots = base.network.embed_actions(torch.from_numpy(chunk.tokens.reshape(1, 7)))
    hidden = base.network._run(prefix, slots, causal=True, num_read=8)
    close(hidden[0], case["hidden_final_teacher_forced"][-8:], 1e-4)
    close(base.network.language_model.lm_head(hidden[0, 0]), case["full_logits_step0"], 1e-4)


def test_image_chain_stage_by_stage():
    stages = arrays(BASE, "preprocessing.npz")
    np.testing.assert_array_equal(decode_jpeg(stages["jpeg_bytes"].tobytes()), stages["jpeg_decoded"])
    np.testing.assert_array_equal(jpeg_round_trip(stages["rot180"]), stages["jpeg_decoded"])
    resized = lanczos_resize(torch.from_numpy(stages["jpeg_decoded"])[None], 224)[0].numpy().astype(int)
    difference = np.abs(resized - stages["lanczos224"])
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
    cropped = center_crop(torch.from_numpy(stages["lanczos224"])[None], 0.9)
    np.testing.assert_array_equal(cropped[0], stages["crop224"])
    whole = apply_chain(stages["raw"][None], OPENVLA_CHAIN.model_copy(update={"rotate": True}), 224)[0]
    difference = np.abs(whole.astype(int) - stages["crop224"])
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3


def test_prompts():
    prompts = json.loads((oracle(BASE) / "prompts.json").read_text())
    plain = [p for p in prompts if p["kind"] == "openvla"]
    assert len(plain) == 5
    for prompt in plain:
        assert prompt_text(prompt["instruction"]) == prompt["prompt"]
    folder = os.environ.get("VLA_RL_LLAMA_TOKENIZER")
    if not folder:
        pytest.skip("ids not checked: set VLA_RL_LLAMA_TOKENIZER to a folder with Llama-2's tokenizer.json")
    tokenizer = LlamaTokenizer(Path(folder), 32000)
    for prompt in plain:
        assert tokenizer.encode_prompt(prompt["instruction"]) == (*prompt["ids"], 29871)


def test_action_tokens_of_the_table():
    table = arrays(BASE, "action_tokenizer.npz")
    tokenizer = ActionTokenizer()
    np.testing.assert_array_equal(tokenizer.edges, table["bins"])
    np.testing.assert_array_equal(tokenizer.encode(table["encode_in"]) + FIRST_ID, table["encode_tokens"])
    inside = (table["decode_tokens"] >= FIRST_ID) & (table["decode_tokens"] < 32000)
    assert inside.sum() == 256
    close(tokenizer.decode(table["decode_tokens"] - FIRST_ID), table["decode_values"], 1e-15)


# --- OFT, discrete ------------------------------------------------------------------------------

SEMANTICS = {"expected_with_stop.npz": True, "expected_no_stop_rlinf.npz": False}


def discrete_parts(**chosen):
    inputs = arrays(DISCRETE, "inputs.npz")
    names = [str(text) for text in inputs["instructions"]]
    ids = {
        name: row[mask.astype(bool)].tolist()
        for name, row, mask in zip(names, inputs["input_ids_left"], inputs["attention_mask_left"], strict=True)
    }
    policy = load(DISCRETE, ids, decoder="parallel", **chosen)
    return policy, observation(as_images(inputs["pixel_values"]), names), inputs


@pytest.fixture(scope="module", params=SEMANTICS)
def discrete(request):
    policy, obs, inputs = discrete_parts(end_token=SEMANTICS[request.param])
    return policy, obs, inputs, arrays(DISCRETE, request.param)


@torch.no_grad()
def test_discrete_logits_tokens_and_actions(discrete):
    policy, obs, inputs, expected = discrete
    close(policy.network.prefix(*inputs_of(policy, obs)).embeddings[:, 1:257], inputs["projected_patches"], 1e-5)
    hidden, logits = policy._read(obs, None)
    close(logits, expected["logits"], 1e-4)
    close(hidden[:, 0], expected["hidden_at_29871"], 1e-4)
    chunk = policy.act(obs, temperature=0.0)
    assert chunk.tokens is not None and policy.norm_stats is not None
    np.testing.assert_array_equal(chunk.tokens.reshape(2, 56) + FIRST_ID, expected["greedy_tokens"])
    normalized = policy.action_tokenizer.decode(chunk.tokens)
    close(normalized, expected["greedy_actions_normalized"], 1e-12)
    unnormalized = policy.norm_stats.action.unnormalize_exact(normalized)
    close(unnormalized, expected["greedy_actions_unnormalized"], 1e-9)


def inputs_of(policy, obs):
    prompts = [policy.tokenizer.encode_prompt(text) for text in obs.instruction]
    images = image_batch(policy.prepare(obs), policy.cameras, 224, policy.device)
    return images, None, *prompt_batch(prompts, 32000, policy.device)


@torch.no_grad()
def test_discrete_likelihoods(discrete):
    policy, obs, _, expected = discrete
    output = policy.evaluate(obs, to_chunk(expected["sampled_tokens"], 8), 1.6)
    close(output.log_prob.flatten(1), expected["sampled_logprobs_T1p6"], 5e-5)
    close(output.entropy.flatten(1), expected["entropy_T1p6"], 5e-5)
    greedy = policy.evaluate(obs, to_chunk(expected["greedy_tokens"], 8), 1.6)
    close(greedy.log_prob.flatten(1), expected["greedy_logprobs_T1p6"], 5e-5)


@torch.no_grad()
def test_rlinf_positions_are_those_stored():
    policy, obs, inputs = discrete_parts(end_token=False)
    expected = arrays(DISCRETE, "expected_no_stop_rlinf.npz")
    *_, ids, _ = inputs_of(policy, obs)
    np.testing.assert_array_equal(ids.numpy(), inputs["input_ids_bos_then_pad"])
    valid = policy._prefix(obs).valid
    assert valid is not None
    valid = torch.nn.functional.pad(valid, (0, 56), value=True)
    np.testing.assert_array_equal(valid.numpy(), expected["multimodal_mask"])
    positions = token_positions(valid, valid.shape[1], valid.device).numpy()
    np.testing.assert_array_equal(positions[valid.numpy()], expected["position_ids"][valid.numpy()])


@torch.no_grad()
def test_wrongly_causal_is_what_the_control_shows():
    """The fault that costs users 40 points: were our decoder causal, it would give the control's logits."""
    policy, obs, _ = discrete_parts()
    expected = arrays(DISCRETE, "expected_with_stop.npz")
    prefix = policy._prefix(obs)
    hidden = policy.network._run(prefix, policy.network.placeholders(2), causal=True, num_read=56)
    wrong = policy.network.logits(hidden)
    close(wrong, expected["logits_if_wrongly_causal"], 1e-4)
    assert (wrong - policy._read(obs, None)[1]).abs().max() > 1.0


def test_discrete_gradients():
    policy, obs, _ = discrete_parts()
    expected = arrays(DISCRETE, "expected_with_stop.npz")
    gradients = arrays(DISCRETE, "expected_grad_with_stop.npz")
    loss = -policy.evaluate(obs, to_chunk(expected["sampled_tokens"], 8), 1.6).log_prob.mean()
    loss.backward()
    assert loss.item() == pytest.approx(float(gradients["loss"]), abs=1e-5)
    found = dict(policy.network.named_parameters())
    assert set(found) == set(gradients["names"].tolist())
    for name, norm, has_gradient in zip(gradients["names"], gradients["grad_l2"], gradients["has_grad"], strict=True):
        gradient = found[name].grad
        assert (gradient is not None) == bool(has_gradient), name
        if gradient is not None:
            assert gradient.norm().item() == pytest.approx(float(norm), rel=1e-4), name
    for key, stored in gradients.items():
        kind, _, name = key.partition("/")
        if kind == "grad":
            close(found[name].grad, stored, 1e-4 * np.abs(stored).max())
        elif kind == "grad_rows_31744_32000":
            close(found[name].grad[31744:32000], stored, 1e-4 * np.abs(stored).max())


# --- OFT, continuous ----------------------------------------------------------------------------


def l1_parts(**chosen):
    inputs = arrays(L1, "inputs.npz")
    name = str(inputs["instruction"])
    policy = load(L1, {name: inputs["input_ids"].tolist()}, norm_key=KEY, **chosen)
    images = np.stack([inputs["agentview_224"], inputs["wrist_224"]])[None]
    return policy, observation(images, [name], inputs["proprio_raw"][None]), inputs, arrays(L1, "expected.npz")


@torch.no_grad()
def test_l1_actions_and_intermediates():
    policy, obs, _, expected = l1_parts()
    assert policy.config.decoder == "l1" and policy.cameras == ("agentview", "wrist")
    assert policy.norm_stats is not None and policy.norm_stats.state is not None
    close(policy.norm_stats.state.normalize(obs.state)[0], expected["proprio_normalized"], 1e-6)
    prefix = policy._prefix(obs)
    close(prefix.embeddings[0, 1:513], expected["projected_patches"], 1e-5)
    close(prefix.embeddings[0, 513], expected["proprio_token"], 1e-5)
    hidden = policy.network.hidden(prefix, None)
    close(hidden[0], expected["action_hidden_states"], 1e-4)
    chunk = policy.act(obs, temperature=0.0)
    assert chunk.path is not None and chunk.tokens is None and chunk.log_prob is None
    close(chunk.path[0], expected["action_normalized"], 2e-5)
    close(policy.norm_stats.action.unnormalize_exact(chunk.path[0]), expected["action_unnormalized"], 2e-5)
    close(chunk.actions[0], expected["action_libero_env"], 2e-5)


@torch.no_grad()
@pytest.mark.parametrize("control", ["neg_swapped_views", "neg_causal"])
def test_l1_wrong_set_ups_are_what_the_controls_show(control):
    policy, obs, _, expected = l1_parts(gripper="environment")
    right = policy.act(obs, temperature=0.0).actions[0]
    close(right, expected["action_unnormalized"], 2e-5)
    if control == "neg_swapped_views":
        swapped = {"agentview": obs.images["wrist"], "wrist": obs.images["agentview"]}
        wrong = policy.act(type(obs)(swapped, obs.state, obs.instruction), temperature=0.0).actions[0]
    else:
        prefix = policy._prefix(obs)
        hidden = policy.network._run(prefix, policy.network.placeholders(1), causal=True, num_read=56)
        assert policy.network.action_head is not None and policy.norm_stats is not None
        wrong = policy.norm_stats.action.unnormalize(policy.network.action_head(hidden)[0].numpy())
    close(wrong, expected[control], 2e-5)
    assert np.abs(wrong - right).max() > 1e-3


@torch.no_grad()
def test_l1_without_the_state():
    policy, obs, _, expected = l1_parts(use_state=False, gripper="environment")
    close(policy.act(obs, temperature=0.0).actions[0], expected["neg_no_proprio"], 2e-5)


def test_the_fixtures_are_whole():
    for name in (BASE, DISCRETE, L1):
        folder = oracle(name)
        for line in (folder / "SHA256SUMS").read_text().splitlines():
            digest, file = line.split()
            assert hashlib.sha256((folder / file.lstrip("*")).read_bytes()).hexdigest() == digest, f"{name}/{file}"
