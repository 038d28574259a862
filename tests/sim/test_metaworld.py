"""MetaWorld's adapter: options, names, pictures and experts; the contract is checked in tests/test_conformance.py."""

import importlib.util
from typing import Any

import numpy as np
import pytest

from sim.metaworld.config import CAMERAS, INSTRUCTIONS, MetaWorldConfig
from vla_rl.config import ConfigError, build_component
from vla_rl.types import EpisodeSpec


def test_the_spec_needs_no_metaworld() -> None:
    spec = MetaWorldConfig(horizon=200, horizons={"reach": 80}).env_spec()
    assert len(spec.tasks) == len(set(spec.tasks.values())) == 50
    assert (spec.horizon["reach"], spec.horizon["push"], spec.state_dim, spec.action_dim) == (80, 200, 4, 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ["drawer-opn"]}, "unknown MetaWorld task 'drawer-opn'. Did you mean 'drawer-open'"),
        ({"tasks": ["reach-v3"]}, "unknown MetaWorld task 'reach-v3'. Did you mean 'reach'"),
        ({"horizons": {"reach": 0}}, "the horizon of 'reach' must be at least 1"),
        ({"horizons": {"reach": 600}}, "ends an episode after 500 control steps"),
        ({"cameras": ["corner2"]}, "cameras are some of agentview, wrist, corner"),
    ],
)
def test_bad_options_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_component("env", {"kind": "metaworld", **values})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps metaworld==3\.1\.1; or env\.kind=remote"):
        MetaWorldConfig().make()


def test_names_are_metaworlds_own() -> None:
    metaworld = pytest.importorskip("metaworld", reason="metaworld is not installed")
    assert {f"{task}-v3" for task in INSTRUCTIONS} == set(metaworld.ALL_V3_ENVIRONMENTS)


@pytest.mark.slow
def test_pictures_are_metaworlds_and_upright() -> None:
    """MuJoCo's own renderer draws the same, and the camera's upward axis points up after what is turned is turned."""
    pytest.importorskip("metaworld", reason="metaworld is not installed")
    import mujoco

    env: Any = MetaWorldConfig(tasks=("drawer-open",), cameras=tuple(CAMERAS), exact_rendering=True).make()
    images = env.reset(EpisodeSpec("drawer-open")).images
    model, data = env._scene.model, env._scene.data
    with mujoco.Renderer(model, 128, 128) as renderer:
        for name, (theirs, on_its_head) in CAMERAS.items():
            renderer.update_scene(data, theirs)
            drawn = renderer.render()
            drawn = drawn[::-1, ::-1] if on_its_head else drawn
            assert np.abs(images[name].astype(int) - drawn).mean() < 8, name
            up = data.camera(theirs).xmat.reshape(3, 3)[2, 1] * (-1 if on_its_head else 1)
            assert up > -0.01, name
    env.close()


@pytest.mark.slow
def test_the_first_picture_shows_the_episodes_goal() -> None:
    pytest.importorskip("metaworld", reason="metaworld is not installed")
    env: Any = MetaWorldConfig(tasks=("reach",), image_size=16).make()
    for index in range(3):
        env.reset(EpisodeSpec("reach", "train", index))
        np.testing.assert_allclose(env._scene.data.site("goal").xpos, env._scene._target_pos)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reach", "handle-press", "pick-place", "drawer-open"])
def test_its_expert_solves_the_task(task: str) -> None:
    pytest.importorskip("metaworld", reason="metaworld is not installed")
    env = MetaWorldConfig(tasks=(task,), image_size=16, horizon=150).build(1)
    try:
        env.reset([EpisodeSpec(task, "validation", 3)])
        result = env.step(env.expert_action()[:, None])
        while not result.done[0]:
            result = env.step(env.expert_action()[:, None])
        assert result.success[0]
    finally:
        env.close()
