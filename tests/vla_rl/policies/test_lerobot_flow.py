"""SmolVLA, pi0, pi0.5 and X-VLA behind our policy: the same as LeRobot's own, and saved so that LeRobot loads them."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.config import ConfigError, validate
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.config import LeRobotConfig, describe
from vla_rl.policies.lerobot.options import FLOW_TYPES
from vla_rl.policies.lerobot.tiny import tiny_pi
from vla_rl.policies.load import load_policy

pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")

SPEC = fake_env_spec()


def make(policy_type="smolvla", spec=SPEC, seed=0, **options):
    config = validate(LeRobotConfig, {"type": policy_type, "preset": "tiny", **options}, prefix="policy")
    policy = config.build(spec, seed=seed)
    mean, spread = {"mean": [0.1] * 7, "std": [0.5] * 7}, {"mean": [0.2] * 8, "std": [1.5] * 8}
    policy.set_norm_stats({**fake_statistics(7), **mean}, {**fake_statistics(8, gripper=False), **spread})
    return sharpen(policy)


def sharpen(policy):
    """Larger weights, so that a fresh network's output depends visibly on all of its inputs."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    return policy


@pytest.fixture(scope="module", params=FLOW_TYPES)
def policy(request):
    return make(request.param, value_head=True)


@pytest.fixture
def old_crop(monkeypatch):
    """The cache as LeRobot 0.6 knows it, cropped to an absolute length: for LeRobot's own sampler of SmolVLA."""
    own = DynamicCache.crop

    def crop(self, length):
        for layer in self.layers:
            layer.crop(min(length - layer.get_seq_length(), 0) if length > 0 else length)

    monkeypatch.setattr(DynamicCache, "crop", crop)
    assert own is not crop


def built_as(policy):
    """Where LeRobot itself builds a tiny pi0 or pi0.5."""
    kind = policy.core.config.type
    return tiny_pi(kind) if kind in ("pi0", "pi05") else nullcontext()


def sampled(core, batch, rows):
    """LeRobot's own sampler from the noise that our generator of seed 3 gives."""
    if core.config.type == "xvla":  # It takes no noise, but draws its own from the global stream.
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return core.predict_action_chunk(batch)
    return core.predict_action_chunk(batch, noise=torch.randn((rows, 8, 7), generator=torch.Generator().manual_seed(3)))


def test_temperature_0_is_lerobots_sampler(policy, old_crop):
    obs = fake_observation(SPEC, 3)
    ours = policy.act(obs, torch.Generator().manual_seed(3), 0.0).actions
    theirs = policy.postprocessor(sampled(policy.core, policy._batch(obs), 3))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-5)
    assert np.abs(ours - policy.act(obs, torch.Generator().manual_seed(4), 0.0).actions).max() > 1e-2


def test_actions_depend_on_image_state_and_instruction(policy):
    obs = fake_observation(SPEC, 1)
    first = policy.act(obs, temperature=0.0).actions
    other = fake_observation(SPEC, 2, seed=9).select([1])
    for change in (
        {"images": other.images},
        {"state": other.state},
        {"instruction": other.instruction},
    ):
        changed = type(obs)(**{**obs.__dict__, **change})
        assert np.abs(policy.act(changed, temperature=0.0).actions - first).max() > 1e-4, change.keys()


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_a_batch_equals_one_by_one(policy, temperature):
    obs = fake_observation(SPEC, 4)
    chunk = policy.act(obs, torch.Generator().manual_seed(0), temperature)
    together = policy.evaluate(obs, chunk, temperature)
    np.testing.assert_allclose(together.log_prob.detach().numpy(), chunk.log_prob, atol=1e-5)
    np.testing.assert_allclose(together.value.detach().numpy(), chunk.value, atol=1e-5)
    for i in range(4):
        alone = policy.evaluate(obs.select([i]), chunk.select([i]), temperature)
        np.testing.assert_allclose(alone.log_prob.detach()[0], together.log_prob.detach()[i], atol=1e-3)
        np.testing.assert_allclose(alone.value.detach()[0], together.value.detach()[i], atol=1e-4)


def test_the_cloning_loss_is_lerobots(policy, monkeypatch):
    obs = fake_observation(SPEC, 3)
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 8, 7)).astype(np.float32)
    network, seen = policy.network, {}
    original = network.loss

    def loss(batch, target, noise, level, *rest):
        seen.update(batch=dict(batch), noise=noise, level=level)
        return original(batch, target, noise, level, *rest)

    network.loss = loss
    try:
        ours, _ = policy.bc_loss(obs, actions)
    finally:
        del network.loss
    core = policy.core.model
    core.sample_noise = lambda shape, device: seen["noise"]
    core.sample_time = lambda rows, device: seen["level"]
    monkeypatch.setattr(torch, "rand", lambda *size, **options: seen["level"][:1])  # X-VLA's first of evenly spread.
    monkeypatch.setattr(torch, "randn_like", lambda like: seen["noise"])
    try:
        theirs, _ = policy.core.forward(seen["batch"])
    finally:
        del core.sample_noise, core.sample_time
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    assert seen["level"].min() >= 0.0 and seen["level"].max() <= 1


def test_invalid_actions_and_those_not_given_have_no_say_in_the_loss(policy):
    obs = fake_observation(SPEC, 2)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 8, 7)).astype(np.float32)
    valid = np.ones((2, 8), bool)
    valid[:, 5:] = False
    policy.train()
    torch.manual_seed(0)
    loss, _ = policy.bc_loss(obs, actions, valid)
    torch.manual_seed(0)
    every, _ = policy.bc_loss(obs, actions)
    policy.eval()
    assert float(loss.detach()) != float(every.detach())
    with pytest.raises(ValueError, match="denoises 8 at once"):
        policy.bc_loss(obs, np.zeros((2, 9, 7), np.float32))


def test_lerobot_loads_what_we_save_wherever_it_is_moved(policy, tmp_path, old_crop, monkeypatch):
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    policy.save(tmp_path / "made" / "policy")
    folder = Path(shutil.move(tmp_path / "made" / "policy", tmp_path / "moved"))
    shutil.rmtree(tmp_path / "made")
    assert not [file for file in folder.rglob("*.json") if str(tmp_path) in file.read_text()]
    monkeypatch.chdir(folder)  # Its names are relative, and LeRobot looks them up from the current folder.
    with built_as(policy):
        theirs = get_policy_class(policy.core.config.type).from_pretrained(folder)
    for name, value in policy.core.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], value), name
    before, after = make_pre_post_processors(theirs.config, pretrained_path=str(folder))
    obs = fake_observation(SPEC, 2)
    batch = {"task": obs.instruction, "observation.state": torch.from_numpy(obs.state)}
    batch["observation.images.agentview"] = torch.from_numpy(obs.images["agentview"]).permute(0, 3, 1, 2) / 255
    actions = after(sampled(theirs, before(batch), 2))
    expected = policy.act(obs, torch.Generator().manual_seed(3), 0.0).actions
    np.testing.assert_allclose(expected, actions, atol=1e-5)
    monkeypatch.chdir(tmp_path)
    ours = load_policy(folder)
    np.testing.assert_array_equal(ours.act(obs, torch.Generator().manual_seed(3), 0.0).actions, expected)


def test_saved_as_lerobot_saves_itself(policy, tmp_path):
    policy.save(tmp_path / "ours")
    policy.core.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    full = policy.core.state_dict()

    def storages(tensors):
        return {full[name].data_ptr() for name in tensors}

    assert storages(ours) == storages(theirs) and len(ours) == len(theirs)
    assert all(full[n].dtype == v.dtype and full[n].shape == v.shape for n, v in ours.items())
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs")]
    assert configs[0].keys() == configs[1].keys()


def test_a_checkpoint_without_our_files_loads(policy, tmp_path):
    """As it comes from LeRobot: no options of ours, no heads. The tiny sizes of pi0 are ours alone."""
    if policy.core.config.type in ("pi0", "pi05"):
        pytest.skip("a pi0 of LeRobot's own sizes does not fit a test")
    policy.save(tmp_path / "policy")
    for name in ("vla_rl.json", "vla_rl.safetensors"):
        (tmp_path / "policy" / name).unlink()
    again = load_policy(tmp_path / "policy")
    obs = fake_observation(SPEC, 2)
    np.testing.assert_array_equal(again.act(obs, temperature=0.0).actions, policy.act(obs, temperature=0.0).actions)
    chosen = LeRobotConfig(path=str(tmp_path / "policy"), value_head=True, sampling={"joint": True})  # type: ignore[arg-type]
    learner = chosen.build(SPEC)
    assert learner.act(obs, torch.Generator().manual_seed(0)).path.shape == (2, 6, 8, 8)
    assert learner.act(obs, torch.Generator().manual_seed(0)).value is not None


@pytest.mark.parametrize("policy_type", ["smolvla", "pi0"])
def test_adapters_are_merged_in_what_lerobot_reads(policy_type, tmp_path, old_crop):
    policy = make(policy_type, lora={"rank": 2, "part": "all"}, trainable="lora", value_head=True)
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name or name.startswith("value_head.") for name in trained)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(0.1)
    policy.save(tmp_path / "policy")
    assert not [name for name in load_file(tmp_path / "policy" / "model.safetensors") if "lora" in name]
    again = load_policy(tmp_path / "policy")
    for name, value in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    for name in ("vla_rl.safetensors", "vla_rl.json"):
        (tmp_path / "policy" / name).unlink()
    obs = fake_observation(SPEC, 2)
    with built_as(policy):
        merged = load_policy(tmp_path / "policy")
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    expected = policy.act(obs, temperature=0.0).actions
    np.testing.assert_allclose(merged.act(obs, temperature=0.0).actions, expected, atol=1e-4)


def test_recomputing_changes_no_gradient():
    gradients = []
    for recompute in (False, True):
        policy = make("smolvla", gradient_checkpointing=recompute, sampling={"joint": True})
        obs = fake_observation(SPEC, 2)
        chunk = policy.act(obs, torch.Generator().manual_seed(0))
        policy.evaluate(obs, chunk).log_prob.sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_a_shorter_execution_than_the_network_denoises():
    policy = make("smolvla", num_actions=3)
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    assert policy.chunk_size == 3 and policy.demonstration_size == 8
    assert chunk.actions.shape == chunk.log_prob.shape == (2, 3, 7) and chunk.path.shape == (2, 2, 8, 8)
    assert policy.evaluate(obs, chunk).log_prob.shape == (2, 3, 7)


def test_statistics_reach_the_actions():
    policy = make("smolvla")
    obs = fake_observation(SPEC, 2)
    first = policy.act(obs, temperature=0.0).actions
    action = {**fake_statistics(7), "mean": [0.1] * 7, "std": [1.0] * 7}
    policy.set_norm_stats(action, {**fake_statistics(8, gripper=False), "mean": [0.2] * 8, "std": [1.5] * 8})
    second = policy.act(obs, temperature=0.0).actions
    np.testing.assert_allclose(second[..., :6] - 0.1, 2 * (first[..., :6] - 0.1), atol=1e-5)
    np.testing.assert_allclose(second[..., 6], first[..., 6], atol=1e-6, err_msg="the gripper passes unchanged")


def test_bf16_is_close_to_fp32():
    obs = fake_observation(SPEC, 2)
    one, two = (make("smolvla", precision=p).act(obs, temperature=0.0).actions for p in ("fp32", "bf16"))
    assert 0 < np.abs(one - two).max() < 0.1


def test_lerobots_own_bf16_weights_and_adapters_on_them():
    policy = make("pi0", options={"dtype": "bfloat16"}, precision="bf16", lora={"rank": 2}, trainable="lora")
    dtypes = {parameter.dtype for parameter in policy.core.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    output = policy.evaluate(obs, chunk)
    np.testing.assert_allclose(output.log_prob.detach().numpy(), chunk.log_prob, atol=1e-3)
    output.log_prob.sum().backward()
    adapters = [p for n, p in policy.named_parameters() if ".lora_" in n]
    assert all(p.grad is not None for p in adapters)
    before = [p.detach().clone() for p in adapters]
    for p in adapters:
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(adapters, lr=2e-5, weight_decay=0.0).step()  # In bfloat16 most of it would be rounded away.
    assert all(bool((p != old).all()) for p, old in zip(adapters, before, strict=True))


def test_cameras_are_matched_by_name_or_by_map():
    two = fake_env_spec(("front", "wrist"))
    config = LeRobotConfig(type="smolvla", preset="tiny", cameras=("front", "wrist"))
    with pytest.raises(ConfigError, match=r"policy.cameras: \['wrist'\]"):
        LeRobotConfig(type="smolvla", preset="tiny", cameras=("agentview", "wrist")).build(SPEC)
    policy = config.build(two)
    assert policy.cameras == ("front", "wrist")
    with pytest.raises(ConfigError, match=r"policy\.camera_map"):
        policy.check_env(SPEC)


def test_algorithms_take_it_and_ppo_wants_its_critic():
    policy = make("smolvla")
    GRPOConfig().build(policy)
    with pytest.raises(ValueError, match="value_head"):
        PPOConfig().build(policy)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "policy"
    make("smolvla").save(folder)
    return folder


def damaged(saved, tmp_path, change):
    import shutil

    folder = tmp_path / "policy"
    shutil.copytree(saved, folder)
    change(folder)
    return folder


def edit_weights(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def rename(tensors):
    tensors["model.nothing.weight"] = tensors.pop("model.state_proj.weight")


def poison(tensors):
    tensors["model.state_proj.bias"][0] = torch.nan


def reshape(tensors):
    tensors["model.state_proj.bias"] = torch.zeros(3)


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_weights(rename), r"state_proj.weight: missing.*nothing.weight: not part"),
        (edit_weights(poison), r"NaN or infinity in model.state_proj.bias"),
        (edit_weights(reshape), r"state_proj.bias: found shape \(3,\), expected \(64,\)"),
        (truncate, "truncated"),
        (lambda folder: (folder / "model.safetensors").unlink(), "not found"),
        (lambda folder: (folder / "policy_preprocessor.json").unlink(), "migrate_policy_normalization"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "vla_rl.json").write_text('{"config": {"kind": "x"}}'), "not options"),
    ],
)
def test_damaged_checkpoints_are_named(saved, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_policy(damaged(saved, tmp_path, change))


def test_bad_input_is_named():
    policy = make("smolvla")
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="agentview"):
        policy.act(type(obs)({}, obs.state, obs.instruction))
    with pytest.raises(ValueError, match=r"expected \(B, 8\)"):
        policy.act(type(obs)(obs.images, obs.state[:, :5], obs.instruction))
    with pytest.raises(ValueError, match="uint8"):
        policy.act(type(obs)({"agentview": obs.images["agentview"][..., :1]}, obs.state, obs.instruction))
    with pytest.raises(ValueError, match=r"chunk.path: None"):
        policy.evaluate(obs, policy.act(obs, temperature=0.0))
    with pytest.raises(ValueError, match=r"other policy\.sampling options"):
        policy.evaluate(obs, type(chunk)(chunk.actions, path=np.zeros((2, 6, 8, 8), np.float32)))
    with pytest.raises(ValueError, match="temperature"):
        policy.act(obs, temperature=-1.0)
    fresh = LeRobotConfig(type="smolvla", preset="tiny").build(SPEC)
    with pytest.raises(ValueError, match="no action statistics"):
        fresh.act(obs)
    with pytest.raises(ValueError, match=r"\['mean', 'std'\] missing"):
        fresh.set_norm_stats({"q01": [0] * 7, "q99": [1] * 7}, {"q01": [0] * 8, "q99": [1] * 8})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs policy.path"),
        ({"type": "nothing"}, "LeRobot has: "),
        ({"type": "smolvla", "preset": "tiny", "options": {"num_step": 3}}, "num_step"),
        ({"type": "vqbet", "preset": "tiny"}, "policy.preset"),
        ({"type": "smolvla", "trainable": "lora"}, "policy.lora"),
        ({"type": "smolvla", "preset": "tiny", "num_actions": 9}, "at most 8"),
        (
            {"type": "smolvla", "preset": "tiny", "lora": {"targets": ["qkv"]}, "trainable": "lora"},
            "policy.lora.targets",
        ),
        ({"type": "smolvla", "preset": "tiny", "lora": {"rank": 2}}, "policy.lora: given with"),
        ({"type": "smolvla", "preset": "tiny", "options": {"adapt_to_pi_aloha": True}}, "adapt_to_pi_aloha"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        validate(LeRobotConfig, options, prefix="policy").build(SPEC)


def test_a_checkpoints_own_options_hold(saved):
    with pytest.raises(ConfigError, match=r"policy.chunk_size: got 4"):
        LeRobotConfig(path=str(saved), chunk_size=4).build(SPEC)


def test_describe_reads_no_weights(saved, tmp_path):
    folder = damaged(saved, tmp_path, lambda folder: (folder / "model.safetensors").unlink())
    info = describe(folder)
    assert info is not None and (info.family, info.kind) == ("LeRobot smolvla", "lerobot")
    assert (info.facts["chunk size"], info.facts["actions executed"]) == ("8", "8")
    assert (info.facts["cameras"], info.facts["state"], info.facts["action"]) == ("agentview", "8", "7")
    assert "PPO" in info.rl and "Flow-SDE" in info.rl_reason and str(folder) in info.recipe_line(str(folder))
