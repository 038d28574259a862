"""Checkpoints in the published layout: batches, strict loading, exact saving, adapters and merging, refusals."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch

from vla_rl.algorithms.grpo import GRPOConfig
from vla_rl.config import ConfigError
from vla_rl.policies.base import resolve_path
from vla_rl.policies.fake_input import fake_env_spec, fake_observation
from vla_rl.policies.load import describe, load_policy
from vla_rl.policies.openvla.config import OpenVLAConfig
from vla_rl.policies.openvla.files import weights as openvla_weights
from vla_rl.policies.openvla.files.fake_checkpoint import write_checkpoint
from vla_rl.policies.openvla.inputs import prompt_batch
from vla_rl.policies.openvla.policy import OpenVLAPolicy

SPEC = fake_env_spec(("agentview", "wrist"))
VARIANTS = ("base", "discrete", "l1", "film")
FP32 = {"precision": "fp32"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    return {variant: write_checkpoint(root / variant, variant) for variant in VARIANTS}


def load(folder, **chosen) -> OpenVLAPolicy:
    return OpenVLAPolicy.load(folder, chosen={**FP32, **chosen}, for_training=True)


def sharpen(policy: OpenVLAPolicy) -> OpenVLAPolicy:
    """Larger weights, so that a fresh network's output depends on all of its inputs."""
    with torch.no_grad():
        for name, parameter in policy.network.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(2.0)
    return policy


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_different_instructions_equals_one_by_one(folders, variant, attention):
    laplace = {"laplace": {"initial_scale": 0.5}} if variant in ("l1", "film") else {}
    policy = sharpen(load(folders[variant], attention=attention, **laplace))
    obs = fake_observation(SPEC, 3)
    assert len({len(policy.tokenizer.encode_prompt(text)) for text in obs.instruction}) == 3
    chunk = policy.act(obs, torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = policy.evaluate(obs, chunk).log_prob
        for i in range(3):
            alone = policy.evaluate(obs.select([i]), chunk.select([i])).log_prob[0]
            torch.testing.assert_close(alone, together[i], atol=1e-4, rtol=0)
    np.testing.assert_allclose(chunk.log_prob, together.numpy(), atol=1e-4)
    other = replace(obs, instruction=obs.instruction[1:] + obs.instruction[:1])
    assert (policy.evaluate(other, chunk).log_prob - together).abs().max() > 1e-3, "the instruction matters"


def test_film_is_moved_by_language_alone(folders):
    policy = load(folders["film"])
    images = torch.randint(0, 256, (1, 56, 56, 3), dtype=torch.uint8)
    language = torch.randn(2, 64)
    one, two = (policy.network.vision_backbone(images, torch.float32, language[i : i + 1]) for i in range(2))
    assert (one - two).abs().max() > 1e-3
    obs = fake_observation(SPEC, 2)
    words = policy.network.language_model.model.embed_tokens.weight
    prompts = [policy.tokenizer.encode_prompt(text) for text in obs.instruction]
    ids, valid = prompt_batch(prompts, 32000, torch.device("cpu"))
    given = policy.network._language(words[ids], valid)
    for row, own in enumerate(prompts):
        torch.testing.assert_close(given[row], words[torch.tensor([*own, 2])].mean(0), atol=1e-6, rtol=1e-5)


# --- saving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_untouched_every_file_has_the_same_tensors_to_the_bit(folders, variant, weights, tmp_path):
    precision = "bf16" if weights == "bf16" else "fp32"
    policy = load(folders[variant], weights=weights, precision=precision)
    policy.save(tmp_path / "again")
    assert {p.name for p in folders[variant].iterdir()} <= {p.name for p in (tmp_path / "again").iterdir()}
    for file in folders[variant].iterdir():
        copy = tmp_path / "again" / file.name
        if file.suffix == ".safetensors":
            assert_same(safetensors.torch.load_file(file), safetensors.torch.load_file(copy))
        elif file.suffix == ".pt":
            assert_same(torch.load(file, weights_only=True), torch.load(copy, weights_only=True))
        else:
            assert file.read_bytes() == copy.read_bytes()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_trained_policy_loads_again_with_keys_shapes_and_dtypes_as_they_were(folders, variant, tmp_path):
    policy = load(folders[variant], value_head=True)
    obs = fake_observation(SPEC, 2)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.05)
    policy.bc_loss(obs, np.zeros((2, policy.chunk_size, 7), np.float32))[0].backward()
    optimizer.step()
    policy.save(tmp_path / "trained")
    again = load_policy(tmp_path / "trained")
    assert isinstance(again, OpenVLAPolicy) and again.config.value_head
    for file in folders[variant].glob("*.safetensors"):
        old, new = safetensors.torch.load_file(file), safetensors.torch.load_file(tmp_path / "trained" / file.name)
        assert {n: (t.dtype, t.shape) for n, t in old.items()} == {n: (t.dtype, t.shape) for n, t in new.items()}
    before = policy.network.state_dict()
    for name, tensor in again.network.state_dict().items():
        torch.testing.assert_close(tensor.float(), before[name].to(torch.bfloat16).float(), atol=1e-3, rtol=2**-7)
    assert torch.equal(again.network.value_head.fc1.weight, policy.network.value_head.fc1.weight)


# --- strict loading -----------------------------------------------------------------------------


@pytest.fixture
def broken(folders, tmp_path):
    return shutil.copytree(folders["l1"], tmp_path / "broken")


def change_shard(folder, change):
    file = sorted(folder.glob("model-*.safetensors"))[0]
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def truncate(folder):
    file = sorted(folder.glob("model-*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def edit_json(name, change):
    def edit(folder):
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return edit


def index_of(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


EMBED = "language_model.model.embed_tokens.weight"


def drop_from_index(folder):
    edit_json("model.safetensors.index.json", lambda v: v["weight_map"].pop("projector.fc1.weight"))(folder)


def add_tensor(folder):
    file = sorted(folder.glob("model-*.safetensors"))[0]
    change_shard(folder, lambda t: t.update({"projector.fc9.weight": torch.zeros(2)}))
    edit_json("model.safetensors.index.json", lambda v: v["weight_map"].update({"projector.fc9.weight": file.name}))(
        folder
    )


def set_nan(folder):
    def change(tensors):
        tensors[next(n for n in tensors if "layers.0" in n)][0] = float("nan")

    change_shard(folder, change)


def pickled_head(folder):
    torch.save({"model.fc1.weight": torch.nn.Linear(2, 2)}, folder / "action_head--100_checkpoint.pt")


DAMAGE = {
    "truncated shard": (truncate, r"model-00001-of-00002.safetensors: truncated"),
    "index names a missing file": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"names files that are not in the folder: model-00002-of-00002.safetensors",
    ),
    "wrong vocabulary": (
        edit_json("config.json", lambda v: v["text_config"].update(vocab_size=32128)),
        rf"{EMBED}: found shape \(32064, 64\), expected \(32128, 64\).*text_config.vocab_size",
    ),
    "missing tensor": (drop_from_index, r"projector.fc1.weight: missing"),
    "extra tensor": (add_tensor, r"projector.fc9.weight: not part of this architecture"),
    "NaN": (set_nan, r"NaN or infinity in language_model.model.layers.0"),
    "pickled objects": (pickled_head, r"action_head--100_checkpoint.pt: holds Python objects"),
    "truncated part": (
        lambda f: (f / "action_head--100_checkpoint.pt").write_bytes(b"PK\x03\x04half"),
        r"action_head--100_checkpoint.pt: truncated",
    ),
    "two action heads": (
        lambda f: shutil.copy(f / "action_head--100_checkpoint.pt", f / "action_head--200_checkpoint.pt"),
        r"2 files of action_head",
    ),
    "no statistics of the action": (
        edit_json("dataset_statistics.json", lambda v: v["fake"].pop("action")),
        r"statistics of 'fake': .*action",
    ),
    "broken config": (lambda f: (f / "config.json").write_text('{"model_type": "openvla"'), r"not valid JSON"),
    "unknown towers": (
        edit_json("config.json", lambda v: (v.pop("vision_sizes"), v.update(timm_model_ids=["vit_tiny"]))),
        r"timm_model_ids is \['vit_tiny'\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(broken, damage):
    change, message = DAMAGE[damage]
    change(broken)
    with pytest.raises(ValueError, match=message):
        load_policy(broken)


def test_norm_keys(folders, tmp_path, caplog):
    one = {"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}, "proprio": {"q01": [0.0] * 8, "q99": [1.0] * 8}}
    many = {"libero_goal_no_noops": one, "bridge_orig": one}
    folder = write_checkpoint(tmp_path / "many", "base", statistics=many)
    with pytest.raises(ValueError, match=r"statistics of 2 datasets.*bridge_orig, libero_goal_no_noops"):
        load(folder)
    with pytest.raises(ValueError, match=r"norm_key: 'bridge_org'.*Did you mean 'bridge_orig'.*libero_goal_no_noops"):
        load(folder, norm_key="bridge_org")
    assert load(folder, norm_key="libero_goal").norm_stats.name == "libero_goal_no_noops"
    for suite in ("libero_goal", "libero_goal+camera-2", "libero_10", "bridge_orig"):
        caplog.clear()
        load(folder, norm_key="libero_goal").check_env(replace(SPEC, suite=suite))
        assert ("policy.norm_key=bridge_orig meant?" in caplog.text) is (suite == "bridge_orig"), suite
    fresh = load(folder, norm_key="from_data")
    assert fresh.norm_stats is None
    fresh.set_norm_stats({"q01": [-2.0] * 7, "q99": [2.0] * 7}, name="mine")
    fresh.save(tmp_path / "saved")
    assert load_policy(tmp_path / "saved").norm_stats.action.q99[0] == 2.0
    assert json.loads((tmp_path / "saved" / "dataset_statistics.json").read_text()).keys() == {*many, "mine"}


def test_wrong_inputs(folders):
    policy = load(folders["l1"])
    obs = fake_observation(SPEC, 1)
    for size in (64, 224):
        assert policy.act(fake_observation(fake_env_spec(SPEC.cameras, size), 1), temperature=0).actions.shape[0] == 1
    for wrong in (np.zeros((1, 64, 64, 4), np.uint8), np.zeros((1, 64, 64, 3), np.float32)):
        with pytest.raises(ValueError, match=r"observation image 'wrist'.*expected uint8 \(B, height, width, 3\)"):
            policy.act(replace(obs, images={**obs.images, "wrist": wrong}))
    with pytest.raises(ValueError, match=r"state has shape \(1, 5\), this policy expects \(B, 8\)"):
        policy.act(replace(obs, state=obs.state[:, :5]))


def test_no_tokenizer(broken):
    (broken / "tokenizer.json").unlink()
    policy = load(broken)
    with pytest.raises(ValueError, match=r"tokenizer.json: not found.*Llama-2"):
        policy.act(fake_observation(SPEC, 1))


# --- refusals and choices -----------------------------------------------------------------------


def test_cloning_with_a_scale_head_moves_the_actions_as_cloning_without(folders):
    """However small the scale: a dimension that hardly moves must not take the gradient of the others."""
    obs, target = fake_observation(SPEC, 2), np.zeros((2, 8, 7), np.float32)
    gradients = {}
    for scale in (None, 0.01, 0.5):
        policy = load(folders["l1"], **({} if scale is None else {"laplace": {"initial_scale": scale}}))
        policy.bc_loss(obs, target)[0].backward()
        head = policy.network.action_head
        assert head is not None
        gradients[scale] = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
        if policy.network.scale_head is not None:
            assert policy.network.scale_head.log_b_head.bias.grad.abs().sum() > 0
    assert gradients[None].abs().sum() > 0
    for scale in (0.01, 0.5):
        torch.testing.assert_close(gradients[scale], gradients[None])


def test_an_l1_checkpoint_is_refused_for_rl_on_tokens(folders, tmp_path):
    for chosen, message in (({"decoder": "parallel"}, "lm_head never was"), ({}, r"policy.laplace=\{\}")):
        with pytest.raises(ValueError, match=message):
            GRPOConfig().build(load(folders["l1"], **chosen))
    GRPOConfig().build(load(folders["l1"], laplace={}))
    discrete = load(folders["l1"], decoder="parallel")
    discrete.save(tmp_path / "cloned")
    assert not list((tmp_path / "cloned").glob("action_head*"))
    again = OpenVLAConfig(path=str(tmp_path / "cloned"), precision="fp32").build(SPEC)
    assert again.config.decoder == "parallel"
    GRPOConfig().build(again)


@pytest.mark.parametrize(
    ("variant", "chosen", "message"),
    [
        ("base", {"decoder": "l1"}, "policy.decoder: got 'l1', but .* has no action_head"),
        ("base", {"use_state": True}, "policy.use_state: true, but .* has no proprio_projector"),
        ("discrete", {"laplace": {}}, "policy.laplace: a scale head belongs to the l1 decoder"),
        ("base", {"action_bins": 128}, "policy.action_bins: got 128, but the checkpoint"),
        ("l1", {"laplace": {"min_scale": 0.1}}, "needs min_scale <= initial_scale"),
    ],
)
def test_choices_that_contradict_the_files(folders, variant, chosen, message):
    with pytest.raises(ConfigError, match=message):
        load(folders[variant], **chosen)


def test_weights_are_held_as_the_training_needs(folders):
    chosen = {"precision": "bf16", "lora": {"rank": 2}, "trainable": "lora", "value_head": True}
    policy = OpenVLAPolicy.load(folders["l1"], chosen=chosen, for_training=True)
    for name, parameter in policy.network.named_parameters():
        assert (parameter.dtype == torch.float32) == parameter.requires_grad, name
    policy = OpenVLAPolicy.load(folders["base"], chosen={"precision": "bf16"})
    assert {p.dtype for p in policy.network.parameters()} == {torch.bfloat16}
    obs = fake_observation(SPEC, 2)
    assert np.isfinite(policy.act(obs).log_prob).all()
    with pytest.raises(ConfigError, match=r"policy.weights: got 'bf16'"):
        load(folders["base"], weights="bf16")


def test_loading_holds_one_copy_at_most(folders, monkeypatch):
    """Every tensor is made once, in its dtype: nothing on the way is as large as a second network."""
    given: list[tuple[str, torch.dtype]] = []
    made: list[str] = []
    assign, make_linear = openvla_weights._assign, torch.nn.Linear.__init__

    def record_tensor(network, name, tensor, file):
        given.append((name, tensor.dtype))
        assign(network, name, tensor, file)

    def record_linear(self, *args, **kwargs):
        make_linear(self, *args, **kwargs)
        made.append(self.weight.device.type)

    monkeypatch.setattr(openvla_weights, "_assign", record_tensor)
    monkeypatch.setattr(torch.nn.Linear, "__init__", record_linear)
    policy = OpenVLAPolicy.load(folders["base"], chosen={"precision": "bf16"})
    assert set(made) == {"meta"} and len(given) == len(policy.network.state_dict())
    assert {dtype for _, dtype in given} == {torch.bfloat16}


@pytest.mark.parametrize("variant", VARIANTS)
def test_inspect_and_its_recipe_line(folders, variant):
    import yaml

    info = describe(folders[variant])
    text = info.text(str(folders[variant]))
    assert "OpenVLA" in text and "fake" in text and "grpo" in text
    section = yaml.safe_load(info.recipe_line(str(folders[variant])))["policy"]
    policy = OpenVLAConfig.model_validate({**section, **FP32}).build(SPEC)
    assert GRPOConfig().build(policy).policy is policy


def test_folders_that_are_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: not found"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"no family knows this folder \(openvla"):
        describe(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_path("no/such/folder")


def test_a_hub_id_comes_from_the_cache_or_says_why_not(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="is not whole in the hub"):
        resolve_path("someone/some-vla")
    snapshot = tmp_path / "models--someone--some-vla" / "snapshots" / ("0" * 40)
    shutil.copytree(folders["base"], snapshot)
    refs = tmp_path / "models--someone--some-vla" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    assert describe(resolve_path("someone/some-vla")).kind == "openvla"
