"""The arrows between the files (tests/imports.py), and the sizes that keep the code readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from imports import PACKAGES, Arrow, arrows, circles, going_up, names_of_others, nodes

ROOT = Path(__file__).resolve().parent.parent
# The sizes of files and functions, in lines.
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 70
ACROSS = "pretend_device"  # The tests that mirror no package: all of them, on a device that is not there.

PICKLES = ("pickle", "dill", "cloudpickle")

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


@pytest.fixture(scope="module")
def found() -> list[Arrow]:
    """The arrows between our own files."""
    return arrows(ROOT)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_no_arrow_goes_up(found: list[Arrow]) -> None:
    assert not going_up(found), "\n".join(map(str, going_up(found)))


def test_no_string_names_another_package(found: list[Arrow]) -> None:
    assert not names_of_others(found), "\n".join(map(str, names_of_others(found)))


def test_no_files_go_round_in_a_circle(found: list[Arrow]) -> None:
    assert not circles(found), "\n".join(" ".join(group) for group in circles(found))


def test_planted_faults_are_seen(tmp_path: Path) -> None:
    files = {
        "vla_rl/common/kinds.py": 'KINDS = {"toy": "sim.toy:ToyConfig"}\n',
        "vla_rl/core.py": "import vla_rl.common.kinds\n",
        "vla_rl/cli/app.py": "def run():\n    from vla_rl.workflows import jobs\n",
        "vla_rl/workflows/jobs.py": 'import importlib\nmodule = importlib.import_module("sim.toy")\n',
        "sim/toy.py": "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from sim.config import ToyConfig\n",
        "sim/config.py": "def make():\n    from sim import toy\n",
        "world_model/a.py": "from world_model.b import x\nimport sim.toy\n",
        "world_model/b.py": 'worker = "world_model.c"\n',
        "world_model/c.py": "def late():\n    from .a import y\n",
        "real_robot/up.py": "from vla_rl import core\nfrom vla_rl.workflows.jobs import z\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = arrows(tmp_path)
    assert sorted(map(str, going_up(found))) == [
        "real_robot.up:2 -> vla_rl.workflows.jobs (import)",
        "world_model.a:2 -> sim.toy (import)",
    ]
    assert list(map(str, names_of_others(found))) == ["vla_rl.workflows.jobs:2 -> sim.toy (string)"]
    assert circles(found) == [["world_model.a", "world_model.b", "world_model.c"]]


@pytest.mark.parametrize("module", ["vla_rl", "vla_rl.config", "vla_rl.types", "vla_rl.interfaces", "vla_rl.cli"])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    heavy = "('torch', 'mujoco', 'transformers', 'lerobot', 'libero', 'robosuite', 'matplotlib', 'pandas', 'wandb')"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_training_loop_fits_on_a_screen() -> None:
    assert len((ROOT / "vla_rl" / "training" / "train.py").read_text().splitlines()) <= 150


def test_files_stay_short() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*FILES, *TESTS]}
    assert not {relative(path): size for path, size in sizes.items() if size > MOST_LINES}


def test_functions_stay_short() -> None:
    too_long = []
    for path in FILES:
        for node, _ in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                size = node.end_lineno - node.lineno + 1
                if size > MOST_LINES_OF_A_FUNCTION:
                    too_long.append(f"{relative(path)}:{node.lineno} {node.name}: {size} lines")
    assert not too_long, "\n".join(too_long)


def test_each_file_says_its_job_first() -> None:
    def begins_with_code(path: Path) -> bool:
        lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
        return not next(lines, "").startswith('"""')

    assert not [relative(path) for path in [*FILES, *TESTS] if begins_with_code(path)]


def test_the_tests_mirror_the_packages() -> None:
    for path in TESTS:
        parts = path.relative_to(ROOT / "tests").parts
        if len(parts) > 1 and parts[0] != ACROSS:
            assert ROOT.joinpath(*parts[:-1]).is_dir(), f"{relative(path)} mirrors no package"


def unsafe_loads(some: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, what) of each node that could unpickle."""
    for node in some:
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            yield node.lineno, "imports from a pickle module"
        if isinstance(node, ast.Call):
            options = {k.arg: ast.unparse(k.value) for k in node.keywords}
            called = ast.unparse(node.func)
            if called in {f"{module}.{name}" for module in PICKLES for name in ("load", "loads", "Unpickler")}:
                yield node.lineno, "unpickles"
            if called == "torch.load" and options.get("weights_only") != "True":
                yield node.lineno, "torch.load without weights_only=True"
            if options.get("allow_pickle", "False") != "False":
                yield node.lineno, "allow_pickle"


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []  # pytest imports them by name alone.


def test_nothing_is_unpickled() -> None:
    found = [
        f"{relative(path)}:{line} {what}"
        for path in FILES
        for line, what in unsafe_loads(node for node, _ in nodes(path))
    ]
    assert not found, "\n".join(found)


def test_the_pickle_check_sees_each_form() -> None:
    source = "torch.load(f)\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=True)\npickle.loads(b)\n"
    some = ast.walk(ast.parse(source + "from dill import load\n"))
    assert sorted(line for line, _ in unsafe_loads(some)) == [1, 3, 4, 5]
