"""A table over suites: rows, averages with intervals that hold what they say, Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom
from test_compare import make

from vla_rl.evaluation.results import EvaluationError
from vla_rl.evaluation.statistics import mean_interval, wilson_interval
from vla_rl.evaluation.suites import SuiteResults

LABELS = {"one": "Spatial", "two": "Object", "three": "90"}


def results() -> SuiteResults:
    outcomes = {"one": [1] * 9 + [0], "two": [1] * 5 + [0] * 15, "three": [1] * 30}
    evaluations = {suite: make({f"task_{suite}": values}) for suite, values in outcomes.items()}
    return SuiteResults.of("oft_7b", evaluations, LABELS, [["one", "two"], ["one", "two", "three"], ["three"]])


def test_rows_and_averages_by_hand() -> None:
    found = {rate.label: rate for rate in results().rates}
    assert list(found) == ["Spatial", "Object", "90", "average of 2", "average of 3"]
    assert found["Spatial"].interval == wilson_interval(9, 10) and found["Object"].num_episodes == 20
    two, three = found["average of 2"], found["average of 3"]
    assert two.rate == pytest.approx((0.9 + 0.25) / 2)  # Not 14 of 30: each suite counts alike.
    assert three.rate == pytest.approx((0.9 + 0.25 + 1) / 3) and three.num_episodes == 60 and three.num_tasks == 3
    a, b = wilson_interval(9, 10), wilson_interval(5, 20)
    assert two.interval.low == pytest.approx(two.rate - np.hypot(0.9 - a.low, 0.25 - b.low) / 2)
    assert two.interval.high == pytest.approx(two.rate + np.hypot(a.high - 0.9, b.high - 0.25) / 2)


def test_the_interval_of_an_average_covers_what_it_says() -> None:
    """Exactly, over every outcome: alike and unlike suites, near the ends too, where a standard error fails."""
    n = 40
    own = [wilson_interval(count, n) for count in range(n + 1)]
    pairs = [(first, second) for first in range(n + 1) for second in range(n + 1)]
    rates = np.array(pairs) / n
    ends = np.array([mean_interval((a / n, b / n), (own[a], own[b])) for a, b in pairs])
    error = 1.96 * np.sqrt((rates * (1 - rates) / n).sum(1)) / 2
    for truth in ((0.5, 0.5), (0.9, 0.97), (0.2, 0.98), (0.95, 0.95), (0.98, 0.98)):
        one, other = (binom.pmf(np.arange(n + 1), n, p) for p in truth)
        chance, mean = np.outer(one, other).ravel(), np.mean(truth)
        covered = chance[(ends[:, 0] <= mean) & (mean <= ends[:, 1])].sum()
        standard = chance[np.abs(rates.mean(1) - mean) <= error].sum()
        assert 0.925 <= covered <= 0.985, (truth, covered)  # Wilson's own is as uneven there.
        if min(truth) >= 0.95:
            assert standard < 0.91 < covered
    perfect = mean_interval([1.0, 1.0], [own[n]] * 2)
    assert perfect.high == 1.0 and own[n].low < perfect.low < 1.0


def test_files_read_back_and_print(tmp_path: Path) -> None:
    found = results()
    found.save(tmp_path / "suites.json")
    assert SuiteResults.load(tmp_path / "suites.json") == found
    lines = (tmp_path / "suites.md").read_text().splitlines()
    assert lines[0].count("|") == lines[2].count("|") and len(lines) == 7
    assert "| sampled | 90 | 100.0 | 88.6 - 100.0 | 30 | 1 |" in lines
    comment, heads, row = (tmp_path / "suites.tex").read_text().splitlines()
    assert comment.startswith("% oft_7b on ") and "Object 1 tasks, n = 20" in comment
    assert heads == "Policy & Spatial & Object & 90 & average of 2 & average of 3 \\\\"
    assert row.startswith("oft\\_7b & 90.0 {\\scriptsize [59.6, 98.2]} & 25.0 ") and row.endswith("\\\\")
    (tmp_path / "suites.json").write_text('{"schema_version": 1, "name": "x"}')
    with pytest.raises(EvaluationError, match=r"suites\.json: no usable suites' results: env"):
        SuiteResults.load(tmp_path / "suites.json")


def test_suites_that_were_evaluated_otherwise_are_refused() -> None:
    evaluations = {"one": make({"a": [1, 0]}), "two": make({"b": [1, 0]}, split="validation")}
    with pytest.raises(EvaluationError, match="Evaluate them alike"):
        SuiteResults.of("x", evaluations, LABELS, [])
