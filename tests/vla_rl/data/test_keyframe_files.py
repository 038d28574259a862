"""Keyframes on disk: simulators restored exactly at moments of recorded episodes, what is drawn, and bad files."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.config import Config, ConfigError, build_component
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import DataNeeds, EpisodeDataset, open_dataset
from vla_rl.data.keyframes import KeyframeError, KeyframeSet, SimulatorStates, split_start
from vla_rl.rollout.task_sampling import SamplingConfig
from vla_rl.types import Episode, EpisodeSpec, Observation
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

sys.path.append(str(Path(__file__).parents[2] / "sim"))
from libero_setup import ASSETS, needs_assets

STEP = 8
SIMULATORS: dict[str, tuple[dict[str, Any], int, float]] = {  # env section, episodes, the expert's noise
    "tabletop": ({"kind": "tabletop", "tasks": ["stack", "push_to_zone"], "num_envs": 4}, 3, 0.9),
    "libero": (
        {"kind": "libero", "suite": "libero_object", "tasks": ["0"], "image_size": 32, "num_envs": 1}
        | {"assets_path": str(ASSETS)},
        1,
        0.15,
    ),
}


def collected(kind: str, folder: Path) -> tuple[Config, EpisodeDataset]:
    """Episodes of the noisy expert with the simulator's states, and the environment they are from."""
    section, episodes, noise = SIMULATORS[kind]
    env = build_component("env", section)
    config = CollectConfig(
        dataset=str(folder),
        episodes_per_task=episodes,
        noise=noise,
        noise_hold=4,
        keyframes=True,
        shard_episodes=2,
        keep="all",
    )
    collect_dataset(env, config)
    spec = env.env_spec()
    needs = DataNeeds(spec.cameras, spec.action_dim, spec.state_dim, spec.image_size[0], spec.control_hz)
    return env, open_dataset(DatasetConfig(path=str(folder)), needs)


@pytest.mark.parametrize(
    "kind", ["tabletop", pytest.param("libero", marks=[pytest.mark.slow, needs_assets])], ids=["tabletop", "libero"]
)
def test_a_real_episode_starts_exactly_at_a_recorded_moment(kind: str, tmp_path: Path) -> None:
    """It shows what was recorded there, and with the logged actions it goes on, and ends, as it did."""
    env_config, dataset = collected(kind, tmp_path / "episodes")
    states = SimulatorStates(dataset.path)
    with closing(env_config.build(1, record_frames=True)) as env:  # type: ignore[attr-defined]
        for episode, start in enumerate(dataset.initial_states):
            first, length = int(dataset.starts[episode]), int(dataset.lengths[episode])
            assert states.steps(start) == list(range(length))
            step = min(2 * STEP, length - 2)
            task, split, index = split_start(start)
            keyframe = states.at(start, step)
            obs = env.reset([EpisodeSpec(task, split, index, keyframe=keyframe)])
            np.testing.assert_array_equal(obs.images["agentview"][0], dataset.images["agentview"][first + step])
            np.testing.assert_array_equal(obs.state[0], dataset.state[first + step])
            result = env.step(dataset.executed_actions[None, first + step : first + length])
            frames = result.info["frames"][0]["agentview"]
            np.testing.assert_array_equal(frames[:-1], dataset.images["agentview"][first + step + 1 : first + length])
            assert result.done[0] and result.success[0] == dataset.success[episode]
            assert result.num_steps[0] == length - step


def test_a_stopped_collection_keeps_the_states_of_what_it_has_finished(tmp_path: Path) -> None:
    _, dataset = collected("tabletop", tmp_path / "episodes")
    assert len(list((dataset.path / "keyframes").glob("*.safetensors"))) == 3, "one file a shard"
    file = sorted((dataset.path / "keyframes").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(KeyframeError, match="truncated"):
        SimulatorStates(dataset.path)


def test_what_cannot_be_restored_in_a_simulator_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyframeError, match=r"holds no simulator states.*collect\.keyframes=true"):
        SimulatorStates(tmp_path)
    env_config, dataset = collected("tabletop", tmp_path / "episodes")
    states, start = SimulatorStates(dataset.path), dataset.initial_states[0]
    with pytest.raises(KeyframeError, match=r"no simulator state at step 999 .* its states are of steps"):
        states.at(start, 999)
    with pytest.raises(KeyframeError, match="the episode has none"):
        states.at("stack/train/77", 8)
    keyframe = states.at(start, 8)
    older = replace(keyframe, arrays=keyframe.arrays | {"physics": keyframe.arrays["physics"][:-1]})
    with closing(env_config.build(1)) as env, pytest.raises(ValueError, match="another version of the simulator"):  # type: ignore[attr-defined]
        env.reset([EpisodeSpec(keyframe.task, keyframe=older)])


# --- files and draws ----------------------------------------------------------------------------


def keyframe_file(folder: Path, count: int = 5, **changes: Any) -> Path:
    moments = [
        {"source": 0, "episode": i, "step": 8, "task": "reach", "start": f"reach/train/{i}", "kinds": ["gripper"]}
        | {"value": 0.5, "score": 1.0, **changes}
        for i in range(count)
    ]
    file = folder / "keyframes.json"
    sources = [{"path": "data/episodes", "content": "abc"}]
    file.write_text(json.dumps({"schema_version": 1, "sources": sources, "keyframes": moments}))
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "keyframes not found"),
        ('{"schema_version": 1, "sour', "not valid JSON, truncated"),
        ('{"schema_version": 9}', "schema_version is 9"),
        ('{"schema_version": 1, "sources": [], "keyframes": []}', "no usable keyframes: keyframes"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "keyframes.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(KeyframeError, match=message):
        KeyframeSet.load(file)


def test_a_set_comes_back_from_its_file(tmp_path: Path) -> None:
    mined = KeyframeSet.load(keyframe_file(tmp_path))
    mined.save(tmp_path / "again.json")
    assert KeyframeSet.load(tmp_path / "again.json") == mined and mined.counts() == {"gripper": 5}
    spec = mined.recorded(3)
    assert (spec.task, spec.split, spec.index) == ("reach", "train", 3) and spec.keyframe is not None
    assert (spec.keyframe.env, spec.keyframe.step) == ("recorded", 8) and int(spec.keyframe.arrays["episode"]) == 3
    with pytest.raises(KeyframeError, match="no keyframe of the tasks other; they are of reach"):
        mined.of_tasks(["other"])


def test_a_share_of_the_groups_begins_at_keyframes(tmp_path: Path) -> None:
    config = SamplingConfig(keyframe_share=0.3, keyframes=keyframe_file(tmp_path))
    sampler = config.build(["reach"], seed=1, imagined=True)
    draws = [sampler.draw(4) for _ in range(10)]
    assert [len([s for s in draw if s.keyframe]) for draw in draws] == [1, 1, 1, 1, 2, 1, 1, 1, 1, 2]
    episodes = [int(s.keyframe.arrays["episode"]) for draw in draws for s in draw if s.keyframe]
    assert sorted(episodes[:5]) == sorted(episodes[5:10]) == [0, 1, 2, 3, 4], "each once a lap"
    assert [s.index for draw in draws for s in draw if s.keyframe is None] == list(range(28))

    resumed = config.build(["reach"], seed=1, imagined=True)
    for draw in draws[:4]:
        assert [s.index for s in resumed.draw(4)] == [s.index for s in draw]
    again = config.build(["reach"], seed=1, imagined=True)
    again.load_state(json.loads(json.dumps(resumed.state())))
    assert [[s.index for s in again.draw(4)] for _ in range(6)] == [[s.index for s in draw] for draw in draws[4:]]


def test_without_a_share_nothing_changes(tmp_path: Path) -> None:
    plain = SamplingConfig().build(["reach"], seed=1)
    file = SamplingConfig(keyframes=keyframe_file(tmp_path)).build(["reach"], seed=1)
    assert plain.draw(7) == file.draw(7) and not any(s.keyframe for s in file.draw(9))


def test_a_share_needs_a_file() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.keyframes: is null, but sampling\.keyframe_share is 0\.5"):
        SamplingConfig(keyframe_share=0.5).build(["reach"])


def test_outcomes_from_keyframes_say_nothing_of_a_tasks_difficulty(tmp_path: Path) -> None:
    config = SamplingConfig(kind="vade", keyframe_share=0.5, keyframes=keyframe_file(tmp_path))
    sampler = config.build(["reach"], imagined=True)
    obs, none = Observation({}, np.zeros((0, 1)), []), np.zeros((0, 1))
    specs = [next(s for s in sampler.draw(2) if bool(s.keyframe) == at_keyframe) for at_keyframe in (True, False)]
    successes = []
    for spec in specs:
        sampler.update([Episode(spec, obs, None, none, none, none, none, success=True, final_obs=obs)])  # type: ignore[arg-type]
        successes += sampler.state()["successes"]
    assert successes == [0, 1]
