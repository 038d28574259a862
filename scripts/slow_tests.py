"""Runs the slow tests whose file, or a module that it imports, changed since they last passed.

`tests/slow_passed.json` has, for each test file, a digest of itself and of what it imports, as of its last pass.
Commit it with what was tested. `python scripts/slow_tests.py --list` says what would run. A file of which every test
is skipped counts as not run.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED = ROOT / "tests" / "slow_passed.json"
OURS = ("vla_rl", "sim", "world_model", "real_robot")
SLOW = "slow and not gpu and not network"
MARKS_SLOW = re.compile(r"mark\.slow|on_both_graphs|slow_but_for|variants\(")
FAILED, NOTHING_RAN = 1, 5  # pytest's exit status.


def slow_files() -> list[Path]:
    """The test files that mark a test slow, or let a helper do it."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if MARKS_SLOW.search(file.read_text("utf-8"))]


def imported(file: Path, helpers: dict[str, Path]) -> set[Path]:
    """Files of ours that a test file imports, wherever in it the import stands, and those that its helpers import."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        for name in _names(ast.parse(waiting.pop().read_text("utf-8"))):
            inside = ROOT.joinpath(*name.split("."))
            paths = [inside.with_suffix(".py"), inside / "__init__.py"] if name.split(".")[0] in OURS else []
            paths += [helpers[name]] if name in helpers else []
            for path in (path for path in paths if path.is_file() and path not in found):
                found.add(path)
                waiting += [path] if path in helpers.values() else []
    return found


def _names(tree: ast.AST) -> set[str]:
    """Modules that are imported, and for `from a import b` a.b too, which may be one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def digest(file: Path, helpers: dict[str, Path]) -> str:
    """Of a test file and of what it imports."""
    whole = hashlib.sha256()
    for path in sorted({file, *imported(file, helpers)}):
        whole.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def run(file: Path, is_live: bool) -> tuple[bool, bool, str]:
    """Run a file's slow tests; live ones that fail once more, as `make test` does.

    Returns:
        Whether none failed, whether one passed, and pytest's output.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", SLOW, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if is_live and done.returncode == FAILED:
        print(done.stdout + done.stderr, "once more, what failed:", sep="\n", flush=True)
        command += ["--last-failed", "--last-failed-no-failures", "none"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    is_good = done.returncode in (0, NOTHING_RAN)
    return is_good, is_good and re.search(r"\b\d+ passed", done.stdout) is not None, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="Only say which files would run.")
    parser.add_argument("--known", action="store_true", help="Only files that have passed before; the others are told.")
    parser.add_argument("--jobs", type=int, default=2, help="Files side by side; live ones come last, one by one.")
    parser.add_argument("--minutes", type=float, default=60.0, help="Begin no further file after so long.")
    args = parser.parse_args()
    helpers = {path.stem: path for path in (ROOT / "tests").rglob("*.py") if not path.stem.startswith("test_")}
    passed = json.loads(PASSED.read_text("utf-8")) if PASSED.is_file() else {}
    digests = {file.relative_to(ROOT).as_posix(): digest(file, helpers) for file in slow_files()}
    due = [name for name in digests if passed.get(name) != digests[name]]
    print(f"{len(due)} of {len(digests)} files with slow tests changed, or import what changed, since they passed")
    if args.known and (unknown := [name for name in due if name not in passed]):
        print(f"{len(unknown)} of them have not been seen to pass and are left out: {', '.join(unknown)}")
        due = [name for name in due if name in passed]
    if args.list:
        print(*due, sep="\n")
        return 0
    end, failed = time.monotonic() + 60 * args.minutes, []

    def one(name: str) -> None:
        if time.monotonic() > end:
            print(f"not run, {args.minutes:g} minutes are over: {name}", flush=True)
            return
        is_good, has_passed, output = run(ROOT / name, name in live)
        print(f"{name}: {output.strip().splitlines()[-1] if output.strip() else 'no output'}", flush=True)
        if not is_good:
            failed.append(name)
            print(output, flush=True)
        if has_passed:
            passed[name] = digests[name]

    live = [name for name in due if "mark.live" in (ROOT / name).read_text("utf-8")]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, [name for name in due if name not in live]))
    for name in live:  # Each has the machine to itself.
        one(name)
    kept = {name: passed[name] for name in sorted(passed.keys() & digests.keys())}
    PASSED.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(*(f"failed: {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
