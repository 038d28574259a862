"""Everything about the hf-libero package as a package: where it is, its files, and importing it without questions.

On its first import LIBERO asks on the terminal where to put data sets and writes ~/.libero/config.yaml.
`import_library` points it to a folder of ours under the system's temporary directory before that, so
nothing is asked and nothing is written into the home folder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import io
import logging
import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from vla_rl.common.atomic import write_text_atomic

ASSETS_VARIABLE = "LIBERO_ASSETS"
CONFIG_VARIABLE = "LIBERO_CONFIG_PATH"
INSTALL = "pip install '.[libero]'"
ASSET_FOLDERS = (
    *("scenes", "textures", "articulated_objects"),
    *("stable_scanned_objects", "stable_hope_objects", "turbosquid_objects"),
)


class AssetsError(RuntimeError):
    """LIBERO's meshes and textures are not there; the message says where they were looked for and what to do."""


def package_root() -> Path:
    """The folder of the installed `libero.libero` package, found without importing it.

    Raises:
        ImportError: hf-libero is not installed.
    """
    spec = importlib.util.find_spec("libero")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        root = Path(place) / "libero"
        if (root / "bddl_files").is_dir():
            return root
    raise ImportError(f"the LIBERO simulator needs hf-libero and robosuite 1.4, which are not installed: {INSTALL}")


@functools.cache
def suite_tasks(suite: str) -> tuple[str, ...]:
    """Task names of a suite, in LIBERO's order.

    Raises:
        ImportError: hf-libero is not installed.
    """
    path = package_root() / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("_libero_suite_task_map", path)
    assert spec is not None and spec.loader is not None, f"{path} is not a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return tuple(module.libero_task_map[suite])


def bddl_path(suite: str, task: str) -> Path:
    """The file with the task's objects, regions and goal."""
    return package_root() / "bddl_files" / suite / f"{task}.bddl"


def init_states_path(suite: str, task: str) -> Path:
    """The file with the task's official initial states."""
    return package_root() / "init_files" / suite / f"{task}.pruned_init"


def load_init_states(
    path: Path, dims: Sequence[int] = (2,), remedy: str = f"Reinstall the library: {INSTALL}"
) -> np.ndarray:
    """Official initial states, float64 (50, 1 + nq + nv): time, positions, velocities of each.

    The files are pickles in a torch archive; only numpy's array types are allowed in them.

    Args:
        dims: numbers of dimensions that the array may have. remedy: what errors tell to do.

    Raises:
        FileNotFoundError: no such file.
        ValueError: truncated, not a torch archive, holding other objects, or not a 2-D array of finite floats.
    """
    import torch
    from numpy._core.multiarray import _reconstruct

    if not path.is_file():
        raise FileNotFoundError(f"LIBERO's initial states are missing: {path}. {remedy}")
    allowed = [
        (_reconstruct, "numpy.core.multiarray._reconstruct"),
        _reconstruct,
        np.ndarray,
        np.dtype,
        type(np.dtype(np.float64)),
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            states = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    except (RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path}: not a usable file of initial states (it is damaged, or holds more than a numpy array: {reason}). "
            f"{remedy}"
        ) from error
    if not isinstance(states, np.ndarray) or states.ndim not in dims or states.dtype != np.float64:
        found = f"{states.dtype} {states.shape}" if isinstance(states, np.ndarray) else type(states).__name__
        raise ValueError(f"{path}: expected a float64 array (states, values), found {found}")
    if not np.isfinite(states).all():
        raise ValueError(f"{path}: the initial states hold NaN or infinite values")
    return states


def find_assets(configured: Path | None) -> Path | None:
    """The folder with LIBERO's assets: as configured, else $LIBERO_ASSETS, else where the library keeps its own.

    Returns None if only the library's own download can bring them.

    Raises:
        AssetsError: a configured folder that is not one of LIBERO's assets.
    """
    variable = os.environ.get(ASSETS_VARIABLE)
    chosen = configured or (Path(variable) if variable else None)
    if chosen is not None:
        folder = chosen.expanduser().resolve()
        missing = [name for name in ASSET_FOLDERS if not (folder / name).is_dir()]
        if missing:
            source = "env.assets_path" if configured else f"${ASSETS_VARIABLE}"
            raise AssetsError(f"{source} is {folder}, which has no {', '.join(missing)}. {_assets_advice()}")
        return folder
    for folder in (package_root() / "assets", Path.home() / ".cache" / "libero" / "assets"):
        if all((folder / name).is_dir() for name in ASSET_FOLDERS):
            return folder
    return None


def _assets_advice() -> str:
    return (
        f"Set env.assets_path in the recipe or {ASSETS_VARIABLE} in the environment to the folder that holds "
        f"{', '.join(ASSET_FOLDERS)}; or, with access to the Hugging Face Hub, unset both and let the library download "
        "them into ~/.cache/libero/assets."
    )


def import_library(assets: Path | None) -> None:
    """Import LIBERO and robosuite without any question, with this process's assets folder set.

    Raises:
        ImportError: a package is missing.
        AssetsError: no assets, and the library cannot download them.
    """
    package_root()
    folder = find_assets(assets)
    point_to_config()
    _import_robosuite()
    libero = importlib.import_module("libero.libero")
    if folder is None:
        folder = Path(libero.get_assets_path())  # downloads, or prints why it cannot
        if not all((folder / name).is_dir() for name in ASSET_FOLDERS):
            raise AssetsError(
                f"LIBERO's assets are missing, and the library could not download them. {_assets_advice()}"
            )
    vars(libero)["_assets_path_cache"] = str(folder)


def _import_robosuite() -> None:
    """Import robosuite for its models. It also sets up GL for a renderer of its own, which we do not use."""
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it warns about a file of private macros
    # It refuses a device that is not in CUDA_VISIBLE_DEVICES (EGL numbers them otherwise) and sets MUJOCO_GL.
    before = {name: os.environ.get(name) for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID")}
    os.environ.pop("MUJOCO_EGL_DEVICE_ID", None)
    try:
        import robosuite  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"the LIBERO simulator needs hf-libero and robosuite 1.4: {error}. {INSTALL}") from error
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        from sim.rendering import gl

        raise gl.RenderError(gl.advice(error)) from error
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def point_to_config() -> None:
    """Have LIBERO find a config file, so that it asks nothing. Safe against other processes doing the same."""
    root = package_root()
    if CONFIG_VARIABLE in os.environ:
        folder = Path(os.environ[CONFIG_VARIABLE])
    elif (Path.home() / ".libero" / "config.yaml").is_file():
        return
    else:
        digest = hashlib.sha256(str(root).encode()).hexdigest()[:12]
        folder = Path(tempfile.gettempdir()) / f"vla_rl_libero_{os.getuid()}_{digest}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            folder = Path(tempfile.mkdtemp(prefix="vla_rl_libero_"))
        os.environ[CONFIG_VARIABLE] = str(folder)
    if (folder / "config.yaml").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    paths = {
        "benchmark_root": str(root),
        "bddl_files": str(root / "bddl_files"),
        "init_states": str(root / "init_files"),
        "datasets": str(root.parent / "datasets"),
        "assets": str(root / "assets"),
    }
    write_text_atomic(folder / "config.yaml", yaml.safe_dump(paths))
