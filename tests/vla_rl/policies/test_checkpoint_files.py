"""Policy folders: exact round trip, whole or not at all, and a clear message for each kind of damage."""

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch

from vla_rl.config import ConfigError
from vla_rl.policies.base import resolve_path
from vla_rl.policies.checkpoint_files import write_folder
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot.options import LeRobotOptions
from vla_rl.policies.load import load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.policies.openvla.options import OPENVLA_CHAIN, ImageChain

TWO_CAMERAS = fake_env_spec(("agentview", "wrist"))
SPEC = fake_env_spec()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    policy = OpenVLAConfig(precision="fp32").build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False), name="demos")
    folder = tmp_path_factory.mktemp("policies") / "whole"
    policy.save(folder)
    return policy, folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Checkpoints in the published layout, by variant; only read."""
    root = tmp_path_factory.mktemp("published")
    return {variant: write_checkpoint(root / variant, variant) for variant in ("base", "discrete", "l1")}


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "policy")


def change_weights(folder, change):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, folder / "model.safetensors")


def test_files(saved):
    assert {p.name for p in saved[1].iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "dataset_statistics.json",
    }  # fmt: skip
    assert json.loads((saved[1] / "dataset_statistics.json").read_text()).keys() == {"demos"}
    assert [p.name for p in saved[1].parent.iterdir()] == ["whole"], "no temporary folder is left"


def test_stored_in_half_the_size_the_policy_is_nearly_the_same(saved, tmp_path):
    policy, whole = saved
    policy.save(tmp_path / "half", dtype=torch.bfloat16)
    sizes = [(f / "model.safetensors").stat().st_size for f in (whole, tmp_path / "half")]
    assert sizes[1] < 0.51 * sizes[0] and sizes[1] < 10e6
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs)
    again = load_policy(tmp_path / "half")
    torch.testing.assert_close(
        again.evaluate(obs, chunk).log_prob, policy.evaluate(obs, chunk).log_prob, atol=0.05, rtol=0
    )


def test_a_critic_and_adapters_can_be_added_to_a_checkpoint(saved, folder, tmp_path):
    policy, _ = saved
    obs = fake_observation(SPEC, 2)
    config = OpenVLAConfig(path=str(folder), value_head=True, lora={"rank": 2}, trainable="lora", precision="fp32")
    started = config.build(SPEC)
    assert started.act(obs).value is not None
    np.testing.assert_array_equal(started.act(obs, temperature=0).actions, policy.act(obs, temperature=0).actions)
    started.save(tmp_path / "with_adapters")
    again = load_policy(tmp_path / "with_adapters")
    assert set(again.network.state_dict()) == set(started.network.state_dict())
    np.testing.assert_array_equal(again.act(obs, temperature=0).value, started.act(obs, temperature=0).value)


def test_heads_that_a_recipe_turns_off_are_left_out(tmp_path):
    policy = OpenVLAConfig(precision="fp32", value_head=True, keyframe_loss_weight=1.0).build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(tmp_path / "critic")
    off = OpenVLAConfig(path=str(tmp_path / "critic"), value_head=False, keyframe_loss_weight=0.0).build(SPEC)
    assert off.network.value_head is None and off.network.keyframe_head is None
    obs = fake_observation(SPEC, 2)
    np.testing.assert_array_equal(off.act(obs, temperature=0).actions, policy.act(obs, temperature=0).actions)


def test_adapters_that_were_trained_are_saved_and_trained_on(published, tmp_path):
    base, obs = published["discrete"], fake_observation(SPEC, 2)
    options = {"lora": {"rank": 2}, "trainable": "lora", "precision": "fp32"}
    policy = OpenVLAConfig(path=str(base), **options).build(SPEC)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    policy.save(tmp_path / "trained")
    assert not (tmp_path / "trained" / "heads.safetensors").exists()
    again = load_policy(tmp_path / "trained")
    torch.testing.assert_close(again.embed(obs), policy.embed(obs), rtol=0, atol=0)
    # A later run that trains the adapters alone keeps it.
    adapters = OpenVLAConfig(path=str(tmp_path / "trained"), trainable="lora", precision="fp32").build(SPEC)
    adapters.save(tmp_path / "later")
    torch.testing.assert_close(load_policy(tmp_path / "later").embed(obs), policy.embed(obs), rtol=0, atol=0)


def test_own_statistics_are_kept_where_the_checkpoint_has_others_of_that_name(published, tmp_path):
    base = published["discrete"]
    policy = OpenVLAConfig(path=str(base), norm_key="from_data", precision="fp32").build(SPEC)
    own = {"q01": [-0.25] * 7, "q99": [0.25] * 7, "mask": [True] * 6 + [False]}
    policy.set_norm_stats(own, fake_statistics(8, gripper=False), name="fake")
    policy.save(tmp_path / "cloned")
    assert load_policy(tmp_path / "cloned").norm_stats.action.to_json() == own
    load_policy(tmp_path / "cloned").save(tmp_path / "again")
    assert load_policy(tmp_path / "again").norm_stats.action.to_json() == own
    published = OpenVLAConfig(path=str(base), precision="fp32").build(SPEC)
    published.save(tmp_path / "untouched")
    files = [(folder / "dataset_statistics.json").read_bytes() for folder in (base, tmp_path / "untouched")]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("variant", "norm_range"), [("base", "q01_q99"), ("discrete", "min_max"), ("l1", "q01_q99"), ("l1", "min_max")]
)
def test_a_policy_with_statistics_from_data_acts_the_same_when_it_is_read_again(
    published, variant, norm_range, tmp_path
):
    base, obs = published[variant], fake_observation(TWO_CAMERAS, 3)
    options = {"norm_key": "from_data", "norm_range": norm_range, "precision": "fp32"}
    policy = OpenVLAConfig(path=str(base), **options).build(TWO_CAMERAS)
    own = {"q01": [-0.013] * 7, "q99": [0.0171] * 7, "min": [-0.02] * 7, "max": [0.03] * 7, "mask": [True] * 7}
    policy.set_norm_stats(own, fake_statistics(8, gripper=False), name="mine")
    low, high = (own["min"], own["max"]) if norm_range == "min_max" else (own["q01"], own["q99"])
    assert (policy.norm_stats.action.q01.tolist(), policy.norm_stats.action.q99.tolist()) == (low, high)
    policy.save(tmp_path / "cloned")
    again = load_policy(tmp_path / "cloned")
    for temperature in (0.0, 1.0):
        first, second = (p.act(obs, torch.Generator().manual_seed(1), temperature) for p in (policy, again))
        np.testing.assert_array_equal(first.actions, second.actions)


@pytest.mark.parametrize("variant", ["base", "discrete", "l1"])
def test_a_checkpoint_learns_a_robot_with_more_joints_where_its_weights_leave_that_open(published, variant, tmp_path):
    base = published[variant]
    cameras = TWO_CAMERAS.cameras if variant == "l1" else ("agentview",)
    arms, options = fake_env_spec(cameras, action_dim=14), {"path": str(base), "precision": "fp32"}
    for norm_key in (None, "from_data"):
        if norm_key is None or variant == "l1":
            with pytest.raises(ConfigError, match="the policy has 7, environment 'fake' has 14"):
                OpenVLAConfig(norm_key=norm_key, **options).build(arms)
    if variant == "l1":
        return
    policy = OpenVLAConfig(norm_key="from_data", **options).build(arms)
    policy.set_norm_stats(fake_statistics(14), fake_statistics(8, gripper=False) if policy.uses_state else None, "arms")
    policy.save(tmp_path / "cloned")
    obs = fake_observation(arms, 2)
    chunk = policy.act(obs, None, 0.0)
    assert chunk.actions.shape == (2, policy.chunk_size, 14)
    again = OpenVLAConfig(path=str(tmp_path / "cloned"), precision="fp32").build(arms)
    np.testing.assert_array_equal(again.act(obs, None, 0.0).actions, chunk.actions)


def test_single_options_of_a_section_are_set_over_the_checkpoints(published, tmp_path):
    """As docs/checkpoints.md has it: without the center crop, images are compressed and resized as in training."""
    base = published["discrete"]
    config = OpenVLAConfig.model_validate({"path": str(base), "images": {"crop_area": None}, "precision": "fp32"})
    for again in (config, OpenVLAConfig.model_validate(config.model_dump(mode="json"))):
        policy = again.build(SPEC)
        assert policy.config.images == OPENVLA_CHAIN.model_copy(update={"crop_area": None})
    policy.save(tmp_path / "saved")
    rotated = OpenVLAConfig.model_validate({"path": str(tmp_path / "saved"), "images": {"rotate": True}}).build(SPEC)
    assert rotated.config.images == policy.config.images.model_copy(update={"rotate": True})
    assert OpenVLAConfig.model_validate({"path": str(base), "images": {}}).build(SPEC).config.images == ImageChain()
    saved = LeRobotOptions.model_validate(
        {"type": "pi0", "sampling": {"method": "flow_noise", "noise_bounds": [0.1, 0.2]}}
    )
    chosen = LeRobotOptions.model_validate({"path": "there", "sampling": {"num_steps": 4}}).sampling
    assert saved.with_chosen({"sampling": chosen}).sampling == saved.sampling.model_copy(update={"num_steps": 4})


def test_a_failed_write_leaves_the_old_folder(folder):
    before = (folder / "config.json").read_text()

    def fail(path):
        (path / "config.json").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="disk full while writing the policy"):
        write_folder(folder, fail)
    assert (folder / "config.json").read_text() == before
    assert [p.name for p in folder.parent.iterdir()] == ["policy"]


def test_saving_replaces_the_folder(saved, folder):
    (folder / "stale.txt").write_text("old")
    saved[0].save(folder)
    assert not (folder / "stale.txt").exists()
    load_policy(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"policy/{name}: not found"):
        load_policy(folder)


def test_a_runs_folder_stands_for_the_policy_that_it_ended_with(folder):
    run = folder.parent
    (run / "config.yaml").touch()
    assert resolve_path(run) == folder
    for number in (2, 10):  # A closed loop's, whose own folder has no policy.
        (run / f"round_{number}/train").mkdir(parents=True)
    folder.rename(run / "round_10/train/policy")
    assert resolve_path(run) == run / "round_10/train/policy"
    load_policy(run)
    (run / "round_10/train/policy").rename(run / "elsewhere")
    with pytest.raises(ConfigError, match=rf"the run .*{run.name} has no policy so far"):
        load_policy(run)


def test_truncated_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model.safetensors: truncated.*again"):
        load_policy(folder)


def test_wrong_shapes_and_names_are_listed(folder):
    def change(weights):
        weights["projector.fc2.bias"] = torch.zeros(3)
        weights["surprise"] = torch.zeros(1)
        del weights["language_model.lm_head.weight"]

    change_weights(folder, change)
    with pytest.raises(ValueError) as error:
        load_policy(folder)
    message = str(error.value)
    assert "model.safetensors" in message
    assert "projector.fc2.bias: found shape (3,), expected (128,)" in message
    assert "surprise: not part of this architecture" in message
    assert "language_model.lm_head.weight: missing" in message


def test_nan_weights(folder):
    change_weights(folder, lambda weights: weights["projector.fc2.bias"].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"NaN or infinity in projector.fc2.bias.*earlier checkpoint"):
        load_policy(folder)


def test_damaged_configs(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        load_policy(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"config.json: has no 'kind'"):
        load_policy(folder)
    (folder / "config.json").write_text('{"kind": "openvla", "config": {"presett": 1}, "architecture": {}}')
    with pytest.raises(ValueError, match=r"config.json: not a config of this package's OpenVLA policy"):
        load_policy(folder)
    (folder / "config.json").write_text('{"kind": "opnvla"}')
    with pytest.raises(ConfigError, match=r"policy.kind.*Did you mean 'openvla'"):
        load_policy(folder)


def test_unknown_paths():
    with pytest.raises(ConfigError, match="no such folder"):
        load_policy("/nowhere/at/all")
    with pytest.raises(ConfigError, match="no such pretrained policy"):
        load_policy("pretrained:nothing")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (fake_env_spec(cameras=("front",)), r"policy.cameras: \['agentview'\] not in environment"),
        (fake_env_spec(state_dim=14), "policy state_dim: the policy has 8, environment 'fake' has 14"),
        (fake_env_spec(action_dim=14), "policy action_dim: the policy has 7, environment 'fake' has 14"),
    ],
)
def test_a_checkpoint_for_another_environment(saved, spec, message):
    with pytest.raises(ConfigError, match=message):
        OpenVLAConfig(path=str(saved[1])).build(spec)


def test_a_recipe_that_contradicts_its_checkpoint(saved):
    with pytest.raises(ConfigError, match=r"policy.chunk_size: got 4, but the checkpoint at policy.path has 8"):
        OpenVLAConfig(path=str(saved[1]), chunk_size=4).build(SPEC)
