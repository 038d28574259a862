"""Changes of style on the tabletop: what the simulator itself would draw, nothing moves, names of colors stay true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.tabletop import TabletopConfig
from sim.tabletop.env import TabletopEnv
from vla_rl.data.segmentation import CAMERA_PREFIX, TABLE, unpack
from vla_rl.types import EpisodeSpec
from world_model.config import StyleConfig
from world_model.data.style import (
    AT_ONCE,
    CLEAR,
    NAMES,
    RECOLORED,
    Palette,
    Style,
    color_name,
    draw_style,
    from_hsv,
    named_colors,
    neighbor,
    restyle,
    to_hsv,
)

CAMERAS = ("agentview", "wrist")
RED, GREY = NAMES.index("red"), NAMES.index("grey")


def play(env: TabletopEnv, task: str, index: int = 0) -> list[dict[str, np.ndarray]]:
    """Images of some moments of an episode."""
    shown = [env.reset(EpisodeSpec(task, index=index)).images]
    for step in range(24):
        env.apply(env.expert_action())
        if step % 8 == 7:
            shown.append(env.observe().images)
    return shown


@pytest.fixture(scope="module")
def env() -> TabletopEnv:
    return TabletopConfig(cameras=CAMERAS, structure=True).make()


@pytest.fixture(scope="module", params=["push_to_zone", "pick_colour", "bowl_push"])
def episode(request, env) -> tuple[str, dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Instruction, and by camera: images (n, h, w, 3), segments and depth (n, h, w)."""
    shown = play(env, request.param)
    images = {camera: np.stack([moment[camera] for moment in shown]) for camera in CAMERAS}
    packed = {camera: unpack(np.stack([moment[CAMERA_PREFIX + camera] for moment in shown])) for camera in CAMERAS}
    segments, depth = ({c: p[k] for c, p in packed.items()} for k in range(2))
    return env.observe().instruction, images, segments, depth


def palette_of(images: dict[str, np.ndarray], segments: dict[str, np.ndarray]) -> Palette:
    return Palette.of(images.values(), segments.values())


def styles(instruction: str, palette: Palette, count: int, recolored: float = 1.0, **options) -> list[Style]:
    config, named = StyleConfig.model_validate({"share": 0.5, **options}), named_colors(instruction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("world_model.data.style.RECOLORED", recolored)
        return [draw_style(config, palette, named, np.random.default_rng([7, i])) for i in range(count)]


def flatten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Styles from here on have no pattern and even light."""
    for name in ("TEXTURE", "LIGHT"):
        monkeypatch.setattr(f"world_model.data.style.{name}", 0.0)


def inside(segments: np.ndarray) -> np.ndarray:
    return neighbor(segments) == segments


# --- names of colors -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rgb", "name"),
    [
        ((0.90, 0.08, 0.08), "red"), ((0.5, 0.04, 0.04), "red"), ((0.10, 0.25, 0.95), "blue"),
        ((0.98, 0.85, 0.08), "yellow"), ((0.62, 0.12, 0.80), "purple"), ((0.10, 0.72, 0.22), "green"),
        ((0.96, 0.62, 0.16), "orange"), ((0.96, 0.96, 0.94), "white"), ((0.36, 0.38, 0.42), "grey"),
        ((0.10, 0.10, 0.12), "black"), ((0.15, 0.92, 0.90), "cyan"), ((1.0, 0.6, 0.7), "pink"),
        ((0.4, 0.25, 0.1), "brown"),
    ],
)  # fmt: skip
def test_colors_are_called_what_people_call_them(rgb, name):
    assert NAMES[int(color_name(np.array(rgb)))] == name


@pytest.mark.parametrize(
    ("instruction", "names"),
    [
        ("stack the red block on the blue block", {"red", "blue"}),
        ("put the bowl on the plate", set()),
        ("Pick up the Gray bowl, then the violet one.", {"grey", "purple"}),
        ("the reddish cup", set()),
    ],
)
def test_instructions_name_colors(instruction, names):
    assert {NAMES[i] for i in named_colors(instruction)} == names


def test_hue_saturation_value_there_and_back():
    for rgb in np.random.default_rng(0).random((50, 3)):
        assert np.allclose(from_hsv(*to_hsv(rgb)), rgb)


# --- repainting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["pick_colour", "bowl_push"])
@pytest.mark.parametrize("camera", CAMERAS)
def test_repainting_is_what_the_simulator_draws_in_those_colors(task, camera):
    """Recolored by segmentation, against the scene rendered again with recolored geometries."""
    env = TabletopConfig(cameras=(camera,), structure=True, image_size=96).make()
    env.reset(EpisodeSpec(task, index=3))
    for _ in range(12):
        env.apply(env.expert_action())
    before = env.observe().images
    segments = unpack(before[CAMERA_PREFIX + camera])[0][None]
    things, look = env._scene.things, env._look
    rng = np.random.default_rng(5)
    old, new = np.zeros((256, 3)), np.zeros((256, 3))
    rgba = look.rgba.copy()
    visible = rgba[:, 3] > 0
    for i in np.unique(segments):
        old[i] = rgba[(things == i) & visible, :3].mean(0)
        ratio = from_hsv(rng.random(), 0.5, rng.uniform(0.4, 0.9)) / old[i]
        rgba[(things == i) & visible, :3] *= ratio  # Of several geometries each in proportion, as shading is.
        new[i] = rgba[(things == i) & visible, :3].mean(0)
    env._look = replace(look, rgba=np.clip(rgba, 0, 1).astype(np.float32))
    drawn = env.observe().images[camera].astype(int)
    style = Style(old.astype(np.float32), new.astype(np.float32), np.ones(256, bool))
    painted = restyle(before[camera][None], segments, style)[0].astype(int)
    error = np.abs(painted - drawn)
    assert np.abs(before[camera].astype(int) - drawn).mean() > 20, "another picture"
    assert error.mean() < 3 and np.quantile(error, 0.99) < 25, (error.mean(), np.quantile(error, 0.99))


def test_a_style_that_changes_nothing_changes_nothing(episode):
    _, images, segments, _ = episode
    palette = palette_of(images, segments)
    same = palette.color.astype(np.float32)
    for camera in CAMERAS:
        shown = restyle(images[camera], segments[camera], Style(same, same, np.ones(256, bool)), still=True)
        assert np.abs(shown.astype(int) - images[camera]).max() <= 1


def test_boundaries_stay_visible_and_inside_them_nothing_new_appears(episode, monkeypatch):
    """Where two segments differed clearly they still do; without patterns a segment has no edges of its own."""
    instruction, images, segments, _ = episode
    palette = palette_of(images, segments)
    for style in styles(instruction, palette, 12, recolored=RECOLORED):
        seen = [i for i in palette.ids if inside(segments["agentview"])[segments["agentview"] == i].any()]
        for a in seen:
            for b in seen:
                before = np.linalg.norm(palette.color[a] - palette.color[b])
                assert np.linalg.norm(style.new[a] - style.new[b]) >= min(before, CLEAR) - 1e-4
    flatten(monkeypatch)
    for style in styles(instruction, palette, 4, recolored=RECOLORED):
        for camera in CAMERAS:
            ids, shown = segments[camera], restyle(images[camera], segments[camera], style, still=True)
            flat = np.abs(np.diff(images[camera].astype(int), axis=2)).max(-1) == 0
            within = flat & (ids[:, :, 1:] == ids[:, :, :-1]) & inside(ids)[:, :, 1:] & inside(ids)[:, :, :-1]
            change = np.abs(np.diff(shown.astype(int), axis=2)).max(-1)
            assert within.sum() > 1000 and change[within].max() <= 1


def test_a_style_is_the_same_in_all_frames_and_cameras(episode, monkeypatch):
    """A segment's mean color changes by the same amount wherever its shading is the same."""
    instruction, images, segments, _ = episode
    palette = palette_of(images, segments)
    flatten(monkeypatch)
    for style in styles(instruction, palette, 6, recolored=RECOLORED):
        for i in palette.ids:
            expected = style.new[i] - style.old[i]
            for camera in CAMERAS:
                ids = segments[camera]
                shown = restyle(images[camera], ids, style, still=True) / 255.0
                plain = images[camera] / 255.0
                for t in range(len(ids)):
                    chosen = (ids[t] == i) & inside(ids)[t]
                    middle = chosen & (shown[t] > 0.004).all(-1) & (shown[t] < 0.996).all(-1)
                    if middle.sum() < 5:
                        continue
                    luminance = np.array([0.299, 0.587, 0.114])
                    shading = (plain[t][middle] @ luminance + 0.04) / (style.old[i] @ luminance + 0.04)
                    change = (shown[t] - plain[t])[middle] / shading[:, None]
                    assert np.abs(change - expected).max() < 0.02


def test_named_colors_keep_their_name_and_nothing_else_gets_it(episode):
    instruction, images, segments, depth = episode
    palette, named = palette_of(images, segments), named_colors(instruction)
    before = {i: int(color_name(palette.color[i])) for i in palette.ids}
    assert any(name in named for name in before.values())
    changed = 0
    for style in styles(instruction, palette, 25, depth=True):
        shown = {c: restyle(images[c], segments[c], style, depth[c], still=c == "agentview") for c in CAMERAS}
        after = palette_of(shown, segments)
        for i in palette.ids:
            name = int(color_name(after.color[i]))
            if before[i] in named:
                assert name == before[i], (NAMES[before[i]], NAMES[name])
                changed += int(np.abs(after.color[i] - palette.color[i]).max() > 0.05)
            else:
                assert name not in named, (NAMES[before[i]], NAMES[name])
    assert changed > 10, "named colors vary as well, within their name"


def test_a_thing_of_several_colors_one_of_them_named_is_left_alone():
    image = np.zeros((1, 16, 16, 3), np.uint8)
    image[:] = (90, 95, 105)
    segments = np.full((1, 16, 16), TABLE, np.uint8)
    segments[0, 4:12, 4:12] = 2
    image[0, 4:12, 4:12] = (240, 220, 20)
    image[0, 4:12, 8:12] = (245, 245, 245)
    palette = Palette.of([image], [segments])
    for style in styles("pick up the yellow and white mug", palette, 10):
        assert np.array_equal(style.new[2], style.old[2]) and not np.array_equal(style.new[TABLE], style.old[TABLE])
    for style in styles("pick up the mug", palette, 10):
        assert not np.array_equal(style.new[2], style.old[2])


def test_styles_differ_and_follow_their_seed(episode):
    instruction, images, segments, depth = episode
    palette = palette_of(images, segments)

    def show(style: Style) -> np.ndarray:
        return restyle(images["agentview"], segments["agentview"], style, depth["agentview"], still=True)

    first, again = (styles(instruction, palette, 5, depth=True) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(show(a), show(b))
    shown = [show(style).astype(int) for style in first]
    assert all(np.abs(a - b).mean() > 4 for i, a in enumerate(shown) for b in shown[:i])


def test_many_images_at_once_are_as_one_by_one(episode):
    instruction, images, segments, depth = episode
    style = styles(instruction, palette_of(images, segments), 1, RECOLORED, depth=True)[0]
    many = [np.concatenate([values["agentview"]] * 3) for values in (images, segments, depth)]
    assert len(many[0]) > AT_ONCE
    together = restyle(many[0], many[1], style, many[2], still=True)
    alone = [restyle(*(v[i : i + 1] for v in many[:2]), style, many[2][i : i + 1], still=True) for i in range(12)]
    assert np.array_equal(together, np.concatenate(alone))


def test_side_light_follows_the_depth():
    """A ramp that faces the light gets brighter, one that faces away darker, flat ground stays."""
    image = np.full((1, 32, 32, 3), 100, np.uint8)
    segments = np.full((1, 32, 32), TABLE, np.uint8)
    depth = np.full((1, 32, 32), 1000, np.uint16)
    depth[0, :, 8:16] -= np.arange(8, dtype=np.uint16) * 40  # Comes nearer to the right: faces left.
    depth[0, :, 16:24] -= (8 - np.arange(8, dtype=np.uint16)) * 40
    grey = np.full((256, 3), 100 / 255, np.float32)
    shown = restyle(image, segments, Style(grey, grey, np.ones(256, bool), side=(0.5, 0.0)), depth, still=True)
    assert shown[0, :, 10:14].max() < 85 and shown[0, :, 18:22].min() > 115 and (shown[0, :, 2:6] == 100).all()
    elsewhere = restyle(image, segments, Style(grey, grey, np.ones(256, bool), side=(0.5, 0.0)), depth, still=False)
    assert (elsewhere == 100).all()
