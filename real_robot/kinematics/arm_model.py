"""The robot's geometry in MuJoCo: how near its links are to each other and to the cell, and where its joints take it.

Distances are MuJoCo's own, of its narrow phase, exact for boxes, spheres, capsules, cylinders and planes; a mesh counts
as its convex hull. Nothing is simulated: joints are put somewhere, and distances asked.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from real_robot.kinematics.config import ModelConfig
from real_robot.kinematics.robot_file import JointFacts, compile_spec, load_spec, read_joints
from vla_rl.config import ConfigError

if TYPE_CHECKING:
    import mujoco

Pair = tuple[str, str]

LOOK = 0.05  # meters beyond min_distance in which distances are asked for
NUM_SAMPLES = 200  # poses that tell which links always touch
ALWAYS = 0.95  # share of them
MAX_POINTS = 32  # of a path


@dataclass(frozen=True)
class Pairs:
    """Which pairs of links, boxes and planes are not kept apart, and why.

    Attributes:
        neighbors: joined by a joint, with no link between.
        touching: they touch in the neutral pose.
        always: they touch in nearly every pose.
        told: the contract allows it.
        close: nearer than min_distance in the neutral pose, or in nearly every one: they must only not touch.
    """

    neighbors: frozenset[Pair] = frozenset()
    touching: frozenset[Pair] = frozenset()
    always: frozenset[Pair] = frozenset()
    told: frozenset[Pair] = frozenset()
    close: frozenset[Pair] = frozenset()

    @property
    def ignored(self) -> frozenset[Pair]:
        return self.neighbors | self.touching | self.always | self.told


class ArmModel:
    """See the module. Not for use from several threads at once.

    Attributes:
        joints: names of the joints that move by themselves, in the file's order; N of them. Mimic joints follow.
        low, high, effort: float64 (N,), the file's limits, infinite where it has none.
        is_slide: bool (N,), whose positions are meters.
        neutral: float64 (N,), the neutral pose.
        pairs: which pairs are not kept apart.

    Raises:
        ConfigError: the file cannot be used, or the section names a joint, link, box or plane that is not there.
    """

    def __init__(self, config: ModelConfig, path: Path) -> None:
        import mujoco

        self._mujoco, self.config = mujoco, config
        facts = read_joints(path)
        spec = load_spec(path, config.packages)
        _add_cell(spec, config)
        self._use(compile_spec(spec, path), facts)
        self.neutral = self._neutral(config.neutral)
        self.pairs = self._find_pairs()
        for first, second in sorted(self.pairs.ignored & self._between_links()):
            spec.add_exclude(bodyname1=first, bodyname2=second)
        self._use(compile_spec(spec, path), facts)

    # --- what it is made of -------------------------------------------------------------------

    def _use(self, model: mujoco.MjModel, facts: dict[str, JointFacts]) -> None:
        mujoco = self._mujoco
        self._model, self._data = model, mujoco.MjData(model)
        solid = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        model.geom_contype[:] = model.geom_conaffinity[:] = solid
        model.geom_margin[:] = self.config.min_distance + LOOK
        model.geom_gap[:] = 0.0
        model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_FILTERPARENT)  # `Pairs` says who may touch
        self.joints = tuple(name for name, fact in facts.items() if fact.mimic is None)
        own = [facts[name] for name in self.joints]
        self.low, self.high = np.array([fact.low for fact in own]), np.array([fact.high for fact in own])
        self.effort = np.array([fact.effort for fact in own])
        self.is_slide = np.array([fact.is_slide for fact in own])
        self._follow = np.zeros((model.nq, len(self.joints)))  # qpos = _follow @ joints + _offset
        self._offset = np.zeros(model.nq)
        for name, fact in facts.items():
            row = int(model.jnt_qposadr[model.joint(name).id])
            leader, factor, offset = _leader(name, fact, facts)
            self._follow[row, self.joints.index(leader)] = factor
            self._offset[row] = offset
        self._labels = [self._label(i) for i in range(model.ngeom)]
        self._reach = _reach(model) @ np.abs(self._follow)

    def _label(self, geom: int) -> str:
        model = self._model
        body = int(model.geom_bodyid[geom])
        return model.geom(geom).name or f"shape {geom}" if body == 0 else model.body(body).name

    @property
    def solid_links(self) -> frozenset[str]:
        """Links, boxes and planes that have a shape to collide with."""
        return frozenset(n for n, solid in zip(self._labels, self._model.geom_contype, strict=True) if solid)

    def index(self, joint: str) -> int:
        """
        Raises:
            ConfigError: no such joint, or one that follows another.
        """
        if joint not in self.joints:
            raise ConfigError(f"model: joint {joint!r}; {self.config.file} has: {', '.join(self.joints)}")
        return self.joints.index(joint)

    def link(self, name: str) -> int:
        """The number of a link, for `jacobian` and `rotation`.

        Raises:
            ConfigError: no such link.
        """
        links = [self._model.body(i).name for i in range(1, self._model.nbody)]
        if name not in links:
            raise ConfigError(f"model: link {name!r}; {self.config.file} has: {', '.join(links)}")
        return links.index(name) + 1

    # --- where it is --------------------------------------------------------------------------

    def _put(self, joints: np.ndarray) -> None:
        self._data.qpos[:] = self._follow @ joints + self._offset
        self._mujoco.mj_kinematics(self._model, self._data)

    def distances(self, joints: np.ndarray) -> dict[Pair, float]:
        """Meters between the parts of each pair that are nearer than min_distance + LOOK at joints (N,); below 0: how
        deep they overlap. Names of a pair are in alphabetical order; ignored pairs are not there."""
        self._put(joints)
        self._mujoco.mj_collision(self._model, self._data)
        contact, found = self._data.contact, {}
        farthest = self.config.min_distance + LOOK  # MuJoCo adds two shapes' margins, or takes the larger, by version
        for (first, second), distance in zip(contact.geom.tolist(), contact.dist.tolist(), strict=True):
            pair = _pair(self._labels[first], self._labels[second])
            if distance < found.get(pair, farthest):
                found[pair] = distance
        return {pair: distance for pair, distance in found.items() if pair not in self.pairs.ignored}

    def jacobian(self, joints: np.ndarray, link: int) -> np.ndarray:
        """Float64 (6, N): how fast the link moves along and turns about x, y, z of the root's frame, per joint."""
        self._put(joints)
        self._mujoco.mj_comPos(self._model, self._data)
        out = np.zeros((6, self._model.nv))
        self._mujoco.mj_jacBody(self._model, self._data, out[:3], out[3:], link)
        return out @ self._follow

    def position(self, joints: np.ndarray, link: int) -> np.ndarray:
        """Float64 (3,): the link's origin in the root's frame, meters."""
        self._put(joints)
        return self._data.xpos[link].copy()

    def rotation(self, joints: np.ndarray, link: int) -> np.ndarray:
        """Float64 (3, 3): turns vectors of the link's frame into the root's."""
        self._put(joints)
        return self._data.xmat[link].reshape(3, 3).copy()

    def farthest(self, change: np.ndarray) -> float:
        """Meters by which two parts of the robot may move, at most, when its joints change by (N,)."""
        return float(np.abs(change) @ self._reach)

    # --- which pairs count --------------------------------------------------------------------

    def _neutral(self, told: dict[str, float]) -> np.ndarray:
        pose = np.clip(np.zeros(len(self.joints)), self.low, self.high)
        home = [i for i in range(self._model.nkey) if self._model.key(i).name == "home"]
        if home:
            rows = [int(self._model.jnt_qposadr[self._model.joint(name).id]) for name in self.joints]
            pose = np.clip(self._model.key_qpos[home[0]][rows], self.low, self.high)
        for joint, position in told.items():
            pose[self.index(joint)] = position
        return pose

    def _between_links(self) -> set[Pair]:
        links = {self._model.body(i).name for i in range(1, self._model.nbody)}
        return {_pair(a, b) for a in links for b in links if a < b}

    def _find_pairs(self) -> Pairs:
        """Look at the neutral pose and at random ones, the same at each start."""
        known = self.solid_links
        for name in (n for pair in self.config.allowed for n in pair):
            if name not in known:
                raise ConfigError(f"model.allowed: {name!r}; solid are: {', '.join(sorted(known))}")
        links = self._between_links()
        told = frozenset(_pair(*pair) for pair in self.config.allowed)
        self.pairs = Pairs(neighbors=self._neighbors(), told=told)
        near = {pair: d for pair, d in self.distances(self.neutral).items() if pair in links}
        touching = frozenset(pair for pair, distance in near.items() if distance <= 0)
        self.pairs = replace(self.pairs, touching=touching)
        generator = np.random.default_rng(0)
        low, high = np.maximum(self.low, -math.pi), np.minimum(self.high, math.pi)
        touch: dict[Pair, int] = {}
        close: dict[Pair, int] = {}
        for _ in range(NUM_SAMPLES):
            for pair, distance in self.distances(generator.uniform(low, high)).items():
                if pair in links:
                    touch[pair] = touch.get(pair, 0) + (distance <= 0)
                    close[pair] = close.get(pair, 0) + (distance < self.config.min_distance)
        often = ALWAYS * NUM_SAMPLES
        always = frozenset(pair for pair, count in touch.items() if count >= often)
        narrow = {pair for pair, distance in near.items() if distance < self.config.min_distance}
        narrow |= {pair for pair, count in close.items() if count >= often}
        return replace(self.pairs, always=always, close=frozenset(narrow - self.pairs.ignored - always))

    def _neighbors(self) -> frozenset[Pair]:
        """Pairs of links with at most one joint between them, and no solid link."""
        model, solid = self._model, self.solid_links
        found: set[Pair] = set()
        for body in range(1, model.nbody):
            if model.body(body).name not in solid:
                continue
            above, joints = body, 0
            while above != 0:
                joints += int(model.body_jntnum[above])
                above = int(model.body_parentid[above])
                if joints > 1:
                    break
                if above != 0 and model.body(above).name in solid:
                    found.add(_pair(model.body(body).name, model.body(above).name))
                    break
        return frozenset(found)

    def summary(self) -> str:
        """Which pairs are not kept apart, in a line."""
        parts = [
            f"{what}: {', '.join('/'.join(pair) for pair in sorted(pairs))}"
            for what, pairs in (
                ("touch in the neutral pose", self.pairs.touching),
                ("always touch", self.pairs.always),
                ("allowed", self.pairs.told),
                (f"may come nearer than {self.config.min_distance:g} m", self.pairs.close),
            )
            if pairs
        ]
        return "; ".join([f"neighbors: {len(self.pairs.neighbors)}", *parts])


def _pair(first: str, second: str) -> Pair:
    return (first, second) if first < second else (second, first)


def _leader(name: str, fact: JointFacts, facts: dict[str, JointFacts]) -> tuple[str, float, float]:
    """The joint that this one follows, through any number of others: (name, factor, offset)."""
    factor, offset = 1.0, 0.0
    for _ in facts:
        if fact.mimic is None:
            return name, factor, offset
        offset += factor * fact.mimic.offset
        factor *= fact.mimic.multiplier
        name = fact.mimic.joint
        if name not in facts:
            raise ConfigError(f"model.file: a joint mimics {name!r}, which does not move; it has: {', '.join(facts)}")
        fact = facts[name]
    raise ConfigError(f"model.file: joint {name} mimics itself")


def _add_cell(spec: mujoco.MjSpec, config: ModelConfig) -> None:
    import mujoco

    taken = {body.name for body in spec.bodies} | {geom.name for geom in spec.geoms}
    for thing in (*config.boxes, *config.planes):
        if thing.name in taken:
            raise ConfigError(f"model: box or plane {thing.name!r}: a link of the file has that name; take another")
    for box in config.boxes:
        x, y, z = box.center
        half = [length / 2 for length in box.size]
        geom = spec.worldbody.add_geom(name=box.name, type=mujoco.mjtGeom.mjGEOM_BOX, size=half, pos=[x, y, z])
        geom.quat = quaternion_of(box.turn)
        geom.contype = geom.conaffinity = 1
    for plane in config.planes:
        normal = np.array(plane.normal) / np.linalg.norm(plane.normal)
        geom = spec.worldbody.add_geom(
            name=plane.name, type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], pos=list(plane.point)
        )
        geom.alt.zaxis = normal
        geom.contype = geom.conaffinity = 1


def quaternion_of(turn: Iterable[float]) -> np.ndarray:
    """Unit quaternion w, x, y, z of roll, pitch, yaw about the fixed axes."""
    quaternion = np.array([1.0, 0.0, 0.0, 0.0])
    import mujoco

    for axis, angle in zip(np.eye(3), turn, strict=True):
        step, before = np.zeros(4), quaternion.copy()
        mujoco.mju_axisAngle2Quat(step, axis, angle)
        mujoco.mju_mulQuat(quaternion, step, before)
    return quaternion


def _reach(model: mujoco.MjModel) -> np.ndarray:
    """Float64 (nq,): meters that any point beyond a joint moves at most, per radian (meter) of it.

    A hinge's is the farthest point of the links that it carries, with the chain stretched out.
    """
    import mujoco

    slide = int(mujoco.mjtJoint.mjJNT_SLIDE)
    extent = np.zeros(model.nbody)  # from a body's origin to the farthest point that it carries
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        extent[body] = max(extent[body], float(np.linalg.norm(model.geom_pos[geom]) + model.geom_rbound[geom]))
    for body in range(model.nbody - 1, 0, -1):
        own = [j for j in range(model.njnt) if model.jnt_bodyid[j] == body]
        slack = 0.0
        for j in own:
            is_slide = model.jnt_type[j] == slide
            slack += float(np.abs(model.jnt_range[j]).max() if is_slide else 2 * np.linalg.norm(model.jnt_pos[j]))
        parent = int(model.body_parentid[body])
        extent[parent] = max(extent[parent], float(np.linalg.norm(model.body_pos[body])) + slack + extent[body])
    return np.array(
        [
            1.0 if model.jnt_type[j] == slide else float(np.linalg.norm(model.jnt_pos[j]) + extent[model.jnt_bodyid[j]])
            for j in range(model.njnt)
        ]
    )
