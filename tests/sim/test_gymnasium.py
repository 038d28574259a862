"""Real Gymnasium environments by a section of the recipe: what stands where, and what a mistake is told."""

from typing import Any

import numpy as np
import pytest
from gym_examples import Slider
from reach_policy import ReachPolicy

from sim.gymnasium_env import GymnasiumConfig
from sim.remote.host import GymEpisodes
from vla_rl.algorithms.ppo import bootstrap_values
from vla_rl.config import ConfigError, build_component
from vla_rl.rollout.runner import collect
from vla_rl.types import SPLITS, ActionChunk, EpisodeSpec

REACHER = {"id": "Reacher-v5", "instruction": "touch the red ball", "success": "info.reward_dist >= -0.02"}
SLIDER = {
    "id": "gym_examples:Slider",
    "instruction": "go right",
    "state": "x",
    "action_low": [-1],
    "action_high": [1],
    "horizon": 20,
}


class Still(ReachPolicy):
    """Does nothing, four steps at a time."""

    def act(self, obs: Any, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(np.zeros((obs.batch_size, 4, 1), np.float32))


def make(**values: Any) -> GymnasiumConfig:
    config = build_component("env", {"kind": "gymnasium", **values})
    assert isinstance(config, GymnasiumConfig)
    return config


def test_reacher_in_one_line() -> None:
    env = GymnasiumConfig(**REACHER).build(num_envs=2)  # type: ignore[arg-type]
    try:
        spec = env.spec
        assert (spec.tasks, spec.horizon) == ({"Reacher": "touch the red ball"}, {"Reacher": 50})
        assert (spec.state_dim, spec.action_dim, spec.control_hz) == (10, 2, 50.0)
        obs = env.reset([EpisodeSpec("Reacher", "eval", i) for i in range(2)])
        assert obs.images["agentview"].shape == (2, 64, 64, 3) and obs.images["agentview"].std() > 5
    finally:
        env.close()


def test_success_is_what_the_recipe_says() -> None:
    """The fingertip is put at the target, so that Gymnasium's own distance in info is known."""
    env = make(**REACHER).make()
    env.reset(EpisodeSpec("Reacher"))
    simulator = env._env.unwrapped  # type: ignore[attr-defined]
    simulator.data.qpos[2:4] = np.add(simulator.data.body("fingertip").xpos[:2], [0.01, 0.0])
    assert env.run_chunk(np.zeros((1, 2), np.float32)).success
    simulator.data.qpos[2:4] += [0.1, 0.0]
    assert not env.run_chunk(np.zeros((1, 2), np.float32)).success
    env.close()


@pytest.mark.parametrize(
    ("success", "solved"),
    [
        ("info.is_success", 4),
        ("", 4),
        ("info.is_success > 0", 4),
        ("terminated", 6),
        ("reward >= 0.7", 2),
        ("return > 1.4", 2),
    ],
)
def test_forms_of_success(success: str, solved: int) -> None:
    """From 0.6 on the dot moves by 0.1 a step; its reward is where it is."""
    env = make(**SLIDER, success=success).make()
    env.reset(EpisodeSpec("Slider"))
    env._env.x = 0.595  # type: ignore[attr-defined]
    result = env.run_chunk(np.ones((20, 1), np.float32))
    assert result.success and result.num_steps == solved


def test_an_end_without_success_is_no_truncation() -> None:
    """It was one, and PPO counted the value of what would never follow."""
    env = make(**SLIDER).make()
    env.reset(EpisodeSpec("Slider"))
    result = env.run_chunk(-np.ones((10, 1), np.float32))
    assert result.num_steps == 6 and result.terminated[5] and not result.truncated.any() and not result.success
    env.reset(EpisodeSpec("Slider"))
    assert not env.run_chunk(np.zeros((2, 1), np.float32)).terminated.any(), "the next episode goes on"


def test_a_simulators_end_also_ends_what_a_reward_pays() -> None:
    env = make(**SLIDER, reward={"kind": "simulator"}).build(1)
    env.reset([EpisodeSpec("Slider")])
    assert not env.step(np.zeros((1, 4, 1), np.float32)).done[0]
    result = env.step(-np.ones((1, 4, 1), np.float32))
    assert result.terminated[0].tolist() == [False, True, False, False] and not result.success[0]
    env.close()


@pytest.mark.parametrize(("ends_at", "is_over"), [(6, True), (50, False)])
def test_ppo_counts_a_value_after_an_episode_that_was_cut_off_alone(ends_at: int, is_over: bool) -> None:
    env = make(**SLIDER, kwargs={"ends_at": ends_at}).build(1)
    episodes = collect(Still(), env, [EpisodeSpec("Slider")])
    assert episodes[0].truncated.any() != is_over
    values = bootstrap_values(episodes, lambda *_: (np.zeros(0, np.float32), np.array([0.7], np.float32)))
    assert values.tolist() == pytest.approx([0.0 if is_over else 0.7])
    env.close()


def test_behind_a_host_an_end_without_success_is_no_truncation_either() -> None:
    facts = {"tasks": {"go": "go right"}, "horizon": 9, "cameras": {"side": "render()"}, "state": "x", "control_hz": 5}
    bounds = {"action_low": [-1.0], "action_high": [1.0]}
    for ends_at, ends in ((6, [[5], []]), (50, [[], [8]])):
        env = GymEpisodes(Slider("rgb_array", ends_at), facts | bounds, record_frames=False)
        env.reset(EpisodeSpec("go"))
        result = env.run_chunk(-np.ones((12, 1), np.float32))
        assert [np.flatnonzero(end).tolist() for end in (result.terminated, result.truncated)] == ends
        assert not result.success


def test_what_numpys_global_generator_draws_is_the_episodes_own() -> None:
    """Same split and index, same episode, whatever else draws; and outside draws are left alone."""
    env = make(**SLIDER).make()
    np.random.seed(1)
    expected = np.random.RandomState(1).uniform(size=3)
    seen = {}
    for split in SPLITS:
        for index in range(3):
            env.reset(EpisodeSpec("Slider", split, index))
            seen[split, index] = env.run_chunk(np.zeros((2, 1), np.float32)).obs.state
    np.testing.assert_array_equal(np.random.uniform(size=3), expected)
    assert len({float(state[0]) for state in seen.values()}) == 9
    env.reset(EpisodeSpec("Slider", "validation", 1))
    np.random.uniform(size=5)
    assert env.run_chunk(np.zeros((2, 1), np.float32)).obs.state == seen["validation", 1]


def test_pictures_are_square_and_upright() -> None:
    env = make(**SLIDER, image_size=20, upside_down=["agentview"]).make()
    image = env.reset(EpisodeSpec("Slider")).images["agentview"]
    assert image.shape == (20, 20, 3) and image[2, 0, 0] == 200 and image[17, 0, 0] == 0
    assert make(**SLIDER, image_size=20).make().reset(EpisodeSpec("Slider")).images["agentview"][17, 0, 0] == 200


def test_an_image_and_a_state_of_the_observation() -> None:
    env = make(
        id="gym_examples:pusher_with_pixels",
        instruction="push the puck to its place",
        cameras={"front": "pixels"},
        state="state",
        success="info.reward_dist >= -0.1",
        horizon=100,
        image_size=48,
    ).make()
    obs = env.reset(EpisodeSpec("pusher_with_pixels"))
    assert obs.images["front"].shape == (48, 48, 3) and obs.state.shape == (23,)
    np.testing.assert_array_equal(obs.images["front"], env._env.render()[:, 24:72])  # type: ignore[attr-defined]
    env.close()


def test_an_expert_of_the_users_own() -> None:
    env = make(**SLIDER, expert="gym_examples:to_the_right").make()
    env.reset(EpisodeSpec("Slider"))
    assert env.expert_action() == np.array([1.0], np.float32), "clipped to the bounds"
    with pytest.raises(NotImplementedError, match=r"env\.expert=module:function"):
        make(**SLIDER).make().expert_action()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"id": "Reachr-v5"}, r"env.id: got 'Reachr-v5'.*Did you mean: `Reacher`"),
        ({"id": "no_such_lab:Reacher-v5"}, "env.id: .*needs a package that is not installed here.*no_such_lab"),
        ({"success": ""}, "env.success: needed.*reward_dist float64; reward_ctrl"),
        ({"success": "info.dist < 1"}, "env.success: there is no 'dist'.*info, which has: reward_dist"),
        ({"success": "reward"}, "env.success: got 'reward'.*terminated, info.KEY"),
        ({"state": "position"}, r"env.state: there is no 'position'.*one array float64 \(10,\)"),
        ({"cameras": {"front": "pixels.front"}}, "env.cameras.front: there is no 'pixels.front'"),
        ({"cameras": ["agentview"]}, "env.cameras: .*say where each image comes from"),
        ({"kwargs": {"wdith": 64}}, "env.kwargs: Reacher-v5 does not take.*wdith"),
        ({"action_low": [-1, -1, -1]}, "env.action_low: got 3 numbers, Reacher-v5 has 2"),
        ({"action_low": [2]}, "env.action_low: .*must be below action_high"),
        ({"tasks": ["reach"]}, "unknown task of this Gymnasium environment 'reach'.*Reacher"),
        ({"upside_down": ["wrist"]}, "env.upside_down: got .*wrist.*agentview"),
        ({"id": "CartPole-v1", "success": "terminated"}, r"env.id: CartPole-v1 takes Discrete\(2\)"),
    ],
)
def test_a_mistake_is_told_with_what_there_is(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**{**REACHER, **values}).env_spec()


@pytest.mark.parametrize("key", ["horizon", "action_low"])
def test_what_only_the_user_knows_is_asked_for(key: str) -> None:
    values = {name: value for name, value in SLIDER.items() if name != key}
    with pytest.raises(ConfigError, match=rf"env\.{key}: .*give"):
        make(**values).env_spec()


def test_an_image_that_is_none_is_told() -> None:
    env = make(**SLIDER, kwargs={"render_mode": None}).make()
    with pytest.raises(ConfigError, match=r"env\.cameras\.agentview: render\(\) gave.*rgb_array"):
        env.reset(EpisodeSpec("Slider"))


def test_gym_hil_lifts_a_cube() -> None:
    """The recipe of docs/own_environment.md: a random block, 4-D actions, its own success."""
    pytest.importorskip("gym_hil", reason="gym-hil is not installed")
    env = make(
        id="gym_hil:gym_hil/PandaPickCube-v0",
        kwargs={"image_obs": True, "random_block_position": True, "reset_delay_seconds": 0.0},
        instruction="pick up the red cube",
        cameras={"front": "pixels.front", "wrist": "pixels.wrist"},
        state="agent_pos",
        success="info.succeed",
        control_hz=10,
        image_size=64,
        expert="gym_hil_expert:pick",
    ).build(num_envs=1)
    try:
        obs = env.reset([EpisodeSpec("PandaPickCube", "train", 0)])
        assert obs.images["front"].shape == (1, 64, 64, 3) and env.spec.action_dim == 4
        result = env.step(env.expert_action()[:, None])
        while not result.done[0]:
            result = env.step(env.expert_action()[:, None])
        assert result.success[0]
    finally:
        env.close()
