"""What a camera cannot see: the triangles that a picture is the same without, to the last bit.

MuJoCo draws every triangle of a scene, wherever the camera looks, and all of them twice where a box reflects (a stove's
top does). In software an image costs what its triangles cost. Meshes are therefore cut into runs of faces, in their
order, and left out is what lies in a box that is

- wholly outside the camera's view, and not to be seen in the mirror;
- wholly behind a large opaque face, such as a table's top;
- or what has no opacity at all.

Where a mirror takes up little of the image, its rectangle is drawn for itself, with what can be seen there, and the
rest without reflections. All tests err on the side of drawing: boxes around triangles, widened views, margins.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

WIDER = 1.02  # how much wider than the image the view is taken to be
MARGIN = 0.002  # meters that a box must be outside, or behind a face, by
OPAQUE = 0.995  # mjr_render's own limit
RUN = 512  # faces of a mesh that are drawn together
BUILT_IN = 200  # faces of a sphere or cylinder, about
LARGE = 0.15  # meters; faces with both half sides as long hide what is behind them
_KINDS = mujoco.mjtGeom
_BOXED = range(int(_KINDS.mjGEOM_SPHERE), int(_KINDS.mjGEOM_MESH) + 1)
_PLANE, _BOX, _MESH = int(_KINDS.mjGEOM_PLANE), int(_KINDS.mjGEOM_BOX), int(_KINDS.mjGEOM_MESH)
_CORNERS = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])


@dataclass(frozen=True)
class Drawing:
    """One call of mjr_render: of which geoms and runs; whether reflections are drawn; which pixels of it are used.

    geoms: bool (ngeom of the scene,). runs: bool (all runs of the model,). mirror: the geom of the scene that reflects.
    pixels: left, bottom, width, height, as OpenGL counts; None: all.
    """

    geoms: np.ndarray
    runs: np.ndarray
    reflects: bool
    mirror: int | None
    pixels: tuple[int, int, int, int] | None = None


@dataclass(frozen=True)
class Face:
    """A rectangle in the world, corners (4, 3), that looks along `normal`; of which geom of the scene or model."""

    geom: int
    corners: np.ndarray
    normal: np.ndarray

    def looks_at(self, eye: np.ndarray) -> bool:
        """Whether the eye is before it, or as good as."""
        return bool((eye - self.corners[0]) @ self.normal > -MARGIN)


@dataclass(frozen=True)
class Runs:
    """How a model's visible geoms are cut.

    Of each run its geom, first face, number of faces, and a box around it in the geom's frame: center and half sides.
    first is -1 for a geom that is not a mesh, or too small to be cut.
    """

    geom: np.ndarray
    first: np.ndarray
    faces: np.ndarray
    center: np.ndarray
    half: np.ndarray

    @classmethod
    def of(cls, model: mujoco.MjModel) -> Runs:
        """Cut every mesh into runs of about RUN faces."""
        rows = [(geom, *run) for geom in range(model.ngeom) for run in _runs(model, geom)]
        geom, first, faces, boxes = (np.array(column) for column in zip(*rows, strict=True))
        return cls(geom, first, faces, boxes[:, :3], boxes[:, 3:])


def _runs(model: mujoco.MjModel, geom: int) -> list[tuple[int, int, np.ndarray]]:
    mesh = model.geom_dataid[geom] if model.geom_type[geom] == _MESH else -1
    count = int(model.mesh_facenum[mesh]) if mesh >= 0 else 0
    if model.geom_group[geom] == 0:  # collision shapes, which are not drawn
        return []
    if count < 2 * RUN:
        return [(-1, count or BUILT_IN, model.geom_aabb[geom].copy())]
    start = int(model.mesh_faceadr[mesh])
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :]
    runs = []
    for run in np.array_split(np.arange(count), count // RUN):
        corners = vertices[model.mesh_face[start + run[0] : start + run[-1] + 1]].reshape(-1, 3).astype(np.float64)
        low, high = corners.min(0), corners.max(0)
        runs.append((start + int(run[0]), len(run), np.concatenate([(low + high) / 2, (high - low) / 2])))
    return runs


class Culling:
    """Which runs of a model's faces a view needs."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        self.runs = Runs.of(model)
        self._is_boxed = np.isin(model.geom_type, _BOXED)
        is_large = np.sort(model.geom_size, 1)[:, 1] > LARGE
        self._large = np.flatnonzero((model.geom_type == _BOX) & (model.geom_group != 0) & is_large)

    def drawings(
        self, scene: mujoco.MjvScene, data: mujoco.MjData, camera: int, size: int, mirrors: bool = True
    ) -> list[Drawing]:
        """How to draw the scene, just updated, as the model's camera number `camera` sees it in a square image.

        The second of two drawings replaces its pixels in the first's. Without `mirrors`, nothing reflects.
        """
        geoms = scene.geoms[: scene.ngeom]
        opacity = np.array([geom.rgba[3] for geom in geoms])
        visible = (opacity > 0) | np.array([geom.type == _PLANE for geom in geoms])
        of_model = np.array([g.objid if g.objtype == mujoco.mjtObj.mjOBJ_GEOM else -1 for g in geoms])
        eye, view = data.cam_xpos[camera], data.cam_xmat[camera].reshape(3, 3)
        half = np.tan(np.radians(self.model.cam_fovy[camera]) / 2)
        mirror = _mirror(geoms, opacity) if mirrors else None
        casts_shadows = self.model.light_castshadow.any()  # What is not seen may then leave one in the view.
        is_odd = casts_shadows or self.model.cam_sensorsize[camera].any()
        if is_odd or (mirror is not None and not len(mirror.corners)):
            return [Drawing(np.ones_like(visible), np.ones(len(self.runs.geom), bool), reflects=mirrors, mirror=None)]
        boxes = _Boxes(self.runs, data)
        opaque = set(of_model[opacity >= OPAQUE].tolist()) - {of_model[mirror.geom] if mirror else -1}
        beyond = MARGIN + self._clipped(half)
        faces = [face for geom in self._large if geom in opaque for face in _sides(self.model, data, geom, eye, beyond)]
        hidden = np.zeros(len(self.runs.geom), bool)
        for face in faces:
            hidden |= boxes.inside(_cone(eye, face, 1 - MARGIN / LARGE))
        hidden &= ~np.isin(self.runs.geom, [face.geom for face in faces])

        def drawing(runs: np.ndarray, reflects: bool, pixels: tuple | None = None) -> Drawing:
            of_geom = ~self._is_boxed
            of_geom[self.runs.geom[runs]] = True
            of_mirror = mirror.geom if mirror else None
            return Drawing(visible & ((of_model < 0) | of_geom[of_model]), runs, reflects, of_mirror, pixels)

        seen = boxes.touched(_pyramid(eye, view, half * WIDER * _CORNERS)) & ~hidden
        plain = drawing(seen, reflects=False)
        if mirror is None or not plain.geoms[mirror.geom] or not mirror.looks_at(eye):
            return [drawing(seen, reflects=mirror is not None and bool(plain.geoms[mirror.geom]))]
        behind = eye - 2 * ((eye - mirror.corners[0]) @ mirror.normal) * mirror.normal  # the eye in the mirror
        reflected = boxes.touched(_cone(behind, Face(-1, mirror.corners, -mirror.normal), WIDER))
        reflected |= self.runs.geom == of_model[mirror.geom]
        whole = drawing(seen | reflected, reflects=True)
        pixels = _bounds(eye, view, half, mirror.corners, size)
        if pixels is None:
            return [whole]
        left, bottom, width, height = pixels
        edges = np.array((left, bottom)) + np.array((width, height)) * (_CORNERS + 1) / 2
        near = boxes.touched(_pyramid(eye, view, half * (2 * edges / size - 1))) & ~hidden
        patch = drawing(near | reflected, reflects=True, pixels=pixels)
        return [whole] if self._is_cheaper(whole, plain, patch) else [plain, patch]

    def _clipped(self, half: float) -> float:
        """Meters from the eye within which parts of the view are not drawn, being nearer than MuJoCo's near plane."""
        return self.model.vis.map.znear * self.model.stat.extent * np.sqrt(1 + 2 * half**2)

    def _is_cheaper(self, whole: Drawing, plain: Drawing, patch: Drawing) -> bool:
        """Whether all at once, twice for the mirror, has fewer triangles than the mirror's part for itself."""
        once, twice, part = (int(self.runs.faces[each.runs].sum()) for each in (plain, whole, patch))
        return 2 * twice <= once + 2 * part


class _Boxes:
    """The runs' boxes where the scene is now."""

    def __init__(self, runs: Runs, data: mujoco.MjData) -> None:
        self._axes = data.geom_xmat.reshape(-1, 3, 3)[runs.geom]
        self._center = data.geom_xpos[runs.geom] + (self._axes @ runs.center[:, :, None])[:, :, 0]
        self._half = runs.half[:, :, None]

    def _distances(self, planes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the boxes' centers before planes (P, 4), float64 (boxes, P), and how far the boxes reach from there."""
        normals = planes[:, :3]
        reach = (np.abs(normals @ self._axes) @ self._half)[:, :, 0]
        return self._center @ normals.T - planes[:, 3], reach

    def touched(self, planes: np.ndarray) -> np.ndarray:
        """bool (boxes,): not surely outside of planes (P, 4), whose normals point outwards."""
        distance, reach = self._distances(planes)
        return np.all(distance <= reach + MARGIN, axis=1)

    def inside(self, planes: np.ndarray) -> np.ndarray:
        """bool (boxes,): surely inside of planes (P, 4)."""
        distance, reach = self._distances(planes)
        return np.all(distance < -reach - MARGIN, axis=1)


def _mirror(geoms: list, opacity: np.ndarray) -> Face | None:
    """The one geom that mjr_render takes for a mirror; without corners where it has no end."""
    for index, geom in enumerate(geoms):
        if geom.reflectance <= 0 or geom.type not in (_PLANE, _BOX) or opacity[index] < OPAQUE:
            continue
        axes, size = np.array(geom.mat, np.float64).reshape(3, 3), np.array(geom.size, np.float64)
        if geom.type == _PLANE:
            return Face(index, np.zeros((0, 3)), axes[:, 2])
        corners = geom.pos + size[2] * axes[:, 2] + (_CORNERS * size[:2]) @ axes[:, :2].T
        return Face(index, corners, axes[:, 2])
    return None


def _sides(model: mujoco.MjModel, data: mujoco.MjData, geom: int, eye: np.ndarray, near: float) -> list[Face]:
    """The large sides of a box of the model that the eye is before, by more than `near` meters."""
    axes, size, center = data.geom_xmat[geom].reshape(3, 3), model.geom_size[geom], data.geom_xpos[geom]
    found = []
    for axis in range(3):
        others = [(axis + 1) % 3, (axis + 2) % 3]
        if size[others].min() <= LARGE:
            continue
        for sign in (-1, 1):
            normal = sign * axes[:, axis]
            corners = center + size[axis] * normal + (_CORNERS * size[others]) @ axes[:, others].T
            if (eye - corners[0]) @ normal > near:
                found.append(Face(geom, corners, normal))
    return found


def _pyramid(eye: np.ndarray, view: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Planes (5, 4) around what the eye sees between corners (4, 2), counterclockwise, at distance 1; and behind it."""
    rays = np.concatenate([corners, -np.ones((4, 1))], 1) @ view.T
    normals = np.cross(rays, np.roll(rays, -1, 0))
    normals = np.concatenate([normals / np.linalg.norm(normals, axis=1, keepdims=True), view[None, :, 2]])
    return np.concatenate([normals, normals @ eye[:, None]], 1)


def _cone(eye: np.ndarray, face: Face, scale: float) -> np.ndarray:
    """Planes (5, 4) around what the eye sees through a face scaled so, on the side that its normal looks away from."""
    middle = face.corners.mean(0)
    rays = scale * (face.corners - middle) + middle - eye
    normals = np.cross(rays, np.roll(rays, -1, 0))
    normals *= -np.sign(normals @ (middle - eye))[:, None]
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    normals = np.concatenate([normals / np.maximum(lengths, 1e-12), face.normal[None]])
    return np.concatenate([normals, np.append(normals[:4] @ eye, face.normal @ middle)[:, None]], 1)


def _bounds(eye: np.ndarray, view: np.ndarray, half: float, corners: np.ndarray, size: int) -> tuple | None:
    """The pixels around corners (4, 3), with two more on each side; None where one is not well before the camera."""
    local = (corners - eye) @ view
    depth = -local[:, 2]
    if (depth < 0.05).any():
        return None
    pixels = (0.5 + 0.5 * local[:, :2] / depth[:, None] / half) * size
    low = np.clip(np.floor(pixels.min(0)) - 2, 0, size).astype(int)
    high = np.clip(np.ceil(pixels.max(0)) + 2, 0, size).astype(int)
    width, height = np.maximum(high - low, 1)
    left, bottom = np.minimum(low, size - 1)
    return int(left), int(bottom), int(width), int(height)
