"""Methods that are not shown to gain stand beside the core: nothing names them, and each can be deleted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from imports import PACKAGES, arrows, modules

from vla_rl.config import KINDS

ROOT = Path(__file__).resolve().parent.parent
METHODS = {name: path for name, path in modules(ROOT).items() if ".methods." in name}


def is_method(module: str) -> bool:
    return module.split(".")[1:2] == ["methods"]


def test_nothing_outside_imports_a_method() -> None:
    found = [
        arrow for arrow in arrows(ROOT, annotations=True) if is_method(arrow.target) and not is_method(arrow.source)
    ]
    assert not found, "\n".join(map(str, found))


def test_nothing_outside_names_a_method() -> None:
    """Its kind as a string of its own, which a branch for it would compare with."""
    core = {kind for section in KINDS.values() for kind, target in section.items() if ".methods." not in target}
    kinds = {path.stem for path in METHODS.values()} - core
    naming = re.compile("|".join(rf"""["']{kind}["']""" for kind in sorted(kinds)))
    others = {name: path for name, path in modules(ROOT).items() if name not in METHODS}
    found = {name: naming.findall(path.read_text(encoding="utf-8")) for name, path in others.items()}
    assert METHODS and not {name: named for name, named in found.items() if named}


CODE = """
import json, sys
sys.path.insert(0, ".")
import vla_rl
from vla_rl.config import KINDS, ConfigError, recipes_folder, resolve_kind
from vla_rl.recipe.recipe import load_recipe
failed = {}
for path in sorted(recipes_folder().glob("*.yaml")):
    try:
        load_recipe(path)
    except ConfigError as error:
        failed[path.stem] = str(error)
for section in KINDS:
    for kind in KINDS[section]:
        resolve_kind(section, kind)
print(json.dumps([vla_rl.__file__, failed, [(section, kind) for section in KINDS for kind in KINDS[section]]]))
"""


def test_without_methods_everything_else_works(tmp_path: Path) -> None:
    """All recipes but the methods' own can be read, and all other kinds are there."""
    for package in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("methods", "pretrained"))
    said = subprocess.run([sys.executable, "-c", CODE], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)
    where, failed, kinds = json.loads(said.stdout)
    assert Path(where).is_relative_to(tmp_path)
    gone = {(path.parent.name, path.stem) for path in METHODS.values()}
    assert kinds and not {(section, kind) for section, kind in kinds} & gone
    for name, error in failed.items():
        assert any(f"{section}.kind: got {kind!r}, allowed: " in error for section, kind in gone), (name, error)
