"""What report.html says of a run in a world model: trusted or not, what the gate found, imagined beside real."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from browser import browser, missing_browser
from test_report import run, video  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from vla_rl.cli.app import app
from vla_rl.evaluation.executed import Executed
from vla_rl.evaluation.gate import GateCheck, Pooled
from vla_rl.evaluation.report.report import write_report
from vla_rl.evaluation.report.sections import rounds
from vla_rl.evaluation.sequential_compare import SequentialComparison
from vla_rl.evaluation.statistics import Figure, Interval
from vla_rl.evaluation.video import write_mp4

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
    gap, order = Figure(value=0.5, low=0.3, high=0.7, n=60), Figure(value=math.nan, n=15)
    executed = Executed(num_episodes=60, imagined=0.8, caused=0.3, gap=gap, order=order, at_most=0.2)
    outcome = {"imagined": 0.8, "executed": executed, "verdict": "better", "rolled_back": False}
    check = GateCheck.model_validate({"iteration": 8, "reference": 0, "comparison": found, "pooled": pooled} | outcome)
    (imagined / "gate.json").write_text(
        json.dumps({"power": "what it can tell", "checks": [check.model_dump(mode="json")]})
    )
    page = write_report(imagined).read_text()
    assert "gate at iteration 8: better; real success 30 % -&gt; 70 % in 20 pairs" in page
    assert "What it can tell." in page
    assert "of 60 imagined episodes 80 %, the same actions executed 30 %: +50 points [+30, +70], order within" in page
    assert "not to be trusted: RL stops: imagined success surely exceeds that of the same actions by over 20 p" in page
    (imagined / "gate.json").write_text(json.dumps({"checks": [{"iteration": 8, "p": 0.01}]}))
    refused = CliRunner().invoke(app, ["report", str(imagined)])
    assert refused.exit_code == 2, refused.output
    assert f"{imagined / 'gate.json'}: checks.0.reference: Field required. Use the version of vla-rl" in refused.stderr


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


def after_rl(run: Path, newest: dict, imagined: float = 0.6, bound: str = "at most 0.1") -> str:  # noqa: F811
    """The page of a run whose one round ended so."""
    values = json.loads((run / "admission.json").read_text())
    values["verdicts"] = [VERDICT | {"passed": True, "bound": bound}]
    (run / "admission.json").write_text(json.dumps(values))
    row = {
        "number": 1, "episodes": {"rollouts": 160, "held_out": 100, "gate": 240, "validation": 0}, "total": 500,
        "num_keyframes": {}, "explorer": {}, "before": {}, "after": {}, "imagined": imagined, "gate": [], "refused": "",
        "real": {"greedy": [0.5, 0.4, 0.6], "sampled": [0.5, 0.4, 0.6]}, "newest": newest, "verdict": "undecided",
    }  # fmt: skip
    (run / "rounds.json").write_text(json.dumps({"rows": [row], "budget": 500, "online": None}))
    return write_report(run).read_text()


def test_a_bound_of_trust_that_rl_broke_is_named_first_and_turns_the_headline(imagined):
    broken = after_rl(imagined, {"false_success": [0.63, 0.41, 0.81]})
    headline = broken[broken.index('<div class="headline') : broken.index("Sampled success")]
    assert headline.startswith('<div class="headline broken">')
    assert "not to be trusted: false successes 63 % [41, 81], which must be at most 10 %" in headline
    for newest in ({"false_success": [0.2, 0.08, 0.4]}, {"false_success": [None] * 3}, {"auc": [0.1, 0.0, 0.2]}):
        assert '<div class="headline">' in after_rl(imagined, newest)  # Perhaps; not measured; of no bound.
    low = after_rl(imagined, {"false_success": [0.3, 0.2, 0.4]}, bound="above 0.5")
    assert "false successes 30 % [20, 40], which must be above 50 %" in low


def test_imagination_that_promises_more_than_is_real_is_named(imagined):
    page = after_rl(imagined, {}, imagined=0.9)  # The run's final sampled success is some 60 % of 120.
    assert "90 % success imagined where" in page and '<div class="headline broken">' in page
    assert '<div class="headline">' in after_rl(imagined, {}, imagined=0.7)


def test_pages_of_a_run_link_to_one_another(imagined, tmp_path):
    (tmp_path / "world_model" / "trust.html").write_text("trust")
    control = imagined / "round_1" / "train_shuffled_rewards"
    (control / "evaluations").mkdir(parents=True)
    (imagined / "round_1" / "train" / "policy").mkdir(parents=True)
    (control / "report.html").write_text("control")
    page = after_rl(imagined, {})
    places = dict(re.findall(r'<a href="([^"]+)">([^<]+)</a>', page))
    assert places == {
        "../world_model/trust.html": "how far the world model can be trusted",
        "round_1/train_shuffled_rewards/report.html": "the control: train shuffled rewards",
        "round_1/train/policy": "the policy",
    }
    assert all((imagined / place).exists() for place in places)
    (control / "report.html").unlink()
    assert '<a href="../../report.html">the whole run</a>' in write_report(control).read_text()


@pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "a browser is here")
def test_the_table_of_rounds_fits_its_page(imagined):
    newest = {key: [0.5, 0.25, 0.75] for key in ("auc", "calibration_error", "informedness", "false_success")}
    after_rl(imagined, newest)
    with browser() as chromium:
        for width in (390, 1280):
            page = chromium.new_context(viewport={"width": width, "height": 800}).new_page()
            page.goto((imagined / "report.html").as_uri())
            table = page.evaluate("document.querySelector('.stacked').getBoundingClientRect().right")
            section = page.evaluate("document.querySelector('.stacked').parentElement.getBoundingClientRect().right")
            assert table < section and page.evaluate("document.documentElement.scrollWidth") == width
            page.close()
