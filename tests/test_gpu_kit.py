"""scripts/gpu_kit.py: what commands open is packed, and a bare Python with the target's packages runs them with it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "gpu_kit.py"
COMMAND = "vla-rl config tabletop_grpo"
LACKED = {"pydantic", "pydantic-core", "pyyaml"}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)


def packed(target: Path, output: Path, command: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, SCRIPT, "--target", target, "--output", output, command)


def there() -> dict[str, importlib.metadata.Distribution]:
    """Name -> each package that the target has: all that are here but `LACKED` and ours."""
    found = {canonicalize_name(d.metadata["Name"]): d for d in importlib.metadata.distributions()}
    return {name: found[name] for name in sorted(found.keys() - LACKED - {"vla-rl"})}


def bare_python(folder: Path) -> dict[str, str]:
    """An environment whose `python3` has the standard library, and links to the target's packages, alone."""
    packages, programs = folder / "target", folder / "programs"
    packages.mkdir()
    programs.mkdir()
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (programs / "python3").symlink_to(python)
    for found in there().values():
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return {"PATH": f"{programs}:/usr/bin:/bin", "PYTHONPATH": str(packages), "HOME": os.environ["HOME"]}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace; apt-get install strace")
def test_a_bare_python_runs_a_command_with_the_kit_and_not_without(tmp_path: Path) -> None:
    target, kit, moved = tmp_path / "target.txt", tmp_path / "kit", tmp_path / "moved"
    target.write_text("# pip freeze\n" + "\n".join(f"{name}=={found.version}" for name, found in there().items()))
    assert (made := packed(target, kit, COMMAND)).returncode == 0, made.stderr
    facts = json.loads((kit / "kit.json").read_text())
    assert set(facts["bytes"]) >= {*LACKED, "vla-rl"} and "torch" not in facts["bytes"] and not facts["differs"]
    assert not list((kit / "vla-rl").rglob("*.safetensors")), "no shipped weights: nothing opened them"

    kit.rename(moved)
    bare = bare_python(tmp_path)
    assert "No module named 'pydantic'" in run("python3", "-c", "import pydantic", env=bare).stderr
    ran = run("bash", "-c", f"source {moved}/env.sh && {COMMAND}", env=bare, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == run(sys.executable, "-m", "vla_rl", *COMMAND.split()[1:]).stdout


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    target, kit = tmp_path / "target.txt", tmp_path / "kit"
    target.write_text("torch==2.11.0\n-e git+https://example.org\n")
    assert "line 2: got '-e git+https://example.org'" in packed(target, kit, "true").stderr
    target.write_text("torch\n")
    if shutil.which("strace"):
        assert "failed here, so it would there: false" in packed(target, kit, "false").stderr and not kit.exists()
    assert f"{tmp_path} exists" in packed(target, tmp_path, "true").stderr
