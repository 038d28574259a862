"""A run says where it writes, which step of how many it is in and how far; its page can be looked at all the time."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tiny_run import save_small_policy, small_recipe
from typer.testing import CliRunner

from vla_rl.cli import app as cli
from vla_rl.common import progress
from vla_rl.common.progress import read_status
from vla_rl.common.run_folder import RunFolder, open_run
from vla_rl.rollout.source import LocalSource
from vla_rl.training.run import TrainingRun
from vla_rl.training.train import train

OPTIONS = ("train.iterations=2", "train.groups=2", "eval.episodes_per_task=2", "train.evaluate=before_and_after")
RELOADS = "location.reload"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_small_policy(tmp_path_factory.mktemp("steps") / "base")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each iteration's page is written, however long that takes."""
    monkeypatch.setattr(progress, "_PAGE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_PAGE_SHARE", 1e9)


def report_of(folder: Path) -> str:
    result = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert result.exit_code == 0, result.stderr
    return result.output


def test_the_console_says_where_and_which_step_of_how_many(policy, tmp_path, capsys):
    recipe = small_recipe(policy, *OPTIONS, "log.console=true", "algo.kl_coef=0.01", "train.allow_no_success=true")
    folder = open_run(recipe, tmp_path / "run", resume=False)
    train(recipe, folder)
    lines = capsys.readouterr().out.splitlines()
    said = [line for line in lines if line.startswith(("run: ", "step "))]
    assert said == [
        f"run: {folder}",
        "step 1 of 4: evaluation before",
        "step 2 of 4: iterations",
        "step 3 of 4: evaluation after",
        "step 4 of 4: report",
    ]
    iterations = [line for line in lines if line.startswith("iteration ")]
    assert [line.split("  ")[0] for line in iterations] == ["iteration 1 of 2", "iteration 2 of 2"]
    learned = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("update/approx_kl" in row for row in learned)
    for line, row in zip(iterations, learned, strict=True):
        assert ("update/approx_kl" in line) == ("update/approx_kl" in row)
        assert ("update/kl_reference" in line) == ("update/kl_reference" in row)
    status = read_status(RunFolder(folder).status)
    assert status is not None and (status.state, status.text()) == ("finished", "")
    assert RELOADS not in (folder / "report.html").read_text()
    assert "This run" not in report_of(folder)


def test_while_it_runs_its_page_is_there_says_so_and_reloads(policy, tmp_path, at_once):
    recipe = small_recipe(policy, *OPTIONS)
    folder, seen = open_run(recipe, tmp_path / "run", resume=False), []

    def look() -> None:
        page = (folder / "report.html").read_text()
        seen.append((page, report_of(folder), (folder / "report.html").read_text()))

    train(recipe, folder, on_iteration=look)
    for done, (page, said, again) in enumerate(seen, start=1):
        text = f"This run is running: step 2 of 4, iterations, {done} of 2 done."
        assert text in page and text in said and text in again
        assert RELOADS in page and RELOADS in again
    assert len(seen) == 2 and RELOADS not in (folder / "report.html").read_text()


def test_a_run_that_broke_off_says_so_and_its_page_reloads_no_more(policy, tmp_path, at_once):
    recipe = small_recipe(policy, *OPTIONS)
    folder = open_run(recipe, tmp_path / "run", resume=False)

    def fail() -> None:
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        train(recipe, folder, on_iteration=fail)
    text = "This run was stopped before its end: step 2 of 4, iterations, 1 of 2 done."
    page = (folder / "report.html").read_text()
    assert text in page and RELOADS not in page and text in report_of(folder)


def test_a_run_that_was_killed_is_known_to_be_stopped(policy, tmp_path):
    folder = open_run(small_recipe(policy), tmp_path / "run", resume=False)
    run = RunFolder(folder)
    values = {"step": "iterations", "number": 1, "of": 2, "done": 3, "total": 4, "updated": "2026-01-02T03:04:05"}
    here = socket.gethostname()
    run.status.write_text(json.dumps(values | {"process": 2**22 + 1, "host": here}))  # Beyond Linux's process numbers.
    said = report_of(folder)
    assert (
        "This run was stopped before its end: step 1 of 2, iterations, 3 of 4 done. As of 2026-01-02 03:04:05." in said
    )
    before = {"step": "evaluation before", "done": 0, "process": 2**22 + 1, "host": here}
    run.status.write_text(json.dumps(values | before))
    assert "step 1 of 2, evaluation before, 0 of 4 iterations done." in report_of(folder), "not of the evaluation"
    run.status.write_text(json.dumps(values | {"process": 1, "host": "another machine"}))
    assert "This run is running" in report_of(folder) and RELOADS in (folder / "report.html").read_text()


def test_a_folder_without_a_run_has_no_report(tmp_path):
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and "holds no run (no config.yaml)" in result.stderr


def test_a_run_that_cannot_be_resumed_closes_what_it_opened(policy, tmp_path, monkeypatch):
    recipe, closed = small_recipe(policy, "train.iterations=1"), []
    folder = open_run(recipe, tmp_path / "run", resume=False)
    train(recipe, folder)

    def close(source: LocalSource) -> None:
        closed.append(source)

    monkeypatch.setattr(LocalSource, "close", close)
    monkeypatch.setattr(LocalSource, "load_state", lambda self, state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TrainingRun(recipe, folder, resume=True)
    assert len(closed) == 1
