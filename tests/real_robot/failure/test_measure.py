"""Figures by hand, and that an episode's length cannot pass for foresight."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from synthetic import episodes

from real_robot.failure.conformal import FailureConfig
from real_robot.failure.detector import fit
from real_robot.failure.measure import (
    Curves,
    common_horizon,
    detection_times,
    draw_scores,
    evaluate,
    measure,
    weighted_mean,
)
from vla_rl.evaluation.signal import weighted_auc


def test_roc_auc_by_hand_with_ties_and_weights() -> None:
    scores, failed = np.array([1.0, 2.0, 2.0, 3.0]), np.array([False, False, True, True])
    assert weighted_auc(scores, failed, np.ones((1, len(scores)))) == pytest.approx([3.5 / 4])
    two_resamples = np.array([[1.0, 0, 1, 1], [0, 1, 1, 0]])
    assert weighted_auc(scores, failed, two_resamples) == pytest.approx([1, 0.5])
    assert np.isnan(weighted_auc(scores, failed, np.array([[1.0, 1, 0, 0]]))[0])


def test_weighted_mean_by_hand() -> None:
    assert weighted_mean(np.array([1.0, 3.0]), np.array([[1.0, 1.0], [3.0, 1.0]])) == pytest.approx([2.0, 1.5])


def test_detection_time_by_hand() -> None:
    held_out = episodes(2, 0, lengths=(4, 4))  # 32 control steps each.
    standings = [np.array([0, 0, 2.0, 0]), np.zeros(4)]
    assert detection_times(standings, 1.0, held_out) == pytest.approx([16 / 32, 1.0])


def test_length_alone_ranks_nothing_at_the_common_horizon() -> None:
    """Failures live twice as long, and the score is noise, so that its maximum grows with length alone."""
    held_out = episodes(600, 0, lengths=(4, 8))
    rng = np.random.default_rng(0)
    noise = [rng.standard_normal(count) for count in held_out.counts]
    found = measure(Curves(noise, noise, 2.5, 0.05), held_out)
    assert common_horizon(held_out) == {"task": 4}
    assert found["roc_auc"].low < 0.5 < found["roc_auc"].high
    assert found["roc_auc_by_end"].low > 0.6, "the trap is there: by the end, length leaks"


def test_the_clock_is_blind_at_the_common_horizon_and_perfect_by_the_end() -> None:
    held_out = episodes(40, 0, lengths=(4, 8))
    clock = [np.arange(count, dtype=float) for count in held_out.counts]
    found = measure(Curves(clock, clock, np.inf, 0.0), held_out)
    assert found["roc_auc"].value == 0.5
    assert found["roc_auc_by_end"].value == 1.0


def test_intervals_resample_initial_states() -> None:
    """Each state four times: the interval is that of a quarter as many, so wider than if all were new."""
    rng = np.random.default_rng(0)
    single = episodes(60, 0)
    level = np.repeat(rng.standard_normal(60) + ~single.success, 4)
    four = single.select(np.repeat(np.arange(60), 4))
    curves = [np.full(count, value) for count, value in zip(four.counts, level, strict=True)]
    together = measure(Curves(curves, curves, 0.5, 0.1), four)
    from dataclasses import replace

    apart = measure(Curves(curves, curves, 0.5, 0.1), replace(four, initial_states=tuple(map(str, range(240)))))
    for name in ("roc_auc", "tpr", "balanced_accuracy"):
        assert together[name].high - together[name].low > 1.5 * (apart[name].high - apart[name].low)
        assert together[name].value == apart[name].value


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a detector."""
    folder = tmp_path_factory.mktemp("fitted")
    fit(FailureConfig(detectors=("rnd",), alpha=0.1), episodes(60, 1), episodes(80, 2), folder, policy_name="toy")
    return folder


def test_report_is_written_with_its_picture(fitted: Path, tmp_path: Path) -> None:
    report = evaluate(fitted, episodes(40, 3))
    page = report.save(tmp_path)
    saved = json.loads((tmp_path / "failure.json").read_text())
    assert saved["facts"]["num_episodes"] == 40
    assert saved["figures"]["clock"]["roc_auc"]["value"] == 0.5
    figure = saved["figures"]["rnd"]["tpr"]
    assert figure["low"] <= figure["value"] <= figure["high"]
    text = page.read_text()
    assert text.count('<svg class="figure"') == 1
    assert "http" not in text
    assert "scroll wide" not in text, "one task's chart fits a phone"
    assert "<td>rnd</td>" in text and f"<td>{figure['value']:.3f} [" in text and "<main>" in text
    assert {"rnd", "clock"} <= set(report.table().columns[0]._cells)

    chart = draw_scores(report)
    assert chart.get_supxlabel() == "chunk of the episode" and chart.get_supylabel() == "score (modulations)"
    (legend,) = chart.legends
    assert [t.get_text() for t in legend.get_texts()] == ["success", "failure", "alarm above"]
    assert len({str(line.get_linestyle()) for line in legend.get_lines()}) == 3, "told apart without their colors"


@pytest.mark.parametrize("keep", ["success", "failure"])
def test_one_outcome_alone_cannot_be_measured(fitted: Path, keep: str) -> None:
    held_out = episodes(40, 3)
    with pytest.raises(ValueError, match="needs both failures and successes"):
        evaluate(fitted, held_out.select(held_out.success == (keep == "success")))


def test_no_detectors_say_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no detectors in it; `vla-rl failure fit"):
        evaluate(tmp_path, episodes(4, 0))
