"""Detectors tell drifting episodes from good ones, survive saving, and refuse what is not theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import HASH, INSTRUCTIONS, episodes

from real_robot.failure import float_ot, learned_scorers
from real_robot.failure.conformal import CalibrationError, FailureConfig
from real_robot.failure.detector import CONFIG_FILE, TENSORS_FILE, DetectorError, FailureDetector, fit, scorer_classes
from real_robot.failure.measure import FailureReport, evaluate

KINDS = sorted(scorer_classes())
QUICK = {"width": 32, "layers": 1, "steps": 250, "batch_size": 64}
CONFIG = FailureConfig(alpha=0.1, min_failures=10)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NETWORK", "SAFE_NETWORK"):
            own = getattr(learned_scorers, name).model_copy(update=QUICK).with_optim(lr=3e-3)
            patch.setattr(learned_scorers, name, own)
        patch.setattr(float_ot, "NUM_CANDIDATES", 3)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ot.batch", reason="POT is not installed: pip install '.[robot]'")
    folder = tmp_path_factory.mktemp("run")
    fit(CONFIG, episodes(80, 1), episodes(80, 2), folder, policy_name="toy")
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> FailureReport:
    return evaluate(run, episodes(80, 4))


def detector(run: Path, kind: str) -> FailureDetector:
    return FailureDetector.load(run / "detectors" / kind, HASH)


@pytest.mark.parametrize("kind", KINDS)
def test_a_drift_is_seen_and_a_good_episode_is_left_alone(report: FailureReport, kind: str) -> None:
    figures = report.figures[kind]
    assert figures["roc_auc"].value > 0.9
    assert figures["tpr"].value > 0.75
    assert figures["tnr"].high > 0.9  # alpha is 0.1.


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_equals_the_whole_curve_after_saving(run: Path, tmp_path: Path, kind: str) -> None:
    first = detector(run, kind)
    first.save(tmp_path / kind)
    again = FailureDetector.load(tmp_path / kind, HASH)
    held_out = episodes(4, 5)
    for number in range(4):
        instruction = held_out.instructions[number]
        curve = first.scorer.curve(held_out.episode(number))
        again.reset(instruction)
        scores = [again.update(embedding) for embedding in held_out.episode(number)]
        np.testing.assert_allclose([s.value for s in scores], curve, rtol=1e-5, atol=1e-7)
        assert [s.alarm for s in scores] == list(first.band.standing(curve, instruction) > first.band.q)
        assert [s.number for s in scores] == list(range(len(curve)))


@pytest.mark.parametrize("kind", KINDS)
def test_rewinding_forgets(run: Path, kind: str) -> None:
    own, episode = detector(run, kind), episodes(2, 6).episode(1)
    own.reset(INSTRUCTIONS[0])
    scores = [own.update(embedding) for embedding in episode]
    back = own.rewind(5)
    assert back is not None
    assert back.value == pytest.approx(scores[len(episode) - 6].value)
    assert own.update(episode[len(episode) - 5]).value == pytest.approx(scores[len(episode) - 5].value)
    assert own.rewind(len(episode) - 4) is None
    with pytest.raises(ValueError, match="rewind by 1 chunks: the episode has 0"):
        own.rewind(1)


def test_a_skipped_chunk_keeps_the_count(run: Path) -> None:
    own, episode = detector(run, "safe_mlp"), episodes(2, 7).episode(1)
    own.reset(INSTRUCTIONS[0])
    repeated = [own.update(episode[i]).value for i in (0, 2, 2)][-1]
    own.reset(INSTRUCTIONS[0])
    own.update(episode[0])
    score = own.update(episode[2], number=2)
    assert (score.value, score.number) == (pytest.approx(repeated), 2)
    with pytest.raises(ValueError, match="chunk number 1 is over; the next is 3"):
        own.update(episode[1], number=1)


def test_an_embedding_without_a_value_is_an_alarm(run: Path) -> None:
    own = detector(run, "rnd")
    score = own.update(np.full(6, np.nan))
    assert score.alarm
    assert math.isinf(score.value)
    assert "NaN" in score.reason
    with pytest.raises(ValueError, match=r"shape \(5,\).*fitted on \(6,\) of policy 'toy'"):
        own.update(np.zeros(5))


def test_another_checkpoint_is_refused(run: Path) -> None:
    with pytest.raises(DetectorError, match=r"calibrated for policy 'toy'.*the policy now is bbbbbbbbbbbb"):
        FailureDetector.load(run / "detectors" / "rnd", "b" * 64)


@pytest.mark.parametrize("damage", ["missing", "truncated", "not json", "unknown kind", "no band"])
def test_a_damaged_detector_is_refused_with_its_folder(run: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "rnd"
    detector(run, "rnd").save(folder)
    config = folder / CONFIG_FILE
    if damage == "missing":
        config.unlink()
    elif damage == "truncated":
        data = (folder / TENSORS_FILE).read_bytes()
        (folder / TENSORS_FILE).write_bytes(data[: len(data) // 2])
    elif damage == "not json":
        config.write_text("{")
    else:
        values = json.loads(config.read_text())
        values.update({"kind": "oracle"} if damage == "unknown kind" else {"band": {}})
        config.write_text(json.dumps(values))
    with pytest.raises(DetectorError, match=f"{folder}: not a readable failure detector"):
        FailureDetector.load(folder, HASH)


def test_a_policy_that_never_succeeds_has_no_detector(tmp_path: Path) -> None:
    failures = episodes(60, 1)
    failures = failures.select(~failures.success)
    with pytest.raises(CalibrationError, match=r"succeeded in 0 of 30 .* and 0 of 30 .*never succeeds has no detector"):
        fit(CONFIG, failures, episodes(60, 2).select(~episodes(60, 2).success), tmp_path, policy_name="toy")
    assert not (tmp_path / "detectors").exists()


def test_too_few_successes_say_how_many_alpha_needs(tmp_path: Path) -> None:
    strict = CONFIG.model_copy(update={"alpha": 0.01})
    with pytest.raises(CalibrationError, match=r"50 of 100 to calibrate on; .*alpha=0.01, 104"):
        fit(strict, episodes(80, 1), episodes(100, 2), tmp_path, policy_name="toy")


def test_several_successes_from_each_of_a_few_initial_states_do_not_calibrate_a_threshold(tmp_path: Path) -> None:
    """They go together: of 8 states with 8 successes each, fresh ones rise above in 13 % at alpha = 0.1."""
    calibration = episodes(128, 2)
    few = replace(calibration, initial_states=tuple(f"task/train/{i % 16}" for i in range(128)))
    with pytest.raises(CalibrationError, match=r"64 successes .* begin in 8 initial states; .*alpha=0.1 needs 14 "):
        fit(CONFIG, episodes(80, 1), few, tmp_path, policy_name="toy")
    assert not (tmp_path / "detectors").exists()


def test_supervised_scores_are_left_out_without_failures(tmp_path: Path) -> None:
    told: list[str] = []
    train = episodes(80, 1)
    config = CONFIG.model_copy(update={"detectors": ("rnd", "safe_mlp")})
    written = fit(config, train.select(train.success), episodes(100, 2), tmp_path, policy_name="toy", show=told.append)
    assert [path.name for path in written] == ["rnd"]
    assert told[-1] == "safe_mlp: left out, it learns from failures; 0 recorded, needs 10"


@pytest.mark.parametrize("what", ["fit", "evaluate"])
def test_shared_initial_states_are_refused(run: Path, tmp_path: Path, what: str) -> None:
    with pytest.raises(ValueError, match="initial states, such as task/train/2000"):
        if what == "fit":
            fit(CONFIG, episodes(80, 2), episodes(100, 2), tmp_path, policy_name="toy")
        else:
            evaluate(run, episodes(80, 2))
