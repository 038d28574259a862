"""Fitting on episodes in other styles: what changes and what does not, how often, resuming, and bad input.

The episodes are the dummy environment's, segmented here by color: files that a user's own model might have written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dummy_fit import ENV, collect, config, stop_fitting, weights

from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.segmentation import structure_file
from vla_rl.data.structure import open_structure
from world_model.config import StyleConfig
from world_model.data import style
from world_model.data.clips import ClipDataset
from world_model.data.episodes import EpisodeFrames, open_episodes
from world_model.data.latents import ImageSamples, open_latents
from world_model.data.styled import Restyler, StyledFrames, StyledImages, restylers, with_styles, write_style_sheet
from world_model.fit.config import FitConfig
from world_model.fit.fit import fit
from world_model.fit.stage import updates_kept
from world_model.model.world_model import load_world_model

SPEC = ENV.env_spec()
STYLE = {"share": 0.5, "copies": 2}


def segment(folder: Path) -> None:
    """Write the structure of each episode: a segment for each color of its first image."""
    dataset = open_episodes(DatasetConfig(path=str(folder)), SPEC)
    assert dataset.final_images is not None
    for episode, (start, length) in enumerate(zip(dataset.starts.tolist(), dataset.lengths.tolist(), strict=True)):
        images = np.concatenate(
            [dataset.images["agentview"][start : start + length], dataset.final_images["agentview"][[episode]]]
        )
        codes = images.astype(np.int64) @ np.array([1, 256, 65536])
        background = np.bincount(np.unique(codes[0], return_inverse=True)[1].reshape(-1)).argmax()
        ids = np.full(codes.shape, 2, np.uint8)
        for number, code in enumerate(np.unique(codes[0])):
            ids[codes == code] = 0 if number == background else 3 + number
        file = structure_file(folder, episode)
        file.parent.mkdir(exist_ok=True)
        np.savez_compressed(file, segments_agentview=ids)


@pytest.fixture(autouse=True, scope="module")
def all_recolored() -> Iterator[None]:
    """Every segment gets another color where it may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "RECOLORED", 1.0)
        yield


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Path:
    folder = collect(tmp_path_factory.mktemp("styled") / "episodes", noise=1.5, noise_hold=4, episodes_per_task=12)
    segment(folder)
    return folder


@pytest.fixture(scope="module")
def frames(episodes) -> EpisodeFrames:
    dataset = open_episodes(DatasetConfig(path=str(episodes)), SPEC)
    return EpisodeFrames.of(dataset, 4, SPEC.action_low, SPEC.action_high)


@pytest.fixture(scope="module")
def maker(frames) -> Restyler:
    return restylers(StyleConfig.model_validate(STYLE), [frames], [{}], ("agentview",))[0]


@pytest.fixture(scope="module")
def fitted(episodes, tmp_path_factory) -> Path:
    return fit(config(episodes, style=STYLE, cuts=2), SPEC, tmp_path_factory.mktemp("styled") / "run", seed=1)


def all_frames(frames: EpisodeFrames) -> np.ndarray:
    return np.arange(frames.num_frames)


def test_structure_actions_states_and_outcomes_are_the_recorded_ones(frames, maker):
    styled = StyledFrames.restyled(frames, maker, (0, 0), 1.0)
    index = all_frames(frames)
    for name in ("states", "success", "instruction"):
        assert np.array_equal(getattr(styled, name)(index), getattr(frames, name)(index)), name
    for one, other in zip(styled.actions(index), frames.actions(index), strict=True):
        assert np.array_equal(one, other)
    plain, shown = frames.images(index), styled.images(index)
    assert np.abs(plain.astype(int) - shown).mean() > 10
    segments = maker.structure.segments["agentview"][frames.place]
    for frame in index:
        # Each segment is of one color before and after: the picture is the same map, painted otherwise.
        for i in np.unique(segments[frame]):
            inside = segments[frame] == i
            assert len(np.unique(plain[frame, 0][inside], axis=0)) == 1
            colors = shown[frame, 0][inside].astype(float)
            colors = colors[(colors.min(1) > 20) & (colors.max(1) < 250)]  # Light and patterns only scale them.
            if len(colors):
                assert np.ptp(colors / colors.sum(1, keepdims=True), axis=0).max() < 0.03


def test_a_clip_has_one_style_and_other_clips_have_others(frames, maker, monkeypatch):
    """A flat segment's color in the middle of the picture is the same in all frames, however they are cut."""
    monkeypatch.setattr(style, "TEXTURE", 0)
    monkeypatch.setattr(style, "LIGHT", 0)
    plain = Restyler(maker.dataset, maker.structure, StyleConfig(share=0.5), maker.still)
    colors = []
    for copy in range(2):
        styled = StyledFrames.restyled(frames, plain, (0, copy), 1.0)
        for episode in range(3):
            found = set()
            for cut in (styled, styled.cut_after(2)):
                index = cut.starts[episode] + np.arange(cut.counts[episode])
                images = cut.images(index)[:, 0]
                ids = plain.structure.segments["agentview"][cut.place[index]]
                found |= {tuple(color) for color in images[ids == 0].tolist()}
            assert len(found) == 1
            colors.append(found.pop())
    assert len(set(colors)) == 6


def test_the_same_seed_gives_the_same_images_in_any_order(frames, maker):
    index = all_frames(frames)
    first = StyledFrames.restyled(frames, maker, (3, 1), 1.0).images(index)
    again = Restyler(maker.dataset, maker.structure, maker.config, maker.still)
    shuffled = np.random.default_rng(0).permutation(index)
    assert np.array_equal(StyledFrames.restyled(frames, again, (3, 1), 1.0).images(shuffled), first[shuffled])
    assert not np.array_equal(StyledFrames.restyled(frames, maker, (4, 1), 1.0).images(index), first)


def test_latents_are_kept_for_each_style_and_the_share_is_what_was_asked_for(frames, maker, fitted):
    world_model = load_world_model(fitted)
    options = StyleConfig.model_validate(STYLE | {"share": 0.3})
    folder = frames.dataset.cache.parent
    shown = with_styles(options, [frames], [maker], seed=9)
    parts = [open_latents(part, world_model.autoencoder) for part in shown]
    caches = sorted(folder.glob("latents_*"))
    again = [open_latents(part, world_model.autoencoder) for part in with_styles(options, [frames], [maker], seed=9)]
    assert sorted(folder.glob("latents_*")) == caches
    for one, other in zip(parts, again, strict=True):
        assert np.array_equal(one.latents, other.latents)
    plain, *styled = (np.asarray(part.latents, np.float32) for part in parts)
    assert len(styled) == 2 and min(np.abs(plain - copy).mean() for copy in styled) > 0.1
    metadata = world_model.metadata
    clips = ClipDataset(parts, 3, np.array(metadata.state_mean), np.array(metadata.state_std))
    which = np.concatenate([clips.draw(64, 0, step)[0] for step in range(40)])
    assert abs((which > 0).mean() - 0.3) < 0.04 and abs((which == 1).mean() - 0.15) < 0.03


def test_the_autoencoder_sees_styles_and_the_weights_of_pixels_stay(frames, maker):
    recorded = ImageSamples([frames.dataset])
    samples = StyledImages([frames.dataset], [maker], 0.5)
    styled = 0
    for step in range(10):
        images, means = recorded.batch(8, 2, step)
        shown, shown_means = samples.batch(8, 2, step)
        for i in range(8):
            if (images[i] == shown[i]).all():
                continue
            styled += 1
            difference = (images[i].float() - means[i]) - (shown[i].float() - shown_means[i])
            assert difference.abs().max() < 1e-3
    assert 25 <= styled <= 55
    one, other = (samples.batch(8, 2, 5)[0] for _ in range(2))
    assert bool((one == other).all())


def test_a_stopped_fit_with_styles_goes_on_to_the_same_result(episodes, fitted, tmp_path, monkeypatch):
    options, run = config(episodes, style=STYLE, cuts=2), tmp_path / "run"
    budget = stop_fitting(monkeypatch, 2)
    for left in (3, 20):  # In the autoencoder's stage, which sees images, and in the dynamics', which sees latents.
        with pytest.raises(KeyboardInterrupt):
            fit(options, SPEC, run, seed=1)
        budget[0] = left
    assert updates_kept(options, run) == 3 + 2
    assert weights(fit(options, SPEC, run, seed=1)) == weights(fitted)


def test_every_stage_sees_the_styles_and_no_share_is_as_before(episodes, fitted, tmp_path):
    plain = fit(config(episodes, cuts=2), SPEC, tmp_path / "plain", seed=1)
    off = fit(config(episodes, cuts=2, style={"share": 0.0, "copies": 5}), SPEC, tmp_path / "off", seed=1)
    assert weights(plain) == weights(off)
    before, after = weights(plain), weights(fitted)
    assert all(before[name] != after[name] for name in before)


def no_structure(folder: Path) -> None:
    shutil.rmtree(folder / "structure")


@pytest.mark.parametrize(
    ("change", "style", "error", "message"),
    [
        (no_structure, {}, DatasetError, r"episode_000000.npz: missing; .* guided by segmentation. Collect with"),
        (lambda folder: None, {"depth": True}, DatasetError, "has no 'depth_agentview'; it holds segments_agentview"),
        (
            lambda folder: None,
            {"still_cameras": ["front"]},
            ConfigError,
            r"still_cameras: unknown \['front'\]; allowed",
        ),
    ],
)
def test_style_without_what_guides_it_is_refused_before_anything_is_fitted(
    episodes, tmp_path, change, style, error, message
):
    folder = Path(shutil.copytree(episodes, tmp_path / "episodes", ignore=shutil.ignore_patterns(".cache")))
    change(folder)
    with pytest.raises(error, match=message):
        fit(config(folder, style=STYLE | style), SPEC, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_share_of_all_is_refused():
    with pytest.raises(ConfigError, match=r"world_model\.style\.share"):
        validate(FitConfig, {"style": {"share": 1.0}}, prefix="world_model")


def test_depth_of_the_dataset_reaches_the_light(episodes, tmp_path, frames):
    folder = Path(shutil.copytree(episodes, tmp_path / "episodes", ignore=shutil.ignore_patterns(".cache")))
    for file in (folder / "structure").iterdir():
        with np.load(file) as stored:
            ids = stored["segments_agentview"]
        ramp = np.broadcast_to(1000 + 20 * np.arange(ids.shape[2], dtype=np.uint16), ids.shape)
        np.savez_compressed(file, segments_agentview=ids, depth_agentview=np.ascontiguousarray(ramp))
    dataset = open_episodes(DatasetConfig(path=str(folder)), SPEC)
    depth = open_structure(dataset, {}, depth=True).depth
    assert depth is not None and depth["agentview"].shape[0] == len(dataset.actions) + len(dataset.lengths)
    shown = []
    for use in (False, True):
        options = StyleConfig.model_validate(STYLE | {"depth": use})
        part = EpisodeFrames.of(dataset, 4, SPEC.action_low, SPEC.action_high)
        made = restylers(options, [part], [{}], ("agentview",))[0]
        style = made.style(0, (0, 0))
        place = part.place[:1]
        shown.append(made.show("agentview", part.images(np.arange(1))[:, 0], place, style))
        assert any(style.side) == use
    assert not np.array_equal(*shown)


def test_a_sheet_shows_episodes_in_styles(episodes, tmp_path):
    import cv2

    options = config(episodes, style=STYLE)
    shown = write_style_sheet(
        options.style, options.dataset(episodes), SPEC, tmp_path / "sheet.png", seed=0, num_episodes=2, num_styles=3
    )
    assert shown == ["move to the red square"] * 2
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    assert sheet is not None and sheet.shape == (4 * 96, 5 * 96, 3)
    cells = sheet[:96].reshape(96, 5, 96, 3).swapaxes(0, 1).astype(int)
    assert all(np.abs(cells[0] - cells[i]).mean() > 5 for i in (2, 3, 4))
