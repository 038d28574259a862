"""The built-in tabletop: conventions, determinism, splits, keyframes, success, expert, habits, looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.tabletop import ExpertConfig, TabletopConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.types import SPLITS, EpisodeSpec, Keyframe

mujoco = pytest.importorskip("mujoco")

from sim.tabletop import scene as sc  # noqa: E402
from sim.tabletop.env import TabletopEnv  # noqa: E402
from sim.tabletop.tasks import draw_layout, is_solved_now  # noqa: E402

TASKS = ("push_to_zone", "pick_place", "pick_colour", "stack", "bowl_push")
STAY = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


@pytest.fixture(scope="module")
def env() -> TabletopEnv:
    return TabletopConfig().make()


def play(env: TabletopEnv, spec: EpisodeSpec, noise: float = 0.0) -> tuple[bool, int]:
    """The expert's success and number of steps, without rendering."""
    env._start(spec)
    rng = np.random.default_rng(spec.index)
    for step in range(env.horizon):
        action = env.expert_action()
        action[:6] += noise * rng.normal(size=6)
        if env.apply(np.clip(action, -1, 1)):
            return True, step + 1
    return False, env.horizon


def success_rate(env: TabletopEnv, task: str, count: int, noise: float = 0.0) -> float:
    return float(np.mean([play(env, EpisodeSpec(task, "eval", i), noise)[0] for i in range(count)]))


def put(env: TabletopEnv, name: str, x: float, y: float, z: float) -> None:
    """Place a movable body upright and at rest."""
    address, speed = env._scene.qpos[name], env._scene.qvel[name]
    env._now.qpos[address : address + 7] = (x, y, z, 1, 0, 0, 0)
    env._now.qvel[speed : speed + 6] = 0


def settles_as_success(env: TabletopEnv, steps: int = 12) -> bool:
    return any([env.apply(STAY) for _ in range(steps)])


# --- conventions ---------------------------------------------------------------------------------


def test_spec_and_observation_agree() -> None:
    env = TabletopConfig(cameras=("agentview", "wrist"), image_size=96, tasks=("stack",)).make()
    obs = env.reset(EpisodeSpec("stack"))
    assert (
        env.spec.tasks == {"stack": "stack the red block on the blue block"}
        and obs.instruction in env.spec.tasks.values()
    )
    assert set(obs.images) == {"agentview", "wrist"}
    for image in obs.images.values():
        assert image.shape == (96, 96, 3) and image.dtype == np.uint8 and image.std() > 10
    assert obs.state.shape == (8,) and obs.state.dtype == np.float32
    assert all(horizon % 8 == 0 for horizon in TabletopConfig().env_spec().horizon.values())


def test_images_are_upright_with_the_robots_side_far(env: TabletopEnv) -> None:
    """The red block, nearer to the camera at larger x and further right at larger y."""

    def red_center(x: float, y: float) -> tuple[float, float]:
        env.reset(EpisodeSpec("pick_place"))
        put(env, "block", x, y, sc.HALF)
        image = env.observe().images["agentview"].astype(int)
        rows, columns = np.nonzero(image[..., 0] > 2 * image[..., 1:].max(-1))
        assert len(rows) > 30, "the block must be large in the image"
        return float(rows.mean()), float(columns.mean())

    far, near = red_center(-0.1, 0.0), red_center(0.1, 0.0)
    left, right = red_center(0.0, -0.1), red_center(0.0, 0.1)
    assert near[0] > far[0] + 10
    assert right[1] > left[1] + 10


def test_environments_of_different_image_sizes_do_not_mix_their_pictures() -> None:
    small, large = TabletopConfig(image_size=32).build(), TabletopConfig(image_size=64).build()
    for i in range(2):
        expected = small.reset([EpisodeSpec("pick_place", "train", i)] * small.num_envs).images["agentview"]
        large.reset([EpisodeSpec("push_to_zone", "train", i)] * large.num_envs)
        found = small.reset([EpisodeSpec("pick_place", "train", i)] * small.num_envs).images["agentview"]
        assert np.array_equal(found, expected)
        large.reset([EpisodeSpec("push_to_zone", "train", i)] * large.num_envs)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("sign", [-1, 1])
def test_full_translation_moves_five_centimeters(env: TabletopEnv, axis: int, sign: int) -> None:
    env._start(EpisodeSpec("pick_place"))
    env.apply(np.array([1, 0, 0, 0, 0, 0, -1]))
    env.apply(STAY)
    before = env.proprioception()
    action = STAY.copy()
    action[axis] = sign
    env.apply(action)
    env.apply(STAY)
    moved = env.proprioception()[:3] - before[:3]
    expected = np.zeros(3)
    expected[axis] = 0.05 * sign
    np.testing.assert_allclose(moved, expected, atol=0.002)


def test_rotation_is_an_axis_angle_about_the_world(env: TabletopEnv) -> None:
    env._start(EpisodeSpec("pick_place"))
    np.testing.assert_allclose(env.proprioception()[3:6], [np.pi, 0, 0], atol=0.01)
    env.apply(np.array([0, 0, 0, 0, 0, 0.8, -1]))  # 0.4 rad about z
    env.apply(STAY)
    # Rz(a) Rx(pi) turns by pi about (cos a/2, sin a/2, 0).
    np.testing.assert_allclose(env.proprioception()[3:6], np.pi * np.array([np.cos(0.2), np.sin(0.2), 0]), atol=0.03)


def test_gripper_opens_below_zero_and_closes_above(env: TabletopEnv) -> None:
    env._start(EpisodeSpec("push_to_zone"))
    for command, width in ((1, 0.0), (-1, sc.OPEN_WIDTH)):
        for _ in range(8):
            env.apply(np.array([0, 0, 0, 0, 0, 0, command]))
        np.testing.assert_allclose(env.proprioception()[6:], [width, -width], atol=0.002)


def test_the_gripper_stays_in_its_box(env: TabletopEnv) -> None:
    env._start(EpisodeSpec("pick_place"))
    for _ in range(20):
        env.apply(np.array([1, 1, -1, 1, 1, 1, 1]))
    assert np.isfinite(env.proprioception()).all()
    assert (np.abs(env.proprioception()[:2]) < 0.3).all() and env.proprioception()[2] > 0


# --- initial states ------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_same_spec_same_episode(task: str) -> None:
    first, second = TabletopConfig().make(), TabletopConfig().make()
    actions = np.random.default_rng(0).uniform(-1, 1, (16, 7)).astype(np.float32)
    spec = EpisodeSpec(task, "validation", 3)
    second.reset(EpisodeSpec(task, "train", 5))  # what came before must not matter
    second.run_chunk(actions[:8])
    for env in (first, second):
        env.reset(spec)
    a, b = first.run_chunk(actions), second.run_chunk(actions)
    assert np.array_equal(a.obs.images["agentview"], b.obs.images["agentview"])
    assert np.array_equal(a.obs.state, b.obs.state) and a.num_steps == b.num_steps


@pytest.mark.parametrize("task", TASKS)
def test_splits_and_indices_share_no_state(task: str) -> None:
    config = TabletopConfig()
    layouts = [
        draw_layout(EpisodeSpec(task, split, i), config.block_yaw, config.start_spread)
        for split in SPLITS
        for i in range(60)
    ]
    assert len({str(layout.places) for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("task", TASKS)
def test_a_smaller_spread_draws_all_starts_together(task: str) -> None:
    def starts(spread: float) -> np.ndarray:
        config = TabletopConfig(start_spread=spread)
        layouts = [draw_layout(EpisodeSpec(task, "train", i), config.block_yaw, config.start_spread) for i in range(40)]
        return np.array([[*np.ravel([p[:2] for p in d.places.values()]), *d.gripper] for d in layouts])

    extent = {spread: np.ptp(starts(spread), axis=0) for spread in (1.0, 0.25, 0.0)}
    assert np.all(extent[0.0] == 0) and np.all(extent[0.25] > 0)
    # Layouts that overlap are drawn again, and fewer of them do when all are near a typical one.
    assert np.all(extent[0.25] < 0.4 * extent[1.0])
    for spread in (0.25, 0.0):
        env = TabletopConfig(tasks=(task,), start_spread=spread).make()
        env._start(EpisodeSpec(task, "train", 0))
        assert not env.apply(STAY) and not is_solved_now(task, env._view)
        env.close()


@pytest.mark.parametrize("task", TASKS)
def test_initial_states_are_unsolved_calm_and_apart(env: TabletopEnv, task: str) -> None:
    for index in range(25):
        env._start(EpisodeSpec(task, "train", index))
        starts = {name: env._view.position(name).copy() for name in sc.MOVABLE[task]}
        assert not is_solved_now(task, env._view)
        for _ in range(3):
            assert not env.apply(STAY)
        for name, start in starts.items():
            assert np.linalg.norm(env._view.position(name) - start) < 0.003, (task, index, name)


def test_named_color_varies_and_is_the_instruction(env: TabletopEnv) -> None:
    instructions = {env.reset(EpisodeSpec("pick_colour", "train", i)).instruction for i in range(30)}
    assert instructions == {f"put the {color} block on the plate" for color in sc.COLORS}
    assert env.reset(EpisodeSpec("pick_colour", instruction="tidy up")).instruction == "tidy up"


# --- keyframes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_keyframe_continues_to_the_bit_in_a_fresh_env(task: str) -> None:
    """Expert and random actions, from the middle of an episode, with all appearance on; in the same env and another."""
    env = TabletopConfig(looks=1, expert=ExpertConfig(place_short=0.02)).make()
    env.reset(EpisodeSpec(task, "train", 2))
    for _ in range(9):
        env.apply(env.expert_action())
        env.num_steps += 1
    keyframe = env.save_state()

    def rest(one: TabletopEnv) -> list[np.ndarray]:
        rng, trail = np.random.default_rng(1), []
        for step in range(24):
            action = np.clip(one.expert_action() + 0.1 * rng.normal(size=7), -1, 1)
            solved = one.apply(action)
            obs = one.observe() if step % 8 == 7 else None
            trail += [action, one._now.qpos.copy(), np.array(solved)] + ([obs.images["agentview"]] if obs else [])
        return [*trail, one.proprioception(), np.array([one.num_steps, one.horizon])]

    truth = rest(env)
    fresh = TabletopConfig().make()
    for other in (env, fresh):
        other.reset(EpisodeSpec(task, "eval", 7, keyframe=keyframe))
        assert other.observe().instruction == draw_layout(EpisodeSpec(task, "train", 2), 0.15, 1.0).instruction(task)
        assert all(np.array_equal(a, b) for a, b in zip(truth, rest(other), strict=True))


def test_a_foreign_keyframe_is_refused(env: TabletopEnv) -> None:
    env.reset(EpisodeSpec("stack"))
    keyframe = env.save_state()
    with pytest.raises(ValueError, match=r"tabletop/stack.*tabletop/pick_place"):
        env.reset(EpisodeSpec("pick_place", keyframe=keyframe))
    broken = Keyframe("tabletop", "stack", 0, {**keyframe.arrays, "physics": np.zeros(3)})
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        env.reset(EpisodeSpec("stack", keyframe=broken))


# --- success -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "solved"), [(0.0, True), (0.035, True), (0.055, False), (0.09, False)])
def test_on_the_plate_is_success_and_beside_it_is_not(env: TabletopEnv, offset: float, solved: bool) -> None:
    env._start(EpisodeSpec("pick_place"))
    x, y, _ = env._view.position("plate")
    put(env, "block", x - offset, y, sc.HALF + (sc.PLATE_HEIGHT if offset < 0.06 else 0))
    assert settles_as_success(env) is solved


def test_a_held_block_is_not_placed(env: TabletopEnv) -> None:
    spec = EpisodeSpec("pick_place", "eval", 0)
    env._start(spec)
    while (
        env._view.opening > 0.08 or env._view.apart("block", "plate") > 0.02 or env._view.position("block")[2] > 0.046
    ):
        env.apply(env.expert_action())
    keep = np.array([0, 0, 0, 0, 0, 0, 1])
    assert not any([env.apply(keep) for _ in range(10)])
    assert settles_as_success(env)


def test_the_named_block_alone_counts(env: TabletopEnv) -> None:
    env._start(EpisodeSpec("pick_colour"))
    x, y, _ = env._view.position("plate")
    height = sc.HALF + sc.PLATE_HEIGHT
    put(env, "block_b", x, y, height)
    assert not settles_as_success(env)
    put(env, "block_b", -0.12, -0.12, sc.HALF)
    put(env, "block", x, y, height)
    assert settles_as_success(env)


@pytest.mark.parametrize(("offset", "solved"), [(0.0, True), (0.03, True), (0.055, False)])
def test_stacked_means_resting_on_the_lower_block(env: TabletopEnv, offset: float, solved: bool) -> None:
    env._start(EpisodeSpec("stack"))
    x, y, _ = env._view.position("base")
    put(env, "block", x - offset, y, 2 * sc.BASE_HALF[2] + sc.HALF)
    assert settles_as_success(env, 20) is solved


def test_a_blocks_yaw_is_its_turn_about_the_vertical_also_when_it_is_tilted(env: TabletopEnv) -> None:
    env._start(EpisodeSpec("stack"))
    env._put("block", 0.0, 0.0, 0.5)
    env._put("base", 0.2, 0.0, -1.2)
    assert (env._view.yaw("block"), env._view.yaw("base")) == pytest.approx((0.5, -1.2))
    address = env._scene.qpos["block"]
    turn, tilt = ([np.cos(angle / 2), *(np.sin(angle / 2) * np.eye(3)[axis])] for angle, axis in ((0.5, 2), (0.3, 0)))
    mujoco.mju_mulQuat(env._now.qpos[address + 3 : address + 7], np.array(turn), np.array(tilt))
    assert env._view.yaw("block") == pytest.approx(0.5)


@pytest.mark.parametrize(("offset", "solved"), [(0.0, True), (0.03, True), (0.05, False)])
def test_pushed_means_within_the_zones_radius(env: TabletopEnv, offset: float, solved: bool) -> None:
    env._start(EpisodeSpec("push_to_zone"))
    x, y, _ = env._view.position("zone")
    put(env, "block", x - offset, y, sc.HALF)
    assert settles_as_success(env) is solved


@pytest.mark.parametrize(
    ("bowl", "block", "solved"), [(0.0, 0.0, True), (0.03, 0.0, True), (0.06, 0.0, False), (0.0, 0.12, False)]
)
def test_the_bowl_in_the_zone_with_the_block_inside(env: TabletopEnv, bowl: float, block: float, solved: bool) -> None:
    env._start(EpisodeSpec("bowl_push"))
    x, y, _ = env._view.position("zone")
    put(env, "bowl", x - bowl, y, 0.0)
    put(env, "block", x - bowl - block, y, sc.HALF + (sc.BOWL_FLOOR if block == 0 else 0))
    assert settles_as_success(env) is solved


# --- running -------------------------------------------------------------------------------------


def test_run_chunk_ends_at_success_and_at_the_horizon(env: TabletopEnv) -> None:
    env.reset(EpisodeSpec("stack", "eval", 1))
    x, y, _ = env._view.position("base")
    put(env, "block", x, y, 2 * sc.BASE_HALF[2] + sc.HALF)
    result = env.run_chunk(np.tile(STAY, (8, 1)))
    assert result.success and result.terminated[result.num_steps - 1] and result.reward.sum() == 1
    short = TabletopConfig(horizons={"stack": 12}).make()
    short.reset(EpisodeSpec("stack", "eval", 1))
    assert not short.run_chunk(np.tile(STAY, (8, 1))).truncated.any()
    result = short.run_chunk(np.tile(STAY, (8, 1)))
    assert result.num_steps == 4 and result.truncated[3] and not result.success


def test_an_episode_may_go_on_after_success_and_keeps_it() -> None:
    env = TabletopConfig(steps_after_success=10).start()
    env.reset(EpisodeSpec("stack", "eval", 1))
    x, y, _ = env._view.position("base")
    put(env, "block", x, y, 2 * sc.BASE_HALF[2] + sc.HALF)
    result = env.run_chunk(np.tile(STAY, (8, 1)))
    solved = int(result.reward.argmax())
    assert result.success and result.num_steps == 8 and not result.terminated.any() and result.reward.sum() == 1
    put(env, "block", 0.0, 0.0, sc.HALF)
    result = env.run_chunk(np.tile(STAY, (8, 1)))
    assert result.success and result.num_steps == solved + 3 and result.terminated[solved + 2]
    assert result.reward.sum() == 0
    env.reset(EpisodeSpec("stack", "eval", 1))
    assert not env.run_chunk(np.tile(STAY, (8, 1))).success


def test_frames_are_recorded_after_each_step() -> None:
    env = TabletopConfig().make(record_frames=True)
    env.reset(EpisodeSpec("stack"))
    result = env.run_chunk(np.tile(STAY, (3, 1)))
    assert result.frames["agentview"].shape == (3, 64, 64, 3)
    assert result.states is not None and result.states.shape == (3, 8)


def test_diverged_physics_ends_the_episode_as_a_failure(env: TabletopEnv, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    env.reset(EpisodeSpec("stack"))
    env._now.qvel[:] = np.nan
    result = env.run_chunk(np.tile(STAY, (8, 1)))
    assert result.num_steps == 1 and result.truncated[0] and not result.success
    assert np.isfinite(result.obs.state).all()
    assert not list(tmp_path.iterdir()), "no log file in the working directory"
    env.reset(EpisodeSpec("stack"))
    assert env.run_chunk(np.tile(STAY, (8, 1))).num_steps == 8


def test_bad_requests_name_what_is_allowed(env: TabletopEnv) -> None:
    with pytest.raises(ValueError, match=r"unknown tabletop task 'pick_plac'.*'pick_place'.*bowl_push"):
        env.reset(EpisodeSpec("pick_plac"))
    with pytest.raises(ValueError, match=r"split 'test'.*train, validation, eval"):
        env.reset(EpisodeSpec("stack", "test"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not among this environment's tasks: stack"):
        TabletopConfig(tasks=("stack",)).make().reset(EpisodeSpec("pick_place"))
    with pytest.raises(ConfigError, match=r"env\.tasks.*unknown tabletop task 'juggle'"):
        build_component("env", {"kind": "tabletop", "tasks": ["juggle"]})
    with pytest.raises(ConfigError, match=r"env\.cameras.*agentview, wrist"):
        build_component("env", {"kind": "tabletop", "cameras": ["front"]})


# --- expert --------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_expert_solves_a_few(env: TabletopEnv, task: str) -> None:
    assert success_rate(env, task, 8) == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_expert_survives_noise(env: TabletopEnv, task: str) -> None:
    assert success_rate(env, task, 10, noise=0.15) >= 0.8


@pytest.mark.parametrize("task", TASKS)
def test_placing_short_fails(task: str) -> None:
    sloppy = TabletopConfig(expert=ExpertConfig(place_short=0.055)).make()
    assert success_rate(sloppy, task, 10) <= 0.4


def test_habits_are_drawn_from_the_episode() -> None:
    expert = ExpertConfig(place_short=0.055, place_short_std=0.01)
    env = TabletopConfig(expert=expert).make()

    def shortfall(index: int) -> float:
        env._start(EpisodeSpec("stack", "train", index))
        return env._expert.short

    drawn = [shortfall(i) for i in range(40)]
    assert drawn == [shortfall(i) for i in range(40)]
    assert 0.045 < np.mean(drawn) < 0.065 and 0.005 < np.std(drawn) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_expert_solves_95_of_100(env: TabletopEnv, task: str) -> None:
    assert success_rate(env, task, 200) >= 0.95


# --- appearance ----------------------------------------------------------------------------------
