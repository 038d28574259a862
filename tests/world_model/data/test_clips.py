"""From recorded episodes to batches: frames, cached latents, clips, windows for the success head, and bad input."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.data.config import DatasetConfig, DatasetError
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.lerobot_assembly import assemble
from vla_rl.data.lerobot_io import RecordedEpisode, dataset_features, encode_png, write_shard
from vla_rl.types import EnvSpec
from world_model.data import latents as latents_module
from world_model.data.clips import ClipDataset, SuccessSamples
from world_model.data.episodes import EpisodeFrames, check_states, logged_episodes, open_episodes, state_statistics
from world_model.data.latents import EncodedEpisodes, ImageSamples, open_latents
from world_model.interfaces import Autoencoder
from world_model.trust.types import check_episodes

SIZE, CAMERAS, STATE_DIM, ACTION_DIM = (8, 8), ("front", "wrist"), 3, 2
LOW, HIGH = np.full(ACTION_DIM, -1.0, np.float32), np.full(ACTION_DIM, 1.0, np.float32)
G = 4
# Steps and the step at whose end the task was solved (None: never). The third goes on after success.
EPISODES: tuple[tuple[int, int | None], ...] = ((10, 10), (8, None), (14, 7), (3, None), (9, 9), (12, None))


def image(episode: int, step: int, camera: int) -> np.ndarray:
    """All pixels say which observation it is."""
    return np.full((*SIZE, 3), 20 * episode + step + 100 * camera, np.uint8)


def action(episode: int, step: int) -> list[float]:
    return [0.05 * step - 0.3, 0.1 * episode]


def make_episode(number: int, length: int, solved: int | None) -> RecordedEpisode:
    reward = np.zeros(length, np.float32)
    if solved is not None:
        reward[solved - 1] = 1
    actions = np.array([action(number, t) for t in range(length)], np.float32)
    return RecordedEpisode(
        task="lift",
        split="train",
        index=100 + number,
        instruction=f"lift block {number % 2}",
        png={c: [encode_png(image(number, t, i)) for t in range(length)] for i, c in enumerate(CAMERAS)},
        state=np.stack([np.full(STATE_DIM, number + 0.01 * t, np.float32) for t in range(length)]),
        actions=actions,
        executed_actions=actions,
        reward=reward,
        success=solved is not None,
        control_source=["policy"] * length,
        policy_version="test",
        final_png={c: encode_png(image(number, length, i)) for i, c in enumerate(CAMERAS)},
        final_state=np.full(STATE_DIM, number + 0.01 * length, np.float32),
    )


def make_dataset(path: Path, episodes: Sequence[tuple[int, int | None]] = EPISODES) -> Path:
    features = dataset_features(CAMERAS, SIZE, STATE_DIM, ACTION_DIM)
    recorded = [make_episode(i, *facts) for i, facts in enumerate(episodes)]
    write_shard(path.parent / "shards" / path.name / "shard_00000", recorded, [], features)
    assemble(path.parent / "shards" / path.name, path, fps=10, features=features, robot="test", notes={})
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data") / "rollouts")


def read(path: Path, **options: object) -> EpisodeDataset:
    config = DatasetConfig.model_validate({"path": str(path), **options})
    return open_dataset(config, DataNeeds(CAMERAS, ACTION_DIM, STATE_DIM))


@pytest.fixture(scope="module")
def dataset(path: Path) -> EpisodeDataset:
    return read(path)


@pytest.fixture
def frames(dataset: EpisodeDataset) -> EpisodeFrames:
    return EpisodeFrames.of(dataset, G, LOW, HIGH)


class MeanAutoencoder(Autoencoder):
    """Each quarter of the image as its mean red, in units of 100 gray levels."""

    latent_shape = (1, 2, 2)
    image_size = SIZE

    def __init__(self, gain: float = 0.01) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))
        self.calls = 0

    @torch.no_grad()
    def encode(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.gain * nn.functional.avg_pool2d(images[..., :1].permute(0, 3, 1, 2).float(), 4)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def clips_of(frames: EpisodeFrames, tmp_path: Path, clip_frames: int = 4) -> ClipDataset:
    mean, std = np.full(STATE_DIM, 1.0), np.full(STATE_DIM, 2.0)
    return ClipDataset([open_latents(frames, MeanAutoencoder(), tmp_path)], clip_frames, mean, std)


# --- frames ------------------------------------------------------------------------------------


def test_which_rows_are_frames(frames: EpisodeFrames) -> None:
    assert frames.counts.tolist() == [4, 3, 5, 2, 4, 4]  # 10 steps: 0, 4, 8, end; 8: 0, 4, end; 3: 0, end.
    steps = [[0, 4, 8, 10], [0, 4, 8], [0, 4, 8, 12, 14], [0, 3], [0, 4, 8, 9], [0, 4, 8, 12]]
    expected = [image(e, s, 0)[0, 0, 0] for e, each in enumerate(steps) for s in each]
    everything = np.arange(frames.num_frames)
    images = frames.images(everything)
    assert images.shape == (22, 2, 8, 8, 3)
    assert images[:, 0, 0, 0, 0].tolist() == expected
    assert images[:, 1, 0, 0, 0].tolist() == [x + 100 for x in expected]
    states = [e + 0.01 * s for e, each in enumerate(steps) for s in each]
    assert np.allclose(frames.states(everything)[:, 0], states)


def test_the_actions_that_led_to_each_frame(frames: EpisodeFrames) -> None:
    values, executed = frames.actions(np.arange(4))  # Of the episode with 10 steps.
    assert executed.sum(1).tolist() == [0, 4, 4, 2]
    assert executed[3].tolist() == [True, True, False, False]
    assert np.allclose(values[1], [action(0, t) for t in range(4)])
    assert np.allclose(values[3], [action(0, 8), action(0, 9), [0, 0], [0, 0]])
    assert not values[0].any()
    narrow = replace(frames, high=np.full(ACTION_DIM, 0.1, np.float32))
    assert narrow.actions(np.arange(4))[0].max() == np.float32(0.1)


def test_success_is_that_of_the_step_before_each_frame(frames: EpisodeFrames) -> None:
    success = frames.success(np.arange(frames.num_frames)).astype(int)
    per_episode = [success[s : s + n].tolist() for s, n in zip(frames.starts, frames.counts, strict=True)]
    # The third was solved at the end of step 7, so from frame 2 (after 8 steps) on.
    assert per_episode == [[0, 0, 0, 1], [0, 0, 0], [0, 0, 1, 1, 1], [0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def test_success_at_the_very_step_of_a_frame(tmp_path: Path) -> None:
    frames = EpisodeFrames.of(read(make_dataset(tmp_path / "data", [(9, 4), (9, 5)])), G, LOW, HIGH)
    assert frames.success(np.arange(8)).astype(int).tolist() == [0, 1, 1, 1, 0, 0, 1, 1]


def test_without_a_final_observation_the_last_row_is_the_end(dataset: EpisodeDataset) -> None:
    frames = EpisodeFrames.of(replace(dataset, final_images=None, final_state=None), G, LOW, HIGH)
    assert frames.counts.tolist() == [4, 3, 5, 2, 3, 4]
    # 9, 7, 13, 2, 8 and 11 steps.
    assert frames.images(np.arange(7))[:, 0, 0, 0, 0].tolist() == [0, 4, 8, 9, 20, 24, 27]
    assert frames.actions(np.arange(7))[1].sum(1).tolist() == [0, 4, 4, 1, 0, 4, 3]
    assert frames.success(np.arange(4)).tolist() == [False, False, False, True]


@pytest.mark.parametrize("first_steps", [1, 2, 3, 4])
def test_an_episode_cut_elsewhere_has_the_same_actions(frames: EpisodeFrames, first_steps: int) -> None:
    cut = frames.cut_after(first_steps)
    images = cut.images(np.arange(cut.counts[0]))[:, 0, 0, 0, 0].tolist()
    steps = {1: [0, 1, 5, 9, 10], 2: [0, 2, 6, 10], 3: [0, 3, 7, 10], 4: [0, 4, 8, 10]}[first_steps]
    assert images == [image(0, step, 0)[0, 0, 0] for step in steps]
    values, executed = cut.actions(np.arange(cut.counts[0]))
    assert executed.sum(1).tolist() == [0, *np.diff(steps)]
    assert np.allclose(values[executed], [action(0, t) for t in range(10)])
    # The third episode was solved after 7 steps.
    third = np.arange(cut.starts[2], cut.starts[2] + cut.counts[2])
    seen_after = np.minimum(np.maximum(first_steps + G * (np.arange(len(third)) - 1), 0), 14)
    assert cut.success(third).tolist() == (seen_after >= 7).tolist()


def test_only_selected_episodes(path: Path) -> None:
    frames = EpisodeFrames.of(read(path, only_successes=True), G, LOW, HIGH)
    assert frames.episodes.tolist() == [0, 2, 4] and frames.counts.tolist() == [4, 5, 4]
    assert frames.images(np.array([4]))[0, 0, 0, 0, 0] == 40


def test_logged_episodes(frames: EpisodeFrames) -> None:
    episodes = logged_episodes(frames)
    check_episodes(episodes, G, "held out")
    assert [e.num_steps for e in episodes] == [10, 8, 14, 3, 9, 12]
    assert [e.succeeded for e in episodes] == [True, False, True, False, True, False]
    assert episodes[2].start == "lift/train/102" and episodes[2].instruction == "lift block 0"
    assert episodes[1].images[-1, 1, 0, 0, 0] == image(1, 8, 1)[0, 0, 0]
    assert [e.start for e in logged_episodes(frames, [3, 0])] == ["lift/train/103", "lift/train/100"]


def test_state_statistics_by_hand(frames: EpisodeFrames) -> None:
    mean, std = state_statistics([frames])
    states = frames.states(np.arange(frames.num_frames))
    assert np.allclose(mean, states.mean(0)) and np.allclose(std, states.std(0))
    still = replace(frames, dataset=replace(frames.dataset, state=np.ones_like(frames.dataset.state)))
    assert state_statistics([replace(still, place=frames.place * 0)])[1].tolist() == pytest.approx([0.01] * 3)


# --- latents -----------------------------------------------------------------------------------


def test_latents_are_encoded_once_and_keyed_by_what_they_depend_on(frames: EpisodeFrames, tmp_path: Path) -> None:
    autoencoder, seen = MeanAutoencoder(), []
    encoded = open_latents(frames, autoencoder, tmp_path, lambda done, of: seen.append((done, of)))
    assert encoded.latents.shape == (22, 2, 1, 2, 2) and encoded.latents.dtype == np.float16
    red = frames.images(np.arange(22))[:, :, 0, 0, 0]
    assert np.allclose(encoded.latents[:, :, 0, 1, 1], red / 100, atol=1e-3)
    assert seen == [(22, 22)] and autoencoder.calls == 1
    again = MeanAutoencoder()
    assert np.array_equal(open_latents(frames, again, tmp_path).latents, encoded.latents) and again.calls == 0
    for other in (
        lambda: open_latents(frames, MeanAutoencoder(0.02), tmp_path),
        lambda: open_latents(EpisodeFrames.of(frames.dataset, 2, LOW, HIGH), MeanAutoencoder(), tmp_path),
        lambda: open_latents(EpisodeFrames.of(read(frames.dataset.path, only_successes=True), G, LOW, HIGH), again),
    ):
        assert not np.array_equal(other().latents, encoded.latents)
    assert len(list(tmp_path.iterdir())) == 3


def test_latents_that_cannot_be_had(frames: EpisodeFrames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gives NaN or infinite latents for images of .*rollouts"):
        open_latents(frames, MeanAutoencoder(float("nan")), tmp_path)
    larger = MeanAutoencoder()
    larger.image_size = (16, 16)
    with pytest.raises(DatasetError, match=r"images \(height, width\) of .*\(8, 8\).*autoencoder's are \(16, 16\)"):
        open_latents(frames, larger, tmp_path)
    usage = latents_module.shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(latents_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"disk full while writing the latents .*needed") as caught:
        open_latents(frames, MeanAutoencoder(), tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_images_for_the_autoencoder(dataset: EpisodeDataset) -> None:
    samples = ImageSamples([dataset, replace(dataset, weight=3.0, images={"front": dataset.images["front"]})])
    images, means = samples.batch(400, seed=0, step=0)
    assert images.shape == (400, 8, 8, 3) and images.dtype == torch.uint8 and means.dtype == torch.float32
    front, wrist = (dataset.images[c][:].mean() for c in CAMERAS)
    assert torch.allclose(torch.where(means[:, 0, 0, 0] > 110, wrist, front).float(), means[:, 0, 0, 0])
    assert 0.06 < float((means[:, 0, 0, 0] > 110).float().mean()) < 0.2  # A quarter of the draws, half of those wrist.
    assert torch.equal(images, samples.batch(400, seed=0, step=0)[0])
    assert not torch.equal(images, samples.batch(400, seed=0, step=1)[0])


# --- clips -------------------------------------------------------------------------------------


def test_what_a_clip_holds(frames: EpisodeFrames, tmp_path: Path) -> None:
    clip = clips_of(frames, tmp_path).batch(64, seed=0, step=0)
    assert clip.frames.latents.shape == (64, 4, 2, 1, 2, 2) and clip.frames.latents.dtype == torch.float32
    assert clip.frames.states.shape == (64, 4, 3) and clip.actions.values.shape == (64, 4, G, 2)
    red = (clip.frames.latents[:, :, 0, 0, 0, 0] * 100).round().int().numpy()
    seen = set()
    for i in range(64):
        episode = red[i, 0] // 20
        count, start = int(frames.counts[episode]), int(frames.starts[episode])
        first = int(clip.first[i])
        assert red[i, 0] == 20 * episode and 1 <= first <= max(count - 3, 1)
        numbers = [0, *range(first, first + 3)]
        inside = [n < count for n in numbers]
        index = start + np.minimum(numbers, count - 1)
        assert clip.valid[i].tolist() == inside
        assert red[i].tolist() == frames.images(index)[:, 0, 0, 0, 0].tolist()
        assert np.allclose(clip.frames.states[i], (frames.states(index) - 1) / 2, atol=1e-6)
        values, executed = frames.actions(index)
        assert np.array_equal(clip.actions.executed[i], executed & np.array(inside)[:, None])
        assert np.allclose(clip.actions.values[i], values * clip.actions.executed[i].numpy()[..., None])
        assert clip.success[i].tolist() == frames.success(index).tolist()
        assert clip.instruction[i] == f"lift block {episode % 2}"
        seen.add((int(episode), first))
    assert seen == {(0, 1), (1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (5, 1)}


def test_what_a_step_draws_depends_on_seed_and_step_alone(frames: EpisodeFrames, tmp_path: Path) -> None:
    clips = clips_of(frames, tmp_path)
    one = clips.batch(16, seed=1, step=5)
    assert torch.equal(one.frames.states, clips_of(frames, tmp_path).batch(16, seed=1, step=5).frames.states)
    assert not torch.equal(one.frames.states, clips.batch(16, seed=1, step=6).frames.states)
    assert not torch.equal(one.frames.states, clips.batch(16, seed=2, step=5).frames.states)


def test_several_datasets_mix_by_weight(frames: EpisodeFrames, tmp_path: Path) -> None:
    heavy = replace(frames, dataset=replace(frames.dataset, weight=3.0, instructions=["other", "other"]))
    parts = [open_latents(f, MeanAutoencoder(), tmp_path) for f in (frames, heavy)]
    batch = ClipDataset(parts, 3, np.ones(3), np.ones(3)).batch(400, seed=0, step=0)
    others = np.array([text == "other" for text in batch.instruction])
    assert 0.68 < others.mean() < 0.82 and abs(others[:200].mean() - others[200:].mean()) < 0.15


def test_a_batch_may_draw_nothing_from_a_dataset(frames: EpisodeFrames, tmp_path: Path) -> None:
    part = clips_of(frames, tmp_path).parts[0]
    clips = ClipDataset([part, part], 4, np.zeros(STATE_DIM), np.ones(STATE_DIM))
    assert all(clips.batch(1, seed=0, step=step).size == 1 for step in range(4))


# --- windows for the success head -----------------------------------------------------------------


def test_windows_of_the_success_head(frames: EpisodeFrames, tmp_path: Path) -> None:
    samples = SuccessSamples(clips_of(frames, tmp_path), num_frames=3)
    # Successes: ends of 0 and 4, three frames of 2. Near: frames 1, 2 of 0 and 4, 1 of 2, the last two of 1 and 5 and
    # the only one of 3. Others: the first of 5.
    assert samples.counts == (5, 10, 1)
    batch = samples.batch(300, seed=0, step=0)
    assert batch.frames.latents.shape == (300, 3, 2, 1, 2, 2) and batch.reference.states.shape == (300, 1, 3)
    red = (batch.frames.latents[:, :, 0, 0, 0, 0] * 100).round().int()
    reference = (batch.reference.latents[:, 0, 0, 0, 0, 0] * 100).round().int()
    solved = [red[i].tolist() for i in range(300) if batch.success[i]]
    assert {tuple(x) for x in solved} == {(4, 8, 10), (40, 44, 48), (44, 48, 52), (48, 52, 54), (84, 88, 89)}
    assert 0.25 < len(solved) / 300 < 0.42
    early = red[(red[:, 2] == 104)]
    assert 0.25 < len(early) / 300 < 0.42 and (early == torch.tensor([100, 100, 104])).all()
    assert torch.equal(reference, red[:, 2] // 20 * 20)
    assert batch.instruction == [f"lift block {int(r) // 20 % 2}" for r in reference]
    assert torch.equal(batch.success, samples.batch(300, seed=0, step=0).success)


def test_a_success_head_needs_successes(path: Path, tmp_path: Path) -> None:
    frames = EpisodeFrames.of(read(make_dataset(tmp_path / "failed", [(8, None), (9, None)])), G, LOW, HIGH)
    with pytest.raises(DatasetError, match=r"failed: no success in 2 episodes; a success head needs both"):
        SuccessSamples(clips_of(frames, tmp_path), 2)


# --- bad input ---------------------------------------------------------------------------------


def spec(**changes: object) -> EnvSpec:
    facts = EnvSpec("test", {"lift": "lift"}, {"lift": 20}, CAMERAS, SIZE, STATE_DIM, ACTION_DIM, LOW, HIGH, 10.0)
    return replace(facts, **changes)  # type: ignore[arg-type]


def test_a_dataset_of_another_robot(path: Path) -> None:
    config = DatasetConfig(path=str(path))
    assert list(open_episodes(config, spec()).images) == list(CAMERAS)
    assert open_episodes(config, spec(image_size=(4, 4))).images["wrist"].shape[1:] == (4, 4, 3)
    with pytest.raises(DatasetError, match=r"images .*\(8, 8\).*the world model's are \(8, 12\).*not resized"):
        open_episodes(config, spec(image_size=(8, 12)))
    with pytest.raises(DatasetError, match=r"missing \['side'\]"):
        open_episodes(config, spec(cameras=("front", "side")))
    with pytest.raises(DatasetError, match=r"recorded at 10 fps, the environment is controlled at 20 Hz"):
        open_episodes(config, spec(control_hz=20.0))
    with pytest.raises(DatasetError, match=r"actions have 2 dimensions"):
        open_episodes(config, spec(action_dim=7))


def test_actions_of_another_size_or_scale(dataset: EpisodeDataset) -> None:
    with pytest.raises(DatasetError, match=r"actions have 2 dimensions, the bounds 3"):
        EpisodeFrames.of(dataset, G, np.full(3, -1), np.full(3, 1))
    degrees = replace(dataset, executed_actions=dataset.executed_actions * 50)
    with pytest.raises(DatasetError, match=r"of the actions are far outside \[-1.0, -1.0\]"):
        EpisodeFrames.of(degrees, G, LOW, HIGH)
    meters = replace(dataset, executed_actions=dataset.executed_actions * np.array([0.01, 1], np.float32))
    with pytest.raises(DatasetError, match=r"use only 0\.\d+% of .*such as meters"):
        EpisodeFrames.of(meters, G, LOW, HIGH)


def test_states_of_another_size_or_scale(frames: EpisodeFrames) -> None:
    check_states(frames, np.full(3, 2.0), np.full(3, 1.0))
    with pytest.raises(DatasetError, match=r"states have 3 dimensions, the world model's have 8"):
        check_states(frames, np.zeros(8), np.ones(8))
    with pytest.raises(DatasetError, match=r"state dimension 1 is about .* fitted on 900 \+- 1;.*another robot"):
        check_states(frames, np.array([2.0, 900.0, 2.0]), np.ones(3))


def test_parts_that_do_not_mix(frames: EpisodeFrames, tmp_path: Path) -> None:
    def build(parts: list[EncodedEpisodes]) -> ClipDataset:
        return ClipDataset(parts, 3, np.ones(3), np.ones(3))

    one = open_latents(frames, MeanAutoencoder(), tmp_path)
    other = open_latents(EpisodeFrames.of(frames.dataset, 2, LOW, HIGH), MeanAutoencoder(), tmp_path)
    with pytest.raises(DatasetError, match=r"differ in frame_steps: "):
        build([one, other])
    with pytest.raises(DatasetError, match=r"no dataset given"):
        build([])
    fast = replace(one, frames=replace(frames, dataset=replace(frames.dataset, fps=30.0, path=Path("fast"))))
    with pytest.raises(DatasetError, match=r"differ in fps: .*'fast': 30"):
        build([one, fast])


def test_episodes_without_a_second_frame(tmp_path: Path) -> None:
    single = replace(read(make_dataset(tmp_path / "one", [(1, None)])), final_images=None, final_state=None)
    with pytest.raises(DatasetError, match=r"no episode has a second frame"):
        EpisodeFrames.of(single, G, LOW, HIGH)
