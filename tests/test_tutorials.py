"""The tutorials: short, with pictures, and each command works as it is typed, from an installed wheel, in order."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from own_recordings import aloha
from processes import Child, until
from test_own_robot import aloha_contract
from test_wheel import LIBRARIES, clone, console, installed

from vla_rl.data.source import LeRobotSource

__all__ = ["clone", "console", "installed"]  # Fixtures.

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES, ROBOT = sorted(DOCS.glob("tutorial_*.md")), DOCS / "your_robot.md"
NEEDS = {"tutorial_libero": "LIBERO_ASSETS"}  # Of what a page shows, what no package brings.


def commands(page: Path) -> list[str]:
    """The lines of a page's code blocks that call the program."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("vla-rl ")]


@pytest.mark.parametrize("page", [*PAGES, ROBOT], ids=lambda page: page.stem)
def test_a_tutorial_is_short_has_pictures_and_leads_on(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    assert commands(page) and "## Next" in text and "](pictures/" in text


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


# So that a policy is there in a minute; nor does a robot's stop for a machine that is busy.
SMALL = [
    "policy.image_size=32",
    "policy.action_bins=64",
    "sft.batch_size=8",
    "sft.steps=4",
    "sft.validation_fraction=0.4",
]
PATIENT = {"silence": 120.0}
READY = {"serve": "next, in another terminal: vla-rl deploy", "--dry-run": "Enter", "--console": "console: http"}


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.timeout(3600)
def test_your_robot_as_typed(installed: Path, console: str, tmp_path: Path) -> None:
    """From a lab's recordings to two simulated arms; ports 8000 and 8080 must be free."""
    aloha(tmp_path / "aloha_recordings", episodes=5)
    path = os.pathsep.join([str(installed), LIBRARIES, str(DOCS.parent / "tests" / "real_robot")])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    last: dict[str, str] = {}
    with ExitStack() as stack:
        for number, command in enumerate(commands(ROBOT)):
            words = shlex.split(command, comments=True)[1:]
            typed = [sys.executable, "-S", console, *words, *(SMALL if words[0] == "sft" else [])]
            child = Child(typed, tmp_path / f"{number}.log", env, tmp_path)
            stack.callback(child.kill)
            if ready := next((text for word, text in READY.items() if word in words), None):
                until(lambda child=child, ready=ready: child.says(ready), command, 400)
            if ready and words[0] == "deploy":
                child.signal(signal.SIGINT)
            if words[0] != "serve":
                assert child.process.wait(900) == 0, f"{command}\n{child.output()[-3000:]}"
            last[" ".join(words)] = child.output().splitlines()[-1]
            if words[0] == "import":
                data = LeRobotSource(tmp_path / "datasets" / "robot")
                contract = aloha_contract(tmp_path / "trace.jsonl", data.action_names, [*data.cameras]) | PATIENT
                (tmp_path / "robot.yaml").write_text(yaml.safe_dump(contract))
    assert all(": vla-rl " in line for line in last.values()), last
