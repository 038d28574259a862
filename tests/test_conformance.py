"""Every `VecEnv` keeps the contract of `vla_rl.interfaces`. The checks are in `tests/checks.py`."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from checks import check_vec_env

from sim.libero.library import find_assets
from sim.maniskill import render_device
from vla_rl.config import build_component

HERE = Path(__file__).parent
# Inline and with workers; small images. Heavy simulators are `slow`.
TABLETOP = {"kind": "tabletop", "image_size": 32, "cameras": ["agentview", "wrist"]}
ROBOSUITE = {"kind": "robosuite", "image_size": 64, "tasks": ["Lift", "Stack"], "horizons": {"Lift": 20}}
LIBERO = {"kind": "libero", "image_size": 64, "tasks": ["0", "3"], "horizon": 20}
REMOTE = {"kind": "remote", "env": "sim.tabletop:TabletopConfig", "kwargs": {**TABLETOP, "num_envs": 1}}
GYM_STYLE = {"kind": "remote", "env": "faulty_sim:FaultySim", "python_path": [f"{HERE}/sim/remote"]}
MANISKILL = {"kind": "maniskill", "image_size": 32, "shader": "minimal", "horizons": {"PushCube": 12, "StackCube": 12}}
ROBOTWIN = {
    "kind": "robotwin",
    "tasks": ["stack_blocks_two"],
    "cameras": ["head"],
    "horizons": {"stack_blocks_two": 15},
}
for option in ("python_path", "first_imports"):  # see tests/sim/robotwin
    ROBOTWIN[option] = (
        [os.environ[f"ROBOTWIN_{option.upper()}"]] if os.environ.get(f"ROBOTWIN_{option.upper()}") else []
    )
METAWORLD = {"kind": "metaworld", "image_size": 48, "tasks": ["push", "drawer-open"], "horizon": 20}
REMOTE_METAWORLD = {
    "kind": "remote",
    "env": "sim.metaworld:MetaWorldConfig",
    "kwargs": METAWORLD,
    "python": os.environ.get("METAWORLD_PYTHON", ""),
    "python_path": [str(HERE.parent)],
}
REACHER = {
    "kind": "gymnasium",
    "id": "Reacher-v5",
    "instruction": "touch the red ball",
    "success": "info.reward_dist >= -0.02",
    "horizon": 20,
}
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "dummy": {"kind": "sim.dummy:DummyConfig", "cameras": ["agentview", "wrist"]},
    "dummy-workers": {"kind": "sim.dummy:DummyConfig", "num_workers": 1},
    "tabletop": TABLETOP,
    "tabletop-workers": {**TABLETOP, "num_workers": 2},
    "gymnasium": REACHER,
    "gymnasium-workers": {**REACHER, "num_workers": 2},
    "remote": GYM_STYLE,
    "remote-hosts": {**GYM_STYLE, "num_hosts": 2},
    "remote-tabletop": REMOTE,
    "maniskill": {**MANISKILL, "tasks": ["PickCube", "PushCube"]},
    "maniskill-stack": {**MANISKILL, "tasks": ["StackCube"]},
    "metaworld": METAWORLD,
    "remote-metaworld": REMOTE_METAWORLD,
    "robotwin": ROBOTWIN,
    "robosuite": ROBOSUITE,
    "robosuite-workers": {**ROBOSUITE, "num_workers": 1},
    "libero": LIBERO,
    "libero-workers": {**LIBERO, "num_workers": 1},
}
SLOW = ("robotwin", "tabletop-workers", "gymnasium-workers", "remote-tabletop", "remote-metaworld", "metaworld")
SLOW += ("maniskill", "robosuite", "libero")


def missing(kind: str, of: str) -> str:
    """Why the simulator cannot run here; empty if it can."""
    if kind == "metaworld" and importlib.util.find_spec("metaworld") is None:
        return "metaworld is not installed"
    if of == "remote-metaworld" and not os.environ.get("METAWORLD_PYTHON"):
        return "there is no Python with metaworld: set METAWORLD_PYTHON"
    if kind == "robosuite" and importlib.util.find_spec("robosuite") is None:
        return "robosuite is not installed"
    if kind == "robotwin" and not (os.environ.get("ROBOTWIN_ROOT") and os.environ.get("ROBOTWIN_PYTHON")):
        return "there is no RoboTwin: set ROBOTWIN_ROOT and ROBOTWIN_PYTHON"
    if kind == "maniskill":
        try:
            render_device()
        except (ImportError, RuntimeError) as error:
            return str(error)
    if kind == "libero" and importlib.util.find_spec("libero") is None:
        return "hf-libero is not installed"
    if kind == "libero" and find_assets(None) is None:
        return "LIBERO's assets are not here: set LIBERO_ASSETS"
    return ""


@pytest.mark.timeout(3600)  # software rendering takes seconds for a picture
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n.startswith(SLOW) else ()) for n in ENVIRONMENTS]
)
def test_vec_env_keeps_the_contract(name: str) -> None:
    values = ENVIRONMENTS[name]
    if reason := missing(values["kind"], name):
        pytest.skip(reason)
    config = build_component("env", values)
    check_vec_env(config.build)
