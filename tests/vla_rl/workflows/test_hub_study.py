"""`vla-rl hub measure`: the table's arithmetic, and a run of it all on two episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.workflows.hub_study import RESULTS, TABLE, _summarize, markdown

TINY = ["env.tasks=[push_to_zone]", "hub.alarm=progress", "hub.episodes_per_task=2", "hub.robots=[1,2]"]


def test_a_row_in_numbers() -> None:
    plain = {"task": "stack", "robot": "robot 1", "lost": False, "given_up": False}
    episodes = [
        plain | {"index": 0, "success": True, "requests": 1},
        plain | {"index": 1, "success": True, "requests": 0},
        plain | {"index": 2, "success": False, "requests": 1, "given_up": True},
        plain | {"index": 3, "success": True, "requests": 1, "lost": True},
    ]
    spent = {"helped": 30.0, "mean_wait": 2.0, "max_wait": 4.0, "waited": 6.0}
    row = {"robots": 2, "helped": True, "seconds": 60.0, "shares": spent, "episodes": episodes}
    found = _summarize(row, {("stack", 0): True, ("stack", 1): True, ("stack", 2): False})
    assert (found["n"], found["lost"], found["solved"], found["given_up"]) == (3, 1, 2, 1)
    assert found["person_share"] == 0.5 and found["robots_waiting"] == 0.05 and found["solved_per_hour"] == 120
    assert found["requests_per_episode"] == pytest.approx(2 / 3) and found["not_needed"] == 0.5
    low, high = found["interval"]
    assert low == pytest.approx(0.208, abs=1e-3) and high == pytest.approx(0.939, abs=1e-3)  # Wilson, 2 of 3
    assert markdown({"rows": [found]}).splitlines()[-1] == (
        "| 2 | 1 | 66.7 % [20.8, 93.9], n = 3 | 50 % | 0.67 | 50 % | 2.0 | 4.0 | 5 % | 120 |"
    )


def test_two_episodes_from_the_command_to_the_table(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = CliRunner().invoke(app, ["hub", "measure", "tabletop_hub", *TINY, "-o", str(folder)])
    assert done.exit_code == 0, done.output
    rows = json.loads((folder / RESULTS).read_text())["rows"]
    assert [(row["robots"], row["persons"], row["n"]) for row in rows] == [(2, 0, 2), (1, 1, 2), (2, 1, 2)]
    assert rows[1]["max_wait"] == 0 and all(row["success"] >= rows[0]["success"] for row in rows[1:])
    assert (folder / TABLE).read_text() in done.output
    before = (folder / "robots_1.json").stat().st_mtime_ns
    again = CliRunner().invoke(app, ["hub", "measure", "tabletop_hub", *TINY, "-o", str(folder), "--resume"])
    assert again.exit_code == 0 and (folder / "robots_1.json").stat().st_mtime_ns == before
