"""The arrows between our files, from the syntax trees: module-level and lazy imports, modules named in strings.

`python tests/imports.py` prints every circle of files and every arrow that goes up, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("vla_rl", "sim", "world_model", "real_robot")
TOP_ROOMS = ("vla_rl.workflows", "vla_rl.cli", "vla_rl.__main__")
# The one place that names other packages in strings: what a recipe's `kind` stands for.
RESOLUTION = "vla_rl.common.kinds"


@dataclass(frozen=True)
class Arrow:
    """One file that names another.

    Attributes:
        source, target: full module names. line: where it stands.
        form: "import", "lazy" (inside a function), "annotation" (under TYPE_CHECKING) or "string".
    """

    source: str
    target: str
    line: int
    form: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line} -> {self.target} ({self.form})"


def modules(root: Path) -> dict[str, Path]:
    """Full module name -> file, of all our packages below a folder; a package is named by its folder."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all that look at it."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> list[tuple[ast.AST, str]]:
    """The nodes of a file's syntax tree, each with the form of an import that stands there."""
    found: list[tuple[ast.AST, str]] = [(tree(path), "import")]
    for node, form in found:  # It grows: a node's children follow behind.
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            below = "annotation"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and form == "import":
            below = "lazy"
        else:
            below = form
        found += [(child, below) for child in ast.iter_child_nodes(node)]
    return found


def arrows(root: Path, annotations: bool = False) -> list[Arrow]:
    """Every arrow between two of our files; imports under TYPE_CHECKING, for annotations alone, if asked for."""
    known = modules(root)
    found = [arrow for name, path in known.items() for arrow in _of_file(name, path, known) if arrow.target != name]
    return [arrow for arrow in found if annotations or arrow.form != "annotation"]


def _of_file(name: str, path: Path, known: dict[str, Path]) -> Iterator[Arrow]:
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node, place in nodes(path):
        form = place
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = folder.split(".")[: len(folder.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            targets = [n if n in known else module for n in names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and name != RESOLUTION:
            form, targets = "string", [node.value.partition(":")[0]]
            targets = [t for t in targets if "." in t or ":" in node.value]
        else:
            continue
        yield from (Arrow(name, target, node.lineno, form) for target in targets if target in known)


def floor(module: str) -> int:
    """0: the core of vla_rl; 1: simulators, world model, robot side; 2: workflows; 3: the command line; 4: start."""
    for number, room in enumerate(TOP_ROOMS, start=2):
        if module == room or module.startswith(f"{room}."):
            return number
    return 0 if module.split(".", maxsplit=1)[0] == "vla_rl" else 1


def going_up(found: list[Arrow]) -> list[Arrow]:
    """The arrows to a higher floor, and those between packages of the middle floor, which are strangers."""
    return [
        arrow
        for arrow in found
        if floor(arrow.target) > floor(arrow.source)
        or (floor(arrow.source) == floor(arrow.target) == 1 and _package(arrow.source) != _package(arrow.target))
    ]


def names_of_others(found: list[Arrow]) -> list[Arrow]:
    """The strings that name a file of another package, or of a top room: an import that hides."""

    def home(module: str) -> str:
        return next((room for room in TOP_ROOMS if f"{module}.".startswith(f"{room}.")), _package(module))

    return [arrow for arrow in found if arrow.form == "string" and home(arrow.source) != home(arrow.target)]


def _package(module: str) -> str:
    return module.partition(".")[0]


def circles(found: list[Arrow]) -> list[list[str]]:
    """Groups of files each of which reaches all others (strongly connected components of two files or more)."""
    graph: dict[str, list[str]] = {}
    for arrow in found:
        graph.setdefault(arrow.source, []).append(arrow.target)
        graph.setdefault(arrow.target, [])
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        _visit(start, graph, seen, order)
    back: dict[str, list[str]] = {name: [] for name in graph}
    for source, targets in graph.items():
        for target in targets:
            back[target].append(source)
    groups, taken = [], set()
    for start in reversed(order):
        group: list[str] = []
        _visit(start, back, taken, group)
        if len(group) > 1:
            groups.append(sorted(group))
    return sorted(groups)


def _visit(start: str, graph: dict[str, list[str]], seen: set[str], finished: list[str]) -> None:
    """Depth first from `start`; names in the order in which they are finished."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(graph[start]))]
    while stack:
        name, rest = stack[-1]
        following = next((target for target in rest if target not in seen), None)
        if following is None:
            stack.pop()
            finished.append(name)
        else:
            seen.add(following)
            stack.append((following, iter(graph[following])))


def main() -> int:
    found = arrows(Path(__file__).resolve().parent.parent)
    faults = [f"up: {arrow}" for arrow in going_up(found)]
    faults += [f"in a string: {arrow}" for arrow in names_of_others(found)]
    faults += [f"circle: {' '.join(group)}" for group in circles(found)]
    print(*faults, f"{len(found)} arrows between files, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
