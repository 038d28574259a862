"""A kit for a machine without internet: the files that commands need and that machine's Python has not, in one folder.

python scripts/gpu_kit.py --target target.txt --output kit "vla-rl eval libero_object_grpo env.num_envs=2"

Runs the commands here in an empty folder, in order, and watches which files they open (strace). Of packages that the
target lacks, the opened files are packed; of those that it has, none. `target.txt` is what `pip freeze` says there, or
names alone. Simulators' assets are packed as far as they were opened, and our own packages whole but for large files
that nothing opened. On the target: `source kit/env.sh`, then the same commands (docs/air_gapped.md).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_path("purelib")).resolve()
OURS = ("vla_rl", "world_model", "sim", "real_robot", "configs")
DATA = ("LIBERO_ASSETS",)  # Variables that name a folder of files that commands read.
ALWAYS = ("METADATA", "entry_points.txt")  # Of each packed package's own facts: by these it is known to be installed.
SMALL = 200_000  # Bytes up to which our own files are packed whether opened or not.
OPENED = re.compile(r"= \d+<(/[^>]+)>")
NAME = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:==\s*([^\s;]+))?")
ENV = """# Packed by scripts/gpu_kit.py: source it in a shell of the target, then type commands as ever.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here/vla-rl:$here/packages${PYTHONPATH:+:$PYTHONPATH}" PATH="$here/bin:$PATH" HF_HUB_OFFLINE=1
"""
PROGRAM = '#!/bin/sh\nexec python3 -m vla_rl "$@"\n'


def read_target(file: Path) -> dict[str, str]:
    """Name -> version of what the target has, from `pip freeze`; empty where only names are given.

    Raises:
        SystemExit: a line that names no package.
    """
    found = {}
    for number, text in enumerate(file.read_text().splitlines(), start=1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        if (match := NAME.match(line)) is None:
            raise SystemExit(f"{file}, line {number}: got {line!r}; expected NAME==VERSION, or a name alone")
        found[canonicalize_name(match[1])] = match[2] or ""
    return found


def trace(commands: Iterable[str]) -> set[Path]:
    """Run the commands in an empty folder, in order; return the files that they opened, links resolved.

    Raises:
        SystemExit: strace is missing, or a command failed.
    """
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed. Run: apt-get install strace")
    opened: set[Path] = set()
    with tempfile.TemporaryDirectory(prefix="kit-") as folder:
        log, work = Path(folder) / "opened", Path(folder) / "work"
        work.mkdir()
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        env["NUMBA_CACHE_DIR"] = f"{folder}/numba"  # Empty: it compiles, as it will there.
        watch = ["strace", "-f", "-qq", "-y", "-z", "--seccomp-bpf", "-e", "trace=open,openat", "-o", str(log)]
        for command in commands:
            print(f"running: {command}", flush=True)
            if subprocess.run([*watch, *shlex.split(command)], cwd=work, env=env, check=False).returncode:
                raise SystemExit(f"failed here, so it would there: {command}")
            with log.open(errors="replace") as lines:
                opened |= {Path(match[1]) for line in lines if (match := OPENED.search(line))}
        opened = {path for path in opened if not path.is_relative_to(folder)}
    return {source_of(path) for path in opened if path.is_file()}


def source_of(path: Path) -> Path:
    """Return the module that a .pyc was compiled from, where it is there; another file as it is."""
    is_compiled = path.suffix == ".pyc" and path.parent.name == "__pycache__"
    source = Path(importlib.util.source_from_cache(path)) if is_compiled else path
    return source if source.is_file() else path


def by_package(opened: set[Path]) -> dict[Path, importlib.metadata.Distribution]:
    """File -> the installed distribution that it belongs to, of the opened ones; without a package's own facts."""
    names = {str(path): path for path in opened if path.parent.suffix != ".dist-info"}
    return {
        names[name]: found
        for found in importlib.metadata.distributions(path=[str(SITE)])
        for file in found.files or ()
        if (name := f"{SITE}/{file}") in names
    }


def packages(opened: set[Path], target: Mapping[str, str]) -> tuple[dict[str, set[Path]], list[str]]:
    """Distribution -> its files to pack, of those that the target lacks; and a line for each version that differs."""
    needed, differs = defaultdict[str, set[Path]](set), list[str]()
    facts: dict[str, importlib.metadata.Distribution] = {}
    for path, found in by_package(opened).items():
        facts[name := canonicalize_name(found.metadata["Name"])] = found
        needed[name].add(path)
    for name, found in facts.items():
        if name in target:
            del needed[name]
            if target[name] not in ("", found.version):
                differs.append(f"{name}: {found.version} here, {target[name]} there")
        else:
            needed[name] |= {
                path
                for file in found.files or ()
                if file.name in ALWAYS and file.parent.suffix == ".dist-info"
                if (path := Path(str(file.locate())).resolve()).is_file()
            }
    return dict(needed), sorted(differs)


def own_files(opened: set[Path]) -> set[Path]:
    """Return our packages' files: all small ones, and those large ones that were opened."""
    files = {path for part in OURS for path in (ROOT / part).rglob("*") if path.is_file()}
    kept = {path for path in files if path in opened or path.stat().st_size <= SMALL}
    return {path for path in kept if "__pycache__" not in path.parts}


def data_folders() -> dict[str, Path]:
    """Variable -> the folder of data that it names here, if it does."""
    return {name: Path(os.environ[name]).resolve() for name in DATA if os.environ.get(name)}


def copy(files: Iterable[Path], root: Path, to: Path) -> int:
    """Copy files to where they lie below `root`; return their bytes."""
    total = 0
    for path in files:
        there = to / path.relative_to(root)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, there)
        total += path.stat().st_size
    return total


def left_behind(opened: set[Path], packed: set[Path]) -> list[str]:
    """Return what was opened and is neither packed nor Python's, a package's, a cache's, git's or the system's own."""
    own = (sys.prefix, sys.base_prefix, SITE, ROOT, Path.home() / ".cache", tempfile.gettempdir())
    system = [
        Path(root).resolve() for root in (*own, "/usr", "/lib", "/lib64", "/etc", "/proc", "/sys", "/dev", "/var")
    ]
    rest = (path for path in opened - packed if not any(path.is_relative_to(root) for root in system))
    rest = (path for path in rest if ".git" not in path.parts and path.name != ".gitconfig")
    return sorted(map(str, rest))


def pack(commands: list[str], target: Mapping[str, str], output: Path) -> None:
    """Trace the commands and write the kit; print what is in it, largest first."""
    opened = trace(commands)
    needed, differs = packages(opened, target)
    ours, data, packed, env = own_files(opened), data_folders(), set[Path](), ENV
    sizes = {name: copy(files, SITE, output / "packages") for name, files in needed.items()}
    sizes["vla-rl"] = copy(ours, ROOT, output / "vla-rl")
    for name, folder in data.items():
        files = {path for path in opened if path.is_relative_to(folder)}
        sizes[f"${name}"] = copy(files, folder, output / "data" / name)
        packed |= files
        for part in (part for part in folder.iterdir() if part.is_dir()):  # By these it is known to be the right one.
            (output / "data" / name / part.name).mkdir(parents=True, exist_ok=True)
        env += f'export {name}="$here/data/{name}"\n'
    program = output / "bin" / "vla-rl"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (output / "env.sh").write_text(env)
    left = left_behind(opened, packed)
    facts = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}", "commands": commands, "bytes": sizes}
    facts |= {"differs": differs, "left_behind": left}
    (output / "kit.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 2**20:8.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:8.2f} MiB  {output}, for Python {facts['python']}")
    for title, lines in (("another version there", differs), ("opened, not packed", left)):
        print(*(f"{title}: {line}" for line in lines), sep="\n", end="\n" if lines else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="+", help="what is to run there, each in quotes")
    parser.add_argument("--target", type=Path, required=True, help="a file with the packages that the target has")
    parser.add_argument(
        "--leave-out",
        nargs="*",
        default=[],
        help="packages that the target has by another name, or that the commands do without",
    )
    parser.add_argument("--output", type=Path, required=True, help="the kit's folder, which must not exist yet")
    args = parser.parse_args()
    if args.output.exists():
        raise SystemExit(f"--output: {args.output} exists; name another folder, or move it away")
    pack(
        args.commands, read_target(args.target) | {canonicalize_name(name): "" for name in args.leave_out}, args.output
    )


if __name__ == "__main__":
    main()
