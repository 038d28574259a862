"""ROS 2's message packages that PyPI's wheels lack, control_msgs first, built beside rclpy from our definitions.

rosidl's own generators write the code, and the system's C compiler builds it: no root, no colcon, no CMake. Each
package is one folder in the environment's site-packages: its definitions, its Python modules, and three libraries that
find one another there. `vla-rl robot install` and `scripts/setup.sh dev` run this where rclpy is;
`python -m real_robot.transports.ros.ros2_messages` does the same.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from real_robot.transports.ros.definitions import ros2_packages
from real_robot.transports.ros.install import RosInstallError
from vla_rl.common.atomic import atomic_folder

C, WIRE, INSPECTION = "rosidl_generator_c", "rosidl_typesupport_fastrtps_c", "rosidl_typesupport_introspection_c"
TYPES, PYTHON = "rosidl_typesupport_c", "rosidl_generator_py"
GENERATORS = {  # class in the package's `cli`, and the type supports that it is told of
    C: ("GenerateC", None),
    WIRE: ("GenerateFastRTPSCTypesupport", None),
    INSPECTION: ("GenerateIntrospectionCTypesupport", None),
    TYPES: ("GenerateCTypesupport", [WIRE, INSPECTION]),
    PYTHON: ("GeneratePython", [TYPES]),
}


def install(site: Path | None = None, report: Callable[[str], None] = print) -> list[str]:
    """Build the packages of `ros2_packages` that are not there, or are ours of other definitions. Returns all names.

    Raises:
        RosInstallError: no rclpy or compiler here, or a package that does not build or load.
    """
    site = site or Path(sysconfig.get_path("purelib"))
    os.environ.setdefault("AMENT_PREFIX_PATH", sys.prefix)  # the generators, and what loads the packages, read it too
    missing = {name: files for name, files in ros2_packages().items() if not _is_there(site / name, files)}
    if missing:
        _check_tools()
        report(f"building {', '.join(missing)} for ROS 2 in {site} (half a minute)")
    for name, files in missing.items():
        with (
            tempfile.TemporaryDirectory(prefix="vla-rl-ros2-") as temporary,
            atomic_folder(site / name, what=f"message package {name}", replace=True) as partial,
        ):
            _generate(name, files, Path(temporary))
            _compile(name, Path(temporary), partial)
            _gather(name, Path(temporary), partial)
        _check_loads(name, files, site)
    return list(ros2_packages())


def _is_there(own: Path, files: dict[str, str]) -> bool:
    """Whether the package can be imported: somebody else's, or ours of these very definitions."""
    spec = importlib.util.find_spec(own.name)
    if spec is None or spec.origin is None or Path(spec.origin).parent != own:
        return spec is not None
    return all((own / file).exists() and (own / file).read_text() == text for file, text in files.items())


def _check_tools() -> None:
    if importlib.util.find_spec("rclpy") is None or importlib.util.find_spec("rosidl_adapter") is None:
        raise RosInstallError(f"ROS 2 is not installed for {sys.executable}: pip install '.[ros2]' (docs/ros.md)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    for what, is_there, package in (
        ("a C compiler (cc)", shutil.which("cc"), "gcc"),
        ("a C++ compiler (c++)", shutil.which("c++"), "g++"),
        (str(header), header.exists(), f"python{sys.version_info.major}.{sys.version_info.minor}-dev"),
    ):
        if not is_there:
            raise RosInstallError(f"{what} is not here, and ROS 2's messages are built with it: apt install {package}")


def _prefixes() -> list[Path]:
    """The folders that ROS 2 is installed in: those that were sourced, else the environment with the wheels."""
    return [Path(p) for p in os.environ["AMENT_PREFIX_PATH"].split(os.pathsep) if p]


def _generate(package: str, files: dict[str, str], folder: Path) -> None:
    """Write each generator's code into FOLDER/GENERATOR/PACKAGE."""
    shares = [str(prefix / "share") for prefix in _prefixes()]
    definitions, told = folder / "definitions" / package, io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            convert = importlib.import_module("rosidl_adapter").convert_to_idl
            for file, text in files.items():
                (definitions / file).parent.mkdir(parents=True, exist_ok=True)
                (definitions / file).write_text(text)
                convert(definitions, package, Path(file), definitions)
            idl = [f"{definitions}:{Path(file).with_suffix('.idl')}" for file in files]
            hashing = importlib.import_module("rosidl_generator_type_description.cli").HashTypeDescription("hash")
            hashes = [str(h) for h in hashing.generate_type_hashes(package, idl, shares, output_path=definitions)]
            for name, (kind, supports) in GENERATORS.items():
                options = {} if supports is None else {"typesupport_implementations": supports}
                generate = getattr(importlib.import_module(f"{name}.cli"), kind)(name, **options).generate
                # Kind by kind: rosidl looks descriptions up by name, and GripperCommand is a message and an action.
                for part in sorted({str(Path(file).parent) for file in files}) if name == C else ("",):
                    chosen = [i for i in idl if f":{part}" in i]
                    described = {"type_description_files": [h for h in hashes if f"/{part}/" in h]} if part else {}
                    generate(package, chosen, shares, output_path=folder / name / package, **described)
    except Exception as error:  # whatever rosidl's generators raise
        raise RosInstallError(f"{package}: rosidl's generators failed: {error}\n{told.getvalue()[-500:]}") from error


def _compile(package: str, folder: Path, into: Path) -> None:
    """Compile what the generators wrote, and link it into the package's libraries."""
    prefixes = _prefixes()
    found = [include for prefix in prefixes for include in (prefix / "include", *(prefix / "include").iterdir())]
    headers = [*(folder / name for name in GENERATORS), *found, sysconfig.get_path("include"), np.get_include()]
    options = ["-O1", "-fPIC", *(f"-I{header}" for header in headers)]

    def compiled(source: Path) -> Path:
        target = source.with_name(f"{source.name}.o")
        compiler = ["cc"] if source.suffix == ".c" else ["c++", "-std=c++17"]
        _run([*compiler, *options, "-c", str(source), "-o", str(target)], f"{package}: compiling {source.name}")
        return target

    def link(name: str, generators: tuple[str, ...], own: Iterable[str]) -> str:
        objects = [str(o) for g in generators for s in sources[g] for o in (objects_of[s],)]
        command = ["c++", "-shared", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN", "-o", str(into / name), *objects]
        _run([*command, "-Wl,--no-as-needed", *own, "-Wl,--as-needed", *libraries], f"{package}: linking {name}")
        return str(into / name)

    sources = {name: sorted((folder / name).rglob("*.c*")) for name in GENERATORS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        every = [source for group in sources.values() for source in group]
        objects_of = dict(zip(every, pool.map(compiled, every), strict=True))
    names = ["librosidl_*.so", "libfastcdr.so", "librcutils.so", *(f"lib*__{name}.so" for name in GENERATORS)]
    libraries = [str(lib) for prefix in prefixes for name in names for lib in (prefix / "lib").glob(name)]
    wire = link(f"lib{package}__{WIRE}.so", (C, WIRE), ())
    inspection = link(f"lib{package}__{INSPECTION}.so", (INSPECTION,), (wire,))
    link(f"{package}_s__{TYPES}.so", (TYPES, PYTHON), (wire, inspection))


def _gather(package: str, folder: Path, into: Path) -> None:
    """Put the definitions, with their types' hashes, and the Python modules into the package."""
    for written in (folder / "definitions" / package, folder / PYTHON / package):
        for file in [f for ending in ("msg", "action", "json", "py") for f in written.rglob(f"*.{ending}")]:
            (into / file.relative_to(written)).parent.mkdir(exist_ok=True)
            shutil.copy(file, into / file.relative_to(written))
    (into / "__init__.py").touch()


def _check_loads(package: str, files: dict[str, str], site: Path) -> None:
    """Load each type's support in a Python of its own, as rclpy does."""
    names = [(Path(file).parent.name, Path(file).stem) for file in files]
    code = "; ".join(
        f"from {package}.{kind} import {name}; {name}.__class__.__import_type_support__()" for kind, name in names
    )
    _run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"], f"{package}: loading it")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RosInstallError(f"{what} failed:\n  " + "\n  ".join(done.stderr.strip().splitlines()[-8:]))


if __name__ == "__main__":
    try:
        print(*install(report=lambda text: print(text, file=sys.stderr)))
    except RosInstallError as error:
        sys.exit(f"error: {error}")
