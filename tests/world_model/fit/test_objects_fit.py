"""Fitting the objects part of the dummy's world model: poses by slot, stages, its folder, keyframes, refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dummy_fit import ENV, KEPT, collect, config, keep_killed, weights
from toy import through_a_file

from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.types import EpisodeSpec
from world_model.config import ImaginationConfig, ObjectsStageConfig
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import open_latents
from world_model.data.objects import ObjectSamples, slot_poses
from world_model.env.config import WorldModelEnvConfig
from world_model.fit.fit import fit
from world_model.fit.objects import objects_scores
from world_model.fit.stage import updates_kept
from world_model.model.world_model import load_world_model
from world_model.trust.config import MeasureConfig
from world_model.trust.evaluate import measure_trust
from world_model.trust.report import TrustReport

SPEC = ENV.env_spec()
NETWORK = {"slots": [["green", "red"], ["blue"]], "width": 32, "probe_width": 8, "meters_per_action": 0.2}
OBJECTS = {"steps": 60, "batch_size": 16, "optim": {"lr": 1.5e-2, "warmup_steps": 5}, "network": NETWORK}


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Path:
    return collect(tmp_path_factory.mktemp("objects") / "episodes", noise=1.5, noise_hold=4, objects=True)


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("objects") / "held_out"
    return collect(folder, noise=1.5, noise_hold=4, objects=True, start_index=700)


@pytest.fixture(scope="module")
def fitted(episodes, tmp_path_factory) -> Path:
    """Beside its run lies `killed`, the run as it was after 50 of the part's updates."""
    folder = tmp_path_factory.mktemp("objects")
    with pytest.MonkeyPatch.context() as patch:
        keep_killed(patch, folder / "run", "objects")
        return fit(config(episodes, objects=OBJECTS, save_every=50), SPEC, folder / "run", seed=1)


def frames_of(folder: Path) -> EpisodeFrames:
    dataset = open_episodes(DatasetConfig(path=str(folder)), SPEC)
    return EpisodeFrames.of(dataset, 4, SPEC.action_low, SPEC.action_high)


# --- data ---------------------------------------------------------------------------------------


def test_a_slot_holds_the_first_of_its_objects_that_the_scene_has(episodes) -> None:
    frames = frames_of(episodes)
    poses = slot_poses(frames, NETWORK["slots"])
    assert poses is not None and poses.shape == (len(frames.dataset.actions) + len(frames.dataset.starts), 2, 4)
    env = ENV.model_copy(update={"objects": True}).make()
    for episode in range(3):
        task, split, index = frames.dataset.initial_states[episode].split("/")
        env.reset(EpisodeSpec(task, split, int(index)))  # type: ignore[arg-type]
        for row in (frames.dataset.starts[episode], len(frames.dataset.actions) + episode):
            np.testing.assert_array_equal(poses[row], env.object_poses())


def test_a_slot_without_any_of_its_objects_is_refused(episodes) -> None:
    with pytest.raises(DatasetError, match=r"episode 0 has none of green, the objects of slot 1.*it has: red, blue"):
        slot_poses(frames_of(episodes), [["red"], ["green"]])


def samples_of(folder: Path, world_model: Any, tmp_path: Path, **options: Any) -> ObjectSamples:
    clips = ClipDataset(
        [open_latents(frames_of(folder), world_model.autoencoder, tmp_path)], 3, np.zeros(8), np.ones(8)
    )
    return ObjectSamples(clips, NETWORK["slots"], ObjectsStageConfig.model_validate({"steps": 1, **options}))


def test_a_batch_is_what_was_recorded_and_repeats(episodes, fitted, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("world_model.data.objects.POSITION_NOISE", 0)
    monkeypatch.setattr("world_model.data.objects.YAW_NOISE", 0)
    samples = samples_of(episodes, load_world_model(fitted), tmp_path)
    batch = samples.batch(8, seed=3, step=5)
    assert torch.equal(batch.start, batch.poses[:, 0]) and batch.latents.shape[0] == batch.seen.shape[0] == 4
    assert batch.is_first.tolist()[0] and set(batch.instruction) == {SPEC.tasks["reach_red"]}
    executed = batch.actions.executed[:, 0]
    where = batch.position[:, None] + 0.2 * (batch.actions.values[:, 0, :, :3] * executed[..., None]).cumsum(1)
    near = (where.clamp(-1, 1)[..., :2] - batch.poses[:, 1:, 0, :2]).norm(dim=-1) < 0.2
    inside = (where[..., :2].abs() < 0.95).all(-1).cumprod(1).bool() & executed  # Where the wall has not stopped it.
    assert ((near.cummax(1).values == batch.success) | ~inside).all()
    again = samples.batch(8, seed=3, step=5)
    assert torch.equal(again.latents, batch.latents) and torch.equal(again.actions.values, batch.actions.values)
    assert not torch.equal(samples.batch(8, seed=3, step=6).position, batch.position)


def test_a_batch_has_the_end_effectors_path_where_it_was_recorded(episodes, fitted, tmp_path) -> None:
    samples = samples_of(episodes, load_world_model(fitted), tmp_path)
    dense = samples.batch(8, seed=3, step=5)
    executed = dense.actions.executed[:, 0]
    assert dense.path is not None and torch.equal(dense.path.isfinite().all(-1), executed)
    off = (dense.path[:, 0] - dense.position - 0.2 * dense.actions.values[:, 0, 0, :3])[:, :2]
    inside = (dense.path[:, 0, :2].abs() < 0.95).all(-1)
    torch.testing.assert_close(off[inside], torch.zeros(int(inside.sum()), 2), atol=1e-5, rtol=0)
    part = samples._parts[0]
    dataset = replace(part.frames.dataset, observed_every=4)
    samples._parts = [replace(part, frames=replace(part.frames, dataset=dataset))]
    sparse = samples.batch(8, seed=3, step=5).path
    assert sparse is not None
    step = torch.arange(1, executed.shape[1] + 1)
    expected = executed & ((step % 4 == 0) | (step == executed.sum(1, keepdim=True)))
    assert torch.equal(sparse.isfinite().all(-1), expected) and torch.equal(sparse[expected], dense.path[expected])


def test_datasets_without_poses_are_refused(fitted, tmp_path) -> None:
    plain = collect(tmp_path / "plain", noise=1.5, noise_hold=4, episodes_per_task=6)
    with pytest.raises(DatasetError, match=r"no objects' poses.*collect\.objects=true"):
        samples_of(plain, load_world_model(fitted), tmp_path)


# --- fitting, and its folder --------------------------------------------------------------------


def test_a_fit_saves_the_part_with_its_probability(fitted) -> None:
    world_model = load_world_model(fitted)
    assert (fitted / "objects.safetensors").is_file() and world_model.objects is not None
    assert world_model.config.objects is not None and world_model.config.objects.slots[0] == ("green", "red")
    slope, _ = world_model.check_objects()
    assert slope > 0 and world_model.metadata.objects_calibration["cross_fitted"]["num_episodes"] == 12
    center = world_model.objects.probe.center
    assert center[:, :2].abs().sum() > 0, "the mean of what was recorded"


def test_a_killed_fit_goes_on_as_if_it_had_not_been(episodes, fitted, tmp_path) -> None:
    folder = Path(shutil.copytree(fitted.parents[1] / "killed", tmp_path / "run"))
    options = config(episodes, objects=OBJECTS, save_every=50)
    assert updates_kept(options, folder) == 4 * 3 + 50
    assert weights(fit(options, SPEC, folder, seed=1)) == weights(fitted)


def test_a_world_model_without_the_part_gets_one_and_keeps_the_rest(episodes, fitted, tmp_path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(fitted, bare)
    (bare / "objects.safetensors").unlink()
    values = json.loads((bare / "world_model.json").read_text())
    for name in ("objects_probability", "objects_calibration"):  # As a folder of an earlier version.
        del values["facts"][name]
    del values["config"]["objects"]
    (bare / "world_model.json").write_text(json.dumps(values))
    assert load_world_model(bare).objects is None
    options = {"start_from": str(bare), **KEPT}
    with pytest.raises(ConfigError, match=r"objects\.network: got null with steps=60"):
        fit(config(episodes, **options, objects={**OBJECTS, "network": None}), SPEC, tmp_path / "refused")
    found = weights(fit(config(episodes, **options, objects=OBJECTS), SPEC, tmp_path / "run"))
    before = weights(bare)
    assert found.keys() - before.keys() == {"objects.safetensors"} and before.items() <= found.items()


def test_steps_of_0_keep_the_part_and_choose_its_probability_anew(episodes, held_out, fitted, tmp_path) -> None:
    options = {"start_from": str(fitted), "calibrate_on": str(held_out), **KEPT}
    result = fit(config(episodes, **options), SPEC, tmp_path / "run")
    assert weights(result)["objects.safetensors"] == weights(fitted)["objects.safetensors"]
    assert load_world_model(result).metadata.objects_calibration["cross_fitted"]["num_episodes"] == 24


def test_a_refit_reaches_where_the_first_or_the_new_episodes_did(episodes, held_out, fitted, tmp_path) -> None:
    start = load_world_model(fitted)
    assert start.objects is not None
    start.objects.reach.copy_(torch.tensor([[-0.2, -3.0, 0.0], [0.2, 0.1, 0.5]]))  # As of episodes elsewhere.
    start.save(tmp_path / "start")
    options = {"start_from": str(tmp_path / "start"), "calibrate_on": str(episodes), **KEPT}
    refit = config(held_out, **options, objects={**OBJECTS, "steps": 1})
    after = load_world_model(fit(refit, SPEC, tmp_path / "run")).objects
    assert after is not None and torch.equal(after.probe.center, start.objects.probe.center)
    seen = samples_of(held_out, start, tmp_path).all_poses()[1]
    low, high = seen.amin(0), seen.amax(0)
    assert (low[0] < -0.2) and (high[:2] > 0.2).all(), "the new episodes went further"
    torch.testing.assert_close(after.reach[0], torch.tensor([low[0], -3.0, 0.0]))
    torch.testing.assert_close(after.reach[1], torch.tensor([high[0], high[1], 0.5]))


def test_a_part_that_says_the_opposite_is_left_out(episodes, fitted, tmp_path, monkeypatch) -> None:
    from world_model.fit import objects as module

    def opposite(world_model: Any, clips: ClipDataset) -> tuple[np.ndarray, ...]:
        score, real, starts = objects_scores(world_model, clips)
        return -real.astype(float) + 1e-3 * score, real, starts

    monkeypatch.setattr(module, "objects_scores", opposite)
    result = fit(config(episodes, start_from=str(fitted), **KEPT), SPEC, tmp_path / "run")
    assert load_world_model(result).objects is None and "objects.safetensors" not in weights(result)


def test_cross_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cross_fit: got 2 with objects\.steps"):
        config(Path("data"), cross_fit=2, objects=OBJECTS, autoencoder={"steps": 0})


def test_half_precision_weights_keep_what_is_read_of_the_data(episodes, fitted, tmp_path) -> None:
    world_model = load_world_model(fitted)
    world_model.save(tmp_path / "half", torch.float16)
    found = load_world_model(tmp_path / "half")
    assert world_model.objects is not None and found.objects is not None
    assert torch.equal(found.objects.reach, world_model.objects.reach), "buffers are stored as they are"


# --- use ------------------------------------------------------------------------------------------


def make_env(folder: Path, **imagination: Any):
    first = {"kind": "sim.dummy:DummyConfig", **ENV.model_dump(exclude_defaults=True, exclude={"kind"})}
    options = {"path": str(folder), "num_envs": 2, "trust": {"ignore": True}, "first_frames": first, "device": "cpu"}
    imagination = {"reward": "objects", "dual_noise": 0, "stop_probability": 0.999, "precision": "fp32", **imagination}
    return validate(WorldModelEnvConfig, options | {"imagination": imagination}).build()


SPECS = [EpisodeSpec("reach_red", "train", 1), EpisodeSpec("reach_red", "train", 2)]


def chunks(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (2, 4, 7)).astype(np.float32)


def test_an_episode_is_paid_the_parts_probability_as_it_grows(fitted) -> None:
    env = make_env(fitted)
    env.reset(SPECS)
    world_model, memory = env.world_model, env._memory
    assert memory is not None
    actions = [chunks(0), chunks(1)]
    paid = sum(env.step(action).reward.sum(1) for action in actions)
    together = world_model.actions(np.concatenate(actions, 1), np.array([8, 8]))
    found = world_model.objects_probability(world_model.objects_scores(memory, together)).amax(1)
    np.testing.assert_allclose(paid, found.numpy(), rtol=1e-5)


def test_other_noise_changes_pictures_and_no_reward(fitted) -> None:
    one, other = (make_env(fitted) for _ in range(2))
    other._seed = 5
    for env in (one, other):
        env.reset(SPECS)
    first, second = one.step(chunks(0)), other.step(chunks(0))
    assert not np.array_equal(first.obs.images["agentview"], second.obs.images["agentview"])
    np.testing.assert_array_equal(first.reward, second.reward)


@pytest.fixture(params=["commanded", "learned"])
def either(request, fitted, tmp_path) -> Path:
    """The fitted world model, and one whose end effector is not where it is told to be."""
    if request.param == "commanded":
        return fitted
    world_model = load_world_model(fitted)
    assert world_model.config.objects is not None
    world_model.set_objects(world_model.config.objects.model_copy(update={"end_effector": "learned"}))
    assert world_model.objects is not None
    for parameter in world_model.objects.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    world_model.save(tmp_path / "learned")
    saved, loaded = world_model.objects.state_dict(), load_world_model(tmp_path / "learned").objects
    assert loaded is not None and all(torch.equal(saved[name], t) for name, t in loaded.state_dict().items())
    return tmp_path / "learned"


def test_a_keyframe_has_the_objects_in_memory(either) -> None:
    env = make_env(either)
    env.reset(SPECS)
    env.step(chunks(0))
    keyframes = [through_a_file(keyframe) for keyframe in env.save_state()]
    assert "memory.objects.hidden" in keyframes[0].arrays
    assert ("memory.objects.arm" in keyframes[0].arrays) == (either.name == "learned")
    expected = env.step(chunks(1))
    again = make_env(either)
    again.reset([EpisodeSpec("reach_red", "train", s.index, keyframe=k) for s, k in zip(SPECS, keyframes, strict=True)])
    np.testing.assert_array_equal(again.step(chunks(1)).reward, expected.reward)


def test_without_the_part_the_reward_is_refused(fitted) -> None:
    bare = load_world_model(fitted)
    bare.set_objects(None)
    from world_model.imagination.reward import check_reward

    options = make_env(fitted).config
    with pytest.raises(
        ConfigError, match=r"reward: got 'objects', but the world model has no objects part.*objects\.s"
    ):
        check_reward(bare, options)
    with pytest.raises(ConfigError, match="dual_noise: got 1 with reward 'objects'"):
        make_env(fitted, dual_noise=1)


def test_trust_measures_the_reward_that_is_paid_and_where_objects_are(fitted, held_out, tmp_path) -> None:
    config = MeasureConfig.model_validate({"inverse_updates": 0, "auc_frames": 1})
    reports = {}
    for reward in ("objects", "probability"):
        imagination = validate(ImaginationConfig, {"reward": reward, "dual_noise": 0, "precision": "fp32"})
        measure_trust(config, fitted, [held_out], imagination=imagination, folder=tmp_path / reward)
        reports[reward] = TrustReport.load(tmp_path / reward / "trust.json")
    world_model = load_world_model(fitted)
    frames = frames_of(held_out)
    found = reports["objects"].figures
    assert found["auc"].value != reports["probability"].figures["auc"].value
    assert found["outcome_flips"].value == 0, "the part draws no noise"
    poses = slot_poses(frames, NETWORK["slots"])
    assert poses is not None and world_model.objects is not None
    first = world_model.encode(frames.images(frames.starts)[:, None], frames.states(frames.starts)[:, None])
    read = world_model.objects.read(first, frames.instruction(frames.starts))[:, 0, 0, :2].numpy()
    true = poses[frames.place[frames.starts], 0, :2]
    assert found["object_error_0"].value == pytest.approx(np.linalg.norm(read - true, axis=1).mean(), rel=1e-4)
    assert found["object_error_0"].n == len(frames.starts)
    assert "object_error_1" not in found, "squares never move"
