"""What is done to a robot's MuJoCo spec before it is compiled: the cell is added, and what distances need."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from real_robot.contract.model import ModelConfig
from vla_rl.config import ConfigError

if TYPE_CHECKING:
    import mujoco


def add_cell(spec: mujoco.MjSpec, config: ModelConfig) -> None:
    """Add the contract's boxes and planes.

    Raises:
        ConfigError: one has the name of a link.
    """
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


def boxes_as_meshes(spec: mujoco.MjSpec) -> None:
    """Make each box a mesh of its corners.

    Raises:
        ConfigError: a box of an MJCF is given by fromto.
    """
    import mujoco

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
    import mujoco

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
    import mujoco

    bits = mujoco.mjtDisableBit
    several = getattr(bits, "mjDSBL_MULTICCD", 0)  # off by itself before MuJoCo 3.8
    return int(bits.mjDSBL_FILTERPARENT) | int(several)


def quaternion_of(turn: Iterable[float]) -> np.ndarray:
    """Unit quaternion w, x, y, z of roll, pitch, yaw about the fixed axes."""
    quaternion = np.array([1.0, 0.0, 0.0, 0.0])
    import mujoco

    for axis, angle in zip(np.eye(3), turn, strict=True):
        step, before = np.zeros(4), quaternion.copy()
        mujoco.mju_axisAngle2Quat(step, axis, angle)
        mujoco.mju_mulQuat(quaternion, step, before)
    return quaternion
