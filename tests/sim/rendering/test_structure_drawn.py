"""What each pixel shows and how far away it is, as the simulators draw it, against rays cast into the scene."""

# pyright: reportAttributeAccessIssue=false
# (MuJoCo's names come from compiled modules without type stubs.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import pytest
from libero_setup import ASSETS, needs_assets

from sim.rendering.gl import ARM, GRIPPER
from sim.tabletop import TabletopConfig
from vla_rl.config import build_component
from vla_rl.data.segmentation import CAMERA_PREFIX, TABLE, unpack
from vla_rl.types import EpisodeSpec

SIZE = 64
STATICS = {"tabletop": [1, 1, 0, 0, 0, 0], "robosuite": [0, 1, 0, 0, 0, 0], "libero": [0, 1, 0, 0, 0, 0]}


@dataclass(frozen=True)
class Shown:
    """A moment of an episode: the scene, what it is made of, and what a camera shows."""

    model: Any
    data: Any
    things: np.ndarray
    camera: int
    ids: np.ndarray
    millimeters: np.ndarray
    mirrored: bool
    groups: np.ndarray

    def ray(self, row: int, column: int) -> tuple[int, float]:
        """What a pixel's middle hits, and its distance along the camera's axis, meters."""
        axes, origin = self.data.cam_xmat[self.camera].reshape(3, 3), self.data.cam_xpos[self.camera]
        focal = 0.5 / np.tan(np.radians(self.model.cam_fovy[self.camera]) / 2)
        x, y = (column + 0.5) / SIZE - 0.5, 0.5 - (row + 0.5) / SIZE
        hit = np.zeros(1, np.int32)
        direction = axes @ np.array([-x if self.mirrored else x, y, -focal])
        distance = mujoco.mj_ray(self.model, self.data, origin, direction, self.groups, 1, -1, hit)
        return int(self.things[hit[0]]) if hit[0] >= 0 else 0, distance * focal


def show(kind: str, camera: str, **options: Any) -> Shown:
    values = {"kind": kind, "image_size": SIZE, "cameras": ["agentview", "wrist"], "structure": True, **options}
    config = build_component("env", values)
    env = config.make()
    env.reset(EpisodeSpec(env.spec.tasks and next(iter(env.spec.tasks)), index=1))
    for _ in range(6):
        env.apply(env.expert_action())
    ids, millimeters = unpack(env.observe().images[CAMERA_PREFIX + camera])
    if kind == "tabletop":
        model, data, things, name = env._scene.model, env._now, env._scene.things, camera
    else:
        scene = env._scene if kind == "robosuite" else env.loaded.scene
        renderer = scene.renderer if kind == "robosuite" else env.loaded.renderer
        model, things = scene.model, renderer._things
        data = scene.data if kind == "robosuite" else scene.shown()
        name = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}[camera]
    groups = np.array(STATICS[kind], np.uint8)
    return Shown(model, data, things, model.camera(name).id, ids, millimeters, kind == "libero", groups)


@pytest.mark.parametrize("camera", ["agentview", "wrist"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("tabletop", {"tasks": ["pick_colour"]}),
        pytest.param("robosuite", {"tasks": ["Stack"]}, marks=pytest.mark.slow),
        pytest.param(
            "libero",
            {"suite": "libero_spatial", "tasks": ["0"], "assets_path": str(ASSETS)},
            marks=[pytest.mark.slow, needs_assets],
        ),
    ],
)
def test_segments_and_depth_are_what_rays_hit(kind, options, camera):
    if kind == "robosuite":
        pytest.importorskip("robosuite")
    shown = show(kind, camera, **options)
    agree, near, checked = 0, 0, 0
    for row in range(2, SIZE, 4):
        for column in range(2, SIZE, 4):
            thing, distance = shown.ray(row, column)
            checked += 1
            agree += thing == shown.ids[row, column]
            near += abs(distance - shown.millimeters[row, column] / 1000) < 0.02
    assert agree >= 0.99 * checked and near >= 0.99 * checked, (agree, near, checked)
    found = set(np.unique(shown.ids).tolist())
    assert TABLE in found and found & {ARM, GRIPPER} and any(i > GRIPPER for i in found)


def test_the_picture_is_the_same_with_and_without_structure():
    plain, more = (TabletopConfig(cameras=("agentview",), structure=on).make() for on in (False, True))
    for _ in range(2):
        one, other = (env.reset(EpisodeSpec("stack", index=3)) for env in (plain, more))
        assert np.array_equal(one.images["agentview"], other.images["agentview"])
    assert more.spec.cameras == ("agentview", "structure.agentview")


def test_the_two_fingers_are_one_thing_and_each_body_another():
    env = TabletopConfig(cameras=("wrist",), structure=True).make()
    env.reset(EpisodeSpec("bowl_push"))
    scene = env._scene
    of_body = {
        scene.model.body(b).name: set(scene.things[scene.model.geom_bodyid == b]) for b in range(1, scene.model.nbody)
    }
    assert of_body["finger_left"] == of_body["finger_right"] == {GRIPPER} and of_body["gripper"] == {ARM}
    others = [of_body[name] for name in ("block", "bowl", "zone")]
    assert all(len(ids) == 1 for ids in others) and len(set.union(*others)) == 3
