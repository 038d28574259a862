"""The functions of ours that run from `vla-rl train tabletop_grpo` to the first loss: what a reader of the core reads.

`python scripts/path_to_loss.py [KEY=VALUE]...` trains in the tabletop, in this process, stops at the first loss, and
prints how many lines the functions have that ran, docstrings included, and in how many files. The simulator and the
policy are left out with all that they call, and so is what only defines (imports, class bodies).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import sys
import tempfile
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("sim/", "vla_rl/policies/", "scripts/", "tests/", ".venv/")
LOSS = "policy_loss"  # The clipped surrogate of every algorithm.
SMALL = ("env.num_workers=0", "train.groups=3", "train.evaluate=never")
TOOL = sys.monitoring.PROFILER_ID


class FirstLoss(Exception):
    """The first loss is about to be computed."""


def inside(name: str) -> str | None:
    """Return the path of a file of ours, relative to the repository; None for another."""
    return Path(name).relative_to(ROOT).as_posix() if name.startswith(f"{ROOT}{os.sep}") else None


def watch(started: set[tuple[str, int]]) -> None:
    """Note (file, first line) of each function of ours when it first runs; stop at the first loss."""
    events = sys.monitoring.events

    def on_start(code: CodeType, offset: int) -> object:
        # A module's and a class's body have none; `def f[T]` runs a scope of its own when it is defined.
        is_function = bool(code.co_flags & inspect.CO_NEWLOCALS) and not code.co_name.startswith("<generic")
        file = inside(code.co_filename)
        if not is_function or file is None or file.startswith(LEFT_OUT):
            return sys.monitoring.DISABLE
        frame = sys._getframe(1).f_back
        while frame is not None:  # What a simulator or policy calls is a part of it.
            if (caller := inside(frame.f_code.co_filename)) is not None and caller.startswith(LEFT_OUT[:2]):
                return None
            frame = frame.f_back
        started.add((file, code.co_firstlineno))
        if code.co_name == LOSS:
            sys.monitoring.set_events(TOOL, 0)
            raise FirstLoss
        return sys.monitoring.DISABLE

    sys.monitoring.use_tool_id(TOOL, "path_to_loss")
    sys.monitoring.register_callback(TOOL, events.PY_START, on_start)
    sys.monitoring.set_events(TOOL, events.PY_START)


def lines_of(started: set[tuple[str, int]]) -> dict[str, int]:
    """File -> lines of its functions that ran; a function inside another counts once."""
    counts = {}
    for file in sorted({file for file, _ in started}):
        lines: set[int] = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
                if (file, first) in started:
                    lines |= set(range(first, (node.end_lineno or first) + 1))
        counts[file] = len(lines)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tabletop_grpo")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from vla_rl.cli import main as program

    started: set[tuple[str, int]] = set()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["vla-rl", "train", args.recipe, *SMALL, *args.overrides, "--output", f"{folder}/run"]
        watch(started)
        try:
            program()
        except FirstLoss:
            pass
        finally:
            sys.monitoring.set_events(TOOL, 0)
    counts = lines_of(started)
    for file, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"{count:5d}  {file}")
    print(f"{sum(counts.values()):5d}  lines in {len(counts)} files")


if __name__ == "__main__":
    main()
