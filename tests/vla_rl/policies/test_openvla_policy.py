"""The OpenVLA policy: likelihoods, batches, decoders, cloning, what is trained, messages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError, validate
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.token_draws import draw
from vla_rl.types import ActionChunk

SPEC = fake_env_spec(image_size=32)
DECODERS = [
    ("parallel", 8, "learned"),
    ("parallel", 2, "zero"),
    ("autoregressive", 1, "learned"),
    ("autoregressive", 3, "learned"),
]


def make(decoder="parallel", chunk_size=8, placeholder="learned", spec=SPEC, seed=0, **kwargs) -> OpenVLAPolicy:
    kwargs = {"precision": "fp32", "image_size": 32, **kwargs}
    config = OpenVLAConfig(decoder=decoder, chunk_size=chunk_size, placeholder=placeholder, **kwargs)
    policy = config.build(spec, seed=seed)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


def sharpen(policy: OpenVLAPolicy) -> OpenVLAPolicy:
    """Random embeddings and output layer, so that a fresh network's output depends on all of its inputs."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5)
    return policy


@pytest.mark.parametrize(("decoder", "chunk_size", "placeholder"), DECODERS)
@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_evaluate_gives_the_log_prob_and_value_of_act(decoder, chunk_size, placeholder, temperature):
    policy = sharpen(make(decoder, chunk_size, placeholder, value_head=True))
    obs = fake_observation(SPEC, 5)
    chunk = policy.act(obs, torch.Generator().manual_seed(0), temperature)
    output = policy.evaluate(obs, chunk, temperature)
    assert chunk.log_prob is not None and chunk.value is not None and output.value is not None
    np.testing.assert_allclose(output.log_prob.detach().numpy(), chunk.log_prob, atol=1e-5)
    np.testing.assert_allclose(output.value.detach().numpy(), chunk.value, atol=1e-5)
    assert output.log_prob.requires_grad and output.entropy.min() >= 0


@pytest.mark.parametrize(("decoder", "chunk_size", "placeholder"), DECODERS)
def test_a_batch_of_different_instructions_equals_one_by_one(decoder, chunk_size, placeholder):
    policy = sharpen(make(decoder, chunk_size, placeholder))
    obs = fake_observation(SPEC, 6)
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    together = policy.evaluate(obs, chunk).log_prob.detach().numpy()
    for i in range(6):
        alone = policy.evaluate(obs.select([i]), chunk.select([i])).log_prob.detach().numpy()
        np.testing.assert_allclose(alone[0], together[i], atol=1e-5, err_msg=f"row {i}")
    greedy = policy.act(obs, temperature=0.0)
    assert greedy.log_prob is None
    alone = [policy.act(obs.select([i]), temperature=0.0).actions for i in range(6)]
    np.testing.assert_array_equal(np.concatenate(alone), greedy.actions)


def test_it_fits_the_environment_it_was_made_for_and_none_with_other_actions():
    policy = make()
    policy.check_env(SPEC)
    with pytest.raises(ConfigError, match="action"):
        policy.check_env(replace(SPEC, action_dim=6))


def test_bf16_is_near_fp32():
    obs = fake_observation(SPEC, 4)
    chunk = ActionChunk(np.zeros((4, 8, 7), np.float32), tokens=np.full((4, 8, 7), 3))
    log_probs = [sharpen(make(precision=p)).evaluate(obs, chunk).log_prob.detach() for p in ("fp32", "bf16")]
    spread = log_probs[0].std()
    assert log_probs[1].dtype == torch.float32
    assert 0 < (log_probs[0] - log_probs[1]).abs().mean() < 0.1 * spread


@pytest.mark.parametrize(("decoder", "chunk_size", "placeholder"), DECODERS)
def test_everything_given_matters(decoder, chunk_size, placeholder):
    policy = sharpen(make(decoder, chunk_size, placeholder))
    obs = fake_observation(SPEC, 1)
    chunk = policy.act(obs, temperature=0.0)
    base = policy.evaluate(obs, chunk).log_prob.detach()
    other = fake_observation(SPEC, 1, seed=1)
    for name in ("images", "state"):
        changed = type(obs)(**{**vars(obs), name: getattr(other, name)})
        assert (policy.evaluate(changed, chunk).log_prob - base).abs().max() > 1e-3, name
    changed = type(obs)(obs.images, obs.state, ["push the blue block to the zone"])
    assert (policy.evaluate(changed, chunk).log_prob - base).abs().max() > 1e-3


def test_the_first_autoregressive_token_does_not_see_later_ones():
    policy = sharpen(make("autoregressive", 2))
    obs = fake_observation(SPEC, 1)
    tokens = np.full((1, 2, 7), 100)
    later = tokens.copy()
    later[0, 1, 3] = 7
    zeros = np.zeros((1, 2, 7), np.float32)
    first, second = (policy.evaluate(obs, ActionChunk(zeros, tokens=t)).log_prob.detach()[0] for t in (tokens, later))
    assert torch.equal(first.flatten()[:10], second.flatten()[:10])
    assert (first.flatten()[10:] - second.flatten()[10:]).abs().min() > 0


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([[1.0, -2.0, 0.5, float("-inf")], [0.0, 0.0, 3.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    drawn = draw(logits.expand(20_000, 2, 4), 0.7, generator)
    frequencies = torch.stack([(drawn == k).float().mean(0) for k in range(4)], -1)
    expected = (logits / 0.7).softmax(-1)
    # Four standard errors of a frequency over 20,000 draws are at most 0.014.
    torch.testing.assert_close(frequencies, expected, atol=0.015, rtol=0)
    assert frequencies[0, 3] == 0, "an impossible token is never drawn"
    assert draw(logits, 0.0, None).tolist() == [0, 2]


def test_entropy_and_temperature_by_hand():
    policy = make(chunk_size=1, action_bins=16)
    rows = fake_observation(SPEC, 1).select(np.zeros(16, dtype=int))
    tokens = np.arange(16).reshape(16, 1, 1) * np.ones((1, 1, 7), np.int64)
    chunk = ActionChunk(np.zeros((16, 1, 7), np.float32), tokens=tokens)
    with torch.no_grad():
        one, two = policy.evaluate(rows, chunk, 1.0), policy.evaluate(rows, chunk, 2.0)
    torch.testing.assert_close(one.log_prob.exp().sum(0), torch.ones(1, 7), msg="all tokens together are certain")
    torch.testing.assert_close(one.entropy[0], -(one.log_prob.exp() * one.log_prob).sum(0), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close((one.log_prob / 2).log_softmax(0), two.log_prob, atol=1e-4, rtol=1e-4)


def test_two_cameras_and_no_state():
    spec = fake_env_spec(("agentview", "wrist"))
    policy = sharpen(make(spec=spec, cameras=("wrist", "agentview"), use_state=False))
    obs = fake_observation(spec, 2)
    swapped = type(obs)(
        {"agentview": obs.images["wrist"], "wrist": obs.images["agentview"]}, obs.state, obs.instruction
    )
    chunk = policy.act(obs, temperature=0.0)
    assert not policy.uses_state
    assert (policy.evaluate(obs, chunk).log_prob - policy.evaluate(swapped, chunk).log_prob).abs().max() > 1e-3


def test_images_of_another_size_are_resized():
    policy = make()
    large = fake_env_spec(image_size=128)
    flat = fake_observation(large, 2)
    flat.images["agentview"][:] = 77
    small = type(flat)({"agentview": flat.images["agentview"][:, :32, :32]}, flat.state, flat.instruction)
    np.testing.assert_array_equal(policy.act(flat, temperature=0).tokens, policy.act(small, temperature=0).tokens)


@pytest.mark.parametrize(("decoder", "chunk_size"), [("parallel", 2), ("autoregressive", 1)])
def test_learns_a_small_batch(decoder, chunk_size):
    policy = make(decoder, chunk_size, keyframe_loss_weight=0.1)
    obs = fake_observation(SPEC, 4)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (4, chunk_size, 7)).astype(np.float32)
    keyframe = rng.uniform(-1, 1, (4, 3)).astype(np.float32)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=2e-3)
    metrics = first = policy.bc_loss(obs, actions, None, keyframe)[1]
    for _ in range(100):
        loss, metrics = policy.bc_loss(obs, actions, None, keyframe)
        if metrics["token_accuracy"] > 0.99:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert metrics["token_accuracy"] > 0.95
    assert metrics["keyframe_loss"] < 0.5 * first["keyframe_loss"]
    drawn = policy.act(obs, temperature=0.0).actions
    assert np.abs(drawn - actions).mean() < 0.05, "what is cloned is what is acted"


def test_bc_loss_by_hand_and_valid_mask():
    policy = make(chunk_size=2)
    obs = fake_observation(SPEC, 3)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 2, 7)).astype(np.float32)
    assert policy.norm_stats is not None
    tokens = policy.action_tokenizer.encode(policy.norm_stats.action.normalize(actions))
    log_prob = policy.evaluate(obs, ActionChunk(actions, tokens=tokens)).log_prob.detach().numpy()
    valid = np.array([[True, True], [True, False], [False, False]])
    loss, _ = policy.bc_loss(obs, actions, valid)
    assert loss.item() == pytest.approx(-log_prob[valid].mean(), abs=1e-5)
    changed = np.where(valid[..., None], actions, 0.3).astype(np.float32)
    assert policy.bc_loss(obs, changed, valid)[0].item() == pytest.approx(loss.item(), abs=1e-6)
    assert policy.bc_loss(obs, actions, np.zeros((3, 2), bool))[0].item() == 0.0


def test_value_head_can_be_cut_from_the_network():
    obs = fake_observation(SPEC, 2)
    for detach in (False, True):
        policy = make(value_head=True, value_detach=detach)
        value = policy.evaluate(obs, policy.act(obs)).value
        assert value is not None
        value.sum().backward()
        touched = {n for n, p in policy.network.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert all(n.startswith("value_head.") for n in touched) == detach
        assert "value_head.fc3.weight" in touched


def test_only_what_is_computed_is_trained():
    policy = make(value_head=True, keyframe_loss_weight=0.1)
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs)
    output = policy.evaluate(obs, chunk)
    loss, _ = policy.bc_loss(obs, chunk.actions, keyframe=np.zeros((2, 3)))
    assert output.value is not None
    (loss + output.value.sum()).backward()
    trained = {id(p) for p in policy.trainable_parameters()}
    for name, parameter in policy.network.named_parameters():
        assert (parameter.grad is not None) == (id(parameter) in trained) == parameter.requires_grad, name


def test_frozen_vision():
    policy = make(trainable="frozen_vision")
    names = {id(p): n for n, p in policy.network.named_parameters()}
    trained = {names[id(p)] for p in policy.trainable_parameters()}
    assert not any(n.startswith("vision_backbone.") for n in trained)
    assert {"projector.fc1.weight", "language_model.lm_head.weight", "placeholder.weight"} <= trained


def test_tiny_is_tiny():
    total = sum(p.numel() for p in make().network.parameters())
    assert 2.0e6 < total < 5.0e6


def test_lora_starts_as_the_base_and_merges_into_it():
    obs = fake_observation(SPEC, 2)
    base = make()
    policy = make(lora={"rank": 4, "vision": True}, trainable="lora")
    np.testing.assert_array_equal(policy.act(obs, temperature=0).tokens, base.act(obs, temperature=0).tokens)
    assert sum(p.numel() for p in policy.trainable_parameters()) < 0.2 * sum(p.numel() for p in base.parameters())
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=5.0)
    for _ in range(2):
        policy.bc_loss(obs, np.zeros((2, 8, 7), np.float32))[0].backward()
        optimizer.step()
    chunk = policy.act(obs)
    adapted = policy.evaluate(obs, chunk).log_prob.detach()
    assert (adapted - base.evaluate(obs, chunk).log_prob).abs().max() > 1e-3
    policy.merge_lora()
    torch.testing.assert_close(policy.evaluate(obs, chunk).log_prob.detach(), adapted, atol=1e-4, rtol=1e-4)
    assert set(policy.network.state_dict()) == set(base.network.state_dict())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presett": "tiny"}, r"policy.presett: unknown key.*Did you mean 'preset'"),
        ({"decoder": "serial"}, r"policy.decoder: got 'serial'.*'parallel', 'autoregressive' or 'l1'"),
        ({"trainable": "lora"}, r"policy.trainable: got 'lora', but policy.lora is not set"),
        ({"cameras": ["wrist", "wrist"]}, r"policy.cameras.*named twice"),
    ],
)
def test_wrong_configs(values, message):
    with pytest.raises(ConfigError, match=message):
        validate(OpenVLAConfig, {"kind": "openvla", **values}, prefix="policy")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image_size": 60}, "policy.image_size: got 60, must be a multiple of 8"),
        ({"action_bins": 500}, "policy.action_bins: got 500, at most 384"),
        ({"cameras": ("front",)}, r"policy.cameras: \['front'\] not in environment 'fake', which has \['agentview'\]"),
        (
            {"lora": {"targets": ["query"]}, "trainable": "lora"},
            r"policy.lora.targets: got \['query'\], allowed: down_proj",
        ),
    ],
)
def test_configs_that_do_not_fit(values, message):
    with pytest.raises(ConfigError, match=message):
        OpenVLAConfig(**values).build(SPEC)


def test_wrong_inputs():
    policy = OpenVLAConfig(precision="fp32").build(SPEC)
    obs = fake_observation(SPEC, 2)
    with pytest.raises(ValueError, match="no action statistics yet"):
        policy.act(obs)
    with pytest.raises(ValueError, match="reads the state"):
        policy.set_norm_stats(fake_statistics(7))
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8))
    with pytest.raises(ValueError, match=r"lacks the images of \['agentview'\]; it has \['front'\]"):
        policy.act(type(obs)({"front": obs.images["agentview"]}, obs.state, obs.instruction))
    with pytest.raises(ValueError, match=r"state has shape \(2, 3\), this policy expects \(B, 8\)"):
        policy.act(type(obs)(obs.images, obs.state[:, :3], obs.instruction))
    with pytest.raises(ValueError, match="temperature: got -1"):
        policy.act(obs, temperature=-1)
    with pytest.raises(ValueError, match="temperature: got 0"):
        policy.evaluate(obs, policy.act(obs), temperature=0)
    with pytest.raises(ValueError, match=r"chunk.tokens: None"):
        policy.evaluate(obs, ActionChunk(np.zeros((2, 8, 7), np.float32)))
    with pytest.raises(ValueError, match=r"actions: shape \(2, 3, 7\), expected \(B, 8, 7\)"):
        policy.bc_loss(obs, np.zeros((2, 3, 7), np.float32))


@pytest.mark.parametrize(
    ("decoder", "laplace"), [("parallel", None), ("autoregressive", None), ("l1", {}), ("l1", None)]
)
def test_fewer_actions_than_a_chunk_are_its_first_ones(decoder, laplace):
    whole, fewer = (
        sharpen(make(decoder, 4, laplace=laplace, num_actions=number, value_head=True)) for number in (None, 3)
    )
    obs, generator = fake_observation(SPEC, 2), torch.Generator().manual_seed(0)
    np.testing.assert_array_equal(
        fewer.act(obs, temperature=0.0).actions, whole.act(obs, temperature=0.0).actions[:, :3]
    )
    assert (fewer.chunk_size, fewer.demonstration_size) == (3, 4)
    chunk = fewer.act(obs, generator)
    assert chunk.actions.shape == (2, 3, 7)
    if decoder != "l1" or laplace is not None:
        assert chunk.log_prob is not None
        output = fewer.evaluate(obs, chunk)
        assert output.log_prob.shape == output.entropy.shape == (2, 3, 7)
        np.testing.assert_allclose(output.log_prob.detach().numpy(), chunk.log_prob, atol=1e-5)
    actions = np.zeros((2, 4, 7), np.float32)
    assert fewer.bc_loss(obs, actions)[0] == whole.bc_loss(obs, actions)[0]


def test_more_actions_than_a_chunk_has_are_refused():
    with pytest.raises(ConfigError, match=r"policy.num_actions: got 9, at most 8"):
        make(num_actions=9)
