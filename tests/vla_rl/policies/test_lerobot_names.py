"""What a LeRobot checkpoint says of where its vision-language model and tokenizer are: Hub ids stay Hub ids."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.config import ConfigError
from vla_rl.policies.fake_input import fake_env_spec, fake_observation, fake_statistics
from vla_rl.policies.lerobot import files
from vla_rl.policies.lerobot.config import LeRobotConfig
from vla_rl.policies.lerobot.tiny import tiny_tokenizer
from vla_rl.policies.load import describe, load_policy

pytest.importorskip("num2words", reason="SmolVLA's processor needs it: install '.[flow]'")

SPEC = fake_env_spec()
HUB_ID = "someone/tiny-vlm"

# A program of someone who has LeRobot and a Hub (here: what was downloaded of it), and nothing of this package.
# Under transformers from 5.6 on, LeRobot 0.6's sampler needs the cache's crop as it was.
LEROBOT_ALONE = """
import sys
import numpy as np, torch
from transformers import DynamicCache
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

def crop(self, length):
    for layer in self.layers:
        layer.crop(min(length - layer.get_seq_length(), 0) if length > 0 else length)

DynamicCache.crop = crop
policy = get_policy_class("smolvla").from_pretrained(sys.argv[1])
before, after = make_pre_post_processors(policy.config, pretrained_path=sys.argv[1])
given = np.load("given.npz")
batch = {name: torch.from_numpy(given[name]) for name in given.files if name.startswith("observation")}
processed = before({"task": [str(text) for text in given["task"]], **batch})
np.save("actions.npy", after(policy.predict_action_chunk(processed, noise=torch.from_numpy(given["noise"]))).numpy())
assert "vla_rl" not in sys.modules
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A policy folder as it comes from `lerobot-train`: its names are Hub ids, and it has no copies beside it."""
    folder = tmp_path_factory.mktemp("made") / "policy"
    policy = LeRobotConfig(type="smolvla", preset="tiny").build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(folder)
    vlm = Path(shutil.move(folder / "vlm", folder.parent / "vlm"))
    shutil.rmtree(folder / "tokenizer")
    for file, name in ((folder / "config.json", "./vlm"), (folder / "policy_preprocessor.json", "./tokenizer")):
        text = file.read_text()
        assert json.dumps(name) in text
        file.write_text(text.replace(json.dumps(name), json.dumps(HUB_ID)))
    for name in ("vla_rl.json", "vla_rl.safetensors"):
        (folder / name).unlink()
    return folder, vlm


def names(folder):
    steps = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    tokenizers = [step["config"]["tokenizer_name"] for step in steps if step["registry_name"] == "tokenizer_processor"]
    return [json.loads((folder / "config.json").read_text())["vlm_model_name"], *tokenizers]


def test_a_hub_id_stays_through_copies_on_this_machine(made, tmp_path):
    """Loaded with a copy of the model, saved, loaded again without, saved: it can be read anywhere."""
    folder, vlm = made
    policy = LeRobotConfig(path=str(folder), vlm=str(vlm)).build(SPEC)  # type: ignore[arg-type]
    policy.save(tmp_path / "first")
    load_policy(tmp_path / "first").save(tmp_path / "second")
    assert names(tmp_path / "first") == names(tmp_path / "second") == [HUB_ID, HUB_ID]


@pytest.mark.slow  # Importing LeRobot's policies anew takes 8 s; in this process test_lerobot_flow.py loads with it.
def test_lerobot_alone_reads_it_from_a_hub(made, tmp_path):
    folder, vlm = made
    policy = LeRobotConfig(path=str(folder), vlm=str(vlm)).build(SPEC)  # type: ignore[arg-type]
    policy.save(tmp_path / "policy")
    cache = tmp_path / "cache" / ("models--" + HUB_ID.replace("/", "--"))
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    shutil.copytree(vlm, cache / "snapshots" / ("a" * 40))
    obs, noise = fake_observation(SPEC, 2), torch.Generator().manual_seed(3)
    image = torch.from_numpy(obs.images["agentview"]).permute(0, 3, 1, 2) / 255
    given = {"observation.images.agentview": image.numpy(), "observation.state": obs.state, "task": obs.instruction}
    given["noise"] = torch.randn((2, 8, 7), generator=torch.Generator().manual_seed(3)).numpy()
    np.savez(tmp_path / "given.npz", **given)  # type: ignore[arg-type]
    environment = {**os.environ, "HF_HUB_CACHE": str(cache.parent), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", LEROBOT_ALONE, str(tmp_path / "policy")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = policy.act(obs, noise, 0.0).actions
    np.testing.assert_allclose(np.load(tmp_path / "actions.npy"), expected, atol=1e-5)


def test_folders_of_earlier_versions_are_mended_by_saving_again(made, tmp_path):
    """They named their own place, which is gone."""
    policy = LeRobotConfig(type="smolvla", preset="tiny").build(SPEC)
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(tmp_path / "old")
    for file, name in (("config.json", "vlm"), ("policy_preprocessor.json", "tokenizer")):
        text = (tmp_path / "old" / file).read_text()
        (tmp_path / "old" / file).write_text(text.replace(f'"./{name}"', f'"/gone/policy/{name}"'))
    assert names(tmp_path / "old") == ["/gone/policy/vlm", "/gone/policy/tokenizer"]
    load_policy(tmp_path / "old").save(tmp_path / "new")
    assert names(tmp_path / "new") == ["./vlm", "./tokenizer"]


def test_what_neither_the_folder_nor_a_hub_has_is_named(made, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # An unreachable Hub costs retries.
    with pytest.raises(ValueError, match=rf"policy\.vlm=FOLDER \(now '{HUB_ID}'\)"):
        load_policy(made[0])
    shutil.copytree(made[0], tmp_path / "policy")
    shutil.copytree(made[1], tmp_path / "policy" / "vlm")
    with pytest.raises(ValueError, match=rf"(?s)preprocessor\.json.*'{HUB_ID}'.*policy\.tokenizer=FOLDER"):
        load_policy(tmp_path / "policy")


@pytest.mark.parametrize("policy_type", ["pi0", "pi05"])
def test_fresh_weights_take_the_tokenizer_that_the_recipe_names(policy_type, tmp_path, monkeypatch):
    words = str(tmp_path / "words")
    tiny_tokenizer(["a word"]).save_pretrained(words)
    # The billions of weights are not made, only what stands before them.
    monkeypatch.setattr(files, "_build", lambda core_config: None)
    monkeypatch.setattr(files, "_wrap", lambda config, core, preprocessor, postprocessor: preprocessor)
    monkeypatch.setattr(files, "_finish", lambda preprocessor, device, seed: preprocessor)
    made = files.create(LeRobotConfig(type=policy_type, tokenizer=words), SPEC, "cpu", 0)
    assert [step.tokenizer_name for step in made.steps if hasattr(step, "tokenizer_name")] == [words]


@pytest.mark.parametrize("policy_type", ["pi0", "smolvla"])
def test_images_that_lerobot_fills_in_need_no_camera(policy_type, tmp_path):
    options = {"type": policy_type, "preset": "tiny", "options": {"empty_cameras": 1}}
    policy = LeRobotConfig(**options).build(SPEC)
    assert policy.cameras == ("agentview",) and len(policy.image_keys) == 2
    policy.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    policy.save(tmp_path / "policy")
    again = LeRobotConfig(path=str(tmp_path / "policy")).build(SPEC)
    obs = fake_observation(SPEC, 2)
    np.testing.assert_array_equal(again.act(obs, None, 0.0).actions, policy.act(obs, None, 0.0).actions)
    filled = LeRobotConfig(path=str(tmp_path / "policy"), camera_map={"empty_camera_0": "agentview"}).build(SPEC)
    assert not np.array_equal(filled.act(obs, None, 0.0).actions, policy.act(obs, None, 0.0).actions)
    with pytest.raises(ConfigError, match=r"null: there is no such camera"):
        LeRobotConfig(path=str(tmp_path / "policy")).build(fake_env_spec(("front",)))


def test_lerobots_adapters_without_their_policy_are_refused_before_anything_is_built(made, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_build", lambda core_config: pytest.fail("built"))
    folder = shutil.copytree(made[0], tmp_path / "adapters")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    for ask in (load_policy, describe):
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors: adapters without.*merge_and_unload"):
            ask(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: not found"):
        load_policy(folder)


def test_options_that_a_checkpoints_processors_have_decided_are_refused(tmp_path):
    mapping = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}
    fresh = LeRobotConfig(type="pi0", preset="tiny", options={"normalization_mapping": mapping}).build(SPEC)
    with pytest.raises(ValueError, match="no action statistics yet"):
        fresh.act(fake_observation(SPEC, 1))
    fresh.set_norm_stats(fake_statistics(7), fake_statistics(8, gripper=False))
    fresh.save(tmp_path / "policy")
    path = str(tmp_path / "policy")
    assert LeRobotConfig(path=path, options={"normalization_mapping": mapping, "tokenizer_max_length": 32}).build(SPEC)
    for name, value in (("tokenizer_max_length", 8), ("normalization_mapping", mapping | {"ACTION": "QUANTILES"})):
        with pytest.raises(ConfigError, match=rf"policy\.options\.{name}: got .*a checkpoint brings its own"):
            LeRobotConfig(path=path, options={name: value}).build(SPEC)
