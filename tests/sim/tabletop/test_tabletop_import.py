"""The tabletop's options load no torch, and a dead GL must say what to install."""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_options_load_no_torch() -> None:
    result = run(
        "import sys; from sim.tabletop import TabletopConfig; TabletopConfig().env_spec(); "
        "print('torch' in sys.modules)"
    )
    assert result.stdout.strip() == "False", result.stdout + result.stderr


def test_dead_gl_names_the_backend_and_the_packages() -> None:
    code = (
        "from sim.rendering.devices import RenderError; from vla_rl.types import EpisodeSpec\n"
        "try: from sim.tabletop import TabletopConfig; TabletopConfig().make().reset(EpisodeSpec('stack'))\n"
        "except RenderError as error: print(error)"
    )
    # No vendor's EGL can be found under a folder that does not exist.
    result = run(
        code, MUJOCO_GL="egl", __EGL_VENDOR_LIBRARY_DIRS="/nonexistent", __EGL_VENDOR_LIBRARY_FILENAMES="/none"
    )
    assert "MUJOCO_GL=egl" in result.stdout, result.stdout + result.stderr
    assert "libegl1 libegl-mesa0 libgl1-mesa-dri" in result.stdout and "libosmesa6" in result.stdout
    result = run(code, MUJOCO_GL="off")
    assert "MUJOCO_GL: got 'off', allowed: egl, osmesa, glfw. Unset it" in result.stdout


def test_a_forked_renderer_says_to_spawn() -> None:
    code = (
        "import os; from sim.tabletop import TabletopConfig; from vla_rl.types import EpisodeSpec\n"
        "from sim.rendering.gl import RenderError\n"
        "env = TabletopConfig().make(); env.reset(EpisodeSpec('stack'))\n"
        "child = os.fork()\n"
        "if child: os.waitpid(child, 0); raise SystemExit\n"
        "try: env.observe()\n"
        "except RenderError as error: print(error, flush=True)\n"
        "os._exit(0)"
    )
    result = run(code)
    assert "'spawn'" in result.stdout, result.stdout + result.stderr


def test_gl_is_chosen_even_when_mujoco_came_first() -> None:
    code = (
        "import mujoco; from sim.tabletop import TabletopConfig; from vla_rl.types import EpisodeSpec\n"
        "print(TabletopConfig().make().reset(EpisodeSpec('stack')).images['agentview'].shape)"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "DISPLAY")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "(64, 64, 3)" in result.stdout, result.stdout + result.stderr
