"""Robot geometry in MuJoCo: distances between links and to the cell, and forward kinematics.

Distances are those of MuJoCo's contacts, with two precautions (tests/real_robot/kinematics/test_distances.py): boxes
are meshes here, since its distance of two boxes that do not touch is off by centimeters; and `mj_geomDistance` is not
used, since it says 0 of some that are apart. A mesh counts as its convex hull. Nothing is simulated: joints are put
somewhere, and distances asked.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)
# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

import mujoco
import numpy as np

from real_robot.contract.model import ModelConfig
from real_robot.contract.robot_file import JointFacts, compile_spec, leader, load_spec, read_joints
from vla_rl.config import ConfigError

Pair = tuple[str, str]
LOOK = 0.05  # meters beyond min_distance in which distances are asked for
NUM_SAMPLES = 200  # poses that tell which links always touch
ALWAYS = 0.95  # share of them


@dataclass(frozen=True)
class Pairs:
    """Which pairs of links, boxes and planes are not kept apart, and why.

    Attributes:
        neighbors: joined by a joint, with no link between.
        fingers: nothing moves one against the other but joints that follow the same one: they close on each other.
        touching: they touch in the neutral pose.
        always: they touch in nearly every pose.
        told: the contract allows it.
        close: nearer than min_distance in the neutral pose, or in nearly every one: they must only not touch.
    """

    neighbors: frozenset[Pair] = frozenset()
    fingers: frozenset[Pair] = frozenset()
    touching: frozenset[Pair] = frozenset()
    always: frozenset[Pair] = frozenset()
    told: frozenset[Pair] = frozenset()
    close: frozenset[Pair] = frozenset()

    @property
    def ignored(self) -> frozenset[Pair]:
        return self.neighbors | self.fingers | self.touching | self.always | self.told


def in_order(first: str, second: str) -> Pair:
    """The pair as it is written everywhere: in alphabetical order."""
    return (first, second) if first < second else (second, first)


def find_neighbors(spec: mujoco.MjSpec) -> frozenset[Pair]:
    """Pairs of links with at most one joint between them, and no solid link."""
    found: set[Pair] = set()
    for body in spec.bodies:
        if body.name == "world" or not _is_solid(body):
            continue
        above, joints = body, 0
        while above.name != "world":
            joints += len(above.joints)
            above = above.parent
            if joints > 1:
                break
            if above.name != "world" and _is_solid(above):
                found.add(in_order(body.name, above.name))
                break
    return frozenset(found)


def find_fingers(spec: mujoco.MjSpec, facts: dict[str, JointFacts]) -> frozenset[Pair]:
    """See `Pairs`."""
    above: dict[str, frozenset[str]] = {}  # solid link -> joints that carry it
    for body in spec.bodies:
        if body.name == "world" or not _is_solid(body):
            continue
        joints, part = set(), body
        while part.name != "world":
            joints |= {joint.name for joint in part.joints}
            part = part.parent
        above[body.name] = frozenset(joints)
    found: set[Pair] = set()
    for first, second in combinations(above, 2):
        between = above[first] ^ above[second]
        if len(between) > 1 and len({leader(name, facts[name], facts)[0] for name in between}) == 1:
            found.add(in_order(first, second))
    return frozenset(found)


def _is_solid(body: mujoco.MjsBody) -> bool:
    return any(geom.contype or geom.conaffinity for geom in body.geoms)


def add_cell(spec: mujoco.MjSpec, config: ModelConfig) -> None:
    """Add the contract's boxes and planes.

    Raises:
        ConfigError: one has the name of a link.
    """
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


def boxes_as_meshes(spec: mujoco.MjSpec) -> None:
    """Make each box a mesh of its corners.

    Raises:
        ConfigError: a box of an MJCF is given by fromto.
    """
    corners = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    for number, geom in enumerate(spec.geoms):
        if geom.type != mujoco.mjtGeom.mjGEOM_BOX or not (geom.contype or geom.conaffinity):
            continue
        if not geom.meshname:  # else a box about a mesh
            if np.isfinite(geom.fromto).all():
                raise ConfigError("model.file: a box given by fromto; give its size, pos and quat")
            mesh = spec.add_mesh(name=f"box of shape {number}")
            mesh.uservert = (corners * geom.size).ravel()
            geom.meshname = mesh.name
        geom.type = mujoco.mjtGeom.mjGEOM_MESH


def set_margins(spec: mujoco.MjSpec, distance: float) -> None:
    """Have contacts for what is nearer than that, of all shapes that collide with anything."""
    share = 0.5 if _margins_add() else 1.0
    for geom in spec.geoms:
        solid = int(bool(geom.contype or geom.conaffinity))
        geom.contype = geom.conaffinity = solid
        geom.margin, geom.gap = share * distance, 0.0


@cache
def _margins_add() -> bool:
    """Whether MuJoCo adds the margins of two shapes, or takes the larger, which is so in some versions."""
    spec = mujoco.MjSpec()
    for x in (0.0, 1.0):
        body = spec.worldbody.add_body(pos=[x, 0, 0])
        body.add_joint()
        body.add_geom(type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[0.3, 0, 0], margin=0.3)
    model = spec.compile()
    data = mujoco.MjData(model)
    mujoco.mj_kinematics(model, data)
    mujoco.mj_collision(model, data)
    return bool(data.ncon)


def flags() -> int:
    """What MuJoCo shall leave: to ignore a link and its parent, and to find several contacts of two meshes."""
    bits = mujoco.mjtDisableBit
    several = getattr(bits, "mjDSBL_MULTICCD", 0)  # off by itself before MuJoCo 3.8
    return int(bits.mjDSBL_FILTERPARENT) | int(several)


def quaternion_of(turn: Iterable[float]) -> np.ndarray:
    """Unit quaternion w, x, y, z of roll, pitch, yaw about the fixed axes."""
    quaternion = np.array([1.0, 0.0, 0.0, 0.0])
    for axis, angle in zip(np.eye(3), turn, strict=True):
        step, before = np.zeros(4), quaternion.copy()
        mujoco.mju_axisAngle2Quat(step, axis, angle)
        mujoco.mju_mulQuat(quaternion, step, before)
    return quaternion


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
        self._mujoco, self.config = mujoco, config
        facts = read_joints(path)
        spec = load_spec(path, config.packages)
        add_cell(spec, config)
        boxes_as_meshes(spec)
        set_margins(spec, config.min_distance + LOOK)
        neighbors, fingers = find_neighbors(spec), find_fingers(spec, facts)
        for first, second in sorted(neighbors | fingers):
            spec.add_exclude(bodyname1=first, bodyname2=second)
        self._use(compile_spec(spec, path), facts)
        self.neutral = self._neutral(config.neutral)
        self.pairs = self._find_pairs(neighbors, fingers)

    # --- what it is made of -------------------------------------------------------------------

    def _use(self, model: mujoco.MjModel, facts: dict[str, JointFacts]) -> None:
        mujoco = self._mujoco
        self._model, self._data = model, mujoco.MjData(model)
        model.opt.disableflags |= flags()
        self.joints = tuple(name for name, fact in facts.items() if fact.mimic is None)
        own = [facts[name] for name in self.joints]
        self.low, self.high = np.array([fact.low for fact in own]), np.array([fact.high for fact in own])
        self.effort = np.array([fact.effort for fact in own])
        self.is_slide = np.array([fact.is_slide for fact in own])
        self._follow = np.zeros((model.nq, len(self.joints)))  # qpos = _follow @ joints + _offset
        self._offset = np.zeros(model.nq)
        for name, fact in facts.items():
            row = int(model.jnt_qposadr[model.joint(name).id])
            own_joint, factor, offset = leader(name, fact, facts)
            self._follow[row, self.joints.index(own_joint)] = factor
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
        farthest = self.config.min_distance + LOOK
        for (first, second), distance in zip(contact.geom.tolist(), contact.dist.tolist(), strict=True):
            pair = in_order(self._labels[first], self._labels[second])
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
        """Told, else the file's pose called home, else the middle of each joint's range."""
        has_range = np.isfinite(self.low) & np.isfinite(self.high)
        pose = np.where(has_range, (np.where(has_range, self.low, 0) + np.where(has_range, self.high, 0)) / 2, 0.0)
        home = [i for i in range(self._model.nkey) if self._model.key(i).name == "home"]
        if home:
            rows = [int(self._model.jnt_qposadr[self._model.joint(name).id]) for name in self.joints]
            pose = np.clip(self._model.key_qpos[home[0]][rows], self.low, self.high)
        for joint, position in told.items():
            pose[self.index(joint)] = position
        return pose

    def _between_links(self) -> set[Pair]:
        links = {self._model.body(i).name for i in range(1, self._model.nbody)}
        return {in_order(a, b) for a in links for b in links if a < b}

    def _find_pairs(self, neighbors: frozenset[Pair], fingers: frozenset[Pair]) -> Pairs:
        """Look at the neutral pose and at random ones, the same at each start."""
        known = self.solid_links
        for name in (n for pair in self.config.allowed for n in pair):
            if name not in known:
                raise ConfigError(f"model.allowed: {name!r}; solid are: {', '.join(sorted(known))}")
        links = self._between_links()
        told = frozenset(in_order(*pair) for pair in self.config.allowed)
        self.pairs = Pairs(neighbors, fingers, told=told)
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

    def summary(self) -> str:
        """Which pairs are not kept apart, in a line."""
        parts = [
            f"{what}: {', '.join('/'.join(pair) for pair in sorted(pairs))}"
            for what, pairs in (
                ("fingers", self.pairs.fingers),
                ("touch in the neutral pose", self.pairs.touching),
                ("always touch", self.pairs.always),
                ("allowed", self.pairs.told),
                (f"may come nearer than {self.config.min_distance:g} m", self.pairs.close),
            )
            if pairs
        ]
        return "; ".join([f"neighbors: {len(self.pairs.neighbors)}", *parts])


def _reach(model: mujoco.MjModel) -> np.ndarray:
    """Float64 (nq,): meters that any point beyond a joint moves at most, per radian (meter) of it.

    A hinge's is the farthest point of the links that it carries, with the chain stretched out.
    """
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
