"""The study of the hub over real programs (scripts/hub_processes.py): its arithmetic, and two robots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from hub_processes import (
    RESULTS,
    TABLE,
    Programs,
    main,
    markdown,
    match_episodes,
    measure_processes,
    person_options,
    run_piece,
    summarize,
)
from processes import missing_ros
from typer.testing import CliRunner

from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import load_recipe

SMALL = [
    "env.tasks=[push_to_zone]",
    "failure.fit_on.episodes_per_task=60",
    "failure.calibrate_on.episodes_per_task=60",
    "hub.robots=[2]",
    "hub.episodes_per_task=4",
]


def entry(robot: str, outcome: str | None, **driven: float) -> dict:
    helped = int("recovery" in driven or "correction" in driven)
    counts = {"interventions": helped, "alarms": helped, "ticks": 50, "late": 1}
    return {"robot": robot, "outcome": outcome, "driven": driven, **counts}


def test_a_row_adds_up_its_pieces() -> None:
    shares = {
        "seconds": 20.0,
        "helped": 8.0,
        "requests": 2,
        "served": 2,
        "mean_wait": 1.0,
        "max_wait": 1.5,
        "waited": 2,
    }
    first = {"shares": shares, "interrupted": 1, "episodes": [entry("a", "success", policy=2.0), entry("b", None)]}
    second = {
        "shares": {**shares, "served": 1, "mean_wait": 4.0, "max_wait": 4.0},
        "interrupted": 0,
        "episodes": [
            entry("a", "success", policy=1.0, recovery=3.0, correction=1.0),
            entry("b", "failure", policy=3.0),
        ],
    }
    row = summarize(2, [first, second])
    assert (row["n"], row["solved"], row["alone"], row["interrupted"]) == (4, 2, 1, 1)
    assert row["person_share"] == 16 / 40 and row["driving_share"] == 4 / 40
    assert row["mean_wait"] == (1.0 * 2 + 4.0) / 3 and row["max_wait"] == 4.0
    assert row["robots_waiting"] == 4 / (40 * 2) and row["late_ticks"] == 4 / 200 and row["solved_per_hour"] == 180
    assert "| 2 | 50.0 % [15.0, 85.0], n = 4 | 40 % | 10 % | 1.00 | 0.25 | 2.0 | 4.0 | 5 % | 180 | 2.0 % |" in markdown(
        {"rows": [row]}
    )


def test_results_belong_to_the_episodes_that_were_started() -> None:
    journal = [{"robot": "b", "number": 1, "index": 7}, {"robot": "a", "number": 1, "index": 8}]
    told = {"a": [entry("a", "success")], "b": [entry("b", "failure")]}
    assert [(e["robot"], e["index"], e["outcome"]) for e in match_episodes(journal, told)] == [
        ("a", 8, "success"),
        ("b", 7, "failure"),
    ]
    with pytest.raises(RuntimeError, match="a: 1 episodes were started, 0 are in its results"):
        match_episodes(journal, {**told, "a": []})


def test_the_person_has_as_many_steps_as_slow_hands_need() -> None:
    recipe = load_recipe("tabletop_hub")
    options = person_options(recipe)
    assert options.hand_over == 2.0 and options.patience == 80 and options.full == (1, 1, 1, 10, 10, 10)
    steps = recipe.acting_env.env_spec().horizon["stack"]
    assert options.horizon["stack"] == pytest.approx(3.0 * steps / 10)
    with pytest.raises(ConfigError, match="with alarm: detector"):
        measure_processes(load_recipe("tabletop_hub", ["hub.alarm=progress"]), Path("nowhere"), print, [])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing_ros()), reason=missing_ros() or "ROS 1 is there")
def test_two_robots_and_a_person_over_real_programs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, ["tabletop_hub", *SMALL, "-o", str(folder)])
    assert done.exit_code == 0, done.output[-3000:]
    (row,) = json.loads((folder / RESULTS).read_text())["rows"]
    piece = json.loads(next(folder.glob("processes/robots_2/*/piece.json")).read_text())
    assert row["n"] == 4 and sorted(e["index"] for e in piece["episodes"]) == [0, 1, 2, 3]
    assert {e["robot"] for e in piece["episodes"]} == {"robot_1", "robot_2"}
    assert all(e["outcome"] in ("success", "failure") for e in piece["episodes"])
    helped = [e for e in piece["episodes"] if e["interventions"]]
    assert all({"recovery", "correction"} & set(e["driven"]) for e in helped)
    assert piece["shares"]["served"] >= len(helped)
    assert (folder / TABLE).read_text().startswith("| robots |")


def test_the_first_robots_master_ends_if_the_seconds_does_not_start(tmp_path: Path, monkeypatch) -> None:
    made: list[Any] = []

    class SecondFails:
        """A master as it is where ports run out."""

        uri = "http://localhost:1"

        def __init__(self) -> None:
            if made:
                raise OSError("no port is left")
            made.append(self)
            self.closed = False

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("hub_processes.Master", SecondFails)
    with pytest.raises(OSError, match="no port is left"):
        run_piece(load_recipe("tabletop_hub", SMALL), [], 2, tmp_path, Programs(tmp_path / "piece", ["vla-rl"]))
    assert [master.closed for master in made] == [True]
