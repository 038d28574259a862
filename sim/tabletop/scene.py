"""The tabletop's physics: MJCF written in Python, compiled once per task and process.

Units: meters, seconds, radians. The table's top is z = 0. The robot's side is -x, the agentview
camera looks from +x. Collision groups keep the contact pairs few: static things (bit 1) and the
gripper (bit 2) touch movable objects (bit 4) only, and movable objects touch one another.
"""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import mujoco
import numpy as np

from sim.base import FixedCamera
from sim.rendering.gl import ARM, GRIPPER
from vla_rl.data.segmentation import TABLE

# agentview, without camera jitter: it looks from +x down on the table.
VIEW = FixedCamera(position=(0.5, 0, 0.62), right=(0, 1, 0), up=(-0.7349, 0, 0.6782), fovy=32.5)
TIMESTEP = 0.005
SUBSTEPS = 10  # 20 Hz control
HALF = 0.03  # half edge of a block
BASE_HALF = (0.044, 0.044, 0.025)  # the blue block under a stack
PLATE_RADIUS, PLATE_HEIGHT = 0.05, 0.012
ZONE_RADIUS, BOWL_ZONE_RADIUS = 0.055, 0.08
BOWL_RADIUS, BOWL_HEIGHT, BOWL_FLOOR = 0.066, 0.034, 0.008
BOWL_SIDES = 12
OPEN_WIDTH = 0.055  # each finger's travel
REACH_LOW = np.array([-0.27, -0.23, 0.016])  # the commanded position stays inside this box, meters
REACH_HIGH = np.array([0.25, 0.23, 0.26])

# Damping of movable bodies along x, y, z (N s/m) and about them (N m s/rad): what is pushed stops with the pusher.
_BLOCK_DAMPING = (1.5, 1.5, 0.05, 3e-4, 3e-4, 3e-4)
_DAMPING: dict[str, tuple[float, ...]] = {
    "block": _BLOCK_DAMPING,
    "block_b": _BLOCK_DAMPING,
    "block_c": _BLOCK_DAMPING,
    "base": (4.0, 4.0, 0.1, 2e-3, 2e-3, 2e-3),
    "bowl": (3.0, 3.0, 0.1, 4e-3, 4e-3, 4e-3),
}
# task -> movable bodies (the first is the block to manipulate) and fixed bodies.
MOVABLE: dict[str, tuple[str, ...]] = {
    "push_to_zone": ("block",),
    "pick_place": ("block",),
    "pick_colour": ("block", "block_b", "block_c"),
    "stack": ("block", "base"),
    "bowl_push": ("block", "bowl"),
    "take_off": ("block",),
}
FIXED: dict[str, tuple[str, ...]] = {
    "push_to_zone": ("zone",),
    "pick_place": ("plate",),
    "pick_colour": ("plate",),
    "stack": (),
    "bowl_push": ("zone",),
    "take_off": ("plate",),
}
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.08, 0.08),
    "blue": (0.10, 0.25, 0.95),
    "yellow": (0.98, 0.85, 0.08),
    "purple": (0.62, 0.12, 0.80),
}
ZONE_COLOR = (0.10, 0.72, 0.22)
PLATE_COLOR = (0.96, 0.96, 0.94)
BOWL_COLOR = (0.96, 0.62, 0.16)
BOWL_FLOOR_COLOR = (0.72, 0.46, 0.12)
TABLE_COLOR = (0.36, 0.38, 0.42)
HAND_COLOR = (0.10, 0.10, 0.12)
FINGER_COLOR = (0.15, 0.92, 0.90)
NUM_TABLE_MATERIALS = 4  # plain, checker, stripes, dots

_STATIC = 'contype="1" conaffinity="0"'
_GRIPPER = 'contype="2" conaffinity="0"'
_OBJECT = 'contype="4" conaffinity="7"'
_INSIDE = 'contype="4" conaffinity="6"'  # touches the gripper and objects, not the table
_VISUAL = 'contype="0" conaffinity="0" group="1"'


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _rgba(color: tuple[float, float, float]) -> str:
    return f'rgba="{color[0]} {color[1]} {color[2]} 1"'


def _block(name: str, half: tuple[float, float, float], color: str, mass: float) -> str:
    size = " ".join(map(str, half))
    return f"""<body name="{name}"><freejoint name="{name}"/>
      <geom name="{name}" type="box" size="{size}" mass="{mass}" {_OBJECT} {_rgba(COLORS[color])}/></body>"""


def _bowl() -> str:
    """A floor box under a ring of wall boxes, all one free body with its origin on the table."""
    inner = BOWL_RADIUS - 0.012
    parts = [
        f'<geom type="box" size="{inner} {inner} {BOWL_FLOOR / 2}" pos="0 0 {BOWL_FLOOR / 2}" mass="0.10" '
        f"{_OBJECT} {_rgba(BOWL_COLOR)}/>"
    ]
    width = BOWL_RADIUS * math.tan(math.pi / BOWL_SIDES) + 0.002
    for side in range(BOWL_SIDES):
        angle = 2 * math.pi * side / BOWL_SIDES
        x, y = BOWL_RADIUS * math.cos(angle), BOWL_RADIUS * math.sin(angle)
        parts.append(
            f'<geom type="box" size="0.005 {width:.5f} {BOWL_HEIGHT / 2}" pos="{x:.5f} {y:.5f} {BOWL_HEIGHT / 2}" '
            f'euler="0 0 {angle:.5f}" mass="0.004" priority="1" friction="0.3 0.005 0.001" '
            f"{_INSIDE} {_rgba(BOWL_COLOR)}/>"
        )
    parts.append(
        f'<geom type="cylinder" size="{BOWL_RADIUS} {BOWL_FLOOR / 2}" pos="0 0 {BOWL_FLOOR / 2 + 0.0005}" mass="0" '
        f"{_VISUAL} {_rgba(BOWL_FLOOR_COLOR)}/>"
    )
    return f'<body name="bowl"><freejoint name="bowl"/>{"".join(parts)}</body>'


def _plate() -> str:
    """A disc to look at; two crossed boxes (an octagon) to collide with, which give flat, stable contacts."""
    half = PLATE_RADIUS * 0.94
    boxes = "".join(
        f'<geom type="box" size="{half} {half} {PLATE_HEIGHT / 2}" pos="0 0 {PLATE_HEIGHT / 2}" euler="0 0 {angle}" '
        f'{_STATIC} group="4" rgba="0 0 0 0"/>'
        for angle in (0, math.pi / 4)
    )
    return f"""<body name="plate" mocap="true">{boxes}
      <geom name="plate" type="cylinder" size="{PLATE_RADIUS} {PLATE_HEIGHT / 2}" pos="0 0 {PLATE_HEIGHT / 2}"
        {_VISUAL} {_rgba(PLATE_COLOR)}/></body>"""


def _zone(radius: float) -> str:
    return f"""<body name="zone" mocap="true"><geom name="zone" type="cylinder" size="{radius} 0.001" pos="0 0 0.001"
      {_VISUAL} {_rgba(ZONE_COLOR)}/></body>"""


def _gripper() -> str:
    """Six servoed joints carry the hand; its frame's origin is the point between the fingertips' pads."""
    fingers = "".join(
        f"""<body name="finger_{side}" gravcomp="1">
          <joint name="finger_{side}" type="slide" axis="0 {sign} 0" armature="0.02"/>
          <geom name="finger_{side}" type="box" size="0.012 0.008 0.040" pos="0 {sign * 0.008} 0.025" mass="0.03"
            priority="2" friction="2.5 0.05 0.001" condim="4" {_GRIPPER}
            {_rgba(FINGER_COLOR)}/></body>"""
        for side, sign in (("left", 1), ("right", -1))
    )
    return f"""<body name="gripper" gravcomp="1">
      <joint name="x" type="slide" axis="1 0 0"/><joint name="y" type="slide" axis="0 1 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <joint name="yaw" type="hinge" axis="0 0 1" armature="0.004"/>
      <joint name="pitch" type="hinge" axis="0 1 0" armature="0.004"/>
      <joint name="roll" type="hinge" axis="1 0 0" armature="0.004"/>
      <geom name="hand" type="box" size="0.013 0.071 0.009" pos="0 0 0.074" mass="0.4" {_GRIPPER} {_rgba(HAND_COLOR)}/>
      <geom name="wrist" type="cylinder" size="0.013 0.03" pos="0 0 0.113" mass="0.1" {_VISUAL} {_rgba(HAND_COLOR)}/>
      <camera name="wrist" pos="0.085 0 0.11" xyaxes="0 1 0 -0.92 0 0.39" fovy="75"/>
      {fingers}</body>"""


def _actuators() -> str:
    """A ramped position servo for each hand joint (integrated velocity command plus its feed-forward)."""
    parts = []
    for joint, kp, kv in (
        *((name, 4800, 100) for name in "xyz"),
        *((name, 100, 1.8) for name in ("yaw", "pitch", "roll")),
    ):
        parts.append(
            f'<general name="{joint}" joint="{joint}" dyntype="integrator" gaintype="fixed" gainprm="{kp}" '
            f'biastype="affine" biasprm="0 -{kp} 0"/>'
        )
        parts.append(f'<velocity name="{joint}_rate" joint="{joint}" kv="{kv}"/>')
    for side in ("left", "right"):
        parts.append(f'<position name="finger_{side}" joint="finger_{side}" kp="250" kv="12"/>')
    return "".join(parts)


def _assets() -> str:
    """The same textures in every task's model, so that all share one renderer."""
    light, dark = "1 1 1", "0.72 0.72 0.72"
    patterns = {
        "checker": f'type="2d" builtin="checker" rgb1="{light}" rgb2="{dark}" width="64" height="64"',
        "gradient": f'type="2d" builtin="gradient" rgb1="{light}" rgb2="{dark}" width="64" height="64"',
        "dots": f'type="2d" builtin="flat" mark="random" random="0.2" markrgb="0.6 0.6 0.6" rgb1="{light}" '
        'width="64" height="64"',
    }
    textures = "".join(f'<texture name="{name}" {text}/>' for name, text in patterns.items())
    materials = "".join(
        f'<material name="table_{i}" {texture} specular="0.1" shininess="0.1"/>'
        for i, texture in enumerate(["", *(f'texture="{name}" texrepeat="6 6"' for name in patterns)])
    )
    return f"<asset>{textures}{materials}</asset>"


def mjcf(task: str) -> str:
    """The task's model as MJCF text."""
    makers = {
        "block": lambda: _block("block", (HALF, HALF, HALF), "red", 0.06),
        "block_b": lambda: _block("block_b", (HALF, HALF, HALF), "blue", 0.06),
        "block_c": lambda: _block("block_c", (HALF, HALF, HALF), "yellow", 0.06),
        "base": lambda: _block("base", BASE_HALF, "blue", 0.2),
        "bowl": _bowl,
        "plate": _plate,
        "zone": lambda: _zone(BOWL_ZONE_RADIUS if task == "bowl_push" else ZONE_RADIUS),
    }
    bodies = "".join(makers[name]() for name in (*MOVABLE[task], *FIXED[task]))
    return f"""<mujoco model="{task}">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{TIMESTEP}" integrator="implicitfast" cone="elliptic" impratio="4"/>
  <visual><headlight ambient="0.35 0.35 0.35" diffuse="0.25 0.25 0.25" specular="0 0 0"/>
    <quality shadowsize="0" offsamples="4" numslices="20" numstacks="8" numquads="2"/>
    <map znear="0.05" zfar="10"/><global offwidth="256" offheight="256"/></visual>
  <default><geom friction="1.0 0.01 0.001" condim="3" solref="0.01 1"/></default>
  {_assets()}
  <worldbody>
    <light name="sun" pos="0.3 0.3 1.5" dir="-0.3 -0.35 -1" directional="true" diffuse="0.55 0.55 0.55"
      specular="0.05 0.05 0.05" castshadow="false"/>
    <camera name="agentview" pos="{_numbers(VIEW.position)}" xyaxes="{_numbers((*VIEW.right, *VIEW.up))}"
      fovy="{VIEW.fovy}"/>
    <geom name="table" type="plane" size="1 1 0.1" {_STATIC} material="table_0" {_rgba(TABLE_COLOR)}/>
    {_gripper()}{bodies}
  </worldbody>
  <actuator>{_actuators()}</actuator>
</mujoco>"""


@dataclass(frozen=True)
class Scene:
    """A compiled model and where to find things in it.

    Attributes:
        model: shared by all environments of the task in this process. Physics never changes it;
            what a camera sees (colors, light, camera pose) is written into it before rendering.
        qpos: movable body -> address of its 7 numbers in qpos (position, quaternion).
        qvel: movable body -> address of its 6 numbers in qvel (linear first).
        mocap: fixed body -> row in mocap_pos.
        gripper_geom: bool (ngeom,), geoms of the hand and fingers.
        things: uint8 (ngeom,), what each geom is part of (see vla_rl.data.segmentation).
    """

    model: mujoco.MjModel
    qpos: dict[str, int]
    qvel: dict[str, int]
    mocap: dict[str, int]
    gripper_geom: np.ndarray
    things: np.ndarray


@functools.cache
def load_scene(task: str) -> Scene:
    """The task's scene, compiled on first use in this process."""
    model = mujoco.MjModel.from_xml_string(mjcf(task))
    movable, fixed = MOVABLE[task], FIXED[task]
    for name in movable:
        address = int(model.joint(name).dofadr[0])
        model.dof_damping[address : address + 6] = _DAMPING[name]
    roots = model.body_rootid[model.geom_bodyid]
    return Scene(
        model=model,
        qpos={name: int(model.joint(name).qposadr[0]) for name in movable},
        qvel={name: int(model.joint(name).dofadr[0]) for name in movable},
        mocap={name: int(model.body(name).mocapid[0]) for name in fixed},
        gripper_geom=roots == model.body("gripper").id,
        things=_things(model, (*movable, *fixed)),
    )


def _things(model: mujoco.MjModel, bodies: tuple[str, ...]) -> np.ndarray:
    """The table, the hand, the two fingers as one, and each body of the task."""
    of_body = np.full(model.nbody, TABLE, np.uint8)
    of_body[model.body("gripper").id] = ARM
    for number, name in enumerate(("finger_left", "finger_right", *bodies)):
        of_body[model.body(name).id] = GRIPPER + max(number - 1, 0)
    return of_body[model.geom_bodyid]
