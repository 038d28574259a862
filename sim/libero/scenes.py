"""Loaded task scenes of this process: borrowed by an environment for an episode, perturbed, kept for the next one."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import mujoco
import numpy as np
from libero.libero import get_assets_path
from libero.libero.envs import TASK_MAPPING
from libero.libero.envs.arenas.style import STYLE_MAPPING
from libero.libero.envs.base_object import OBJECTS_DICT
from libero.libero.envs.bddl_base_domain import BDDLBaseDomain
from robosuite.models.objects import MujocoXMLObject
from scipy.spatial.transform import Rotation

from sim.libero.distractors import CrowdedScene
from sim.libero.experts import PickAndPlace
from sim.libero.library import bddl_path, init_states_path, load_init_states
from sim.libero.published import PublishedTask, arm_pose, categories, new_categories, problem_of
from sim.libero.render import Renderer
from sim.libero.scene import InitialState, Scene

if TYPE_CHECKING:
    from sim.libero.scene import InitialState, Scene

MAX_SCENES = 10  # Idle task scenes kept loaded in a process: a suite's.
MAX_STARTS = 256  # settled initial states remembered per scene


@dataclass
class TaskScene:
    """A scene with its renderer and the settled initial states it has already simulated.

    crowded: with distractors, a `CrowdedScene`. published: the task of a user's copy that it is; None: LIBERO's own.
    """

    suite: str
    task: str
    crowded: bool
    scene: Scene
    renderer: Renderer
    published: PublishedTask | None = None
    starts: OrderedDict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=OrderedDict)

    _expert: PickAndPlace | None = None

    @property
    def expert(self) -> PickAndPlace:
        """The task's scripted expert, made when first asked for."""
        if self._expert is None:
            self._expert = PickAndPlace(self.scene)
        return self._expert

    def begin_episode(self) -> None:
        """Tell the expert, if there is one."""
        if self._expert is not None:
            self._expert.begin()

    def remember(self, split: str, index: int, arrays: dict[str, np.ndarray]) -> None:
        self.starts[split, index] = arrays
        while len(self.starts) > MAX_STARTS:
            self.starts.popitem(last=False)

    def rearranged(self, state: InitialState, level: int, rng: np.random.Generator) -> InitialState:
        """See `sim.libero.scenes.rearranged`."""
        return rearranged(self.scene, state, level, rng)

    def scatter(self, level: int, rng: np.random.Generator) -> None:
        """Put an episode's distractors, if it has any, around what is in the scene."""
        if isinstance(self.scene, CrowdedScene):
            self.scene.scatter(level, rng)

    def give_back(self) -> None:
        """The scene is idle; the longest idle ones go when there are more than MAX_SCENES."""
        _idle.append(self)
        del _idle[:-MAX_SCENES]


_idle: list[TaskScene] = []


def borrow(suite: str, task: str, crowded: bool, published: PublishedTask | None = None) -> TaskScene:
    """An idle scene of the task, or a new one (takes seconds). published: one of those."""
    for position, loaded in enumerate(_idle):
        if (loaded.suite, loaded.task, loaded.crowded, loaded.published) == (suite, task, crowded, published):
            return _idle.pop(position)
    if published is not None:
        scene: Scene = PublishedScene(published)
    else:
        make = CrowdedScene if crowded else Scene
        scene = make(bddl_path(suite, task), load_init_states(init_states_path(suite, task)))
    name = f"{suite}/{task}/crowded" if crowded else f"{suite}/{task}"
    return TaskScene(suite, task, crowded, scene, Renderer(name, scene.model, MAX_SCENES), published)


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


PIVOT = np.array([0.0, 0.0, 0.8])  # meters, what LIBERO-Plus moves the camera around


class PublishedScene(Scene):
    """A task's scene, its camera and arm as the benchmark has them."""

    def __init__(self, task: PublishedTask) -> None:
        self._task, self._arm = task, None
        _define_scene(task)
        _define_objects(task)
        super().__init__(task.bddl, task.init_states())
        if task.view:
            camera = self.model.camera("agentview")
            camera.pos[:], camera.quat[:] = moved_camera(camera.pos, camera.quat, task.view)

    def _to_default_pose(self) -> None:
        """See `Scene._to_default_pose`: of the task's own robot, which its initial state does not know of."""
        robot = self.env.robots[0]
        if self._task.arm and self._arm is None:
            self._arm = arm_pose(self._task.root, type(robot.robot_model).__name__, self._task.arm)
            robot.init_qpos = self._arm
        super()._to_default_pose()


def moved_camera(pos: np.ndarray, quat: np.ndarray, view: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Position and quaternion (w, x, y, z) of a camera in LIBERO-Plus's view (around, up, distance, turn, tilt)."""
    around, up, distance, turn, tilt = view
    orbit = Rotation.from_euler("yz", [-up, around], degrees=True)
    head = Rotation.from_euler("zy", [turn, -tilt], degrees=True)
    turned = head * orbit * Rotation.from_quat(np.roll(quat, -1))
    return PIVOT + distance / 100 * orbit.apply(pos - PIVOT), np.roll(turned.as_quat(), 1)


def _define_scene(task: PublishedTask) -> None:
    """Have LIBERO know the variant of its scene that the task's file names."""
    name = problem_of(task.bddl.read_text())
    if name in TASK_MAPPING:
        return
    if not (variant := task.variant):
        raise ValueError(f"{task.bddl}: unknown problem {name!r}")
    for (kind, look), picture in task.pictures(variant).items():
        STYLE_MAPPING[kind][look] = picture
    stock = TASK_MAPPING[variant["base"]]
    options: dict[str, object] = {key: variant[key] for key in ("scene_xml",) if key in variant}
    if looks := {key: variant[key] for key in ("floor_style", "wall_style") if key in variant}:
        options["scene_properties"] = looks

    def init(self: object, *args: object, **others: object) -> None:
        stock.__init__(self, *args, **{**options, **others})

    def as_base(self: BDDLBaseDomain) -> None:
        self.parsed_problem["problem_name"] = variant["base"]  # which LIBERO's placement samplers are known by

    TASK_MAPPING[name] = type(name, (stock,), {"__init__": init, "_assert_problem_name": as_base})


def _define_objects(task: PublishedTask) -> None:
    """Have LIBERO know the new categories: a new model, or LIBERO's own object in whose place it stands, restyled."""
    text = task.bddl.read_text()
    replaced = dict(zip(categories(text), categories(task.base.read_text()), strict=False))
    for category in new_categories(text):
        if category not in OBJECTS_DICT:
            (place, *others) = task.models(category)
            new = functools.partial(NewObject, Path(get_assets_path()) / place)
            OBJECTS_DICT[category] = (
                functools.partial(OBJECTS_DICT[replaced[category]], obj_name=category) if others else new
            )


class NewObject(MujocoXMLObject):
    """An object that LIBERO lacks, upright as LIBERO-Plus puts its own."""

    def __init__(self, file: Path, name: str) -> None:
        super().__init__(
            str(file),
            name=name,
            obj_type="all",
            duplicate_collision_geoms=False,
        )
        self.category_name = name
        self.rotation = {"x": (-np.pi / 2, -np.pi / 2), "y": (-np.pi, -np.pi), "z": (np.pi, np.pi)}
        self.rotation_axis = None
        self.object_properties = {"vis_site_names": {}}

    def _get_object_subtree(self):
        """robosuite's, which looks for a body inside another: one that stands alone gets one around it."""
        if self.worldbody.find("./body/body[@name='object']") is None:
            if (body := self.worldbody.find("./body[@name='object']")) is None:
                raise ValueError(f"{self.file}: has no body named object")
            around = ElementTree.SubElement(self.worldbody, "body")
            self.worldbody.remove(body)
            around.extend([body, *body.findall("site")])
        self.joint_specs = [{"name": "joint0", "type": "free", "damping": "0.0005"}]  # as LIBERO's objects have it
        return super()._get_object_subtree()
