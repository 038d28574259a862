"""What `vla-rl report --status` says of a run, from its folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.common.progress import RunStatus
from vla_rl.common.run_folder import RunFolder
from vla_rl.evaluation.report.report import write_report

LOCAL = {
    "train/episodes": 16, "train/success": 0.25, "time/total": 8.0, "time/simulation": 4.0, "time/inference": 2.0,
    "time/other": 2.0,
}  # fmt: skip
AHEAD = {
    "rollout/lag": 0.5, "rollout/lag_max": 1, "rollout/groups_dropped": 1, "rollout/groups_under_way": 4,
    "rollout/redone": 16, "rollout/moved": 3, "rollout/hosts_lost": 1, "rollout/workers_lost": 1,
    "rollout/stood_s": 20.0, "rollout/seconds": 6.0, "rollout/hosts": 3, "rollout/running": 6, "rollout/waiting": 10,
    "rollout/asking": 2, "rollout/envs_busy": 0.8, "rollout/policy_busy": 0.1,
}  # fmt: skip


def said(folder: Path, *rows: dict[str, float]) -> str:
    run = RunFolder(folder)
    RunStatus(step="iterations", number=1, of=2, done=len(rows), total=20, state="finished").write(run.status)
    run.config.write_text("name: toy\n")
    run.metrics.write_text("".join(json.dumps({"step": n} | row) + "\n" for n, row in enumerate(rows)))
    result = CliRunner().invoke(app, ["report", "--status", str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_in_one_process(tmp_path: Path) -> None:
    text = said(tmp_path, LOCAL)
    assert "iteration 1: 16 episodes, 25 % solved, 2.00 episodes/s with the update" in text
    assert "time: simulation 50 %, inference 25 %, other 25 %" in text
    assert "lost in all" not in text


def test_losses_are_summed_up_and_queues_are_the_last(tmp_path: Path) -> None:
    text = said(tmp_path, LOCAL | AHEAD, LOCAL | AHEAD | {"rollout/running": 5, "rollout/redone": 0})
    assert "busy: environments 80 % of the time, the policy in the rollouts 10 %" in text
    assert "3 hosts, 5 episodes running, 10 waiting for an environment, 2 for the policy; 4 groups under way" in text
    assert "2 hosts, 2 workers; 6 episodes went on elsewhere, 16 were begun again, 2 groups were too old" in text
    assert "stood for 40 s" in text


def test_the_dashboard_of_the_machines_is_linked_while_the_run_goes_on(tmp_path: Path) -> None:
    run, page = RunFolder(tmp_path), "http://10.0.0.7:8265"
    said(tmp_path, LOCAL)
    for state in ("running", "stopped"):
        status = RunStatus(step="iterations", number=1, of=2, done=1, total=20, state=state, dashboard=page)
        status.write(run.status)
        text = CliRunner().invoke(app, ["report", "--status", str(tmp_path)]).output
        write_report(tmp_path)
        shown = run.report.read_text()
        assert (f"machines: {page}" in text) == (f'href="{page}"' in shown) == (state == "running")


def test_a_run_without_iterations_says_what_it_logged_last(tmp_path: Path) -> None:
    text = said(tmp_path, {"dynamics/loss": 0.5}, {"dynamics/loss": 0.25, "dynamics/lr": 1e-3})
    assert ": step 1, dynamics/loss 0.25, dynamics/lr 0.001" in text and "No iteration" not in text


def test_no_iteration_yet_and_no_run(tmp_path: Path) -> None:
    assert "No iteration has ended yet." in said(tmp_path)
    result = CliRunner().invoke(app, ["report", "--status", str(tmp_path / "nowhere")])
    assert result.exit_code != 0 and "holds no run" in result.output


@pytest.mark.parametrize(
    ("text", "what"), [('{"step": "iterations"', "the file: Invalid JSON"), ('{"step": "x", "of": 1}', "number: Field")]
)
def test_a_status_that_cannot_be_read_is_named_and_the_page_is_made(tmp_path: Path, text: str, what: str) -> None:
    said(tmp_path, LOCAL)
    (tmp_path / "status.json").write_text(text)
    result = CliRunner().invoke(app, ["report", "--status", str(tmp_path)])
    assert result.exit_code == 2 and f"status.json: {what}" in result.output and "Delete it" in result.output
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 0
    assert f"status.json: {what}" in (tmp_path / "report.html").read_text()
