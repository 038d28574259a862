"""The world model as an environment: the contract, outcomes by hand, ends, keyframes, noise, and what is refused."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from test_model import SMALL, small_world_model
from toy import FACTS, GAIN, GOAL, ToyDynamics, push, start_position, toy_env, toy_env_spec

from vla_rl.config import ConfigError, build_component
from vla_rl.data.config import DatasetError
from vla_rl.rollout import collect
from vla_rl.types import ActionChunk, EpisodeSpec, Keyframe, Observation
from world_model.config import ImaginationConfig
from world_model.env import WorldModelEnv
from world_model.env_config import WorldModelEnvConfig
from world_model.facts import WorldModelFacts
from world_model.first_frames import MAX_KEPT, RecordedFirstFrames, SimulatedFirstFrames, check_alike
from world_model.model import Parts, WorldModel, build_parts
from world_model.trust.report import TrustError

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125; pushed by 1, it passes the goal, 6, in frame 5, at 6.125.


@pytest.mark.parametrize(
    "options", [{}, {"ensemble": 3, "dual_noise": 2, "max_disagreement": 1.0}, {"horizon": 10, "dual_noise": 0}]
)
def test_the_contract_is_kept(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    from checks import check_vec_env

    check_vec_env(lambda n, record_frames=False: toy_env(n, record_frames, noise=0.05, fresh_noise=False, **options))


# --- outcomes ---------------------------------------------------------------------------------


def test_an_episode_ends_with_the_frame_in_which_it_succeeds() -> None:
    env = toy_env(1)
    env.reset([SPEC])
    for _ in range(2):
        result = env.step(push(1, 1, 8))
        assert not result.done[0] and result.num_steps[0] == 8 and not result.reward.any()
    result = env.step(push(1, 1, 8))
    assert result.num_steps.tolist() == [4] and result.success.tolist() == [True]
    assert np.flatnonzero(result.reward[0]).tolist() == np.flatnonzero(result.terminated[0]).tolist() == [3]
    assert result.reward[0, 3] == 1 and not result.truncated.any()
    assert result.obs.state[0].tolist() == [6.125, 0]  # That of the success, not what the rest of the chunk would do.
    assert (result.obs.images["wrist"][0, 1:] == 8 * 6.125).all()
    with pytest.raises(ValueError, match="environment 0 has ended"):
        env.step(push(1, 1, 8))


@pytest.mark.parametrize("chunk", [3, 4, 6, 8, 10])
def test_any_chunk_length_leads_to_the_same_place(chunk: int) -> None:
    env = toy_env(1)
    env.reset([SPEC])
    states = [env.step(push(1, 1, chunk)).obs.state[0, 0] for _ in range(2)]
    np.testing.assert_allclose(states, [1.125 + GAIN * chunk, 1.125 + GAIN * 2 * chunk])


def test_a_frame_cut_short_by_the_chunk_can_succeed() -> None:
    env = toy_env(1)
    env.reset([EpisodeSpec("reach_back", "train", 4)])  # Starts at 5.5.
    result = env.step(push(1, 1, 3))
    assert result.success[0] and result.num_steps[0] == 3 and result.terminated[0].tolist() == [False, False, True]


def test_a_chunk_that_frames_do_not_divide_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    env = toy_env(1)
    env.reset([SPEC])
    with caplog.at_level(logging.WARNING):
        env.step(push(0, 1, 8))
        assert not caplog.records
        env.step(push(0, 1, 6))
        env.step(push(0, 1, 6))
    assert len(caplog.records) == 1 and "frame of 2" in caplog.text


class Wanderer:
    """A policy that pushes ahead more or less."""

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        actions = torch.rand(obs.batch_size, 6, 3, generator=generator).numpy() * 1.4
        return ActionChunk(actions)


@pytest.mark.parametrize("options", [{}, {"dual_noise": 0}, {"ensemble": 2, "max_disagreement": 0.9}])
def test_success_termination_and_return_always_agree(options: dict[str, Any]) -> None:
    env = toy_env(7, noise=0.5, **options)
    specs = [EpisodeSpec("reach", "train", i) for i in range(10) for _ in range(8)]
    episodes = collect(cast(Any, Wanderer()), env, specs)
    assert 10 < sum(e.success for e in episodes) < 70
    for episode in episodes:
        assert episode.success == episode.terminated.any() == (episode.total_reward == 1)
        assert episode.total_reward in (0, 1) and not episode.lost
        ends = episode.terminated | episode.truncated
        assert ends.sum() == 1 and ends[-1, episode.num_steps[-1] - 1]  # The very last step.
        assert not episode.reward[~episode.terminated].any()
        assert episode.success == (episode.final_obs.state[0, 0] > GOAL) or episode.truncated.any()
        assert episode.length <= 24


# --- ends -------------------------------------------------------------------------------------


def test_the_trust_horizon_truncates_inside_a_chunk() -> None:
    env = toy_env(2, horizon=10)
    assert env.spec.horizon == {"reach": 10, "reach_back": 10}
    env.reset([SPEC, EpisodeSpec("reach_back", "train", 0)])
    env.step(push(0, 2, 8))
    result = env.step(push(0, 2, 8))
    assert result.num_steps.tolist() == [2, 2] and result.truncated[:, 1].all() and result.truncated.sum() == 2


def test_the_tasks_horizon_truncates_where_it_comes_first() -> None:
    env = toy_env(1, horizon=100)
    env.reset([EpisodeSpec("reach_back", "train", 0)])
    result = env.step(push(0, 1, 20))
    assert result.num_steps[0] == 16 and result.truncated[0, 15] and not result.success[0]


def test_disagreement_truncates_without_success() -> None:
    env = toy_env(64, noise=0.5, ensemble=2, max_disagreement=0.3, dual_noise=0)
    env.reset([EpisodeSpec("reach_back", "train", i) for i in range(32, 96)])  # All beyond the goal.
    result = env.step(push(0, 64, 8))
    untrusted = result.info["untrusted"]
    assert 0 < untrusted.sum() < 64
    np.testing.assert_array_equal(untrusted, result.info["disagreement"] > np.float32(0.3))
    np.testing.assert_array_equal(result.truncated[:, 7], untrusted)
    np.testing.assert_array_equal(result.success, ~untrusted)
    np.testing.assert_array_equal(result.num_steps, np.where(untrusted, 8, 4))


def test_a_discarded_success_goes_on() -> None:
    env = toy_env(64, noise=0.5)
    env.reset([EpisodeSpec("reach_back", "train", 7)] * 64)  # Just before the goal.
    result = env.step(push(0, 64, 4))
    discarded = result.info["discarded"]
    assert 5 < discarded.sum() < 40
    assert not (discarded & (result.success | result.done)).any()
    assert (result.obs.state[discarded, 0] <= GOAL).all()
    going = np.flatnonzero(~result.done).tolist()
    env.step(push(0, len(going), 4), going)


def test_what_is_not_finite_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    env = toy_env(2, record_frames=True)
    cast(ToyDynamics, env.world_model.dynamics).broken = 5.0
    env.reset([SPEC, EpisodeSpec("reach_back", "train", 1)])
    with caplog.at_level(logging.WARNING):
        result = env.step(push(1, 2, 4))
    assert result.lost.tolist() == [False, True] and "environment 1" in caplog.text
    assert result.num_steps.tolist() == [4, 0] and not result.success.any() and not result.truncated.any()
    assert np.isfinite(result.obs.state).all() and not result.obs.images["wrist"][1].any()
    assert result.info["states"][1].shape == (0, 2)
    with pytest.raises(ValueError, match="environment 1 has ended"):
        env.step(push(1, 1, 4), [1])
    env.reset([SPEC], [1])
    assert env.step(push(1, 1, 4), [1]).obs.state[0, 0] == 2.125


# --- noise ------------------------------------------------------------------------------------


def walk(env: WorldModelEnv, ids: list[int] | None = None, chunks: int = 3) -> np.ndarray:
    """Positions after each chunk, (B, chunks)."""
    num = env.num_envs if ids is None else len(ids)
    return np.stack([env.step(push(0.1, num, 8), ids).obs.state[:, 0] for _ in range(chunks)], 1)


def test_an_episodes_noise_does_not_depend_on_its_neighbours() -> None:
    specs = [EpisodeSpec("reach", "train", i) for i in range(4)]
    options = {"noise": 0.2, "ensemble": 2, "dual_noise": 2, "fresh_noise": False}
    together = toy_env(4, **options)
    together.reset(specs)
    expected = walk(together)
    alone = toy_env(1, **options)
    for row, spec in enumerate(specs):
        alone.reset([spec])
        np.testing.assert_array_equal(walk(alone)[0], expected[row])
    apart = toy_env(4, **options)
    apart.reset([specs[3], specs[0]], [2, 0])
    np.testing.assert_array_equal(walk(apart, [2, 0]), expected[[3, 0]])


def test_episodes_of_a_group_have_noise_of_their_own() -> None:
    env = toy_env(4, noise=0.2)
    env.reset([SPEC] * 4)
    found = walk(env)
    assert len(np.unique(found[:, 0])) == 4
    env.reset([SPEC] * 4)
    assert not np.isin(walk(env), found).any()
    again = toy_env(2, noise=0.2)  # The place in the group counts, not the environment.
    again.reset([SPEC], [1])
    np.testing.assert_array_equal(walk(again, [1]), found[:1])
    again.reset([SPEC, EpisodeSpec("reach", "train", 2)], [0, 1])
    np.testing.assert_array_equal(walk(again)[0], found[1])
    other = toy_env(1, noise=0.2, seed=1)
    other.reset([SPEC])
    assert not np.isin(walk(other), found).any()


def test_a_resumed_run_draws_on() -> None:
    env = toy_env(1, noise=0.2)
    env.reset([SPEC])
    state = env.state()
    env.reset([SPEC])
    expected = walk(env)
    resumed = toy_env(1, noise=0.2)
    resumed.load_state(state)
    resumed.reset([SPEC])
    np.testing.assert_array_equal(walk(resumed), expected)


def test_without_fresh_noise_a_state_always_has_the_same() -> None:
    env = toy_env(4, noise=0.2, fresh_noise=False)
    env.reset([SPEC] * 4)
    found = walk(env)
    assert (found == found[0]).all()
    env.reset([SPEC] * 4)
    np.testing.assert_array_equal(walk(env), found)


# --- keyframes --------------------------------------------------------------------------------


def through_a_file(keyframe: Keyframe) -> Keyframe:
    """Written and read back without pickle."""
    buffer = io.BytesIO()
    np.savez(buffer, **cast(Any, keyframe.arrays))
    buffer.seek(0)
    with np.load(buffer, allow_pickle=False) as stored:
        return replace(keyframe, arrays={name: stored[name] for name in stored.files})


def test_a_keyframe_leads_to_the_same_future() -> None:
    env = toy_env(2, noise=0.2, horizon=20)
    env.reset([replace(SPEC, instruction="go there")], [0])
    before = env.step(push(0.5, 1, 8), [0])
    keyframe = through_a_file(env.save_state([0])[0])
    assert (keyframe.env, keyframe.task, keyframe.step) == ("world_model", "reach", 8)
    expected = walk(env, [0], 1)
    other = toy_env(3, noise=0.2, horizon=20, seed=9)
    obs = other.reset([replace(SPEC, keyframe=keyframe)] * 2, [2, 0])
    np.testing.assert_array_equal(obs.state, before.obs.state[[0, 0]])
    np.testing.assert_array_equal(obs.images["wrist"], before.obs.images["wrist"][[0, 0]])
    assert obs.instruction == ["go there"] * 2
    found = walk(other, [2, 0], 1)
    assert found[0] == expected[0] and found[1] != expected[0]  # The second of the group has noise of its own.
    result = other.step(push(0, 2, 8), [2, 0])
    assert result.num_steps.tolist() == [4, 4] and result.truncated[:, 3].all()  # 8 of the 20 steps were over.


def test_a_restored_episode_is_its_own_without_fresh_noise() -> None:
    env = toy_env(2, noise=0.2, fresh_noise=False)
    env.reset([SPEC], [0])
    env.step(push(0.5, 1, 8), [0])
    keyframe = env.save_state([0])[0]
    env.reset([replace(SPEC, keyframe=keyframe)] * 2)
    found = walk(env, chunks=2)
    np.testing.assert_array_equal(found[0], found[1])


def test_keyframes_keep_what_numpy_does_not_know() -> None:
    torch.manual_seed(0)
    model = build_parts(SMALL, FACTS.model_copy(update={"image_size": (16, 16)}))
    cast(torch.nn.Module, model.dynamics).to(torch.bfloat16)
    env = real_env(model, image_size=(16, 16))
    env.reset([SPEC], [0])
    env.step(push(0.5, 1, 8), [0])
    keyframe = through_a_file(env.save_state([0])[0])
    expected = env.step(push(0.5, 1, 8), [0])
    env.reset([replace(SPEC, keyframe=keyframe)], [1])
    np.testing.assert_array_equal(env.step(push(0.5, 1, 8), [1]).obs.state, expected.obs.state)


def test_keyframes_of_others_are_refused() -> None:
    env = toy_env(1)
    env.reset([SPEC])
    keyframe = env.save_state()[0]
    with pytest.raises(ValueError, match="is of task 'reach', the episode of 'reach_back'"):
        env.reset([EpisodeSpec("reach_back", keyframe=keyframe)])
    for name, array in (
        ("memory.reference.latents", np.zeros((1, 3, 1, 1, 1), np.float32)),
        ("memory.extra", np.ones(1)),
    ):
        damaged = replace(keyframe, arrays=keyframe.arrays | {name: array})
        with pytest.raises(ValueError, match="of another world model"):
            env.reset([replace(SPEC, keyframe=damaged)])
    with pytest.raises(ValueError, match="environment 0 has ended"):
        env.step(push(0, 1, 4))
    with pytest.raises(ValueError, match="environment 0 has ended"):
        env.save_state()


def test_a_simulators_keyframe_is_a_first_frame() -> None:
    env = toy_env(1, horizon=12)
    keyframe = Keyframe("tabletop", "reach", 16, {"position": np.array(3.0)})
    obs = env.reset([replace(SPEC, keyframe=keyframe)])
    assert obs.state[0, 0] == 3.0
    result = env.step(push(0, 1, 12))
    assert result.num_steps[0] == 8 and result.truncated[0, 7]  # The task's 24 steps count on.
    env.reset([replace(SPEC, keyframe=replace(keyframe, step=4))])
    assert env.step(push(0, 1, 20)).num_steps[0] == 12  # The world model is trusted for 12 steps of its own.


# --- recording --------------------------------------------------------------------------------


def test_recorded_frames_repeat_the_last_one_imagined() -> None:
    env = toy_env(1, record_frames=True)
    env.reset([SPEC])
    result = env.step(push(1, 1, 10))
    states, images = result.info["states"][0][:, 0], result.info["frames"][0]["wrist"]
    assert states.tolist() == [1.125] * 3 + [2.125] * 4 + [3.125] * 2 + [3.625]
    np.testing.assert_array_equal(images[:, -1, -1, 0], 8 * states)
    episodes = collect(cast(Any, Wanderer()), env, [SPEC])
    assert episodes[0].states is not None and len(episodes[0].states) == episodes[0].length


# --- first frames -----------------------------------------------------------------------------


class FakeSimulator:
    """Shows `start_position`; counts its resets."""

    def __init__(self, **changes: Any) -> None:
        self.num_envs, self.spec = 3, toy_env_spec(**changes)
        self.calls: list[int] = []
        self.num_closed = 0

    def reset(self, specs: list[EpisodeSpec], env_ids: list[int]) -> Observation:
        assert list(env_ids) == list(range(len(specs)))
        self.calls.append(len(specs))
        position = np.array([start_position(spec) for spec in specs], np.float32)
        images = np.broadcast_to((8 * position)[:, None, None, None], (len(specs), 8, 8, 3)).astype(np.uint8)
        state = np.stack([position, position], 1)
        return Observation({"wrist": images, "agentview": images}, state, ["x"] * len(specs))

    def close(self) -> None:
        self.num_closed += 1


def test_a_group_is_rendered_once() -> None:
    simulator = FakeSimulator()
    frames = SimulatedFirstFrames(cast(Any, simulator))
    specs = [EpisodeSpec("reach", "train", i) for i in (0, 1, 0, 2, 3, 0)]
    expected = [1 + i / 8 for i in (0, 1, 0, 2, 3, 0)]
    assert frames.observe(specs).state[:, 0].tolist() == expected
    assert simulator.calls == [3, 1]
    assert frames.observe(specs[::-1]).state[:, 0].tolist() == expected[::-1]
    assert simulator.calls == [3, 1]
    keyframes = [Keyframe("sim", "reach", 3, {"position": np.array(p)}) for p in (5.0, 6.0)]
    stored = [replace(SPEC, keyframe=k) for k in (*keyframes, keyframes[0])]
    assert frames.observe([SPEC, *stored]).state[:, 0].tolist() == [1.125, 5, 6, 5]
    assert simulator.calls == [3, 1, 2]
    frames.observe([EpisodeSpec("reach", "eval", i) for i in range(MAX_KEPT)])
    num_calls = len(simulator.calls)
    frames.observe(specs)  # Forgotten, and rendered again.
    assert len(simulator.calls) == num_calls + 2
    frames.close()
    assert simulator.num_closed == 1


def dataset(names: list[str], instructions: list[str], first: float = 0.0) -> Any:
    """Episodes of two rows each."""
    rows = 2 * len(names)
    images = (first + np.arange(rows, dtype=np.float32))[:, None, None, None] * np.ones((8, 8, 3), np.uint8)
    return SimpleNamespace(
        path=Path("data"),
        initial_states=names,
        instructions=instructions,
        task=np.repeat(np.arange(len(names)) % len(instructions), 2),
        starts=np.arange(0, rows, 2),
        episodes=np.arange(len(names)),
        images={"agentview": images.astype(np.uint8), "wrist": images.astype(np.uint8)},
        state=np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),
    )


def test_recorded_episodes_begin_where_they_began() -> None:
    recorded = dataset(["reach/train/40", "reach/eval/0", "reach_back/train/40"], ["go", "come", "turn"])
    frames = RecordedFirstFrames([recorded], FACTS.tasks)
    obs = frames.observe([EpisodeSpec("reach_back", "train", 40), EpisodeSpec("reach", "train", 40)])
    assert obs.images["wrist"][:, 0, 0, 0].tolist() == [4, 0] and obs.instruction == ["turn", "go"]
    np.testing.assert_array_equal(obs.state, recorded.state[[4, 0]])
    with pytest.raises(ValueError, match=r"reach/train/41; .* 1, numbered 40 to 40.*sampling\.first_state"):
        frames.observe([EpisodeSpec("reach", "train", 41)])
    with pytest.raises(ValueError, match="are none"):
        frames.observe([EpisodeSpec("reach", "validation", 0)])
    with pytest.raises(ValueError, match=r"env\.first_frames"):
        frames.observe([replace(SPEC, keyframe=Keyframe("tabletop", "reach", 0, {}))])


def test_episodes_of_other_sources_are_numbered_by_instruction() -> None:
    texts = list(FACTS.tasks.values())
    parts = [dataset([f"robot/{i}" for i in range(4)], texts), dataset(["robot/0"], texts, first=100)]
    frames = RecordedFirstFrames(parts, FACTS.tasks)
    specs = [EpisodeSpec("reach", "train", i) for i in range(3)]
    assert frames.observe(specs).images["wrist"][:, 0, 0, 0].tolist() == [0, 4, 100]
    with pytest.raises(DatasetError, match="no episode of task 'reach_back'"):
        RecordedFirstFrames(parts[1:], FACTS.tasks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cameras": ("wrist",)}, r"env\.first_frames lacks \['agentview'\]"),
        ({"image_size": (16, 16)}, r"image size: the world model has \(8, 8\), env\.first_frames has \(16, 16\)"),
        ({"control_hz": 20.0}, r"control Hz: the world model has 10\.0, env\.first_frames has 20\.0"),
        ({"action_dim": 4, "action_low": -np.ones(4), "action_high": np.ones(4)}, "action dimensions: .* 3, .* 4"),
        ({"state_dim": 8}, "state dimensions"),
        ({"action_high": np.full(3, 0.5)}, "action bounds"),
        ({"tasks": {"reach": "x"}, "horizon": {"reach": 3}}, r"has no \['reach_back'\]"),
    ],
)
def test_first_frames_of_another_robot_are_refused(changes: dict[str, Any], message: str) -> None:
    check_alike(FACTS, toy_env_spec(), list(FACTS.tasks))
    check_alike(FACTS, toy_env_spec(cameras=("front", "wrist", "agentview")), list(FACTS.tasks))
    with pytest.raises(ConfigError, match=message):
        check_alike(FACTS, toy_env_spec(**changes), list(FACTS.tasks))


# --- built from a config ----------------------------------------------------------------------


def real_env(parts: Parts, **changes: Any) -> WorldModelEnv:
    """Real, untrained networks; nothing counts as a success."""
    facts = FACTS.model_copy(update={"success_threshold": 1e6, **changes})
    simulator = FakeSimulator(image_size=facts.image_size)
    frames = SimulatedFirstFrames(cast(Any, simulator))
    observe = frames.observe

    def resized(specs: Any) -> Observation:
        obs = observe(specs)
        images = {name: image.repeat(2, 1).repeat(2, 2) for name, image in obs.images.items()}
        return replace(obs, images=images)

    cast(Any, frames).observe = resized
    return WorldModelEnv(WorldModel(SMALL, facts, parts), frames, ImaginationConfig(), 2)


DUMMY = {"kind": "dummy", "image_size": 16, "cameras": ["agentview", "wrist"], "horizon": 12}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A world model of the dummy simulator, untrained."""
    spec = cast(Any, build_component("env", DUMMY)).env_spec()
    facts = WorldModelFacts.of(spec, np.zeros(8), np.ones(8), success_threshold=1e6)
    torch.manual_seed(0)
    WorldModel(SMALL, facts, build_parts(SMALL, facts)).save(tmp_path / "model")
    return tmp_path / "model"


def section(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {"kind": "world_model", "path": str(folder), "first_frames": DUMMY, "num_envs": 2, "device": "cpu"}
    return {**values, "trust": {"ignore": True}, **changes}


def build(folder: Path, **changes: Any) -> WorldModelEnv:
    return cast(Any, build_component("env", section(folder, **changes))).build()


def test_real_networks_keep_the_contract(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    from checks import check_vec_env

    config = build_component("env", section(folder, imagination={"fresh_noise": False}))
    check_vec_env(cast(Any, config).build)


def test_a_section_comes_back_from_its_own_dump(folder: Path) -> None:
    config = build_component("env", section(folder))
    assert isinstance(config, WorldModelEnvConfig) and config.is_imagined
    assert build_component("env", config.model_dump(mode="json")) == config
    moved = config.model_copy(update={"path": folder.parent})
    assert moved.model_dump(mode="json")["path"] == str(folder.parent)


def test_the_spec_needs_no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = cast(Any, build_component("env", section(folder, tasks=["reach_red"], imagination={"horizon": 8})))
    spec = config.env_spec()
    assert spec.kind == "world_model" and spec.horizon == {"reach_red": 8} and spec.cameras == ("agentview", "wrist")
    shorter = section(folder, first_frames=DUMMY | {"horizon": 6})
    assert set(cast(Any, build_component("env", shorter)).env_spec().horizon.values()) == {6}


def test_without_trust_nothing_is_built(folder: Path) -> None:
    with pytest.raises(TrustError, match=r"trust\.json.*trust\.ignore=true"):
        build(folder, trust={})
    (folder / "trust.json").write_text("{")
    with pytest.raises(TrustError, match="not valid JSON"):
        build(folder, trust={})
    env = build(folder)
    assert env.admission is not None and env.admission.ignored and "not valid JSON" in env.admission.problem
    env.close()


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks \['wrist'\]"):
        build(folder, first_frames=DUMMY | {"cameras": ["agentview"]})
    with pytest.raises(ConfigError, match="image size"):
        build(folder, first_frames=DUMMY | {"image_size": 32})
    with pytest.raises(ConfigError, match="Did you mean 'reach_red'"):
        build(folder, tasks=["reach_rad"])
    with pytest.raises(ConfigError, match="no such folder"):
        build(folder / "nowhere")
    with pytest.raises(ValueError, match="num_envs"):
        WorldModelEnv(small_world_model(), cast(Any, None), ImaginationConfig(), 0)


def test_episodes_begin_in_one_place(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.first_frames: .* got neither"):
        build(folder, first_frames=None)
    with pytest.raises(ConfigError, match="got both"):
        build(folder, datasets="somewhere")
    with pytest.raises(ConfigError, match="must be a real environment"):
        build(folder, first_frames=section(folder))
    with pytest.raises(DatasetError, match="somewhere"):
        build(folder, first_frames=None, datasets="somewhere")


def test_closing_closes_the_first_frames() -> None:
    env = toy_env(1)
    env.reset([SPEC])
    env.close()
    env.close()
    assert cast(Any, env._first_frames).num_closed == 2
    with pytest.raises(ValueError, match="has ended"):
        env.step(push(0, 1, 4))
    with pytest.raises(NotImplementedError, match="no scripted expert"):
        env.expert_action()
