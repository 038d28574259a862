"""Segmentation and depth of a MuJoCo rendering."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

import mujoco
import numpy as np

from vla_rl.data.segmentation import BACKGROUND, FIRST_THING, MAX_ID, TABLE, pack

ARM, GRIPPER = FIRST_THING, FIRST_THING + 1
_TABLES = ("table", "counter", "desk")


def draw_structure(
    model: mujoco.MjModel, scene: mujoco.MjvScene, viewport: mujoco.MjrRect, context: mujoco.MjrContext, ids: np.ndarray
) -> np.ndarray:
    """The structure of a scene that was just updated, as `vla_rl.data.segmentation.pack` gives it, bottom row first.

    Args:
        ids: uint8 (ngeom,), what each geom is part of.
    """
    flags, depth_map = scene.flags.copy(), context.readDepthMap
    scene.flags[mujoco.mjtRndFlag.mjRND_SEGMENT] = scene.flags[mujoco.mjtRndFlag.mjRND_IDCOLOR] = 1
    context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
    drawn = np.full(scene.ngeom + 1, BACKGROUND, np.uint8)
    for geom in scene.geoms[: scene.ngeom]:
        if geom.objtype != mujoco.mjtObj.mjOBJ_GEOM or geom.rgba[3] == 0:
            geom.segid = -1  # Not in the picture, but a segmentation would show it: sites, for one.
        elif geom.segid >= 0:
            drawn[geom.segid + 1] = ids[geom.objid]
    colors = np.empty((viewport.height, viewport.width, 3), np.uint8)
    nearness = np.empty((viewport.height, viewport.width), np.float32)
    try:
        mujoco.mjr_render(viewport, scene, context)
        mujoco.mjr_readPixels(colors, nearness, viewport, context)
    finally:
        scene.flags[:] = flags
        context.readDepthMap = depth_map
    numbers = colors.astype(np.int64) @ np.array([1, 256, 65536])
    near, far = (plane * model.stat.extent for plane in (model.vis.map.znear, model.vis.map.zfar))
    depth = near * far / (nearness.astype(np.float64) * (far - near) + near)
    return pack(drawn[numbers], depth)


def things(model: mujoco.MjModel) -> np.ndarray:
    """uint8 (ngeom,): what each geom of a robosuite scene is part of; every free or fixed object is a thing.

    The floor and the walls are the background.

    Raises:
        ValueError: more things than there are ids.
    """
    ids = np.full(model.ngeom, BACKGROUND, np.uint8)
    numbers: dict[int, int] = {}
    for geom in range(model.ngeom):
        body = int(model.geom_bodyid[geom])
        root = int(model.body_rootid[body])
        names = [model.body(b).name.lower() for b in (root, body)]
        if any(word in name for name in [*names, model.geom(geom).name.lower()] for word in _TABLES):
            ids[geom] = TABLE
        elif body == 0 or root == 0 or any(word in names[0] for word in ("wall", "floor")):
            continue
        elif names[0].startswith(("robot", "mount", "base")) or names[1].startswith(("robot", "gripper", "mount")):
            ids[geom] = GRIPPER if names[1].startswith("gripper") else ARM
        else:
            number = numbers.setdefault(root, GRIPPER + 1 + len(numbers))
            if number > MAX_ID:
                raise ValueError(f"the scene has more than {MAX_ID - GRIPPER} things; a segmentation has no ids left")
            ids[geom] = number
    return ids
