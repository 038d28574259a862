"""The axis `layout` of `sim.perturb` in LIBERO: objects that stand by themselves start elsewhere, and turned."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import mujoco
import numpy as np

if TYPE_CHECKING:
    from sim.libero.scene import InitialState, Scene

# By level of `sim.perturb`, from 0.
OFF = (0.0, 0.02, 0.04, 0.07)  # meters, the most that an object is moved
TURNED = (0.0, 0.2, 0.5, 1.0)  # radians, the most that it is turned
CLEARANCE = 0.015  # meters that a moved object keeps from everything but what it stands on
TRIES = 40  # of one object; then it stays where it is
HALF_REACH = np.array([0.30, 0.32])  # meters along x and y from the middle of the robot's place that objects keep to


def rearranged(scene: Scene, state: InitialState, level: int, rng: np.random.Generator) -> InitialState:
    """The initial state with each object moved and turned that stands on the table or floor alone.

    Those on, in or under others stay. The goal does not hold in it. The state is to be settled like any other.

    Args:
        state: settled, and now in `scene`.
    """
    model, data = scene.model, scene.data
    bodies = {name: model.body(thing.root_body).id for name, thing in scene.env.objects_dict.items()}
    of_body = model.body_rootid[model.geom_bodyid]
    solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    geoms = {name: np.flatnonzero((of_body == body) & solid) for name, body in bodies.items()}
    ground = _ground(scene)
    flat = state.flat.copy()
    seeds = rng.integers(2**32, size=len(bodies))  # of each its own: the same directions at every level
    for name, seed in zip(sorted(bodies), seeds, strict=True):
        draws = np.random.default_rng(seed)
        own = geoms[name]
        others = np.setdiff1d(np.flatnonzero(solid), [*own, *ground])
        alone = _touched(data, own) <= set(ground.tolist())
        address = int(model.joint(scene.env.objects_dict[name].joints[-1]).qposadr[0])
        before = data.qpos[address : address + 7].copy()
        for _ in range(TRIES):
            angle, length, turn = draws.uniform(-np.pi, np.pi), draws.uniform(0.6, 1), draws.uniform(-1, 1)
            if not alone:
                break
            moved = before.copy()
            moved[:2] += OFF[level] * length * np.array([np.cos(angle), np.sin(angle)])
            spin = np.array([np.cos(turn * TURNED[level] / 2), 0, 0, np.sin(turn * TURNED[level] / 2)])
            mujoco.mju_mulQuat(moved[3:], spin, before[3:])
            data.qpos[address : address + 7] = moved
            mujoco.mj_kinematics(model, data)
            far = np.abs(moved[:2] - scene.middle[:2]) > np.maximum(HALF_REACH, np.abs(before[:2] - scene.middle[:2]))
            if not far.any() and _is_clear(model, data, own, others) and not scene.is_success():
                flat[1 + address : 8 + address] = moved
                break
            data.qpos[address : address + 7] = before
        mujoco.mj_forward(model, data)
    return replace(state, flat=flat)


def _ground(scene: Scene) -> np.ndarray:
    """The geoms of the arena: floor, walls and tables, which are no object, no fixture and no robot."""
    model = scene.model
    things = [*scene.env.objects_dict.values(), *scene.env.fixtures_dict.values()]
    roots = [model.body_rootid[model.body(thing.root_body).id] for thing in things]
    robot = model.body_rootid[model.body("robot0_base").id]
    return np.flatnonzero(~np.isin(model.body_rootid[model.geom_bodyid], [*roots, robot]))


def _touched(data: mujoco.MjData, own: np.ndarray) -> set[int]:
    """The geoms in contact with an object's."""
    pairs = data.contact.geom
    inside = np.isin(pairs, own)
    return set(pairs[inside.any(1)][~inside[inside.any(1)]].tolist())


def _is_clear(model: mujoco.MjModel, data: mujoco.MjData, own: np.ndarray, others: np.ndarray) -> bool:
    """Whether an object is `CLEARANCE` from all else."""
    for geom in own:
        apart = np.linalg.norm(data.geom_xpos[others] - data.geom_xpos[geom], axis=1)
        near = others[apart < model.geom_rbound[others] + model.geom_rbound[geom] + CLEARANCE]
        for other in near[model.geom_rbound[near] > 0]:
            if mujoco.mj_geomDistance(model, data, int(geom), int(other), CLEARANCE, None) < CLEARANCE:
                return False
    return True
