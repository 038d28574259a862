"""The tutorials: short, with pictures, and each command works as it is typed, from an installed wheel, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_wheel import LIBRARIES, clone, console, installed

__all__ = ["clone", "console", "installed"]  # Fixtures.

PAGES = sorted((Path(__file__).resolve().parent.parent / "docs").glob("tutorial_*.md"))
NEEDS = {"tutorial_libero": "LIBERO_ASSETS"}  # Of what a page shows, what no package brings.


def commands(page: Path) -> list[str]:
    """The lines of a page's code blocks that call the program."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("vla-rl ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short_and_leads_on(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    assert commands(page) and "## Next" in text


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_tutorial_works_as_typed(page: Path, installed: Path, console: str, tmp_path: Path) -> None:
    if (needed := NEEDS.get(page.stem)) and needed not in os.environ:
        pytest.skip(f"{needed} is not set")
    path = os.pathsep.join([str(installed), LIBRARIES])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    for command in commands(page):
        typed = [sys.executable, "-S", console, *shlex.split(command, comments=True)[1:]]
        with (tmp_path / "log.txt").open("w") as log:
            status = subprocess.run(typed, cwd=tmp_path, env=env, stdout=log, stderr=log, check=False).returncode
        assert status == 0, f"{command}\n{(tmp_path / 'log.txt').read_text()[-3000:]}"
