"""One scripted person between several tabletop robots: who waits, who is helped, and the same again with the seed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from real_robot.failure.detector import Score
from real_robot.operator.hub.sim_fleet import WAITING_ROOM, FleetOptions, FleetResult, run_fleet
from sim.tabletop import TabletopConfig
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, EpisodeSpec, Observation

TASK, HORIZON = "push_to_zone", 24
SPECS = [EpisodeSpec(TASK, "train", i) for i in range(4)]


class Lazy(torch.nn.Module, Policy):
    """A policy that drifts sideways and solves nothing. Chunks of 4."""

    def act(self, obs: Observation, generator: object = None, temperature: float = 1.0) -> ActionChunk:
        actions = np.zeros((obs.batch_size, 4, 7), np.float32)
        actions[:, :, 1], actions[:, :, 6] = 0.3, -1.0
        return ActionChunk(actions)

    def embed(self, obs: Observation) -> torch.Tensor:
        return torch.from_numpy(obs.state).to(torch.bfloat16)  # As under a GPU's autocast.


class Third:
    """A detector that raises the alarm at an episode's third chunk."""

    def reset(self, instruction: str) -> None:
        self.chunks = 0

    def update(self, embedding: np.ndarray) -> Score:
        self.chunks += 1
        return Score(2.0 if self.chunks >= 3 else 0.5, 1.0, self.chunks >= 3, self.chunks - 1)


def fleet(
    robots: int, specs: list[EpisodeSpec] = SPECS, detector: Callable[[], Any] | None = None, **options: Any
) -> FleetResult:
    config = TabletopConfig(
        tasks=(TASK,), image_size=32, num_envs=robots, num_workers=0, horizons={TASK: HORIZON + WAITING_ROOM}
    )
    with closing(config.build()) as env:
        return run_fleet(
            Lazy(),  # type: ignore[arg-type]
            env,
            specs,
            horizons={TASK: HORIZON},
            options=FleetOptions(**{"patience": 8, "hand_over": 1.0} | options),
            make_detector=detector,
        )


def test_robots_wait_for_the_one_person_and_all_are_solved() -> None:
    one, two = fleet(1), fleet(2)
    for result in (one, two):
        assert all(e.outcome.success and e.outcome.intervened and e.requests == 1 for e in result.episodes)
        assert result.shares.requests == result.shares.served == 4
    assert {e.robot for e in two.episodes} == {"robot 1", "robot 2"}
    assert one.shares.max_wait == 0
    # The second robot asks while the person is with the first: it waits at least the hand-over.
    assert two.shares.max_wait >= 1.0
    assert two.shares.person > one.shares.person
    assert two.seconds < one.seconds
    again = fleet(2)
    assert again == two


def test_what_a_detector_scores_is_in_the_queue() -> None:
    asked: list[dict[str, Any]] = []
    config = TabletopConfig(tasks=(TASK,), image_size=32, num_envs=1, horizons={TASK: HORIZON + WAITING_ROOM})
    with closing(config.build()) as env:
        result = run_fleet(
            Lazy(),  # type: ignore[arg-type]
            env,
            SPECS[:1],
            horizons={TASK: HORIZON},
            options=FleetOptions(alarm="detector", patience=20, hand_over=0.0),
            make_detector=Third,  # type: ignore[arg-type]
            on_event=lambda event, **fields: asked.append({"event": event, **fields}),
        )
    first = next(e for e in asked if e["event"] == "asked")
    assert (first["score"], first["threshold"]) == (2.0, 1.0) and "failure score 2 above" in first["reason"]
    assert result.episodes[0].outcome.policy_frames == 9  # The alarm comes with the third chunk, heard a step later.
    assert result.episodes[0].outcome.success


def test_with_nobody_to_help_the_policy_goes_on_and_alarms_are_counted() -> None:
    result = fleet(2, helped=False)
    assert all(not e.outcome.success and not e.outcome.intervened and e.requests == 1 for e in result.episodes)
    assert all(e.outcome.policy_frames == HORIZON for e in result.episodes)
    assert result.shares.requests == 0 and result.shares.helped == 0


def test_a_detector_that_never_alarms_leaves_failures_alone() -> None:
    class Silent(Third):
        def update(self, embedding: np.ndarray) -> Score:
            return Score(0.1, 1.0, False, 0)

    result = fleet(2, SPECS[:2], Silent, alarm="detector")
    assert all(not e.outcome.success and e.requests == 0 for e in result.episodes)
    assert all(e.outcome.policy_frames == HORIZON for e in result.episodes)


def test_a_person_who_gets_nowhere_goes_to_the_next() -> None:
    result = fleet(2, operator_steps=2)
    assert all(e.outcome.given_up and not e.outcome.success for e in result.episodes)
    assert all(e.outcome.recovery_frames + e.outcome.correction_frames == 2 for e in result.episodes)
    assert result.shares.served == 4


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="a detector belongs to alarm=detector"):
        fleet(1, alarm="detector")
    with pytest.raises(ValueError, match="hand_over: got -1"):
        FleetOptions(hand_over=-1)
