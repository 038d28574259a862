"""Any other LeRobot policy: it acts through its own classes, is saved and loaded, and RL is refused with the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import ConfigError, validate
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig, describe
from vla_rl.policies.lerobot.options import NO_LIKELIHOOD, RL_TYPES, no_rl_reason
from vla_rl.policies.load import load_policy

SPEC = fake_env_spec(image_size=96)
RESNET = {"vision_backbone": "resnet18", "pretrained_backbone_weights": None}
# The smallest of each kind that its code allows.
SMALL = {
    "vqbet": {
        **RESNET, "gpt_n_layer": 1, "gpt_n_head": 2, "gpt_hidden_dim": 32, "gpt_input_dim": 32, "gpt_output_dim": 32,
        "vqvae_n_embed": 4, "vqvae_embedding_dim": 16, "crop_shape": (84, 84), "spatial_softmax_num_keypoints": 4,
    },
}  # fmt: skip


def make(policy_type, **options):
    config = validate(LeRobotConfig, {"type": policy_type, "options": SMALL[policy_type], **options}, prefix="policy")
    policy = config.build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    return policy


@pytest.fixture(scope="module", params=SMALL)
def policy(request):
    return make(request.param)


def test_acts_with_its_own_sampler(policy):
    obs = fake_observation(SPEC, 3)
    state = torch.get_rng_state()
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    assert chunk.actions.shape == (3, policy.chunk_size, 7) and chunk.actions.dtype == np.float32
    assert np.isfinite(chunk.actions).all() and chunk.log_prob is None and chunk.path is None
    again = policy.act(obs, torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(chunk.actions, again.actions, err_msg="no history from the decision before")
    assert torch.equal(torch.get_rng_state(), state)
    features = policy.embed(obs)
    assert features.shape == (3, policy.chunk_size * 7 + 8) and torch.isfinite(features).all()


def test_gives_what_lerobot_gives(policy):
    obs = fake_observation(SPEC, 2)
    seed = int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(0)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy.core.reset()
        expected = policy.postprocessor(policy.core.select_action(dict(policy._batch(obs))))
    actions = policy.act(obs, torch.Generator().manual_seed(0)).actions
    np.testing.assert_allclose(actions[:, 0], expected.numpy(), atol=1e-6)


def test_save_and_load(policy, tmp_path):
    from lerobot.policies.factory import get_policy_class

    policy.save(tmp_path / "policy")
    obs = fake_observation(SPEC, 2)
    expected = policy.act(obs, torch.Generator().manual_seed(0)).actions
    again = load_policy(tmp_path / "policy")
    np.testing.assert_array_equal(again.act(obs, torch.Generator().manual_seed(0)).actions, expected)
    theirs = get_policy_class(policy.core.config.type).from_pretrained(tmp_path / "policy")
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in policy.core.state_dict().items())


def test_rl_is_refused_with_the_reason(policy):
    word = "RL cannot train this policy"
    with pytest.raises(ValueError, match=f"{word}.*regressed offset.*RL trains smolvla, pi0"):
        GRPOConfig().build(policy)
    obs = fake_observation(SPEC, 1)
    with pytest.raises(ValueError, match=f"{word}.*offset"):
        policy.evaluate(obs, policy.act(obs))
    with pytest.raises(ValueError, match="lerobot-train"):
        policy.bc_loss(obs, policy.act(obs).actions)


def test_describe_says_why_not(policy, tmp_path):
    policy.save(tmp_path / "policy")
    info = describe(tmp_path / "policy")
    assert info is not None and info.rl == () and info.rl_reason == policy.no_rl_reason
    assert info.facts["action"] == "7" and info.facts["cameras"] == "agentview"


def test_heads_that_cannot_be_trained_are_refused():
    with pytest.raises(ConfigError, match=r"policy\.value_head"):
        make("vqbet", value_head=True)


def test_every_policy_that_lerobot_has_is_trained_or_refused_with_a_reason(tmp_path):
    """From a checkpoint's config.json alone, before anything is built, and in the table of the docs."""
    import lerobot.policies  # noqa: F401  (registers the configs)
    from lerobot.configs import PreTrainedConfig

    rows = [line for line in Path("docs/flow_policies.md").read_text().splitlines() if line.startswith("| ")]
    for kind in PreTrainedConfig.get_known_choices():
        (tmp_path / "config.json").write_text(json.dumps({"type": kind, "n_action_steps": 8}))
        info = describe(tmp_path)
        assert info is not None and info.family == f"LeRobot {kind}"
        assert bool(info.rl) == (kind in RL_TYPES) == (no_rl_reason(kind) is None)
        assert kind in (*RL_TYPES, *NO_LIKELIHOOD), f"{kind}: no reason of its own"
        assert info.rl or all(name in info.rl_reason for name in RL_TYPES), "it says which can be trained"
        assert any(f"`{kind}`" in row for row in rows), f"{kind}: not in docs/flow_policies.md"


def test_groot_n1_5_is_refused_with_the_reason(tmp_path):
    config = {"type": "groot", "tokenizer_assets_repo": "lerobot/eagle2hg-processor-groot-n1p5"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    info = describe(tmp_path)
    assert info is not None and "N1.5 was removed after LeRobot 0.5.1" in info.rl_reason
    with pytest.raises(ValueError, match=r"LeRobot cannot read it: .*N1\.5 support was removed.*lerobot==0\.5\.1"):
        load_policy(tmp_path)


def test_images_of_another_size_are_resized():
    policy = make("vqbet")
    larger = fake_observation(fake_env_spec(image_size=128), 2)
    assert np.isfinite(policy.act(larger).actions).all()
