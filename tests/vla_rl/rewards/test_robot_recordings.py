"""A robot's recordings as what a reward learns from: an episode's number is its recording's own, not a state's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_episodes import episode

from real_robot.operator.recorder import Recording
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import DataNeeds
from vla_rl.data.source import LeRobotSource
from vla_rl.rewards.frames import RewardFrames, open_frames
from vla_rl.rewards.measure import _check_unseen
from vla_rl.rewards.model import STATES_FILE


def recorded(folder: Path, task: str = "move to the red square", steps: int = 3) -> Path:
    """Two episodes; a robot's recorder names the task by the instruction."""
    with Recording(folder, 10, "dummy") as recording:
        for index in range(2):
            one = episode(index, ["policy"] * steps, success=index == 0)
            recording.add(replace(one, task=task), {"agentview": (32, 32)})
    return folder


def opened(folder: Path) -> RewardFrames:
    return open_frames([DatasetConfig(path=str(folder))], DataNeeds(cameras=("agentview",), action_dim=7), 1)


def check(folder: Path, fitted: Path, frames: RewardFrames) -> None:
    """What `reward eval` checks of a reward that was fitted on a recording."""
    (folder / STATES_FILE).write_text(str(opened(fitted).starts.tolist()).replace("'", '"'))
    datasets = {str(fitted): LeRobotSource(str(fitted)).fingerprint()}
    model: Any = SimpleNamespace(facts=SimpleNamespace(datasets=datasets))
    _check_unseen(folder, model, frames)


def test_a_reward_is_measured_on_another_recording_of_the_robot_it_was_fitted_on(tmp_path: Path) -> None:
    monday, tuesday = recorded(tmp_path / "monday"), recorded(tmp_path / "tuesday", steps=4)
    check(tmp_path, monday, opened(tuesday))
    with pytest.raises(ValueError, match=r"2 initial states, such as .*monday/move to the red square/train/0"):
        check(tmp_path, monday, opened(monday))
    monday.rename(tmp_path / "other")
    (tmp_path / "monday").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"other holds what the reward was fitted on, as .*monday"):
        check(tmp_path, tmp_path / "monday", opened(tmp_path / "other"))


def test_a_simulators_states_are_the_same_in_every_recording(tmp_path: Path) -> None:
    one, other = (opened(recorded(tmp_path / name, task="reach_red")).starts.tolist() for name in ("one", "other"))
    assert one == other == ["reach_red/train/0", "reach_red/train/1"]
