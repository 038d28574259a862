"""What is installed, from the wheel that is built here: recipes inside the package, and packages of the user's own.

The programs run without the clone on their path: `-S` leaves out what an editable install put there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")
LIBRARIES = sysconfig.get_path("purelib")
SHOWN = ("config", "tabletop_grpo")
SCRIPT = "import vla_rl\nprint(vla_rl.load_recipe('tabletop_grpo').env.kind)\n"

pytest.importorskip("setuptools", minversion="77", reason="a wheel is built by setuptools")


def run(folder: Path, path: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with these folders and the libraries on its path."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), LIBRARIES]), "COLUMNS": "200"}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(clone: Path, form: str, folder: Path) -> Path:
    """What is installed of a clone, as `form` of wheel: its files, and the wheel beside them."""
    program = f"from setuptools import build_meta; build_meta.build_{form}({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    return folder / "installed"


@pytest.fixture(scope="module")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(clone, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script that an installation writes for `vla-rl`, in a folder of its own."""
    file = tmp_path_factory.mktemp("bin") / "vla-rl"
    file.write_text("import sys\nfrom vla_rl.cli import main\nsys.exit(main())\n")
    return str(file)


def test_the_wheel_holds_the_four_packages_and_in_one_the_recipes(installed: Path) -> None:
    assert sorted(path.name for path in installed.iterdir()) == sorted([*PACKAGES, "vla_rl-0.1.0.dist-info"])
    recipes = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert {path.name for path in (installed / "vla_rl" / "configs").iterdir()} == recipes != set()
    skipped = {".pyc", ".gitignore", "pyproject.toml"}  # The last builds another distribution from the same files.
    missing = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and not skipped & {path.suffix, path.name}
        and not (installed / path.relative_to(ROOT)).is_file()
    ]
    assert not missing


def test_a_configs_folder_of_the_users_hides_no_recipe(installed: Path, console: str, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").write_text("raise SystemExit('the user\\'s own')")
    (tmp_path / "configs" / "tabletop_grpo.yaml").write_text("not: ours")
    listed = run(tmp_path, [tmp_path, installed], console, "list", "recipes")
    assert listed.returncode == 0, listed.stderr
    assert {line.split()[0] for line in listed.stdout.splitlines()} == {p.stem for p in (ROOT / "configs").glob("*")}
    assert run(tmp_path, [tmp_path, installed], console, *SHOWN).returncode == 0
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run(tmp_path, [installed], "script.py").stdout.strip() == "tabletop"


def as_file(folder: Path, name: str) -> Path:
    (folder / f"{name}.py").write_text("raise SystemExit('the user\\'s own')")
    return folder / f"{name}.py"


def as_folder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise SystemExit('the user\\'s own')")
    return folder / name


@pytest.mark.parametrize(
    ("name", "write", "ways"), [("sim", as_file, ("console", "script")), ("world_model", as_folder, ("module",))]
)
def test_what_hides_a_package_is_named(
    installed: Path, console: str, tmp_path: Path, name: str, write: Callable[[Path, str], Path], ways: tuple[str, ...]
) -> None:
    hiding = write(tmp_path, name)
    (tmp_path / "script.py").write_text(SCRIPT)
    expected = f"{hiding}: Python finds this as '{name}', in place of vla-rl's own package {installed / name}. Rename"
    started = {
        "console": ([tmp_path, installed], [console, *SHOWN]),
        "module": ([installed], ["-m", "vla_rl", *SHOWN]),
        "script": ([installed], ["script.py"]),
    }
    for way in ways:
        found = run(tmp_path, started[way][0], *started[way][1])
        assert found.returncode != 0 and expected in found.stderr, (way, found.stderr)
        assert way == "script" or (found.stderr.count("\n") == 1 and found.returncode == 2)
    fine = run(tmp_path, [installed], console, *SHOWN)  # The current folder comes last, and so hides nothing.
    assert fine.returncode == 0 and "kind: tabletop" in fine.stdout, fine.stderr


@pytest.mark.slow
def test_a_clone_installed_for_editing_works_beside_them(clone: Path, console: str, tmp_path: Path) -> None:
    """Its packages are found by a finder that Python asks after every folder of its path."""
    wheel, work = tmp_path / "wheel", tmp_path / "work"
    wheel.mkdir()
    work.mkdir()
    editable = build(clone, "editable", wheel)
    hiding = as_folder(work, "sim")
    as_folder(work, "configs")
    program = tmp_path / "program.py"
    program.write_text(f"import site\nsite.addsitedir({str(editable)!r})\nexec(open({console!r}).read())\n")
    found = run(work, [editable], str(program), *SHOWN)
    assert found.returncode == 0 and "kind: tabletop" in found.stdout, found.stderr
    hidden = run(work, [editable, work], str(program), *SHOWN)
    assert hidden.returncode == 2 and f"error: {hiding}: " in hidden.stderr
    (work / "sim" / "__init__.py").unlink()  # A folder without it comes after every package.
    found = run(work, [editable, work], str(program), *SHOWN)
    assert found.returncode == 0 and "kind: tabletop" in found.stdout, found.stderr


def test_the_version(installed: Path, console: str, tmp_path: Path) -> None:
    for command in ([console, "--version"], ["-m", "vla_rl", "--version"]):
        assert run(tmp_path, [installed], *command).stdout == "vla-rl 0.1.0\n"
