"""Pictures without what the camera cannot see are those of the whole scene, to the bit; and much is left out."""

# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterator

import mujoco
import numpy as np
import pytest
from libero_pictures import draw_whole
from libero_setup import ASSETS, needs_assets

from sim.libero import LiberoConfig
from sim.libero.suites import CAMERAS
from vla_rl.types import EpisodeSpec

pytestmark = [pytest.mark.slow, needs_assets]

# A stove in four of them; the arenas are tables, floors, a kitchen, a living room and a study.
TASKS = [
    *(("libero_spatial", "0"), ("libero_spatial", "4"), ("libero_object", "3"), ("libero_goal", "7")),
    *(("libero_10", "0"), ("libero_10", "2"), ("libero_10", "9"), ("libero_90", "70"), ("libero_90", "85")),
]


@pytest.fixture(params=TASKS, ids="-".join, scope="module")
def env(request: pytest.FixtureRequest) -> Iterator:
    suite, number = request.param
    options = {"cameras": ("agentview", "wrist"), "image_size": 64}
    env = LiberoConfig(suite=suite, tasks=(number,), assets_path=ASSETS, **options).make()
    env.reset(EpisodeSpec(next(iter(env.spec.tasks)), "eval", 1))
    yield env
    env.close()


def assert_equal(env, data: mujoco.MjData, camera: int, size: int, what: str) -> None:
    renderer = env.loaded.renderer
    np.testing.assert_array_equal(
        renderer.render(data, camera, size), draw_whole(renderer, data, camera, size), err_msg=what
    )


def test_pictures_along_an_episode(env) -> None:
    rng = np.random.default_rng(0)
    scene = env.loaded.scene
    for step in range(30):
        if step % 6 == 0:
            for name in env.config.cameras:
                camera = scene.model.camera(CAMERAS[name]).id
                for size in (64, 256) if step == 12 else (64,):
                    assert_equal(env, scene.shown(), camera, size, f"{name}, step {step}, {size} px")
        env.apply(np.clip(rng.normal([0.2, 0, -0.4, 0, 0, 0, 0], 0.6), -1, 1))


def test_pictures_from_anywhere(env) -> None:
    """Cameras all around and close up, among them some inside of things, behind the table, or right before a mirror."""
    rng = np.random.default_rng(1)
    scene, renderer = env.loaded.scene, env.loaded.renderer
    camera = scene.model.camera("agentview").id
    visible = np.flatnonzero(scene.model.geom_group != 0)
    kinds = set()
    for view in range(20):
        data = scene.shown()
        target = data.geom_xpos[rng.choice(visible)] + rng.normal(0, 0.05, 3)
        back = rng.normal(size=3)
        back /= np.linalg.norm(back)
        right = np.cross(rng.normal(size=3), back)
        right /= np.linalg.norm(right)
        data.cam_xpos[camera] = target + rng.choice([0.1, 0.4, 1.5]) * back
        data.cam_xmat[camera] = np.stack([right, np.cross(back, right), back], 1).ravel()
        assert_equal(env, data, camera, 64, f"view {view}")
        renderer.updated(data, camera, 64)
        drawings = renderer.culling.drawings(renderer.scene, data, camera, 64)
        kinds.add((len(drawings), drawings[0].reflects))
    assert (1, False) in kinds


def test_pictures_right_before_a_table(env) -> None:
    """Nearer than MuJoCo's near plane, which cuts a hole into the face: what is behind it is seen."""
    rng = np.random.default_rng(2)
    scene, culling = env.loaded.scene, env.loaded.renderer.culling
    camera = scene.model.camera("agentview").id
    for geom in culling._large:
        for axis, sign in ((axis, sign) for axis in range(3) for sign in (-1, 1)):
            data = scene.shown()
            axes, size = data.geom_xmat[geom].reshape(3, 3), scene.model.geom_size[geom]
            place = rng.uniform(-0.5, 0.5, 3) * size
            place[axis] = sign * (size[axis] + 0.006)
            back, right = sign * axes[:, axis], axes[:, (axis + 1) % 3]
            data.cam_xpos[camera] = data.geom_xpos[geom] + axes @ place
            data.cam_xmat[camera] = np.stack([right, np.cross(back, right), back], 1).ravel()
            assert_equal(env, data, camera, 64, f"before geom {geom}, axis {sign * (axis + 1)}")


def test_pictures_with_shadows(env) -> None:
    """None of LIBERO's lights casts one; what the camera does not see could then leave one in the picture."""
    scene = env.loaded.scene
    lights = scene.model.light_castshadow
    lights[:] = 1
    try:
        assert_equal(env, scene.shown(), scene.model.camera(CAMERAS["wrist"]).id, 64, "shadows")
    finally:
        lights[:] = 0


def faces(env, camera: str) -> float:
    """Of the triangles that MuJoCo draws, twice where there is a mirror, the share that is drawn here."""
    scene, renderer = env.loaded.scene, env.loaded.renderer
    data, number = scene.shown(), scene.model.camera(CAMERAS[camera]).id
    renderer.updated(data, number, 64)
    drawings = renderer.culling.drawings(renderer.scene, data, number, 64)
    counts = renderer.culling.runs.faces
    ours = sum(int(counts[each.runs].sum()) * (2 if each.reflects else 1) for each in drawings)
    return ours / (int(counts.sum()) * (1 if drawings[0].mirror is None else 2))


def test_much_is_left_out(env) -> None:
    env.reset(EpisodeSpec(next(iter(env.spec.tasks)), "eval", 0))
    has_mirror = env.config.suite in ("libero_spatial", "libero_goal") or env.config.tasks == ("2",)
    shares = {camera: faces(env, camera) for camera in env.config.cameras}
    assert shares["agentview"] < (0.6 if has_mirror else 0.95)
    assert shares["wrist"] < 0.6


def test_light_pictures_differ_and_leave_the_model_alone(env) -> None:
    scene, renderer = env.loaded.scene, env.loaded.renderer
    model, camera = scene.model, scene.model.camera("agentview").id
    before = {name: getattr(model, name).copy() for name in dir(model) if name.startswith("mesh_")}
    exact = renderer.render(scene.shown(), camera, 64)
    renderer.light = True
    light = renderer.render(scene.shown(), camera, 64)
    renderer.light = False
    assert 0 < np.abs(light.astype(int) - exact).mean() < 8
    np.testing.assert_array_equal(renderer.render(scene.shown(), camera, 64), exact)
    for name, values in before.items():
        np.testing.assert_array_equal(getattr(model, name), values, err_msg=name)
    assert model.vis.quality.offsamples > 0
