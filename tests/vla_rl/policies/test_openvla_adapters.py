"""Adapters on checkpoints in the published layout: PEFT's files, merged into their base once."""

import shutil

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError
from vla_rl.policies.fake_input import fake_env_spec, fake_observation
from vla_rl.policies.load import describe, load_policy
from vla_rl.policies.openvla import merge as merging
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.policies.openvla.policy import OpenVLAPolicy

SPEC = fake_env_spec(("agentview", "wrist"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {variant: write_checkpoint(root / variant, variant) for variant in ("base", "l1")}


def load(folder, **chosen) -> OpenVLAPolicy:
    return OpenVLAPolicy.load(folder, chosen={"precision": "fp32", **chosen}, for_training=True)


def train_adapters(policy: OpenVLAPolicy, steps: int = 2) -> OpenVLAPolicy:
    obs = fake_observation(SPEC, 2)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=2.0)
    for _ in range(steps):
        optimizer.zero_grad()
        policy.bc_loss(obs, np.zeros((2, policy.chunk_size, 7), np.float32))[0].backward()
        torch.nn.utils.clip_grad_norm_(policy.trainable_parameters(), 1.0)
        optimizer.step()
    return policy


@pytest.mark.parametrize("variant", ["base", "l1"])
def test_adapters_are_peft_files_and_merge_into_the_same_outputs(folders, variant, tmp_path):
    adapters = {"lora": {"rank": 4, "targets": "all-linear"}, "trainable": "lora"}
    policy = train_adapters(load(folders[variant], **adapters))
    assert not any(n.startswith("language_model") and ".lora_" not in n for n in policy.trained_names())
    policy.save(tmp_path / "adapters")
    assert not list((tmp_path / "adapters").glob("model*.safetensors")), "no copy of the base"
    obs = fake_observation(SPEC, 2)
    again = load_policy(tmp_path / "adapters")
    np.testing.assert_allclose(again.act(obs, temperature=0).actions, policy.act(obs, temperature=0).actions, atol=1e-4)
    report = merging.merge(tmp_path / "adapters", tmp_path / "merged", dtype=torch.float32)
    assert report.effect > 1e-3 and report.loss < 1e-3
    merged = load_policy(tmp_path / "merged")
    assert isinstance(merged, OpenVLAPolicy) and merged.config.lora is None
    assert describe(tmp_path / "merged").kind == "openvla"


def test_peft_itself_reads_the_adapters(folders, tmp_path):
    import peft

    policy = train_adapters(load(folders["base"], lora={"rank": 4}, trainable="lora"))
    policy.save(tmp_path / "adapters")
    plain = load(folders["base"])
    wrapped = peft.PeftModel.from_pretrained(plain.network, tmp_path / "adapters")
    obs = fake_observation(SPEC, 2)
    chunk = policy.act(obs, temperature=0)
    torch.testing.assert_close(plain.evaluate(obs, chunk).log_prob, policy.evaluate(obs, chunk).log_prob)
    assert wrapped.peft_config["default"].r == 4
    (tmp_path / "adapters" / "vla_rl.json").unlink()
    with pytest.raises(ValueError, match="--base"):
        merging.merge(tmp_path / "adapters", tmp_path / "merged")
    report = merging.merge(tmp_path / "adapters", tmp_path / "merged", folders["base"], dtype=torch.float32)
    assert report.agreement == 1.0 and not (tmp_path / "merged" / "vla_rl.json").exists()


def test_adapters_are_not_merged_into_what_holds_them(folders, tmp_path):
    policy = train_adapters(load(folders["base"], lora={"rank": 4}, trainable="lora"))
    policy.save(tmp_path / "adapters")
    merging.merge(tmp_path / "adapters", tmp_path / "merged", folders["base"], dtype=torch.float32)
    load(tmp_path / "merged").save(tmp_path / "trained_on")
    for holds in ("merged", "trained_on"):
        with pytest.raises(ValueError, match=rf"{holds} holds these adapters already"):
            merging.merge(tmp_path / "adapters", tmp_path / "twice", tmp_path / holds)
    shutil.copytree(folders["base"], tmp_path / "oft")
    shutil.copytree(tmp_path / "adapters", tmp_path / "oft/lora_adapter")
    with pytest.raises(ValueError, match="oft holds these adapters already"):
        merging.merge(tmp_path / "oft/lora_adapter", tmp_path / "twice", tmp_path / "oft")
    assert not (tmp_path / "twice").exists()
    other = train_adapters(load(tmp_path / "merged", lora={"rank": 2}, trainable="lora"))
    other.save(tmp_path / "other")
    merging.merge(tmp_path / "other", tmp_path / "both", dtype=torch.float32)
    with pytest.raises(ValueError, match="holds these adapters already"):
        merging.merge(tmp_path / "adapters", tmp_path / "twice", tmp_path / "both")


def test_adapters_beside_weights_that_are_trained_are_refused(folders):
    with pytest.raises(ConfigError, match=r"policy\.lora: given with policy\.trainable=full"):
        load(folders["base"], lora={"rank": 4})


def test_a_merge_that_rounding_swallows_is_refused(folders, tmp_path):
    policy = train_adapters(load(folders["base"], lora={"rank": 4}, trainable="lora"))
    for name, parameter in policy.network.named_parameters():
        if ".lora_B" in name:
            parameter.data.mul_(1e-3)
    policy.save(tmp_path / "adapters")
    with pytest.raises(ValueError, match=r"--dtype float32"):
        merging.merge(tmp_path / "adapters", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
