"""Evaluations of every form, in processes of their own: Ctrl-C, the command that it names, SIGKILL, and that again."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from processes import Child, until
from tiny_run import save_policy

from sim.dummy import DummyConfig
from vla_rl.evaluation.results import Evaluation

PATH = [str(Path(__file__).parent), *(part for part in sys.path if part)]
RECIPE = (
    "run: eval\nname: tiny\nenv: {kind: 'test_stopped_evaluations:VariedConfig', num_envs: 2, num_workers: 0}\n"
    "policy: {kind: openvla}\neval: {episodes_per_task: 12, videos: 0}\nlog: {tensorboard: false}\n"
)
FORMS = {
    "eval": "eval tiny.yaml policy.path=a -o {out}",
    "suites": "eval tiny.yaml policy.path=a --suites all -o {out}",
    "perturb": "eval tiny.yaml policy.path=a --perturb far -o {out}",
    "compare": "compare a b --recipe tiny.yaml compare.max_pairs=20 compare.alpha=1e-9 -o {out}/pairs.json",
}


class VariedConfig(DummyConfig):
    """The dummy environment with two suites and a perturbation."""

    suites: ClassVar[dict[str, str]] = {"red": "Red", "blue": "Blue"}
    perturb_axes: ClassVar[tuple[str, ...]] = ("far",)
    kind: Literal["test_stopped_evaluations:VariedConfig"] = "test_stopped_evaluations:VariedConfig"

    def in_suite(self, suite: str) -> VariedConfig:
        return self.model_copy(update={"tasks": (f"reach_{suite}",)})

    def perturbed(self, axis: str, level: int) -> VariedConfig:
        return self.model_copy(update={"horizon": self.horizon - 2 * level})


def found(out: Path) -> dict[str, Any]:
    """What an evaluation has come to, without times."""
    files = {str(file.relative_to(out)): json.loads(file.read_text()) for file in out.rglob("*.json")}
    for name in [name for name in files if name.startswith(("evaluations/", "perturbed/"))]:
        files[name] = Evaluation.load(out / name).episodes
    for values in files.values():
        if isinstance(values, dict):
            values.pop("num_episodes", None)  # Of a comparison: those that the last call has run.
    return files


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
def test_stopped_twice_it_ends_as_one_that_was_not(form: str, tmp_path: Path) -> None:
    save_policy(tmp_path / "a")
    save_policy(tmp_path / "b", seed=1)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATH), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    whole = shlex.split(FORMS[form].format(out="whole"))
    subprocess.run([sys.executable, "-m", "vla_rl", *whole], cwd=tmp_path, env=env, check=True, capture_output=True)
    words, out = shlex.split(FORMS[form].format(out="cut")), tmp_path / "cut"

    def kept() -> int:
        return sum(len(journal.read_text().splitlines()) for journal in out.rglob("*.jsonl"))

    for number, stop in enumerate((signal.SIGINT, signal.SIGKILL)):
        before, ended = kept(), len([*out.rglob("*.json")])
        child = Child([sys.executable, "-m", "vla_rl", *words], tmp_path / f"{number}.log", env, tmp_path)
        until(lambda before=before: kept() >= before + 6, form)
        if stop == signal.SIGKILL and form in ("suites", "perturb"):
            until(lambda ended=ended: len([*out.rglob("*.json")]) > ended and kept() >= 6, "the next of several")
        assert child.process.poll() is None, child.output()
        child.signal(stop)
        assert child.process.wait(60) == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[stop]
        if stop == signal.SIGINT and form != "compare":
            (again,) = [line for line in child.output().splitlines() if line.startswith("  vla-rl ")]
            words = shlex.split(again)[1:]
            assert "--resume" in words
    if form in ("suites", "perturb"):  # as one killed between writing a result and deleting its journal leaves it
        written = next(file for file in sorted(out.rglob("*.json")) if file.parent.name in ("evaluations", "perturbed"))
        written.with_name(f"{written.name}.0.jsonl").write_text("{}\n")
    last = subprocess.run([sys.executable, "-m", "vla_rl", *words], cwd=tmp_path, env=env, check=False)
    assert last.returncode == 0
    assert found(out) == found(tmp_path / "whole") and not [*out.rglob("*.jsonl")]
