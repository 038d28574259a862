"""The world model in one: actions into frames, memory, success scores; and its folder, whole or damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import CONFIG, GOAL, METADATA, push, toy_parts, toy_valued, toy_world_model

from vla_rl.config import ConfigError, validate
from world_model.config import AutoencoderConfig, WorldModelConfig
from world_model.fit.config import FitConfig
from world_model.metadata import METADATA_FILE, WorldModelMetadata, content_key, read_metadata, resolve_path, shortened
from world_model.model.autoencoder import without_path
from world_model.model.parts import build_parts
from world_model.model.wan_network import model_folder
from world_model.model.world_model import WorldModel, load_world_model
from world_model.noise import NoiseStream
from world_model.types import Actions, Frames

SMALL = WorldModelConfig.model_validate(
    {
        "frame_steps": 4,
        "autoencoder": {"channels": [8, 8, 8], "blocks": [1, 1, 1], "latent_channels": 4},
        "dynamics": {"width": 32, "depth": 1, "heads": 2, "memory": 2},
        "success": {"width": 32, "depth": 1},
    }
)
SMALL_FACTS = METADATA.model_copy(update={"image_size": (16, 16), "success_threshold": 0.25})


def small_world_model(seed: int = 0) -> WorldModel:
    torch.manual_seed(seed)
    world_model = WorldModel(SMALL, SMALL_FACTS, build_parts(SMALL, SMALL_FACTS))
    for parameter in world_model.parameters():  # Also the layers that start at zero.
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return world_model


def future(world_model: WorldModel, seed: int = 3) -> tuple[Frames, torch.Tensor, torch.Tensor]:
    """Two episodes, two frames, and what the heads say of them."""
    rng = np.random.default_rng(0)
    size = world_model.metadata.image_size
    images = rng.integers(0, 256, (2, 1, 2, *size, 3), np.uint8)
    first = world_model.encode(images, rng.normal(size=(2, 1, 2)).astype(np.float32))
    memory = world_model.begin(first, ["reach the goal", "reach the goal again"], [seed, seed + 1])
    actions = world_model.actions(push(0.5, 2, 8), np.array([8, 8]))
    frames = world_model.dynamics.imagine(memory.context, actions, memory.noise)
    return frames, *world_model.scores(memory, frames)


def positions(values: list[list[float]]) -> Frames:
    """Toy frames at these positions, B x F."""
    position = torch.tensor(values)
    return Frames(
        position[:, :, None, None, None, None].expand(-1, -1, 2, 1, 1, 1), position[..., None].repeat(1, 1, 2)
    )


# --- actions, memory, scores ------------------------------------------------------------------


def test_a_chunk_is_cut_into_frames_clipped_and_masked() -> None:
    actions = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3) / 10
    found = toy_world_model().actions(actions, np.array([6, 3]))
    assert found.values.shape == (2, 2, 4, 3) and found.executed.shape == (2, 2, 4)
    assert found.executed.sum(2).tolist() == [[4, 2], [3, 0]]
    expected = np.zeros((2, 8, 3), np.float32)
    expected[0, :6], expected[1, :3] = actions[0].clip(-1, 1), actions[1, :3].clip(-1, 1)
    np.testing.assert_array_equal(found.values.flatten(1, 2).numpy(), expected)


def test_an_infinite_action_that_is_not_executed_leaves_no_trace() -> None:
    actions = push(np.inf, 1, 4)
    found = toy_world_model().actions(actions, np.array([2]))
    assert found.values[0, 0, :, 0].tolist() == [1, 1, 0, 0]


def test_frames_go_to_the_model_and_back_in_the_robots_units() -> None:
    metadata = METADATA.model_copy(update={"state_mean": (1.0, -2.0), "state_std": (0.5, 4.0)})
    world_model = toy_world_model(metadata=metadata)
    images = np.full((1, 2, 2, 8, 8, 3), 40, np.uint8)
    states = np.array([[[2.0, -2.0], [1.0, 2.0]]], np.float32)
    frames = world_model.encode(images, states)
    assert frames.latents.flatten().tolist() == [5.0] * 4
    assert frames.states.tolist() == [[[2.0, 0.0], [0.0, 1.0]]]
    np.testing.assert_array_equal(world_model.states(frames), states)
    shown = world_model.decode(frames)
    assert shown.shape == images.shape and (shown[..., 1:, :, :] == 40).all()


def test_heads_see_the_last_frames_the_first_repeated_where_there_are_fewer() -> None:
    world_model = toy_world_model()
    seen: list[list[float]] = []

    def record(frames: Frames, reference: Frames, instruction: list[str]) -> torch.Tensor:
        seen.extend(frames.latents[:, :, 0, 0, 0, 0].tolist())
        assert reference.latents[:, 0, 0, 0, 0, 0].tolist() == [1.0] * len(instruction)
        return torch.zeros(len(instruction))

    world_model.clip.score = record  # type: ignore[method-assign]
    memory = world_model.begin(positions([[1]]), ["go"], [0])
    world_model.scores(memory, positions([[2, 3]]))
    assert seen == [[1, 1, 2], [1, 2, 3]]
    seen.clear()
    nothing = Actions(torch.zeros(1, 2, 4, 3), torch.ones(1, 2, 4, dtype=torch.bool))
    world_model.scores(world_model.extend(memory, positions([[2, 3]]), nothing), positions([[4]]))
    assert seen == [[2, 3, 4]]


def test_the_value_is_a_probability_at_real_and_at_imagined_frames() -> None:
    world_model = toy_valued()
    memory = world_model.begin(positions([[4], [5]]), ["go", "go"], [0, 1])
    newest = world_model.value(memory, None, np.array([[24], [12]]))
    assert newest.dtype == torch.float32
    torch.testing.assert_close(newest, torch.sigmoid(2 * torch.tensor([[4 - GOAL + 2], [5 - GOAL]]) + 0.5))
    following = world_model.value(memory, positions([[5, 6], [5, 7]]), np.array([[12, 6], [24, 0]]))
    logits = torch.tensor([[5 - GOAL, 6 - GOAL - 1], [5 - GOAL + 2, 7 - GOAL - 2]])
    torch.testing.assert_close(following, torch.sigmoid(2 * logits + 0.5))
    nothing = Actions(torch.zeros(2, 2, 4, 3), torch.ones(2, 2, 4, dtype=torch.bool))
    later = world_model.extend(memory, positions([[5, 6], [5, 7]]), nothing)
    torch.testing.assert_close(world_model.value(later, None, np.array([[6], [0]])), following[:, 1:])
    with pytest.raises(ValueError, match=r"steps_left: got shape \(2,\), must be \(2, 1\)"):
        world_model.value(later, None, np.array([6, 0]))


def test_a_world_model_without_a_value_says_how_to_get_one(tmp_path) -> None:
    small_world_model().save(tmp_path / "old")
    old = load_world_model(tmp_path / "old")
    memory = old.begin(old.encode(np.full((1, 1, 2, 16, 16, 3), 9, np.uint8), np.zeros((1, 1, 2))), ["go"], [0])
    with pytest.raises(ConfigError, match=r"no value.*world_model\.value\.steps"):
        old.value(memory, None, np.array([[4]]))


def test_a_value_is_kept_in_the_folder(tmp_path) -> None:
    metadata = SMALL_FACTS.model_copy(update={"value_probability": (1.5, -0.25)})
    torch.manual_seed(1)
    world_model = WorldModel(SMALL, metadata, build_parts(SMALL, metadata))
    world_model.add_value_head()
    world_model.save(tmp_path / "valued")
    found = []
    for each in (world_model, load_world_model(tmp_path / "valued")):
        images = np.random.default_rng(0).integers(0, 256, (2, 1, 2, 16, 16, 3), np.uint8)
        memory = each.begin(each.encode(images, np.ones((2, 1, 2))), ["reach the goal", "go"], [0, 1])
        found.append(each.value(memory, None, np.array([[8], [16]])))
        assert not torch.equal(found[-1], each.value(memory, None, np.array([[8], [8]]))), "the time left tells"
    torch.testing.assert_close(*found)
    before = content_key(tmp_path / "valued")
    (tmp_path / "valued" / "value_head.safetensors").unlink()
    assert content_key(tmp_path / "valued") != before


def test_a_success_needs_both_heads() -> None:
    metadata = METADATA.model_copy(update={"success_threshold": 0.5, "clip_threshold": 0.25})
    success, clip = torch.tensor([0.6, 0.6, 0.4, 0.5]), torch.tensor([0.3, 0.2, 0.3, 0.3])
    world_model = toy_world_model(metadata=metadata)
    assert world_model.counts(success, clip).tolist() == [True, False, False, False]


def test_memory_is_put_in_place_and_taken_out_again() -> None:
    world_model = toy_world_model(noise=1.0)
    memory = world_model.begin(positions([[1], [2], [3]]), ["a", "b", "c"], [1, 2, 3])
    other = world_model.begin(positions([[7], [8]]), ["x", "y"], [7, 8])
    put = memory.put([2, 0], other)
    assert put.instruction == ["y", "b", "x"]
    assert put.context.tensors()["position"].flatten().tolist() == [8, 2, 7]
    assert put.recent.latents[:, -1, 0, 0, 0, 0].tolist() == [8, 2, 7]
    assert memory.context.tensors()["position"].flatten().tolist() == [1, 2, 3]  # Unchanged.
    expected = NoiseStream([8, 2, 7]).normal(1)
    torch.testing.assert_close(put.noise.normal(1), expected, rtol=0, atol=0)
    taken = put.select([2])
    assert taken.instruction == ["x"] and taken.reference.states.flatten().tolist() == [7, 7]


def test_parts_must_fit_the_facts() -> None:
    parts = toy_parts(CONFIG, METADATA)
    with pytest.raises(ValueError, match=r"autoencoder: is for images of \(8, 8\)"):
        WorldModel(CONFIG, METADATA.model_copy(update={"image_size": (16, 16)}), parts)
    with pytest.raises(ValueError, match="frame_steps = 8"):
        WorldModel(CONFIG.model_copy(update={"frame_steps": 8}), METADATA, parts)


# --- real networks ----------------------------------------------------------------------------


def test_built_networks_fit_each_other() -> None:
    frames, success, clip = future(small_world_model())
    assert frames.latents.shape == (2, 2, 2, 4, 4, 4) and frames.states.shape == (2, 2, 2)
    assert success.shape == clip.shape == (2, 2) and not torch.equal(success, clip)
    assert small_world_model().decode(frames).shape == (2, 2, 2, 16, 16, 3)


def test_what_is_saved_imagines_the_same(tmp_path: Path) -> None:
    world_model = small_world_model()
    world_model.save(tmp_path / "model")
    loaded = load_world_model(tmp_path / "model")
    assert loaded.config == SMALL and loaded.metadata == SMALL_FACTS and not loaded.training
    (frames, *scores), (loaded_frames, *loaded_scores) = future(world_model), future(loaded)
    assert torch.equal(frames.latents, loaded_frames.latents) and torch.equal(frames.states, loaded_frames.states)
    assert all(torch.equal(a, b) for a, b in zip(scores, loaded_scores, strict=True))


def test_a_pretrained_autoencoder_goes_along(tmp_path: Path) -> None:
    """The world model's folder alone is copied to another machine."""
    diffusers = pytest.importorskip("diffusers")
    sizes = {f"{side}_block_out_channels": (8, 8) for side in ("encoder", "decoder")}
    blocks = {f"num_{side}_blocks": (1, 1) for side in ("encoder", "decoder")}
    diffusers.AutoencoderTiny(**sizes, **blocks, scaling_factor=0.5).save_pretrained(tmp_path / "vae")
    config = SMALL.model_copy(update={"autoencoder": AutoencoderConfig(path=tmp_path / "vae")})
    facts = SMALL_FACTS.model_copy(update={"image_size": (8, 8)})
    world_model = WorldModel(config, facts, build_parts(config, facts))
    world_model.save(tmp_path / "model")
    shutil.rmtree(tmp_path / "vae")
    loaded = load_world_model(tmp_path / "model")
    assert torch.equal(future(loaded)[0].latents, future(world_model)[0].latents)
    assert loaded.config == world_model.config
    described = {"model": {"autoencoder": loaded.config.autoencoder.model_dump()}}
    with pytest.raises(ConfigError, match=r"autoencoder\.pretrained: .* names no weights; give path"):
        validate(FitConfig, described, prefix="world_model")


def test_pretrained_parts_are_found_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for part, name in (("vae", "AutoencoderKLWan"), ("transformer", "WanTransformer3DModel")):
        (tmp_path / "wan" / part).mkdir(parents=True)
        (tmp_path / "wan" / part / "config.json").write_text(json.dumps({"_class_name": name, "_name_or_path": "x"}))
    (tmp_path / "wan" / "vae" / "w.safetensors").touch()
    found = without_path(AutoencoderConfig(path=Path("~/wan")))
    assert found.path is None and found.pretrained == {"_class_name": "AutoencoderKLWan"}
    assert model_folder(Path("~/wan"), "transformer", "WanTransformer3DModel") == tmp_path / "wan" / "transformer"


def test_sampling_can_be_changed_and_stays_so(tmp_path: Path) -> None:
    world_model = small_world_model()
    before, _, _ = future(world_model)
    world_model.set_dynamics_options(sampling_steps=1)
    after, _, _ = future(world_model)
    assert not torch.equal(before.latents, after.latents)
    world_model.save(tmp_path / "model")
    assert torch.equal(future(load_world_model(tmp_path / "model"))[0].latents, after.latents)
    with pytest.raises(ConfigError, match=r"world_model\.denoising_steps: dynamics of kind 'transformer' have no"):
        world_model.set_dynamics_options(denoising_steps=1)


def test_half_precision_halves_the_weights_and_changes_little(tmp_path: Path) -> None:
    world_model = small_world_model()
    world_model.save(tmp_path / "model")
    world_model.save(tmp_path / "half", torch.float16)
    sizes = [(tmp_path / name / "dynamics.safetensors").stat().st_size for name in ("model", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    half = load_world_model(tmp_path / "half")
    assert next(half.parameters()).dtype == torch.float32
    torch.testing.assert_close(future(half)[0].latents, future(world_model)[0].latents, rtol=0, atol=0.05)


def test_loading_leaves_torchs_generator_alone(tmp_path: Path) -> None:
    small_world_model().save(tmp_path / "model")
    torch.manual_seed(5)
    expected = torch.randn(1)
    torch.manual_seed(5)
    load_world_model(tmp_path / "model")
    assert torch.equal(torch.randn(1), expected)


# --- the folder -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy_world_model(noise=0.5).save(tmp_path / "toy")
    return tmp_path / "toy"


def load(folder: Path) -> WorldModel:
    return load_world_model(folder, build=toy_parts)


def edit(folder: Path, **changes: Any) -> None:
    file = folder / METADATA_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_saving_again_replaces_the_whole_folder(folder: Path) -> None:
    (folder / "trust.json").write_text("{}")
    toy_world_model(noise=0.25).save(folder)
    assert float(load(folder).state_dict()["dynamics.noise"]) == 0.25
    assert not (folder / "trust.json").exists()  # It was about the older weights.


def test_the_content_key_is_of_weights_and_facts_alone(folder: Path, tmp_path: Path) -> None:
    key = content_key(folder)
    (folder / "trust.json").write_text("{}")
    assert content_key(Path(shutil.copytree(folder, tmp_path / "copy"))) == key
    toy_world_model(noise=0.25).save(tmp_path / "weights")
    toy_world_model(noise=0.5, metadata=METADATA.model_copy(update={"clip_threshold": 1.0})).save(tmp_path / "facts")
    assert len({key, content_key(tmp_path / "weights"), content_key(tmp_path / "facts")}) == 3


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "clip.safetensors").unlink()
    with pytest.raises(ValueError, match=r"clip\.safetensors: not found"):
        load(folder)
    (folder / METADATA_FILE).unlink()
    with pytest.raises(ValueError, match=rf"{METADATA_FILE}: not found"):
        load(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    file = folder / "dynamics.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"dynamics\.safetensors: truncated"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": torch.tensor(float("nan"))}, "NaN or infinity in noise"),
        ({"noise": torch.zeros(2)}, r"noise: found shape \(2,\), expected \(\)"),
        ({"other": torch.zeros(2)}, "other: not part of it"),
        ({"noise": None}, "noise: missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    file = folder / "dynamics.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | change).items() if tensor is not None}
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_damaged_facts_are_refused(folder: Path) -> None:
    text = (folder / METADATA_FILE).read_text()
    metadata = json.loads(text)["facts"]
    edit(folder, format=99)
    with pytest.raises(ValueError, match="is of format 99, this version reads 1"):
        load(folder)
    edit(folder, format=1, facts=metadata | {"image_size": [0, 8]})
    with pytest.raises(ValueError, match=r"facts\.image_size"):
        load(folder)
    edit(folder, facts=metadata | {"camera": ["x"]})
    with pytest.raises(ValueError, match="cameras"):
        load(folder)
    (folder / METADATA_FILE).write_text("[]")
    with pytest.raises(ValueError, match="no world model of this package"):
        load(folder)
    (folder / METADATA_FILE).write_text(text[:-20])
    with pytest.raises(ValueError, match="not valid JSON"):
        load(folder)


def test_unknown_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolve_path(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no such pretrained world model"):
        resolve_path("pretrained:nothing_of_the_kind")


def test_facts_come_back_from_the_environment_they_describe() -> None:
    spec = METADATA.env_spec()
    fitted = {"success_probability": METADATA.success_probability}
    assert WorldModelMetadata.of(spec, np.zeros(2), np.ones(2), **fitted) == METADATA
    assert METADATA.env_spec(["reach"]).horizon == {"reach": 24}
    assert shortened(spec, 20).horizon == {"reach": 20, "reach_back": 16} and shortened(spec, None) == spec
    with pytest.raises(ConfigError, match="Did you mean 'reach'"):
        METADATA.env_spec(["reech"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_std": (1.0,)}, "state_std"),
        ({"action_low": (1.0, 1.0, 1.0)}, "action_high"),
        ({"horizon": {"reach": 3}}, "horizon"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorldModelMetadata.model_validate(METADATA.model_dump() | changes)


def test_facts_are_read_without_the_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert read_metadata(folder) == (CONFIG, METADATA)
