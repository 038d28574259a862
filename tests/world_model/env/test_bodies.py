"""A simulated body in imagination: it tells the state, the world model the rest; keyframes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from toy import GAIN, ToyInitialFrames, push, start_position, through_a_file, toy_env, toy_world_model

from vla_rl.config import ConfigError, build_component
from vla_rl.data.keyframes import RECORDED, STATES_FOLDER, KeyframeError, write_states
from vla_rl.types import EpisodeSpec, Keyframe
from world_model.config import ImaginationConfig
from world_model.env.bodies import Bodies
from world_model.env.env import WorldModelEnv
from world_model.noise import RepeatCounter

SPEC = EpisodeSpec("reach", "train", 1)  # Starts at 1.125.


class HalfBody:
    """Of the state's two numbers it tells the second: 100 times the start, plus the sum of all actions so far."""

    def __init__(self) -> None:
        self.num_closed = 0

    def begin(self, specs: Sequence[EpisodeSpec]) -> tuple[list[Keyframe], np.ndarray]:
        at = [100 * start_position(spec) for spec in specs]
        bodies = [Keyframe("half", spec.task, 0, {"at": np.array(x)}) for spec, x in zip(specs, at, strict=True)]
        return bodies, np.array([[np.nan, x] for x in at], np.float32)

    def step(self, bodies: Sequence[Keyframe], actions: np.ndarray) -> tuple[list[Keyframe], np.ndarray]:
        path = np.array([b.arrays["at"] for b in bodies])[:, None] + actions[:, :, 0].clip(-1, 1).cumsum(1)
        after = [replace(b, arrays={"at": np.array(row[-1])}) for b, row in zip(bodies, path, strict=True)]
        return after, np.stack([np.full_like(path, np.nan), path], 2).astype(np.float32)

    def close(self) -> None:
        self.num_closed += 1


class Silent(HalfBody):
    """It tells nothing."""

    def step(self, bodies: Sequence[Keyframe], actions: np.ndarray) -> tuple[list[Keyframe], np.ndarray]:
        after, states = super().step(bodies, actions)
        return after, np.full_like(states, np.nan)


def env_with(body: HalfBody, num_envs: int = 2, noise: float = 0.0, **options: object) -> WorldModelEnv:
    config = ImaginationConfig.model_validate(options)
    return WorldModelEnv(toy_world_model(noise), ToyInitialFrames(), config, num_envs, body=body)


def test_the_contract_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from checks import check_vec_env

    config = ImaginationConfig()

    def make(num_envs: int, record_frames: bool = False) -> WorldModelEnv:
        parts = toy_world_model(0.05), ToyInitialFrames(), config, num_envs
        return WorldModelEnv(*parts, record_frames=record_frames, body=HalfBody())

    monkeypatch.setattr(RepeatCounter, "next", lambda *_: 0)  # An initial state always has the same noise.
    check_vec_env(make)


def test_the_body_tells_the_state_and_the_world_model_the_pictures() -> None:
    env, learned = env_with(HalfBody(), 1), toy_env(1)
    env.reset([SPEC])
    learned.reset([SPEC])
    for chunks in (1, 2):
        result, imagined = env.step(push(0.5, 1, 8)), learned.step(push(0.5, 1, 8))
        position = 1.125 + GAIN * 0.5 * 8 * chunks
        assert result.obs.state.tolist() == [[position, 112.5 + 4 * chunks]]
        assert imagined.obs.state.tolist() == [[position, 0]]
        for camera, image in imagined.obs.images.items():
            np.testing.assert_array_equal(result.obs.images[camera], image)
    remembered = env.save_state()[0].arrays["memory.recent.states"]
    assert remembered[-2:, 1].tolist() == [112.5 + 6, 112.5 + 8]  # That of each frame, in the middle of chunks too.


def test_a_body_that_tells_nothing_changes_nothing() -> None:
    env = env_with(Silent(), 2, 0.5, ensemble=2, dual_noise=2)
    learned = toy_env(2, noise=0.5, ensemble=2, dual_noise=2)
    specs = [SPEC, EpisodeSpec("reach_back", "train", 1)]
    np.testing.assert_array_equal(env.reset(specs).state, learned.reset(specs).state)
    for action in (0.2, 0.3):
        one, other = env.step(push(action, 2, 4)), learned.step(push(action, 2, 4))
        for name in ("reward", "terminated", "truncated", "num_steps", "success"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        np.testing.assert_array_equal(one.obs.state, other.obs.state)
        np.testing.assert_array_equal(one.obs.images["wrist"], other.obs.images["wrist"])


def test_the_state_shown_is_that_after_the_last_executed_action() -> None:
    env = env_with(HalfBody(), 1, horizon=6)
    env.reset([SPEC])
    result = env.step(push(0.5, 1, 8))
    assert result.num_steps.tolist() == [6] and result.obs.state[0, 1] == 112.5 + 3


def test_the_body_holds_in_the_future_that_a_discarded_success_is_gone_on_with() -> None:
    env = env_with(HalfBody(), 64, noise=1.0, dual_noise=1)
    env.reset([EpisodeSpec("reach", "train", 32 + i % 2) for i in range(64)])  # Just below the goal.
    result = env.step(push(0.5, 64, 4))
    assert 0 < result.info["discarded"].sum() < 64
    assert (result.obs.state[:, 1] == np.tile([502, 514.5], 32)).all()


def test_each_environment_has_a_body_of_its_own() -> None:
    env = env_with(HalfBody(), 3)
    env.reset([SPEC] * 3)
    env.step(push(0.5, 3, 4))
    env.reset([replace(SPEC, index=2)], [1])
    assert env.step(push(0.5, 2, 4), [2, 1]).obs.state[:, 1].tolist() == [112.5 + 4, 125 + 2]
    assert env.step(push(0.5, 1, 4), [0]).obs.state[:, 1].tolist() == [112.5 + 4]


def test_an_episode_goes_on_from_its_keyframe_with_its_body() -> None:
    env = env_with(HalfBody(), 1)
    env.reset([SPEC])
    env.step(push(0.5, 1, 4))
    keyframe = through_a_file(env.save_state()[0])
    expected = env.step(push(0.25, 1, 4)).obs.state
    other = env_with(HalfBody(), 2)
    other.reset([replace(SPEC, index=2), replace(SPEC, keyframe=keyframe)])
    assert other.step(push(0.25, 2, 4)).obs.state[1].tolist() == expected[0].tolist() == [1.875, 115.5]


def test_keyframes_that_do_not_say_where_the_body_is_are_refused() -> None:
    learned = toy_env(1)
    learned.reset([SPEC])
    env = env_with(HalfBody(), 1)
    with pytest.raises(ValueError, match=r"saved where no simulated body moved"):
        env.reset([replace(SPEC, keyframe=learned.save_state()[0])])


def test_at_a_recorded_moment_the_body_is_where_the_simulator_was(tmp_path: Path) -> None:
    start = "reach/train/7"
    states = [Keyframe("toy", "reach", step, {"position": np.array(step / 4)}) for step in (4, 8)]
    (tmp_path / STATES_FOLDER).mkdir()
    write_states(tmp_path / STATES_FOLDER / "0.safetensors", {start: states})
    arrays = {"dataset": str(tmp_path), "start": start}
    moments = [
        Keyframe(RECORDED, "reach", step, {name: np.frombuffer(x.encode(), np.uint8) for name, x in arrays.items()})
        for step in (8, 12)
    ]
    bodies = Bodies(HalfBody(), toy_world_model(), 2)
    bodies.begin([1, 0], [replace(SPEC, keyframe=moments[0]), SPEC])
    assert [float(bodies.arrays(i)["body.at"]) for i in (0, 1)] == [112.5, 200]
    with pytest.raises(KeyframeError, match=r"env\.body.*joints: .*no simulator state at step 12.*collect\.keyframes"):
        bodies.begin([0], [replace(SPEC, keyframe=moments[1])])


def test_the_body_is_closed_with_the_environment() -> None:
    body = HalfBody()
    env_with(body).close()
    assert body.num_closed == 1


@pytest.mark.parametrize(
    ("beginning", "found"),
    [
        ({"first_frames": {"kind": "sim.dummy:DummyConfig"}}, "kind 'sim.dummy:DummyConfig'"),
        ({"datasets": ["data/policy"]}, "none"),
    ],
)
def test_a_body_is_asked_only_of_a_simulator_that_has_one(beginning: dict[str, object], found: str) -> None:
    with pytest.raises(ConfigError, match=rf"env\.body.*libero, tabletop.*not {found}; set env\.body=learned"):
        build_component("env", {"kind": "world_model", "path": "x", "body": "simulated", **beginning})


def test_the_tabletops_gripper_is_where_the_simulator_has_it() -> None:
    """Above all objects, from the pretrained world model's environment as a recipe builds it."""
    first = {"kind": "tabletop", "tasks": ["pick_place"]}
    section = {"kind": "world_model", "path": "pretrained:tabletop", "body": "simulated", "first_frames": first}
    options = {"num_envs": 1, "imagination": {"precision": "fp32"}, "trust": {"ignore": True}}
    env = build_component("env", {**section, **options}).build()
    real = build_component("env", {**first, "num_envs": 1}).build()
    spec = EpisodeSpec(next(iter(env.spec.tasks)), "train", 5)
    env.reset([spec])
    real.reset([spec])
    rng = np.random.default_rng(0)
    for _ in range(3):
        actions = rng.uniform(-0.3, 0.3, (1, 8, 7)).astype(np.float32)
        actions[..., 2] += 0.3
        np.testing.assert_allclose(env.step(actions).obs.state, real.step(actions).obs.state, atol=1e-5)
    env.close()
    real.close()
