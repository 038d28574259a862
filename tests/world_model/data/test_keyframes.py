"""Mining by hand; and a world model that starts at a keyframe remembers what it would after watching the episode."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_model import SMALL

from sim.tabletop import TabletopConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.data.config import DatasetConfig
from vla_rl.data.keyframes import KeyframeError, KeyframeSet
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset
from world_model.config import KeyframeConfig, WorldModelConfig
from world_model.data.episodes import EpisodeFrames, logged_episodes, open_episodes
from world_model.data.initial_frames import RecordedPrefixes
from world_model.data.keyframes import Moments, choose, mine_keyframes
from world_model.env.env import WorldModelEnv
from world_model.metadata import WorldModelMetadata
from world_model.model.memory import Memory
from world_model.model.parts import build_parts
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import Actions

TABLETOP = TabletopConfig(tasks=("stack", "push_to_zone"), num_envs=4)
CONFIG = WorldModelConfig.model_validate(SMALL.model_dump() | {"frame_steps": 8})


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keyframes") / "episodes"
    options = {"noise": 0.6, "noise_hold": 4, "keyframes": True, "episodes_per_task": 8, "keep": "all"}
    collect_dataset(TABLETOP, CollectConfig.model_validate({"dataset": str(folder), **options}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An untrained world model of the tabletop."""
    metadata = WorldModelMetadata.of(TABLETOP.env_spec(), np.zeros(8), np.ones(8), success_threshold=1e6)
    torch.manual_seed(0)
    world_model = WorldModel(CONFIG, metadata, build_parts(CONFIG, metadata))
    for parameter in world_model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    path = tmp_path_factory.mktemp("keyframes") / "model"
    world_model.save(path)
    return path


@pytest.fixture(scope="module")
def mined(folder, episodes) -> KeyframeSet:
    return mine_keyframes(folder, [episodes], KeyframeConfig())


def build(folder: Path, num_envs: int = 8, **changes: Any) -> WorldModelEnv:
    section = {"kind": "world_model", "path": str(folder), "first_frames": TABLETOP.model_dump(), "device": "cpu"}
    values = {**section, "num_envs": num_envs, "trust": {"ignore": True}, "imagination": {"precision": "fp32"}}
    return cast(Any, build_component("env", values | changes)).build()


def watched(env: WorldModelEnv, mined: KeyframeSet, number: int, seed: int) -> Memory:
    """What is remembered after the recorded episode's frames up to the keyframe, one after another."""
    keyframe, world_model = mined.keyframes[number], env.world_model
    frames = RecordedPrefixes(world_model)._frames(
        mined.sources[keyframe.source].path, mined.sources[keyframe.source].content
    )
    episode = logged_episodes(frames, [int(np.flatnonzero(frames.episodes == keyframe.episode)[0])])[0]

    def seen(i: int) -> Any:
        return world_model.encode(episode.images[None, i : i + 1], episode.states[None, i : i + 1])

    memory = world_model.begin(seen(0), [episode.instruction], [seed])
    for i in range(1, keyframe.step // 8 + 1):
        done = Actions(
            torch.from_numpy(episode.actions[None, i : i + 1]), torch.from_numpy(episode.executed[None, i : i + 1])
        )
        memory = world_model.extend(memory, seen(i), done)
    return memory


# --- the right context ------------------------------------------------------------------------


def test_the_world_model_starts_with_the_context_that_led_to_the_keyframe(folder, episodes, mined) -> None:
    """Keyframes at several steps, beside an episode from its start: each as if it had been watched alone."""
    env = build(folder)
    numbers = [next(i for i, k in enumerate(mined.keyframes) if k.step == step) for step in (16, 8, 24)]
    specs = [mined.recorded(i) for i in (*numbers, numbers[0])]
    places = [5, 0, 3, 7]
    obs = env.reset([*specs, EpisodeSpec("stack", "train", 3)], [*places, 2])
    assert env._memory is not None
    truth = RecordedPrefixes(env.world_model)
    for row, (place, number, spec) in enumerate(zip(places, numbers, specs, strict=False)):
        found = env._memory.select([place])
        expected = watched(env, mined, number, env._seed_of(spec, 0))
        for name, tensor in expected.tensors().items():
            torch.testing.assert_close(found.tensors()[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
        assert torch.equal(found.noise.rows, expected.noise.rows)
        frames = mined.keyframes[number].step // 8
        assert int(found.tensors()["context.num_frames"]) == frames + 1
        assert int(found.tensors()["context.filled"].sum()) == min(frames, 2) + 1, "reference and a memory of two"
        beginning = truth.of(spec)
        np.testing.assert_array_equal(obs.images["agentview"][row], beginning.images[0])
        np.testing.assert_array_equal(obs.state[row], beginning.state)
        assert env._steps[place] == mined.keyframes[number].step and env._imagined[place] == 0
    first, second = env._memory.select([5]), env._memory.select([7])
    assert not torch.equal(first.noise.rows, second.noise.rows), "each of a group has noise of its own"
    assert int(env._memory.select([2]).tensors()["context.num_frames"]) == 1


def test_an_episode_from_a_keyframe_ends_at_its_tasks_horizon(folder, mined) -> None:
    env = build(folder, 1)
    spec = mined.recorded(next(i for i, k in enumerate(mined.keyframes) if k.step == 16))
    env.reset([spec])
    result = env.step(np.zeros((1, 24, 7), np.float32))
    assert result.num_steps[0] == 32 - 16 and result.truncated[0, 15]
    short = build(folder, 1, imagination={"horizon": 8, "precision": "fp32"})
    short.reset([spec])
    assert short.step(np.zeros((1, 24, 7), np.float32)).num_steps[0] == 8, "the trust horizon counts what is imagined"


def test_the_same_moment_is_restored_in_the_simulator(episodes, mined) -> None:
    env = TABLETOP.build(1)
    for number in range(3):
        obs = env.reset([mined.simulated(number)])
        keyframe = mined.keyframes[number]
        frames = _opened(mined.sources[keyframe.source].path)
        place = int(np.flatnonzero(frames.episodes == keyframe.episode)[0])
        row = frames.starts[place] + keyframe.step // 8
        np.testing.assert_array_equal(obs.images["agentview"][0], frames.images(np.array([row]))[0, 0])
    env.close()


def _opened(path: str) -> EpisodeFrames:
    spec = TABLETOP.env_spec()
    return EpisodeFrames.of(open_episodes(DatasetConfig(path=path), spec), 8, spec.action_low, spec.action_high)


# --- mining -----------------------------------------------------------------------------------


def test_mined_keyframes_are_decisive_and_usable(folder, episodes, mined) -> None:
    assert mined.counts().keys() <= {"divergence", "failure", "gripper", "contact"}
    assert {"gripper", "contact"} <= mined.counts().keys()
    frames = _opened(str(episodes))
    for keyframe in mined.keyframes:
        place = int(np.flatnonzero(frames.episodes == keyframe.episode)[0])
        row = frames.starts[place] + keyframe.step // 8
        assert 0 < keyframe.step // 8 < frames.counts[place] - 1 and not frames.success(np.array([row]))[0]
        if "gripper" in keyframe.kinds:
            before = frames.actions(np.array([row]))[0][0, -1, -1]
            assert (np.sign(frames.actions(np.array([row + 1]))[0][0, :, -1]) * np.sign(before) < 0).any()
    assert mine_keyframes(folder, [episodes], KeyframeConfig()) == mined
    one = mine_keyframes(folder, [episodes], KeyframeConfig(kinds=("gripper",), per_kind=1))
    assert one.counts() == {"gripper": len({k.task for k in one.keyframes})}


def by_hand(positions: list[list[float]], success: list[bool], **marks: list[list[bool]]) -> Moments:
    """Episodes of one task as paths along a line."""
    lengths = [len(path) for path in positions]
    owner = np.repeat(np.arange(len(positions)), lengths)
    number = np.concatenate([np.arange(n) for n in lengths])
    last = np.repeat(lengths, lengths) - 1

    def flags(name: str) -> np.ndarray:
        return np.concatenate(marks[name]) if name in marks else np.zeros(len(owner), bool)

    return Moments(
        source=np.zeros_like(owner),
        episode=owner,
        step=8 * number,
        number=number,
        owner=owner,
        task=np.array(["reach"] * len(owner), object),
        start=np.array([f"reach/train/{i}" for i in owner], object),
        features=np.concatenate(positions).astype(np.float32)[:, None],
        success=np.array(success)[owner],
        usable=(number > 0) & (number < last),
        predicted=(owner % 10 / 10 + 0.05 * number).astype(np.float32),
        gripper=flags("gripper"),
        contact=flags("contact"),
    )


def test_similar_moments_that_end_differently_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two episodes pass 5 and end differently; two others pass 10 and both succeed."""
    monkeypatch.setattr("world_model.data.keyframes.NEIGHBORS", 1)
    moments = by_hand([[0, 5.0, 20], [0.2, 5.1, 40], [0.4, 10, 21], [0.6, 10.1, 22]], [True, False, True, True])
    chosen = choose(moments, KeyframeConfig(kinds=("divergence",), per_kind=2))
    assert [(k.episode, k.step, k.value, k.score) for k in chosen] == [(0, 8, 0.5, 1.0), (1, 8, 0.5, 1.0)]


def test_before_a_failure_is_where_success_becomes_unlikely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed episode stays with three that succeed for two frames, then leaves to where others have failed."""
    monkeypatch.setattr("world_model.data.keyframes.NEIGHBORS", 3)
    good = [[0.1 * i, 1 + 0.1 * i, 2 + 0.1 * i, 3 + 0.1 * i] for i in range(3)]
    moments = by_hand([*good, [0.05, 1.05, 2.05, 9.0, 9.5], [8.8, 8.9, 9.0, 9.1]], [True] * 3 + [False] * 2)
    chosen = choose(moments, KeyframeConfig(kinds=("failure",)))
    lost = next(k for k in chosen if k.episode == 3)
    assert lost.step == 16 and lost.value == 0.75 and lost.score == pytest.approx(0.75 - 0.25, abs=0.3)


def test_one_moment_can_be_of_several_kinds_and_an_episode_gives_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("world_model.data.keyframes.NEIGHBORS", 1)
    grip = [[False, True, True, False], [False, True, False, False]]
    moments = by_hand([[0, 1, 2, 3], [0.1, 1.1, 2.1, 3.1]], [True, False], gripper=grip)
    chosen = choose(moments, KeyframeConfig(kinds=("divergence", "gripper")))
    assert [(k.episode, k.step, k.kinds) for k in chosen] == [
        (0, 8, ("divergence", "gripper")),
        (1, 8, ("divergence", "gripper")),
    ]


def test_open_moments_by_the_value_come_first_and_uniform_ones_are_any() -> None:
    moments = by_hand([[0, 1, 2, 3]] * 5, [True] * 5)  # Predicted at frame 2: .1, .2, .3, .4, .5.
    chosen = choose(moments, KeyframeConfig(kinds=("uncertain",), per_kind=2))
    assert [(k.episode, k.step, k.score) for k in chosen] == [(3, 16, 0.96), (4, 16, 1.0)]
    drawn = choose(by_hand([[0] * 22] * 40, [True] * 40), KeyframeConfig(kinds=("uniform",), per_kind=40))
    steps = [k.step // 8 for k in drawn]
    assert sorted(k.episode for k in drawn) == list(range(40)) and set(steps) <= set(range(1, 21))
    assert len(set(steps)) > 10, "any of an episode's"


def test_uncertain_moments_are_those_of_the_world_models_own_value(folder, episodes, tmp_path) -> None:
    config = KeyframeConfig(kinds=("uncertain",), per_kind=3)
    with pytest.raises(ConfigError, match="has no value"):
        mine_keyframes(folder, [episodes], config)
    world_model = load_world_model(folder)
    world_model.add_value_head()
    facts = {"value_probability": (1.0, 0.0)}
    world_model.metadata = world_model.metadata.model_copy(update=facts)
    world_model.save(tmp_path / "valued")
    found = mine_keyframes(tmp_path / "valued", [episodes], config)
    env = build(tmp_path / "valued", 1)
    for number, keyframe in enumerate(found.keyframes[:3]):
        memory = watched(env, found, number, 0)
        left = env.spec.horizon[keyframe.task] - keyframe.step
        value = float(env.world_model.value(memory, None, np.array([[left]])))
        assert keyframe.score == pytest.approx(4 * value * (1 - value), abs=1e-3)


# --- what cannot be restored ------------------------------------------------------------------


def test_what_cannot_be_restored_is_said(folder, episodes, mined, tmp_path) -> None:
    env = build(folder, 1)
    spec = mined.recorded(0)
    assert spec.keyframe is not None

    def reset(**changes: Any) -> None:
        keyframe = replace(spec.keyframe, arrays=spec.keyframe.arrays | changes)  # type: ignore[arg-type, union-attr]
        env.reset([replace(spec, keyframe=keyframe)])

    with pytest.raises(KeyframeError, match="is gone, so they cannot be restored"):
        reset(dataset=np.frombuffer(b"nowhere", np.uint8))
    shutil.copytree(episodes, tmp_path / "copy", ignore=shutil.ignore_patterns(".cache"))
    reset(dataset=np.frombuffer(str(tmp_path / "copy").encode(), np.uint8))  # The same content elsewhere.
    with pytest.raises(KeyframeError, match="has no episode 99"):
        reset(episode=np.array(99))
    with pytest.raises(KeyframeError, match="cannot be restored at control step 12"):
        env.reset([replace(spec, keyframe=replace(spec.keyframe, step=12))])
    other = build(folder, 1)
    with pytest.raises(KeyframeError, match="has changed since"):
        reset_other = replace(spec.keyframe, arrays=spec.keyframe.arrays | {"content": np.frombuffer(b"x", np.uint8)})
        other.reset([replace(spec, keyframe=reset_other)])
    with pytest.raises(ValueError, match="is of task"):
        env.reset([replace(spec, task="stack" if spec.task != "stack" else "push_to_zone")])


def test_nothing_is_mined_from_evaluation_states(folder, tmp_path) -> None:
    config = CollectConfig(dataset=str(tmp_path / "eval"), episodes_per_task=2)
    collect_dataset(TABLETOP, config.model_copy(update={"split": "eval"}))
    with pytest.raises(KeyframeError, match="from eval states, from which nothing may be learned"):
        mine_keyframes(folder, [tmp_path / "eval"], KeyframeConfig())
