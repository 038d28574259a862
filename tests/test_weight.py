"""No figure of the house is above its ceiling (scripts/weight.py), and the figures count what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from imports import arrows

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import weight  # noqa: E402


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    return weight.figures_of_files()


def test_no_figure_is_above_its_ceiling(figures: dict[str, int]) -> None:
    assert not weight.too_heavy(figures), "\n".join(weight.too_heavy(figures))


def test_a_figure_that_grows_by_one_is_too_heavy(figures: dict[str, int]) -> None:
    at_the_ceiling = {name: weight.LIMITS[name].ceiling or 0 for name in figures}
    assert not weight.too_heavy(at_the_ceiling)
    for name, most in at_the_ceiling.items():
        assert weight.too_heavy(at_the_ceiling | {name: most + 1}) == [f"{name}: {most + 1} > {most}"]


def test_each_form_of_import_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checking = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vla_rl.b\n"
    inside = "def f():\n    import torch\n    from vla_rl.a import x\n    def g():\n        from . import c\n"
    files = {
        "vla_rl/a/x.py": f"{checking}y: Any = 1\nz = y  # type: ignore\n",
        "vla_rl/b.py": inside,
        "vla_rl/c.py": 'worker = "vla_rl.a.x"\n',
        **{f"{package}/__init__.py": "" for package in weight.PACKAGES},
        "tests/golden/options.json": '{"A": {"x": 1, "y": 2}, "B": {"x": 1}}',
        "tests/golden/flags.json": '{"vla-rl": {}, "vla-rl a": {}, "vla-rl a b": {}, "vla-rl c": {}}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(weight, "ROOT", tmp_path)
    figures = weight.figures_of_files()
    expected = {
        "files": 7,
        "longest file": 5,
        "longest function": 5,
        "option entries": 3,
        "commands": 2,
        "two-way rooms of vla_rl": 1,
        "first floor of vla_rl": 4,
        "function-level imports": 3,
        "of them, of our own modules": 2,
        "circles of files": 1,  # a.x -> b -> c -> a.x: under TYPE_CHECKING, in a function, in a string.
        "files in them": 3,
        "Any and ignores": 2,
    }
    assert {name: figures[name] for name in expected} == expected
    assert len(arrows(tmp_path)) == len(arrows(tmp_path, annotations=True)) - 1
