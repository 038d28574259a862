"""The process's shared GL context beside other libraries' renderers."""

from __future__ import annotations

from contextlib import closing

import mujoco
import numpy as np
import pytest

from sim.rendering.gl import backend, open_context
from sim.tabletop.env import TabletopConfig
from vla_rl.interfaces import VecEnv
from vla_rl.types import EpisodeSpec


def picture(env: VecEnv, index: int) -> np.ndarray:
    return env.reset([EpisodeSpec("pick_place", "train", index)], [0]).images["agentview"].copy()


@pytest.mark.skipif(backend() != "egl", reason="EGL alone says which context is current")
def test_a_renderer_that_is_freed_later_takes_nothing_of_ours() -> None:
    from OpenGL import EGL

    with closing(TabletopConfig(num_envs=1, num_workers=0).build()) as env:
        expected = [picture(env, index) for index in (0, 1)]
        foreign = open_context(64, 64)
        uploaded = mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
        EGL.eglMakeCurrent(EGL.eglGetCurrentDisplay(), EGL.EGL_NO_SURFACE, EGL.EGL_NO_SURFACE, EGL.EGL_NO_CONTEXT)
        picture(env, 0)
        uploaded.free()  # As the garbage collector does at any time.
        foreign.free()
        assert all(np.array_equal(picture(env, index), expected[index]) for index in (0, 1))
