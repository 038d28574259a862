"""The weight of the house: each figure of the code, its ceiling, and where it is to go. Exits with 1 above a ceiling.

python scripts/weight.py            # what is read from the files alone: a test of the fast suite asks for the same
python scripts/weight.py --path     # also the way from the command to the first loss, which is run
python scripts/weight.py --tests    # also the tests by mark, which pytest collects

A ceiling is the figure's last value: who lowers a figure lowers its ceiling, and nobody raises one without saying why.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from imports import PACKAGES, Arrow, arrows, circles, modules, nodes  # noqa: E402

UNTYPED = re.compile(r": Any =|(type|pyright): ignore")


@dataclass(frozen=True)
class Limit:
    """What a figure may be at most now, and what it is to become; None where it is only said."""

    ceiling: int | None
    goal: int | None


LIMITS = {
    "lines": Limit(100_332, 82_000),
    "files": Limit(520, 520),
    "longest file": Limit(450, None),
    "longest function": Limit(70, None),
    "option entries": Limit(849, 850),
    "commands": Limit(39, 40),
    "two-way rooms of vla_rl": Limit(3, 4),
    "two-way rooms of sim": Limit(0, 2),
    "two-way rooms of world_model": Limit(0, 2),
    "two-way rooms of real_robot": Limit(0, 2),
    "first floor of vla_rl": Limit(18, 18),
    "first floor of sim": Limit(17, 18),
    "first floor of world_model": Limit(15, 18),
    "first floor of real_robot": Limit(17, 18),
    "function-level imports": Limit(140, 150),
    "of them, of our own modules": Limit(53, None),
    "circles of files": Limit(0, 0),
    "files in them": Limit(0, 0),
    "Any and ignores": Limit(11, 30),
    "lines to the loss": Limit(1_309, 1_100),
    "files to the loss": Limit(21, 18),
    "fast tests": Limit(None, None),
    "live tests": Limit(86, 75),
    "slow tests": Limit(None, None),
}


def figures_of_files() -> dict[str, int]:
    """The figures that the files alone give."""
    files = modules(ROOT).values()
    texts = [path.read_text(encoding="utf-8").splitlines() for path in files]
    every = arrows(ROOT, annotations=True)
    every_node = [placed for path in files for placed in nodes(path)]
    functions = [n for n, _ in every_node if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = [n for n, form in every_node if form == "lazy" and isinstance(n, ast.Import | ast.ImportFrom)]
    golden = {name: json.loads((ROOT / f"tests/golden/{name}.json").read_text()) for name in ("options", "flags")}
    commands = golden["flags"]
    return {
        "lines": sum(map(len, texts)),
        "files": len(texts),
        "longest file": max(map(len, texts)),
        "longest function": max((n.end_lineno or n.lineno) - n.lineno + 1 for n in functions),
        "option entries": sum(map(len, golden["options"].values())),
        "commands": sum(not any(other.startswith(f"{name} ") for other in commands) for name in commands),
        **{f"two-way rooms of {package}": len(two_way_rooms(package, every)) for package in PACKAGES},
        **{f"first floor of {p}": sum(e.name != "__pycache__" for e in (ROOT / p).iterdir()) for p in PACKAGES},
        "function-level imports": len(lazy),
        "of them, of our own modules": sum(is_ours(node) for node in lazy),
        "circles of files": len(circles(every)),
        "files in them": sum(map(len, circles(every))),
        "Any and ignores": sum(bool(UNTYPED.search(line)) for lines in texts for line in lines),
    }


def is_ours(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return bool(getattr(node, "level", 0)) or any(name.partition(".")[0] in PACKAGES for name in names)


def two_way_rooms(package: str, every: list[Arrow]) -> set[tuple[str, str]]:
    """The pairs of rooms of a package (`package.room`: a folder or file of its first floor) that import each other."""

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    pairs = {(room(arrow.source), room(arrow.target)) for arrow in every if arrow.form != "string"}
    return {(a, b) for a, b in pairs if a < b and (b, a) in pairs and a.startswith(package) and b.startswith(package)}


def figures_of_the_path() -> dict[str, int]:
    """Lines and files of ours that run from `vla-rl train tabletop_grpo` to the first loss."""
    command = [sys.executable, str(ROOT / "scripts" / "path_to_loss.py")]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"(\d+)  lines in (\d+) files", said)
    assert found, f"path_to_loss.py prints no sum: {said[-200:]}"
    return {"lines to the loss": int(found[1]), "files to the loss": int(found[2])}


class Marks:
    """A plugin of pytest that counts the tests that each part of the suite has."""

    def __init__(self) -> None:
        self.counts = {"fast tests": 0, "live tests": 0, "slow tests": 0}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            marks = {mark.name for mark in item.iter_markers()}
            if not marks & {"gpu", "network"}:
                part = "slow" if "slow" in marks else "live" if "live" in marks else "fast"
                self.counts[f"{part} tests"] += 1


def figures_of_the_tests() -> dict[str, int]:
    marks, said = Marks(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(
            ["--collect-only", "-q", "-m", "", f"--rootdir={ROOT}", str(ROOT / "tests")], plugins=[marks]
        )
    assert status == 0, f"pytest cannot collect the tests: {said.getvalue()[-2000:]}"
    return marks.counts


def too_heavy(figures: dict[str, int]) -> list[str]:
    """A line for each figure above its ceiling."""
    limits = {name: LIMITS[name].ceiling for name in figures}
    return [f"{n}: {figures[n]} > {most}" for n, most in limits.items() if most is not None and figures[n] > most]


def table(figures: dict[str, int]) -> Iterator[str]:
    yield f"{'figure':30s}{'now':>9s}{'ceiling':>9s}{'goal':>9s}"
    for name, now in figures.items():
        ceiling, goal = ("" if n is None else f"{n:,}" for n in (LIMITS[name].ceiling, LIMITS[name].goal))
        yield f"{name:30s}{now:9,}{ceiling:>9s}{goal:>9s}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", action="store_true", help="run path_to_loss.py")
    parser.add_argument("--tests", action="store_true", help="collect the tests")
    args = parser.parse_args()
    figures = figures_of_files()
    if args.path:
        figures |= figures_of_the_path()
    if args.tests:
        figures |= figures_of_the_tests()
    print(*table(figures), *(f"too heavy: {line}" for line in too_heavy(figures)), sep="\n")
    return 1 if too_heavy(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
