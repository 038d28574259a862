"""The arrows between the packages, read from the syntax trees; and the sizes that keep the core readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")
# What the other packages may use of vla_rl: the contracts, and leaf helpers that themselves import nothing else.
CONTRACTS = {"vla_rl.types", "vla_rl.interfaces", "vla_rl.config"}
LEAF_HELPERS = {
    f"vla_rl.{name}"
    for name in ("timing", "atomic", "progress", "statistics", "checkpoint", "sharding", "video", "precision")
}
DATASETS = "vla_rl.data"  # Recorded episodes, which every package reads or writes.

PICKLES = ("pickle", "dill", "cloudpickle")

FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of each import in a file; `from a import b` gives a.b where that is a module of ours."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), relative(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join([*parts[: -node.level], *([node.module] if node.module else [])])
            module = module if node.level else (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}" if is_module(f"{module}.{alias.name}") else module


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def violations(path: Path) -> list[str]:
    """Imports of a file that go against the arrows."""
    package = path.relative_to(ROOT).parts[0]
    found = []
    for line, name in imported(path):
        top = name.split(".")[0]
        if top not in PACKAGES or top == package:
            continue
        allowed = name in CONTRACTS | LEAF_HELPERS or name.startswith(f"{DATASETS}.")
        if package == "vla_rl" or top != "vla_rl" or not allowed:
            found.append(f"{relative(path)}:{line} imports {name}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    found = [text for path in FILES if path.relative_to(ROOT).parts[0] == package for text in violations(path)]
    assert not found, "\n".join(found)


def test_the_check_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vla_rl", "sim", "world_model"):
        (tmp_path / name).mkdir()
    (tmp_path / "vla_rl" / "train.py").touch()
    source = tmp_path / "sim" / "bad.py"
    source.write_text(
        "import vla_rl.training.train\nfrom vla_rl import train\nfrom vla_rl.types import Split\n"
        "def f():\n    from world_model import x\n    import vla_rl.config\nfrom .other import y\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert violations(source) == [
        "sim/bad.py:1 imports vla_rl.train",
        "sim/bad.py:2 imports vla_rl.train",
        "sim/bad.py:5 imports world_model",
    ]


def test_leaf_helpers_are_leaves() -> None:
    for name in LEAF_HELPERS:
        path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        ours = [module for _, module in imported(path) if module.split(".")[0] in PACKAGES]
        assert set(ours) <= CONTRACTS | LEAF_HELPERS, f"{name} is no leaf: it imports {ours}"


@pytest.mark.parametrize("module", ["vla_rl", "vla_rl.config", "vla_rl.types", "vla_rl.interfaces", "vla_rl.cli"])
def test_light_modules_import_nothing_heavy(module: str) -> None:
    heavy = "('torch', 'mujoco', 'transformers', 'lerobot', 'libero', 'robosuite', 'matplotlib', 'pandas', 'wandb')"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_training_loop_fits_on_a_screen() -> None:
    assert len((ROOT / "vla_rl" / "train.py").read_text().splitlines()) <= 150


def test_files_stay_short() -> None:
    sizes = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*FILES, *TESTS]}
    too_long = {name: size for name, size in sizes.items() if size >= 500}
    assert not too_long


def test_functions_stay_short() -> None:
    too_long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                size = node.end_lineno - node.lineno + 1
                if size >= 80:
                    too_long.append(f"{relative(path)}:{node.lineno} {node.name}: {size} lines")
    assert not too_long, "\n".join(too_long)


def test_each_file_says_its_job_first() -> None:
    silent = [relative(p) for p in [*FILES, *TESTS] if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert not silent


def test_the_tests_mirror_the_packages() -> None:
    for path in TESTS:
        parts = path.relative_to(ROOT / "tests").parts
        if len(parts) > 1:
            assert ROOT.joinpath(*parts[:-1]).is_dir(), f"{relative(path)} mirrors no package"


def unsafe_loads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of each place that could unpickle."""
    for node in ast.walk(tree):
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


def test_nothing_is_unpickled() -> None:
    found = [
        f"{relative(path)}:{line} {what}"
        for path in FILES
        for line, what in unsafe_loads(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_the_pickle_check_sees_each_form() -> None:
    source = "torch.load(f)\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=True)\npickle.loads(b)\n"
    assert sorted(line for line, _ in unsafe_loads(ast.parse(source + "from dill import load\n"))) == [1, 3, 4, 5]
