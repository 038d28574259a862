"""What report.html says of a run in a world model: trusted or not, what the gate found, imagined beside real."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_report import run, video  # noqa: F401  (fixtures)

from vla_rl.evaluation.gate import GateCheck, Pooled
from vla_rl.evaluation.sequential_compare import SequentialComparison
from vla_rl.evaluation.statistics import Interval
from vla_rl.evaluation.video import write_mp4
from vla_rl.report.imagination import rounds
from vla_rl.report.report import write_report

VERDICT = {
    "figure": "false_success",
    "value": 0.2,
    "bound": "at most 0.1",
    "refuses": True,
    "text": "False successes: 20 %",
}


@pytest.fixture
def imagined(run: Path, tmp_path: Path) -> Path:  # noqa: F811
    trust = tmp_path / "world_model"
    write_mp4(trust / "clips" / "0.mp4", np.zeros((3, 32, 64, 3), np.uint8), 5)
    clip = {
        "file": "clips/0.mp4",
        "start": "stack/train/1",
        "instruction": "stack <it>",
        "real": False,
        "imagined": True,
    }
    (trust / "trust.json").write_text(json.dumps({"clips": [clip, clip | {"file": "clips/gone.mp4"}]}))
    write_admission(run, trust, problem="")
    return run


def write_admission(run: Path, trust: Path, problem: str) -> None:  # noqa: F811
    values = {"report": str(trust / "trust.json"), "problem": problem, "ignored": bool(problem), "warnings": []}
    values["verdicts"] = [VERDICT | {"passed": not problem}]
    (run / "admission.json").write_text(json.dumps(values))


def test_a_trusted_world_model_is_shown_with_a_clip(imagined):
    page = write_report(imagined).read_text()
    assert "every figure is in" in page and "holds</span> False successes: 20 %" in page
    assert page.count("really failure, imagined success") == 1 and "stack &lt;it&gt;" in page
    assert '<div class="distrust">' not in page


def test_distrust_that_was_overruled_is_shown_in_red(imagined, tmp_path):
    write_admission(imagined, tmp_path / "nowhere", problem="the world model cannot be trusted enough")
    page = write_report(imagined).read_text()
    assert '<div class="distrust"><strong>Not trusted' in page and "cannot be trusted enough" in page
    assert "fails</span> False successes" in page


def test_a_requirement_that_was_not_measured_is_open(imagined, tmp_path):
    file = imagined / "admission.json"
    values = json.loads(file.read_text())
    values["verdicts"] = [VERDICT | {"passed": False, "value": None}]
    file.write_text(json.dumps(values))
    assert "open</span> False successes" in write_report(imagined).read_text()


def test_the_gates_checks_are_told(imagined):
    found = SequentialComparison(
        decision="better", gained=9, lost=1, tied=10, num_pairs=20, max_pairs=150, num_lost_pairs=0, rate_a=0.3,
        rate_b=0.7, interval=Interval(0.1, 0.7), p_value=0.01, alpha=0.05,
    )  # fmt: skip
    pooled = Pooled(num_checks=1, gained=9, lost=1, num_pairs=20, better=31, worse=0.1, needed=20)
    outcome = {"imagined": 0.8, "verdict": "better", "rolled_back": False}
    check = GateCheck.model_validate({"iteration": 8, "mark": 0, "comparison": found, "pooled": pooled} | outcome)
    (imagined / "gate.json").write_text(
        json.dumps({"power": "what it can tell", "checks": [check.model_dump(mode="json")]})
    )
    page = write_report(imagined).read_text()
    assert "gate at iteration 8: better; real success 30 % -&gt; 70 % in 20 pairs" in page
    assert "What it can tell." in page


@pytest.mark.parametrize(
    ("found", "column", "shown"),
    [
        ({"verdict": "undecided"}, "gate", "undecided"),
        ({}, "gate", "–"),  # Rounds written before verdicts have none.
        ({}, "imagined", "50.0 %"),
        ({"imagined_probability": 0.4}, "imagined", "50.0 %; 40.0 % by its probability"),
        ({}, "newest", ["–"]),  # Before trust was measured after RL.
        (
            {"newest": {"auc": [0.876, 0.8, 0.95], "calibration_error": [0.05, 0.02, 0.1], "informedness": [None] * 3}},
            "newest",
            [
                "AUC 0.88 [0.80, 0.95]",
                "calibration error 5 % [2, 10]",
                "successes told from failures not measured",
                "false successes not measured",
            ],
        ),
    ],
)
def test_the_table_of_rounds(tmp_path, found, column, shown):
    row = {
        "number": 1, "episodes": {"rollouts": 8, "held_out": 8, "gate": 4, "validation": 0}, "total": 20,
        "num_keyframes": {}, "explorer": {}, "before": {}, "after": {}, "imagined": 0.5, "gate": [], "refused": "",
        "real": {"sampled": [0.5, 0.4, 0.6]},
    }  # fmt: skip
    table = {"rows": [row | found], "budget": None, "online": None}
    (tmp_path / "rounds.json").write_text(json.dumps(table))
    shown_table = rounds(tmp_path)
    assert shown_table is not None and shown_table["rows"][0][column] == shown


def test_a_run_in_a_simulator_says_nothing_of_world_models(run):  # noqa: F811
    assert "The world model" not in write_report(run).read_text()
