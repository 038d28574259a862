"""The ROS 2 package `vla_rl_bridge`, which ships inside this one, copied into a ROS 2 workspace."""

from __future__ import annotations

import shutil
from pathlib import Path

from vla_rl.common.atomic import atomic_folder

PACKAGE = Path(__file__).parent / "vla_rl_bridge"


def copy_package(sources: Path) -> Path:
    """Copy the package into a workspace's `src` folder, where colcon finds it. Returns its folder.

    Raises:
        NotADirectoryError: no such folder. FileExistsError: it is there already.
    """
    if not sources.is_dir():
        raise NotADirectoryError(f"{sources} is no folder; give the src folder of a ROS 2 workspace")
    with atomic_folder(sources / PACKAGE.name, what="the ament package", exclusive=True) as partial:
        shutil.copytree(PACKAGE, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return sources / PACKAGE.name
