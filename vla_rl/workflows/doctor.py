"""Diagnosis of this machine for a recipe, with what to do about each fault.

`vla-rl doctor [RECIPE]` shows it; `python -m vla_rl.workflows.doctor --gl` prints the first MuJoCo back end
that renders a frame (set-up asks that). Everything that can crash or prompt (a GL driver, the
LIBERO library) runs in a process of its own or is only looked at from outside.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.common.distributed import process_group
from vla_rl.common.next_command import STARTED_BY
from vla_rl.common.tables import Check
from vla_rl.config import ConfigError, apply_overrides, find_recipe, read_yaml
from vla_rl.data.hub import is_dataset
from vla_rl.training.published_sizes import advice

MIN_DISK_GB = 5.0
MIN_RAM_GB = 6.0
DRAWN_BY_MUJOCO = ("tabletop", "libero", "robosuite", "metaworld")
GL_PACKAGES = "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libopengl0"

# Renders a red ball and checks that it is there. Run with MUJOCO_GL set, in a process of its own.
RENDER_PROBE = """
import mujoco
model = mujoco.MjModel.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 2'/><geom size='.3' rgba='1 0 0 1'/>"
    "<camera name='c' pos='0 -2 0' xyaxes='1 0 0 0 0 1'/></worldbody></mujoco>")
data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
renderer = mujoco.Renderer(model, 64, 64)
renderer.update_scene(data, 'c')
image = renderer.render()
red, green, blue = (int(v) for v in image[32, 32])
assert red > 60 and red > 2 * max(green, blue), f'the picture is wrong: its center is {(red, green, blue)}'
from OpenGL import GL
print(GL.glGetString(GL.GL_RENDERER).decode())
renderer.close()
"""


def read_recipe(name: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe's values, merged and overridden but not validated: its packages may be what is missing.

    Raises:
        ConfigError: no such recipe, not YAML, or no env section with a kind.
    """
    values = apply_overrides(read_yaml(find_recipe(name)), overrides)
    env = values.get("env")
    if not isinstance(env, Mapping) or "kind" not in env:
        raise ConfigError(f"env: {name} has no env section with a 'kind', so there is nothing to check; got {env!r}")
    return values


def first_command(recipe: Mapping[str, Any]) -> str:
    """Return the command that a recipe of these values begins with: what collects the demonstrations that it lacks, or
    what runs it."""
    run, dataset = str(recipe.get("run", "eval")), (recipe.get("collect") or {}).get("dataset")
    return "collect" if run == "sft" and dataset and not is_dataset(dataset) else STARTED_BY.get(run, "train")


def check_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Check:
    """Whether the recipe's options are ones that there are, with values that are allowed; some may not be there yet."""
    missing = "install what is missing, then check the recipe again"  # The other checks name the package.
    try:
        from vla_rl.recipe.recipe import load_recipe

        load_recipe(name, overrides)
    except ImportError as error:
        return Check("recipe", "warning", f"could not be checked: {error}", missing)
    except ConfigError as error:
        if "cannot be imported" in str(error):
            return Check("recipe", "warning", str(error), missing)
        is_begun = all(line.endswith("required, but not given.") for line in str(error).splitlines())
        return Check("recipe", "warning" if is_begun else "wrong", str(error), "mend the recipe, or the KEY=VALUE")
    return Check("recipe", "ok", "every option is known, every value allowed")


def run_checks(recipe: Mapping[str, Any] | None = None) -> list[Check]:
    """Every check, in the order of the report.

    Args:
        recipe: its values, which decide what is needed. None: the core alone.
    """
    recipe = recipe or {}
    envs = simulators(recipe)
    assets = envs.get("libero", {}).get("assets_path")
    return [
        check_python(),
        check_torch(),
        check_device(str(recipe.get("device", "auto")), billions(recipe.get("policy") or {})),
        check_gl(needed=not envs.keys().isdisjoint(DRAWN_BY_MUJOCO) or not recipe),
        check_libero(needed="libero" in envs),
        check_libero_assets(assets, needed="libero" in envs),
        check_package("robosuite", "robosuite", "pip install '.[robosuite]'", needed="robosuite" in envs),
        check_robotwin(needed="robotwin" in envs),
        *recipe_checks(recipe),
        check_ros(),
        check_video(),
        check_disk(Path.cwd()),
        check_ram(),
    ]


def simulators(recipe: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Kind -> section of each environment that a recipe names: beside a world model, the real one."""
    env = recipe.get("env") or {}
    sections = (env, recipe.get("real_env") or {}, env.get("first_frames") or {})
    return {str(section["kind"]): section for section in sections if isinstance(section, Mapping) and "kind" in section}


# ---------------------------------------------------------------- software


def check_python() -> Check:
    """Version and place of the interpreter; one that is too old never gets here."""
    return Check("Python", "ok", f"{platform.python_version()} ({sys.executable})", needed=True)


def check_package(name: str, module: str, fix: str, needed: bool) -> Check:
    """An importable top-level module, without importing it."""
    if importlib.util.find_spec(module) is None:
        return Check(name, "missing", "not installed", fix, needed)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    return Check(name, "ok", version, needed=needed)


def check_torch() -> Check:
    """torch can be imported (a broken CUDA library shows up here)."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "torch", "missing", f"import fails: {error}", "run `make setup`, or `pip install torch`", needed=True
        )
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check("torch", "ok", f"{torch.__version__}, {built}", needed=True)


def billions(policy: Mapping[str, Any]) -> int:
    """Billions of parameters of a recipe's policy, as its preset or its checkpoint's name says; 0: neither does."""
    names = " ".join(str(policy.get(key) or "") for key in ("preset", "path")).lower()
    found = re.search(r"(?<![a-z0-9])(\d+)b(?![a-z0-9])", names)
    return int(found[1]) if found else 3 if "/pi0" in names else 0


def check_device(wanted: str = "auto", size: int = 0) -> Check:
    """The device that `device: auto` takes, its memory, and whether it computes in bfloat16.

    Args:
        wanted: the recipe's `device`, which must be here.
        size: billions of parameters of the recipe's policy, which need a GPU.
    """
    try:
        import torch
    except (ImportError, OSError):
        return Check("device", "missing", "needs torch", "see torch above", needed=wanted.startswith("cuda"))
    from vla_rl.common.precision import wants_bf16

    try:
        process_group.check_device(wanted)
    except ConfigError as error:
        fix = "set device=auto or device=cpu, or check the GPU with nvidia-smi and that torch is a CUDA build"
        return Check("device", "missing", str(error).partition(". Set")[0], fix, needed=True)
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        bf16 = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use fp16 or fp32"
        names = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        return Check("device", "ok", f"CUDA: {names}, {memory:.0f} GiB, {bf16}", advice(memory * 2**30))
    has_bf16 = wants_bf16("auto", "cpu")
    products = "products in bf16" if has_bf16 else "no products in bf16: updates take three times as long"
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads; {products}"
    if shutil.which("nvidia-smi"):
        fix = "torch does not see the GPU: compare `nvidia-smi`'s CUDA version with torch's above, and renew the older"
        return Check("device", "warning", f"CPU ({threads}), though nvidia-smi is here", fix)
    if torch.backends.mps.is_available():
        return Check("device", "ok", f"MPS (set `device: mps`); `auto` takes the CPU ({threads})")
    if size:
        found = f"no GPU, and the policy has {size} billion parameters: an action takes a CPU many seconds"
        fix = (
            "run the recipe on a machine with a GPU (docs/gpu.md); `vla-rl plan --memory RECIPE` says how much it needs"
        )
        return Check("device", "missing", found, fix, needed=True)
    fix = f"enough for the tiny policy and the demo; {advice()} (docs/gpu.md)"
    return Check("device", "ok", f"CPU: {threads}", fix)


# ---------------------------------------------------------------- rendering


def probe_gl(backend: str, timeout: float = 120.0) -> tuple[bool, str]:
    """Render one frame with a MuJoCo back end ("egl", "osmesa", "glfw", "cgl") in a process of its own.

    Returns:
        (it worked, the renderer's name or the reason).
    """
    env = {**os.environ, "MUJOCO_GL": backend}
    if backend in ("egl", "osmesa"):
        env["PYOPENGL_PLATFORM"] = backend
    try:
        done = subprocess.run(
            [sys.executable, "-c", RENDER_PROBE], env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no frame after {timeout:.0f} s"
    if done.returncode == 0:
        return True, done.stdout.strip().splitlines()[-1]
    if done.returncode < 0:
        return False, f"crashed with signal {-done.returncode}"
    lines = [
        line for line in done.stderr.splitlines() if line and not line[0].isspace() and "Exception ignored" not in line
    ]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return False, (errors or lines or ["failed without a message"])[0]


def gl_backends() -> tuple[str, ...]:
    """Back ends to try here, best first; MUJOCO_GL, where set, is the only one."""
    chosen = os.environ.get("MUJOCO_GL", "")
    if chosen:
        return (chosen,)
    return ("cgl",) if sys.platform == "darwin" else ("egl", "osmesa")


def find_gl() -> tuple[str | None, str]:
    """The first back end that renders, and its renderer; or None and each one's reason."""
    reasons = []
    for backend in gl_backends():
        works, detail = probe_gl(backend)
        if works:
            return backend, detail
        reasons.append(f"{backend}: {detail}")
    return None, "; ".join(reasons)


def check_gl(needed: bool) -> Check:
    """One real MuJoCo frame."""
    if importlib.util.find_spec("mujoco") is None:
        return Check("GL", "missing", "mujoco is not installed", "run `make setup`", needed)
    backend, detail = find_gl()
    if backend is None:
        fix = f"sudo apt-get install {GL_PACKAGES} (Debian, Ubuntu), or libosmesa6 with MUJOCO_GL=osmesa"
        if os.environ.get("MUJOCO_GL"):
            fix = f"unset MUJOCO_GL (it is {os.environ['MUJOCO_GL']!r}; usual: egl, osmesa), or: {fix}"
        return Check("GL", "missing", detail, fix, needed)
    if not os.environ.get("MUJOCO_GL") and backend == "osmesa":
        return Check("GL", "warning", f"osmesa: {detail}; egl fails", "export MUJOCO_GL=osmesa", needed)
    return Check("GL", "ok", f"{backend}: {detail}", needed=needed)


# ---------------------------------------------------------------- simulators


def check_libero(needed: bool) -> Check:
    """The LIBERO package; not imported, because its first import asks questions and writes into the home folder."""
    return check_package(
        "hf-libero", "libero", "make setup-dev, or: pip install '.[libero]' -c constraints.txt", needed
    )


def check_libero_assets(configured: str | Path | None, needed: bool) -> Check:
    """LIBERO's meshes and textures: `env.assets_path`, else $LIBERO_ASSETS, else what the library has."""
    name = "LIBERO assets"
    fix = (
        "set env.assets_path in the recipe or LIBERO_ASSETS to the folder that holds scenes/ and textures/, "
        "or let the library download them at its first use (docs/libero.md)"
    )
    if importlib.util.find_spec("libero") is None:
        return Check(name, "missing", "needs the libero package", "see hf-libero above", needed)
    from sim.libero.library import AssetsError, find_assets

    try:
        folder = find_assets(Path(configured) if configured else None)
    except AssetsError as error:
        return Check(name, "missing", str(error).partition(". ")[0], fix, needed)
    if folder is None:
        return Check(name, "missing", "no env.assets_path, no LIBERO_ASSETS, none in the library's places", fix, needed)
    return Check(name, "ok", str(folder), needed=needed)


def check_robotwin(needed: bool) -> Check:
    """A checkout of RoboTwin 2.0, named by ROBOTWIN_ROOT."""
    root = os.environ.get("ROBOTWIN_ROOT")
    if not root:
        return Check("RoboTwin", "missing", "ROBOTWIN_ROOT is not set", "set it to a checkout of RoboTwin 2.0", needed)
    if not (Path(root) / "envs").is_dir():
        fix = "set ROBOTWIN_ROOT to the checkout's top folder, the one that holds envs/"
        return Check("RoboTwin", "missing", f"ROBOTWIN_ROOT is {root}, which holds no envs/", fix, needed)
    return Check("RoboTwin", "ok", root, needed=needed)


def check_ros() -> Check:
    """A way to a robot: ROS 2, ROS 1, or a websocket to rosbridge."""
    modules = {"rclpy": "ROS 2", "rospy": "ROS 1", "roslibpy": "rosbridge", "websockets": "rosbridge by websocket"}
    found = [f"{module} ({what})" for module, what in modules.items() if importlib.util.find_spec(module)]
    if found:
        return Check("ROS", "ok", ", ".join(found))
    return Check("ROS", "missing", "no " + ", ".join(modules), "source your ROS set-up file, or pip install websockets")


def check_video() -> Check:
    """Whether videos can be written: one frame through the encoder."""
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
        subprocess.run([program, "-version"], capture_output=True, check=True, timeout=30)
    except (ImportError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        return Check(
            "video", "missing", f"no ffmpeg: {error}", "pip install 'imageio[ffmpeg]', or apt-get install ffmpeg"
        )
    return Check("video", "ok", program)


# ---------------------------------------------------------------- what a recipe names


def recipe_checks(recipe: Mapping[str, Any]) -> list[Check]:
    """The policy, the datasets and the optional packages that a recipe names."""
    policy, sft, algo = (recipe.get(section) or {} for section in ("policy", "sft", "algo"))
    found = []
    if path := policy.get("path"):
        found.append(check_policy(str(path)))
    own = str((recipe.get("collect") or {}).get("dataset", ""))
    learns = not algo or algo.get("bc_coef") or (recipe.get("train") or {}).get("control") == "continue_bc"
    datasets = sft.get("datasets") or []
    for one in datasets if isinstance(datasets, list | tuple) else [datasets]:
        dataset = str(one.get("path", "")) if isinstance(one, Mapping) else str(one)
        found.append(check_dataset(dataset, needed=bool(learns) and dataset != own))
    envs = simulators(recipe)
    if "maniskill" in envs:
        found.append(check_package("mani_skill", "mani_skill", "pip install '.[maniskill]'", needed=True))
    if "metaworld" in envs:
        fix = "pip install --no-deps metaworld==3.1.1 (docs/metaworld.md)"
        found.append(check_package("metaworld", "metaworld", fix, needed=True))
    if any((section.get("optim") or {}).get("name") == "adamw_8bit" for section in (algo, sft)):
        found.append(check_package("torchao", "torchao", "pip install '.[low_memory]'", needed=True))
    if policy.get("kind") == "lerobot" and "smolvla" in str(policy.get("type") or path).lower():
        found.append(check_package("num2words", "num2words", "pip install '.[flow]'", needed=True))
    return found


def check_policy(path: str) -> Check:
    """`policy.path`: a folder, a policy that ships, or a name on the hub, which is not asked."""
    from vla_rl.common.hub import parse_name
    from vla_rl.policies.base import pretrained_folder

    shipped = path.startswith("pretrained:")
    folder = pretrained_folder() / path.removeprefix("pretrained:") if shipped else Path(path).expanduser()
    if folder.is_dir():
        return Check("policy.path", "ok", path, needed=True)
    name = None if shipped else parse_name(path)
    if name is not None and not name.may_be_local:
        return Check("policy.path", "warning", f"no folder {path}", "as a name on the hub it is downloaded at its use")
    fix = "give a checkpoint's folder: policy.path=FOLDER; a recipe that starts from runs/NAME needs NAME's run first"
    return Check("policy.path", "missing", f"no folder {path}", fix, needed=True)


def check_dataset(path: str, needed: bool) -> Check:
    """One of `sft.datasets`; not needed where RL learns without it, or where the recipe itself collects it."""
    from vla_rl.common.hub import parse_name
    from vla_rl.data.hub import how_to_get, is_dataset

    if is_dataset(path):
        return Check("dataset", "ok", path, needed=needed)
    name = parse_name(path)
    if name is not None and not name.may_be_local:
        return Check("dataset", "warning", f"no folder {path}", "as a name on the hub it is downloaded at its use")
    return Check("dataset", "missing", f"no dataset {path}", how_to_get(path), needed)


# ---------------------------------------------------------------- machine


def check_disk(folder: Path) -> Check:
    """Free space where runs are written."""
    free = shutil.disk_usage(folder).free / 2**30
    found = f"{free:.0f} GiB free in {folder}"
    if free < MIN_DISK_GB:
        fix = f"free some, or choose another folder with --output: a run may need {MIN_DISK_GB:.0f} GiB"
        return Check("disk", "warning", found, fix)
    return Check("disk", "ok", found)


def check_ram() -> Check:
    """The machine's memory."""
    total = total_ram_gb()
    if total is None:
        return Check("RAM", "warning", "unknown on this system")
    if total < MIN_RAM_GB:
        fix = f"{MIN_RAM_GB:.0f} GiB are wanted: lower env.num_envs and env.num_workers"
        return Check("RAM", "warning", f"{total:.0f} GiB", fix)
    return Check("RAM", "ok", f"{total:.0f} GiB")


def total_ram_gb() -> float | None:
    """Physical memory in GiB; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (AttributeError, ValueError, OSError):
        return None


# ---------------------------------------------------------------- report


if __name__ == "__main__":
    if sys.argv[1:] != ["--gl"]:
        sys.exit("usage: python -m vla_rl.workflows.doctor --gl   (the full report is `vla-rl doctor`)")
    name, reason = find_gl()
    if name is None:
        sys.exit(reason)
    print(name)
