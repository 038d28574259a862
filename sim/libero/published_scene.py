"""The scene of a published perturbed task: LIBERO's, with what the benchmark changes in it."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import functools
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from libero.libero import get_assets_path
from libero.libero.envs import TASK_MAPPING
from libero.libero.envs.arenas.style import STYLE_MAPPING
from libero.libero.envs.base_object import OBJECTS_DICT
from libero.libero.envs.bddl_base_domain import BDDLBaseDomain
from robosuite.models.objects import MujocoXMLObject
from scipy.spatial.transform import Rotation

from sim.libero.published import PublishedTask, arm_pose, categories, new_categories, problem_of
from sim.libero.scene import Scene

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
