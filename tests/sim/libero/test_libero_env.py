"""LIBERO with its simulator: equal to the stock environment, splits apart, exact keyframes, experts, all tasks."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from libero_experts import update_table
from libero_setup import ASSETS, needs_assets

from sim.libero import LiberoConfig
from sim.libero.library import bddl_path, init_states_path, load_init_states, suite_tasks
from sim.libero.suites import VIEWS
from sim.single_env import SingleObservation
from vla_rl.types import EpisodeSpec, Keyframe

pytestmark = [pytest.mark.slow, needs_assets]
WAIT = [0, 0, 0, 0, 0, 0, -1]


def make(suite: str, *tasks: str, **options):
    options.setdefault("image_size", 32)
    return LiberoConfig(suite=suite, tasks=tasks, assets_path=ASSETS, **options).make()


def random_actions(count: int, seed: int = 0) -> np.ndarray:
    """Moves that reach the objects: downwards on average."""
    rng = np.random.default_rng(seed)
    actions = rng.normal([0.1, 0, -0.4, 0, 0, 0, 0], 0.5, (count, 7))
    return np.clip(actions, -1, 1).astype(np.float32)


def assert_same(a: SingleObservation, b: SingleObservation) -> None:
    np.testing.assert_array_equal(a.state, b.state)
    assert a.images.keys() == b.images.keys()
    for camera in a.images:
        np.testing.assert_array_equal(a.images[camera], b.images[camera], err_msg=camera)


@pytest.fixture(scope="module")
def env() -> Iterator:
    """The task with a drawer, an articulated fixture and bowls inside and on top."""
    env = make("libero_spatial", "4", cameras=("agentview", "wrist"))
    yield env
    env.close()


@pytest.fixture
def task(env) -> str:
    return next(iter(env.spec.tasks))


# ---------------------------------------------------------------- the stock environment


def stock_observation(obs: dict) -> SingleObservation:
    """As OpenVLA's LIBERO evaluation prepares it: both images turned by 180 degrees, an 8-D state."""
    from robosuite.utils.transform_utils import quat2axisangle

    images = {
        "agentview": obs["agentview_image"][::-1, ::-1],
        "wrist": obs["robot0_eye_in_hand_image"][::-1, ::-1],
    }
    state = [obs["robot0_eef_pos"], quat2axisangle(obs["robot0_eef_quat"].copy()), obs["robot0_gripper_qpos"]]
    return SingleObservation(images, np.concatenate(state).astype(np.float32), "")


@pytest.mark.parametrize(
    ("suite", "number", "index"),
    [("libero_spatial", "4", 2), ("libero_goal", "7", 0), ("libero_object", "3", 1), ("libero_10", "3", 0)],
)
def test_equal_to_the_stock_environment_to_the_bit(suite: str, number: str, index: int) -> None:
    ours = make(suite, number, cameras=("agentview", "wrist"), image_size=64)
    (task,) = ours.spec.tasks
    first = ours.reset(EpisodeSpec(task, "eval", index))
    scene = ours.loaded.scene
    actions = random_actions(24)
    results, positions, chunks = [], [], []
    for i, action in enumerate(actions):
        results.append(ours.apply(action))
        positions.append(scene.data.qpos.copy())
        if i % 8 == 7:
            chunks.append(ours.observe())

    from libero.libero.envs import OffScreenRenderEnv

    stock = OffScreenRenderEnv(bddl_file_name=str(bddl_path(suite, task)), camera_heights=64, camera_widths=64)
    stock.seed(0)
    for _ in range(index + 1):
        stock.reset()
    stock.set_init_state(load_init_states(init_states_path(suite, task))[index])
    np.testing.assert_array_equal(stock.sim.model.body_pos, scene.model.body_pos)
    np.testing.assert_array_equal(stock.sim.model.body_quat, scene.model.body_quat)
    for _ in range(10):
        obs, _, _, _ = stock.step(WAIT)
    assert_same(first, stock_observation(obs))
    for i, action in enumerate(actions):
        obs, _, done, _ = stock.step(action)
        np.testing.assert_array_equal(stock.sim.data.qpos, positions[i], err_msg=f"positions after step {i}")
        assert done == results[i]
        if i % 8 == 7:
            assert_same(chunks[i // 8], stock_observation(obs))
    # A placement that we sample is what the stock environment's reset gives from the same seed, but for the arm.
    placed = np.setdiff1d(np.arange(scene.model.nq), scene.env.robots[0]._ref_joint_pos_indexes)
    for seed in (1, 2):
        sampled = scene.sampled_state(seed)
        stock.env.object_property_initializers.clear()  # reset adds its own once more each time
        stock.seed(seed)
        stock.reset()
        np.testing.assert_array_equal(sampled.flat[1 + placed], stock.sim.data.qpos[placed])
        np.testing.assert_array_equal(sampled.body_pos, stock.sim.model.body_pos)
        np.testing.assert_array_equal(sampled.body_quat, stock.sim.model.body_quat)
    stock.close()
    ours.close()


@pytest.mark.parametrize(
    ("suite", "number", "things"),
    [
        ("libero_object", "0", ("alphabet_soup_1", "basket_1")),
        ("libero_goal", "0", ("wooden_cabinet_1_middle_region",)),
    ],
)
def test_poses_are_where_the_stock_environment_shows_what_is_of_interest(suite, number, things) -> None:
    ours = make(suite, number, objects=True)
    (task,) = ours.spec.tasks
    ours.reset(EpisodeSpec(task, "eval", 0))
    env = ours.loaded.scene.env
    assert tuple(env.parsed_problem["obj_of_interest"]) == things
    start = ours.object_poses()
    assert start.shape == (5, 4) and start.dtype == np.float32
    assert np.isnan(start[len(things) : 4]).all() and np.isfinite(start[: len(things)]).all()
    for action in random_actions(8):
        ours.apply(action)
    told = ours.object_poses()
    for row, name in enumerate(things):
        if name in env.objects_dict:  # LIBERO's own sensors tell these; of regions they tell nothing.
            seen = env._get_observations(force_update=True)[f"{name}_pos"]
            np.testing.assert_allclose(told[row, :3], seen, atol=1e-3)  # Told as of 2 ms to 50 ms before.
    np.testing.assert_array_equal(told[4, :3], ours.observe().state[:3])  # The gripper.
    np.testing.assert_array_equal(ours.object_poses(), told)  # Asking changes nothing.
    ours.close()


def test_a_turn_about_the_vertical_is_the_yaw() -> None:
    ours = make("libero_object", "0", objects=True)
    (task,) = ours.spec.tasks
    ours.reset(EpisodeSpec(task, "eval", 0))
    scene = ours.loaded.scene
    before = ours.object_poses()[0]
    address = int(scene.model.joint(scene.env.objects_dict["alphabet_soup_1"].joints[-1]).qposadr[0])
    half, turned = 0.35, scene._shown_qpos.copy()
    w, x, y, z = turned[address + 3 : address + 7]
    c, s = np.cos(half), np.sin(half)
    turned[address + 3 : address + 7] = [c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w]
    turned[address] += 0.1
    scene._shown_qpos = turned
    change = ours.object_poses()[0] - before
    change[3] = np.remainder(change[3] + np.pi, 2 * np.pi) - np.pi
    np.testing.assert_allclose(change, [0.1, 0, 0, 0.7], atol=1e-5)
    ours.close()


def test_success_is_the_stock_ones_answer(env, task: str) -> None:
    """The quick contact check agrees with robosuite's, on states with and without contact."""
    from robosuite.environments.base import MujocoEnv

    env.reset(EpisodeSpec(task, "eval", 0))
    scene = env.loaded.scene
    things = [*scene.env.objects_dict.values(), *scene.env.fixtures_dict.values()]
    answers = set()
    for first in things:
        for second in things:
            expected = MujocoEnv.check_contact(scene.env, first, second)
            assert scene._check_contact(first, second) == expected, (first.name, second.name)
            answers.add(expected)
    assert answers == {True, False}


# ---------------------------------------------------------------- initial states


def test_sampled_states_are_never_official_ones_and_splits_are_apart(env, task: str) -> None:
    env.reset(EpisodeSpec(task, "eval", 0))
    scene = env.loaded.scene
    official = scene.official[:, 1 : 1 + scene.model.nq]
    seen = []
    for split in ("train", "validation"):
        for index in range(100):
            state = scene.sampled_state(env.seed_of(EpisodeSpec(task, split, index)))
            seen.append(state.flat[1 : 1 + scene.model.nq])
    seen = np.array(seen)
    assert np.abs(seen[:, None] - official[None]).max(-1).min() > 1e-3
    apart = np.abs(seen[:, None] - seen[None]).max(-1) + np.eye(len(seen))
    assert apart.min() > 1e-3
    again = scene.sampled_state(env.seed_of(EpisodeSpec(task, "validation", 99)))
    np.testing.assert_array_equal(again.flat[1 : 1 + scene.model.nq], seen[-1])


def test_the_arm_of_sampled_states_varies_as_in_the_official_ones(env, task: str) -> None:
    env.reset(EpisodeSpec(task, "eval", 0))
    scene = env.loaded.scene
    arm = 1 + np.array(scene.env.robots[0]._ref_joint_pos_indexes)
    sampled = np.array([scene.sampled_state(seed).flat[arm] for seed in range(50)])
    official = scene.official[:, arm]
    assert 0.8 < sampled.std(0).mean() / official.std(0).mean() < 1.25
    np.testing.assert_allclose(sampled.mean(0), official.mean(0), atol=0.02)


def test_a_state_that_the_sampler_could_repeat_is_drawn_again(env, task: str) -> None:
    env.reset(EpisodeSpec(task, "eval", 0))
    scene = env.loaded.scene
    drawn = scene.sampled_state(5)
    before = scene.official
    scene.official = np.concatenate([before, drawn.flat[None]])
    redrawn = scene.sampled_state(5)
    scene.official = before
    assert np.abs(redrawn.flat - drawn.flat).max() > 1e-3


@pytest.mark.parametrize("split", ["train", "validation", "eval"])
def test_the_same_spec_is_the_same_state_whatever_came_before(env, task: str, split) -> None:
    spec = EpisodeSpec(task, split, 3)
    env._load(task).starts.clear()
    simulated = env.reset(spec)
    env.run_chunk(random_actions(8))
    env.reset(EpisodeSpec(task, split, 4))
    remembered = env.reset(spec)
    assert_same(simulated, remembered)
    env.run_chunk(random_actions(3))
    env._load(task).starts.clear()
    assert_same(simulated, env.reset(spec))


def test_numpys_global_generator_is_left_alone(env, task: str) -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    env._load(task).starts.clear()
    env.reset(EpisodeSpec(task, "train", 1))
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (EpisodeSpec("open_the_drawer"), "Nearest: pick_up_the_black_bowl_in_the_top_drawer"),
        (EpisodeSpec("", "eval", 50), "50 official states"),
        (EpisodeSpec("", "train", -1), "must be from 0"),
        (EpisodeSpec("", "test", 0), "allowed: train, validation, eval"),  # type: ignore[arg-type]
        (EpisodeSpec("", keyframe=Keyframe("tabletop", "stack", 0, {})), "of tabletop/stack"),
    ],
)
def test_impossible_episodes_say_why(env, task: str, spec: EpisodeSpec, said: str) -> None:
    spec = EpisodeSpec(spec.task or task, spec.split, spec.index, keyframe=spec.keyframe)
    with pytest.raises(ValueError, match=said):
        env.reset(spec)


# ---------------------------------------------------------------- episodes


def test_an_episode_ends_at_its_horizon_and_images_are_upright() -> None:
    env = make("libero_spatial", "4", horizon=5, image_size=64)
    (task,) = env.spec.tasks
    obs = env.reset(EpisodeSpec(task, "eval", 0, instruction="do it"))
    assert obs.instruction == "do it"
    assert obs.state[6] > 0.03 and obs.state[7] < -0.03, "the fingers are open"
    image = obs.images["agentview"].astype(int)
    assert image[:20].mean() < image[-20:].mean(), "the dark robot is at the top, the light table at the bottom"
    result = env.run_chunk(np.tile(np.float32(WAIT), (8, 1)))
    assert result.num_steps == 5 and result.truncated[4] and not result.success
    env.close()


@pytest.mark.parametrize("suite", VIEWS)
def test_the_known_camera_is_the_one_that_renders(suite: str) -> None:
    env = make(suite, "0", horizon=20, image_size=64)
    (task,) = env.spec.tasks
    first = env.reset(EpisodeSpec(task, "eval", 0))
    data, camera = env._loaded.scene.data, env._loaded.scene.model.camera("agentview")
    axes = data.cam_xmat[camera.id].reshape(3, 3)
    np.testing.assert_allclose(VIEWS[suite].position, data.cam_xpos[camera.id], atol=1e-4)
    np.testing.assert_allclose([VIEWS[suite].right, VIEWS[suite].up], axes.T[:2], atol=1e-4)
    assert camera.fovy[0] == VIEWS[suite].fovy

    moved = env.run_chunk(np.tile(np.float32([0, 1, 0, 0, 0, 0, -1]), (20, 1))).obs
    columns = []
    for state in (first.state, moved.state):
        x, _, depth = env.spec.projections["agentview"] @ [*state[:3], 1]
        columns.append(x / depth)
    change = np.abs(moved.images["agentview"].astype(float) - first.images["agentview"]).sum((0, 2))
    middle = (change * (np.arange(64) + 0.5) / 64).sum() / change.sum()
    assert abs(columns[1] - columns[0]) > 0.1 and abs(middle - np.mean(columns)) < 0.1
    env.close()


def test_frames_are_recorded_each_step(env, task: str) -> None:
    env.reset(EpisodeSpec(task, "eval", 0))
    env.record_frames = True
    result = env.run_chunk(random_actions(3))
    env.record_frames = False
    assert result.frames["wrist"].shape == (3, 32, 32, 3)
    np.testing.assert_array_equal(result.frames["wrist"][-1], result.obs.images["wrist"])
    assert result.states is not None and len(np.unique(result.states[:, 2])) == 3


def test_a_keyframe_continues_exactly_in_another_scene(env, task: str) -> None:
    env.reset(EpisodeSpec(task, "train", 7))
    before = env.run_chunk(random_actions(11))
    keyframe = env.save_state()
    actions = random_actions(12, seed=1)
    expected = env.run_chunk(actions)
    positions = env.loaded.scene.data.qpos.copy()

    other = make("libero_spatial", "4", cameras=("agentview", "wrist"))  # the first scene is in use: a new one
    assert_same(before.obs, other.reset(EpisodeSpec(task, keyframe=keyframe)))
    assert other.num_steps == 11 and other.loaded.scene is not env.loaded.scene
    assert_same(expected.obs, other.run_chunk(actions).obs)
    np.testing.assert_array_equal(other.loaded.scene.data.qpos, positions)
    other.close()

    broken = Keyframe("libero", task, 11, {**keyframe.arrays, "shown_qpos": np.zeros(3)})
    with pytest.raises(ValueError, match=r"'shown_qpos': expected shape .* found \(3,\)"):
        env.reset(EpisodeSpec(task, keyframe=broken))


def test_environments_of_different_tasks_take_turns() -> None:
    """Each renders its own scene, and stepping one does not move the other."""
    first, second = make("libero_spatial", "0"), make("libero_object", "0")
    specs = [EpisodeSpec(next(iter(env.spec.tasks)), "eval", 0) for env in (first, second)]
    started = [env.reset(spec) for env, spec in zip((first, second), specs, strict=True)]
    first.run_chunk(random_actions(4))
    assert_same(second.observe(), started[1])
    assert_same(first.reset(specs[0]), started[0])
    assert np.abs(started[0].images["agentview"].astype(int) - started[1].images["agentview"]).mean() > 10
    first.close()
    second.close()


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize(("suite", "numbers"), [("libero_spatial", "45"), ("libero_object", "07")])
def test_the_expert_solves_a_task_despite_noise(suite: str, numbers: str) -> None:
    env = make(suite, *numbers, image_size=8)
    rng = np.random.default_rng(0)
    for task in env.spec.tasks:
        env.reset(EpisodeSpec(task, "train", 0))
        solved = False
        while env.num_steps < env.horizon and not solved:
            action = env.expert_action()
            assert action.shape == (7,) and action.dtype == np.float32 and np.abs(action).max() <= 1
            action[:6] += 0.1 * rng.standard_normal(6)
            solved = env.apply(np.clip(action, -1, 1))
            env.num_steps += 1
        assert solved, task
    env.close()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("turn_on_the_stove", "there is no scripted expert for libero_goal's turn_on_the_stove"),
        ("push_the_plate_to_the_front_of_the_stove", "solves 0 of 5 episodes of libero_goal's push_the_plate"),
    ],
)
def test_where_the_expert_is_not_offered_it_says_why(task: str, said: str) -> None:
    env = make("libero_goal", task, image_size=8)
    env.begin(EpisodeSpec(task, "eval", 0))
    with pytest.raises(NotImplementedError, match=said):
        env.expert_action()
    env.close()


def test_the_table_of_measured_experts_grows_by_what_it_lacks(tmp_path) -> None:
    table = tmp_path / "table.json"
    update_table(["libero_object"], 1, ("7",), ASSETS, table)
    (milk,) = json.loads(table.read_text())["libero_object"]
    assert milk == suite_tasks("libero_object")[7]
    table.write_text(json.dumps({"libero_object": {milk: [3, 4]}}))
    update_table(["libero_object"], 1, ("7",), ASSETS, table)
    update_table(["libero_goal"], 1, ("7", "8"), ASSETS, table)
    found = json.loads(table.read_text())
    assert found == {"libero_object": {milk: [3, 4]}, "libero_goal": {"put_the_bowl_on_the_plate": [1, 1]}}


# ---------------------------------------------------------------- all tasks


@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
def test_every_task_resets_to_an_official_state_steps_and_renders(suite: str) -> None:
    env = make(suite, cameras=("agentview", "wrist"), image_size=64)
    assert len(env.spec.tasks) == 10
    for task, instruction in env.spec.tasks.items():
        obs = env.reset(EpisodeSpec(task, "eval", 49))
        assert obs.instruction == instruction and np.isfinite(obs.state).all()
        result = env.run_chunk(random_actions(2))
        assert result.num_steps == 2 and not result.success
        for image in result.obs.images.values():
            assert len(np.unique(image.reshape(-1, 3), axis=0)) > 50, f"{task}: nothing to see"
    assert tuple(env.spec.tasks) == suite_tasks(suite)
    env.close()
