"""What a reward learns from real logged episodes of one task, and that planted faults show in its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_learned_reward import ENV, Torn, opened, record, section

from vla_rl.evaluation.probability import CalibrationError
from vla_rl.evaluation.signal import auc
from vla_rl.rewards.fit import fit_reward
from vla_rl.rewards.frames import RewardFrames
from vla_rl.rewards.measure import ALL, judge_frames, measure
from vla_rl.rewards.model import LearnedReward

pytestmark = pytest.mark.slow  # 240 episodes and a fit.

FITTED = {"steps": 200, "batch_size": 48, "max_false_success": 0.2}
ONE_TASK = ENV.model_copy(update={"tasks": ("reach_red",)})


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("quality") / "logged"
    return record(folder, 0, Torn(0.5, 1.0), "wild 0123", 240, ONE_TASK)


@pytest.fixture(scope="module")
def unseen(tmp_path_factory) -> RewardFrames:
    """Of another policy, from other states."""
    folder = tmp_path_factory.mktemp("quality") / "unseen"
    return opened(record(folder, 500, Torn(0.3, 0.7), "slow 4567", 120, ONE_TASK))


@pytest.fixture(scope="module")
def learned(logged: str, tmp_path_factory) -> tuple[LearnedReward, Path]:
    frames = opened(logged)
    model = fit_reward(section(logged, **FITTED), frames, seed=0)
    folder = tmp_path_factory.mktemp("quality") / "reward"
    model.save(folder, frames.starts.tolist())
    return model, folder


def order(model: LearnedReward, frames: RewardFrames, truth: RewardFrames) -> float:
    return auc(judge_frames(model, frames).probability.astype(float), truth.success)


def test_it_tells_successes_of_an_unseen_policy_and_keeps_the_bound(learned, unseen: RewardFrames) -> None:
    model, folder = learned
    result, judged = measure(folder, model, unseen)
    found = result.figures[ALL]
    assert found["auc"].value > 0.95 and found["progress_rank"].value > 0.6
    assert model.facts.figures["false_success"].high <= 0.2 and found["false_success"].value <= 0.2
    assert found["missed_success"].value < 0.3
    failures = ~unseen.success[unseen.owner]
    assert np.quantile(judged.said.progress[failures], 0.95) < 0.8  # Hardly a failure is told as nearly done.


def test_planted_what_sees_the_first_frame_alone_knows_little(learned, unseen: RewardFrames) -> None:
    blind = replace(unseen, place=unseen.place[unseen.first[unseen.owner]])
    assert order(learned[0], unseen, unseen) > 0.95
    assert order(learned[0], blind, unseen) < 0.75


def test_planted_shuffled_outcomes_are_refused_or_teach_nothing(logged: str, unseen: RewardFrames) -> None:
    config = section(logged, **FITTED, control="shuffled_outcomes")
    try:
        model = fit_reward(config, opened(logged), seed=0)
    except CalibrationError as error:
        assert "cannot tell successes from failures" in str(error)
    else:
        assert 0.25 < order(model, unseen, unseen) < 0.75
