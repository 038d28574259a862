"""More of LIBERO's objects in its scenes: which, where, and that a clean episode's states and physics stay."""

# pyright: reportAttributeAccessIssue=false

from dataclasses import replace

import mujoco
import numpy as np
import pytest
from libero_setup import ASSETS, needs_assets
from scipy.ndimage import binary_dilation
from scipy.spatial import cKDTree

from sim.libero import LiberoConfig
from sim.libero.clearance import Shape
from sim.libero.library import suite_tasks
from sim.libero.suites import HORIZONS
from vla_rl.common.tables import libero_instruction
from vla_rl.data.segmentation import CAMERA_PREFIX, unpack
from vla_rl.types import EpisodeSpec

pytestmark = [pytest.mark.slow, needs_assets]
SCENES = [("libero_object", "0"), ("libero_goal", "0")]  # a floor; a table with drawers


def make(suite: str, number: str, **options):
    env = LiberoConfig(suite=suite, tasks=(number,), assets_path=ASSETS, image_size=64, **options).make()
    return env, next(iter(env.spec.tasks))


def placed(env) -> dict[str, int]:
    """Kind -> body, of the distractors that are in the scene and not hidden."""
    scene = env.loaded.scene
    bodies = {kind: scene.model.body(f"distractor_{kind}_main").id for kind in scene.kinds}
    return {kind: body for kind, body in bodies.items() if scene.model.body_pos[body][2] < 5}


def solid_geoms(model: mujoco.MjModel, bodies: list[int]) -> np.ndarray:
    solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    return np.flatnonzero(solid & np.isin(model.geom_bodyid, bodies))


@pytest.mark.parametrize(("suite", "number"), SCENES)
def test_more_stand_at_each_level_clear_of_all_else_and_on_the_surface(suite: str, number: str) -> None:
    env, task = make(suite, number)
    counts = []
    for index in (0, 7):
        spec, before = EpisodeSpec(task, "eval", index), {}
        for level in (1, 2, 3):
            env.begin(replace(spec, perturbation=f"distractors-{level}"))
            model, data, now = env.loaded.scene.model, env.loaded.scene.data, placed(env)
            poses = {kind: model.body_pos[body].copy() for kind, body in now.items()}
            assert all((poses[kind] == pose).all() for kind, pose in before.items()), "a lower level's are among them"
            before = poses
            counts.append(len(now))
            own = {body: solid_geoms(model, [body]) for body in now.values()}
            assert not np.isin(data.contact.geom, np.concatenate(list(own.values()))).any(), "nothing touches one"
            things = [*env.loaded.scene.env.objects_dict.values(), *env.loaded.scene.env.fixtures_dict.values()]
            roots = [model.body(thing.root_body).id for thing in things] + [model.body("robot0_base").id]
            task_bodies = [body for body in range(model.nbody) if model.body_rootid[body] in roots]
            for body, geoms in own.items():
                rest = [solid_geoms(model, task_bodies), *(own[other] for other in own if other != body)]
                others = Shape(model, np.concatenate(rest).tolist()).points(data, 6)
                points = Shape(model, geoms.tolist()).points(data, 6)
                assert cKDTree(others).query(points)[0].min() > 0.01
                ground = 0.0 if suite == "libero_object" else 0.9
                assert abs(points[:, 2].min() - ground) < 0.012, "on the floor or table"
    assert counts[:3] == sorted(counts[:3]) and counts[0] == 2 and counts[2] >= 5, counts
    env.close()


def test_a_distractor_is_nothing_that_the_task_names() -> None:
    """In every task of every suite there are enough kinds, and none shares a word with the instruction."""
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    from sim.libero.distractors import kinds_beside
    from sim.libero.library import bddl_path

    class Parsed:
        def __init__(self, path: str) -> None:
            self.bddl_file_name, self.parsed_problem = path, robosuite_parse_problem(path)

    for suite in HORIZONS:
        for task in suite_tasks(suite):
            env = Parsed(str(bddl_path(suite, task)))
            kinds = kinds_beside(env)
            assert len(kinds) >= 8, task
            words = set(libero_instruction(task).split()) - {"and"}
            goal = " ".join(" ".join(predicate[1:]) for predicate in env.parsed_problem["goal_state"])
            for kind in kinds:
                assert not words & set(kind.split("_")) and kind not in goal
                assert kind not in env.parsed_problem["objects"]


def test_official_states_and_physics_are_the_clean_scenes_to_the_bit() -> None:
    """The arm moves up, away from what stands on the table: not one bit differs in positions, state or success."""
    clean, task = make("libero_goal", "0")
    crowded, _ = make("libero_goal", "0", perturb={"axis": "distractors", "level": 3})
    for spec in (EpisodeSpec(task, "eval", 3), EpisodeSpec(task, "train", 5)):
        clean.begin(spec)
        crowded.begin(spec)
        assert (crowded.loaded.scene.model.nq, crowded.loaded.scene.model.nv) == (
            clean.loaded.scene.model.nq,
            clean.loaded.scene.model.nv,
        )
        actions = np.clip(np.random.default_rng(0).normal([0, 0, 0.6, 0, 0, 0, 0], 0.3, (12, 7)), -1, 1)
        for action in actions:
            assert clean.apply(action) == crowded.apply(action)
            np.testing.assert_array_equal(clean.loaded.scene.data.qpos, crowded.loaded.scene.data.qpos)
    clean.close()
    crowded.close()


def test_pictures_differ_only_where_a_distractor_is() -> None:
    clean, task = make("libero_object", "0", structure=True)
    crowded, _ = make("libero_object", "0", structure=True, perturb={"axis": "distractors", "level": 2})
    spec = EpisodeSpec(task, "eval", 1)
    before, after = clean.reset(spec), crowded.reset(spec)
    assert after.instruction == before.instruction
    np.testing.assert_array_equal(after.state, before.state)
    name = CAMERA_PREFIX + "agentview"
    ids, clean_ids = unpack(after.images[name])[0], unpack(before.images[name])[0]
    changed = (after.images["agentview"] != before.images["agentview"]).any(2)
    assert 20 < changed.sum() < 0.25 * changed.size
    new = ids > clean_ids.max()
    assert len(np.unique(ids[new])) >= 3, "most of the four are in the picture"
    assert not (changed & ~binary_dilation(new, iterations=2)).any(), "nothing else changed"
    clean.close()
    crowded.close()


def test_a_solid_one_stops_the_hand_and_does_not_move() -> None:
    env, task = make("libero_object", "0")
    env.begin(EpisodeSpec(task, "eval", 0, perturbation="distractors-1"))
    scene = env.loaded.scene
    body = next(iter(placed(env).values()))
    where = scene.data.xpos[body].copy()
    own = set(solid_geoms(scene.model, [body]).tolist())
    hit = False
    for _ in range(120):
        hand = scene.data.site_xpos[scene.control.site]
        above = np.linalg.norm((where - hand)[:2]) > 0.02
        goal = where + np.array([0, 0, 0.25]) if above else where
        env.apply(np.array([*np.clip(10 * (goal - hand), -1, 1), 0, 0, 0, 1.0]))
        hit |= bool({int(geom) for geom in scene.data.contact.geom.ravel()} & own)
    np.testing.assert_array_equal(scene.data.xpos[body], where)
    assert hit
    env.close()


def test_group_members_and_keyframes_have_the_same_ones() -> None:
    """Members of a group begin equal; a keyframe keeps its own, goes to the clean scene, and a clean one gets some."""
    env, task = make("libero_goal", "0")
    spec = EpisodeSpec(task, "train", 2, perturbation="distractors-2")
    first = env.reset(spec)
    before, other = placed(env), make("libero_goal", "0")[0]
    poses = env.loaded.scene.model.body_pos.copy()
    second = other.reset(spec)
    np.testing.assert_array_equal(second.images["agentview"], first.images["agentview"])
    np.testing.assert_array_equal(other.loaded.scene.model.body_pos, poses)
    env.begin(replace(spec, index=3))
    assert not np.array_equal(env.loaded.scene.model.body_pos, poses), "another state, other places"
    env.begin(spec)

    actions = np.clip(np.random.default_rng(1).normal([0.1, 0, -0.4, 0, 0, 0, 0], 0.5, (8, 7)), -1, 1)
    for action in actions[:4]:
        env.apply(action)
    env.num_steps = 4
    keyframe = env.save_state()
    ahead = []
    for action in actions[4:]:
        env.apply(action)
        ahead.append(env.loaded.scene.data.qpos.copy())
    seen = env.observe()
    other.begin(replace(spec, keyframe=keyframe))
    assert other.num_steps == 4
    for action, qpos in zip(actions[4:], ahead, strict=True):
        other.apply(action)
        np.testing.assert_array_equal(other.loaded.scene.data.qpos, qpos)
    np.testing.assert_array_equal(other.observe().images["agentview"], seen.images["agentview"])

    other.begin(EpisodeSpec(task, "train", 2, keyframe=keyframe))
    assert not other.loaded.crowded
    plain = other.save_state()
    assert {name: array.shape for name, array in plain.arrays.items()} == {
        name: array.shape for name, array in keyframe.arrays.items() if name != "distractors"
    }
    other.begin(replace(spec, keyframe=plain))
    np.testing.assert_array_equal(other.loaded.scene.data.qpos.shape, ahead[0].shape)
    assert len(placed(other)) == len(before)
    with pytest.raises(ValueError, match="keyframe array 'physics'"):
        broken = replace(plain, arrays={**plain.arrays, "physics": plain.arrays["physics"][:9]})
        other.begin(replace(spec, keyframe=broken))
    env.close()
    other.close()
