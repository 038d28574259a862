"""Perturbed episodes: graded, paired with the clean one, undone for others, and never told."""

import numpy as np
import pytest

from sim.dummy import DummyConfig
from sim.perturb import Perturbation, PerturbConfig, Surfaces, _either_way
from sim.tabletop import TabletopConfig
from sim.tabletop.tasks import INSTRUCTIONS, PARAPHRASES
from vla_rl.config import ConfigError, build_component
from vla_rl.types import EpisodeSpec

SPEC = EpisodeSpec("pick_colour", "eval", 3)
CLEAN = TabletopConfig(tasks=tuple(INSTRUCTIONS), cameras=("agentview", "wrist"))
LOOKS = ("camera", "light", "texture", "noise")


def reset(config: TabletopConfig, spec: EpisodeSpec = SPEC):
    env = config.make()
    return env, env.reset(spec)


def difference(a, b) -> float:
    return float(np.abs(a.images["agentview"].astype(float) - b.images["agentview"]).mean())


@pytest.mark.parametrize("axis", LOOKS)
def test_pictures_differ_more_at_each_level_and_nothing_else_does(axis: str) -> None:
    clean_env, clean = reset(CLEAN)
    seen = []
    for level in (1, 2, 3):
        env, obs = reset(CLEAN.perturbed(axis, level))
        seen.append(difference(obs, clean))
        np.testing.assert_array_equal(env._now.qpos, clean_env._now.qpos)
        assert obs.instruction == clean.instruction
        if axis != "noise":
            np.testing.assert_array_equal(obs.state, clean.state)
            # The same model draws the clean environment as before.
            np.testing.assert_array_equal(clean_env.observe().images["agentview"], clean.images["agentview"])
    assert 1 < seen[0] < seen[1] < seen[2]


@pytest.mark.parametrize("task", list(INSTRUCTIONS))
def test_distractors_are_more_at_each_level_and_in_nobodys_way(task: str) -> None:
    """Drawn, and no part of the physics; those of a lower level are among those of a higher one."""
    numbers = {level: [] for level in (1, 2, 3)}
    for index in range(5):
        spec = EpisodeSpec(task, "eval", index)
        clean_env, clean = reset(CLEAN, spec)
        hand = clean_env._now.qpos[:2]
        objects = [clean_env._view.position(name)[:2] for name in (*clean_env._scene.qpos, *clean_env._scene.mocap)]
        seen, before = [], []
        for level in (1, 2, 3):
            env, obs = reset(CLEAN.perturbed("distractors", level), spec)
            placed = env._distractors
            numbers[level].append(len(placed))
            assert placed[: len(before)] == before
            before = placed
            seen.append(difference(obs, clean))
            np.testing.assert_array_equal(env._now.qpos, clean_env._now.qpos)
            np.testing.assert_array_equal(obs.state, clean.state)
            for thing in placed:
                assert min(np.linalg.norm(thing.place - at) for at in objects) >= 0.095
                for at in objects:  # the hand's way there
                    ways = [hand + share * (at - hand) for share in np.linspace(0, 1, 50)]
                    assert min(np.linalg.norm(thing.place - stop) for stop in ways) >= 0.065 - 1e-9
        assert 0 < seen[0] <= seen[1] <= seen[2] and seen[0] < seen[2]
        np.testing.assert_array_equal(clean_env.observe().images["agentview"], clean.images["agentview"])
    assert [np.median(numbers[level]) for level in (1, 2, 3)] == [2, 4, 7]


def test_noise_is_of_the_step_and_leaves_the_structure_alone() -> None:
    config = TabletopConfig(structure=True)
    _, clean = reset(config)
    env, first = reset(config.perturbed("noise", 2))
    structure = next(name for name in first.images if name != "agentview")
    np.testing.assert_array_equal(first.images[structure], clean.images[structure])
    np.testing.assert_array_equal(env.observe().images["agentview"], first.images["agentview"])
    assert 0 < np.abs(first.state - clean.state)[:3].max() < 0.02
    env.num_steps += 1
    assert not np.array_equal(env.observe().images["agentview"], first.images["agentview"])


def test_a_camera_goes_around_what_it_looks_at() -> None:
    env, _ = reset(CLEAN)
    model = env._scene.model
    camera = model.camera("agentview").id
    before = model.cam_pos[camera].copy()
    distances, places = [], []
    for level in (1, 2, 3):
        perturbation = Perturbation(PerturbConfig(axis="camera", level=level), SPEC)
        with perturbation.look(model, [camera], np.zeros(3), Surfaces([])):
            distances.append(np.linalg.norm(model.cam_pos[camera]) / np.linalg.norm(before))
            places.append(np.linalg.norm(model.cam_pos[camera] - before))
        np.testing.assert_array_equal(model.cam_pos[camera], before)
    assert places[0] < places[1] < places[2] and max(np.abs(np.log(distances))) < 0.2


def test_half_of_the_episodes_are_lit_brighter_and_half_dimmer_and_no_color_is_beyond_white() -> None:
    model = reset(CLEAN)[0]._scene.model
    before, brighter = model.vis.headlight.ambient.mean(), []
    for index in range(200):
        perturbation = Perturbation(PerturbConfig(axis="light", level=3), EpisodeSpec("stack", "eval", index))
        with perturbation.look(model, [], np.zeros(3), Surfaces([])):
            brighter.append(model.vis.headlight.ambient.mean() > before)
            largest = max(c.max() for c in (model.light_diffuse, model.vis.headlight.ambient, model.light_ambient))
            assert largest <= 1
    assert 0.4 < np.mean(brighter) < 0.6


def test_a_shift_is_most_of_the_largest_to_either_side() -> None:
    shifts = np.array([_either_way(np.random.default_rng(seed)) for seed in range(200)])
    assert 0.7 <= np.abs(shifts).min() < 0.75 and 0.95 < np.abs(shifts).max() <= 1
    assert 0.4 < (shifts > 0).mean() < 0.6


def test_objects_start_further_out_and_the_robot_elsewhere() -> None:
    clean, _ = reset(CLEAN)
    for level in (1, 2, 3):
        layout, obs = reset(CLEAN.perturbed("layout", level))
        assert obs.instruction == clean._instruction, "the same block"
        np.testing.assert_array_equal(layout._now.qpos[:8], clean._now.qpos[:8])
        moved = np.abs(layout._now.qpos[8:] - clean._now.qpos[8:])
        assert 0 < moved.max() < 0.6
        robot, _ = reset(CLEAN.perturbed("robot", level))
        np.testing.assert_array_equal(robot._now.qpos[8:], clean._now.qpos[8:])
        off = np.abs(robot._now.qpos[:3] - clean._now.qpos[:3]).max()
        assert 0.005 < off <= (0, 0.015, 0.04, 0.08)[level] + 1e-9


@pytest.mark.parametrize("axis", ["layout", "robot"])
def test_the_expert_still_solves_what_is_hard(axis: str) -> None:
    env = TabletopConfig(tasks=tuple(INSTRUCTIONS), cameras=("wrist",), image_size=32).perturbed(axis, 3).make()
    solved = 0
    for task in INSTRUCTIONS:
        for index in range(4):
            env.reset(EpisodeSpec(task, "eval", index))
            while env.num_steps < env.horizon:
                if env.apply(np.clip(env.expert_action(), -1, 1)):
                    solved += 1
                    break
                env.num_steps += 1
    assert solved >= 23


def test_the_wording_alone_says_it_otherwise() -> None:
    texts = [reset(CLEAN.perturbed("wording", level))[1].instruction for level in (1, 2, 3)]
    clean = reset(CLEAN)[1].instruction
    assert len({clean, *texts}) == 4
    color = clean.split()[2]
    assert all(color in text for text in texts)
    for task, sentences in PARAPHRASES.items():
        assert len({INSTRUCTIONS[task], *sentences}) == 4
        assert all(("{colour}" in sentence) == ("{colour}" in INSTRUCTIONS[task]) for sentence in sentences)
    told = EpisodeSpec("stack", "eval", 0, instruction="my own words")
    assert reset(CLEAN.perturbed("wording", 3), told)[1].instruction == "my own words"


def test_the_same_spec_is_the_same_perturbation_and_a_keyframe_keeps_it() -> None:
    config = CLEAN.perturbed("camera", 2)
    env, first = reset(config)
    np.testing.assert_array_equal(reset(config)[1].images["agentview"], first.images["agentview"])
    other = reset(config, EpisodeSpec("pick_colour", "eval", 4))[1]
    assert difference(other, reset(CLEAN, EpisodeSpec("pick_colour", "eval", 4))[1]) > 1
    env.apply(np.array([0.5, 0, -0.5, 0, 0, 0, 1], np.float32))
    env.num_steps += 1
    now = env.observe()
    again = env.reset(EpisodeSpec("pick_colour", "eval", 3, keyframe=env.save_state()))
    np.testing.assert_array_equal(again.images["agentview"], now.images["agentview"])


def test_what_an_environment_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.perturb: unknown"):
        build_component("env", {"kind": "sim.dummy:DummyConfig", "perturb": {"axis": "camera", "level": 1}})
    with pytest.raises(ConfigError, match=r"env\.perturb\.level"):
        build_component("env", {"kind": "tabletop", "perturb": {"axis": "camera", "level": 4}})
    assert DummyConfig.perturb_axes == () and CLEAN.perturbed("light", 3).env_spec().title == "tabletop/light-3"
