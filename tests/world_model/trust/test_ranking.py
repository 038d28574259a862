"""Ranking policies by imagined success: figures by hand, the head on real frames, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from toy import GOAL, push, toy_env, toy_world_model

from vla_rl.interfaces import Policy
from vla_rl.rollout.runner import collect
from vla_rl.types import ActionChunk, EpisodeSpec, Observation
from world_model.config import ImaginationConfig
from world_model.trust import evaluate
from world_model.trust.evaluate import judge_episodes, rank

STARTS = [f"reach/validation/{i}" for i in range(20)]


def outcomes(name: str, real: int, imagined: int, judged: int, starts: list[str] = STARTS) -> Any:
    """So many successes of 20."""
    return (name, starts, *([i < count for i in range(len(starts))] for count in (real, imagined, judged)))


def test_the_order_and_how_far_to_believe_it() -> None:
    found = rank([outcomes("poor", 4, 1, 5), outcomes("good", 16, 8, 15), outcomes("fair", 10, 9, 9)])
    assert [policy.name for policy in found.policies] == ["fair", "good", "poor"] and found.num_states == 20
    assert found.imagined["spearman"].value == pytest.approx(0.5)
    assert found.judged["spearman"].value == pytest.approx(1)
    assert found.imagined["mmrv"].value == pytest.approx((0.3 + 0.3) / 3)
    assert found.imagined["policy_gap"].value == pytest.approx((1 + 8 + 9 - 30) / 60)
    assert found.policies[0].real.value == 0.5 and found.policies[0].judged.value == 0.45
    assert found.imagined["pearson"].low < found.imagined["pearson"].value <= 1
    text = found.text().splitlines()
    assert text[1].startswith("fair") and "45.0 %" in text[1] and "imagined against real: pearson" in text[4]


def test_only_states_that_all_have_finished_count(tmp_path: Path) -> None:
    part = outcomes("b", 5, 5, 5, STARTS[::-1][:10])
    found = rank([outcomes("a", 12, 12, 12), part])
    assert found.num_states == 10
    assert {p.name: p.real.value for p in found.policies} == {"a": 0.2, "b": 0.5}
    found.save(tmp_path / "ranking.json")
    assert json.loads((tmp_path / "ranking.json").read_text())["num_states"] == 10
    with pytest.raises(ValueError, match="no initial state was finished by every policy"):
        rank([outcomes("a", 1, 1, 1), outcomes("b", 1, 1, 1, ["x", "y"])])
    with pytest.raises(ValueError, match="at least two"):
        rank([outcomes("a", 1, 1, 1)])


class Steady(torch.nn.Module, Policy):
    """Pushes ahead evenly."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.size = size

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        return ActionChunk(push(self.size, obs.batch_size, 6))


def test_the_head_judges_real_frames_at_the_steps_that_it_knows(monkeypatch) -> None:
    """Episodes from six states in a world where the toy's head is right at every frame."""
    monkeypatch.setattr(evaluate, "load_world_model", lambda path, device: toy_world_model())
    env = toy_env(3, record_frames=True, dual_noise=0)
    specs = [EpisodeSpec("reach", "train", i) for i in (0, 4, 30)] + [EpisodeSpec("reach_back", "train", 0)]
    episodes = collect(cast(Any, Steady()), env, specs)
    episodes += collect(cast(Any, Steady(0.1)), env, specs)
    judged = judge_episodes(Path("toy"), episodes, ImaginationConfig(dual_noise=0))
    assert judged == [bool(e.final_obs.state[0, 0] > GOAL) for e in episodes] == [e.success for e in episodes]
    assert set(judged) == {True, False}
    bare = collect(cast(Any, Steady()), toy_env(1, dual_noise=0), specs[:1])
    with pytest.raises(ValueError, match="record_frames=True"):
        judge_episodes(Path("toy"), bare, ImaginationConfig())
