"""A camera that does not show the arm's motion is an alarm; one that does is none, with noise or a person behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from real_robot.contract.load import load_contract
from real_robot.control.robot_loop import Tick
from real_robot.deploy.notices import CameraAnswers
from real_robot.types import RobotObservation
from sim.tabletop.env import TabletopConfig
from vla_rl.types import EpisodeSpec

Change = Callable[[np.ndarray, int], np.ndarray]
RNG = np.random.default_rng(0)
WALL = RNG.integers(60, 200, (64, 64, 3), dtype=np.uint8)


def episodes(number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(picture, state) of the tabletop's expert at 20 Hz; two seconds of rest before each episode."""
    env = TabletopConfig().make()
    for k in range(number):
        env.reset(EpisodeSpec(("push_to_zone", "stack", "pick_place")[k % 3], "train", k))
        for step in range(130):
            if step >= 40:
                env.apply(np.clip(env.expert_action(), -1, 1))
            seen = env.observe()
            yield seen.images["agentview"], np.asarray(seen.state)


@pytest.fixture(scope="module")
def seen() -> list[tuple[np.ndarray, np.ndarray]]:
    return list(episodes(9))


def noise(picture: np.ndarray, sigma: float) -> np.ndarray:
    return np.clip(picture + RNG.normal(0, sigma, picture.shape), 0, 255).astype(np.uint8)


def person(picture: np.ndarray, k: int) -> np.ndarray:
    """Somebody walks through, whether the robot moves or not."""
    picture = picture.copy()
    picture[:40, k % 50 : k % 50 + 12] = 150
    return picture


SOUND: dict[str, Change] = {
    "as it is": lambda picture, k: picture,
    "noise": lambda picture, k: noise(picture, 6),
    "a person behind": lambda picture, k: np.where(picture > 0, noise(person(picture, k), 2), picture),
}
BLIND: dict[str, Change] = {
    "covered": lambda picture, k: noise(np.full_like(picture, 20), 6),
    "turned to a wall": lambda picture, k: noise(WALL, 3),
    "frozen": lambda picture, k: WALL,
}


def alarms(seen: list[tuple[np.ndarray, np.ndarray]], change: Change, begins: int = 0) -> list[str]:
    told: list[str] = []
    answers = CameraAnswers(load_contract("sim_robot").safety, told.append)
    for k, (picture, state) in enumerate(seen):
        shown = change(picture, k) if k >= begins else picture
        observation = RobotObservation({"agentview": shown}, state, "", 0.05 * k)
        answers(Tick(k, 0.05 * k, observation, True, None, None, 0.0, 0.0))
    return told


@pytest.mark.parametrize("kind", SOUND)
def test_a_camera_that_shows_the_arm(seen: list[tuple[np.ndarray, np.ndarray]], kind: str) -> None:
    assert not alarms(seen, SOUND[kind])


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("begins", [0, 500], ids=["from the start", "in mid-run"])
def test_a_camera_that_does_not(seen: list[tuple[np.ndarray, np.ndarray]], kind: str, begins: int) -> None:
    told = alarms(seen, BLIND[kind], begins)
    assert len(told) == 1 and told[0].startswith("alarm: camera agentview does not answer the arm's motion: in 5 s")


def test_a_robot_at_rest_says_nothing_of_its_cameras(seen: list[tuple[np.ndarray, np.ndarray]]) -> None:
    still = [(picture, seen[0][1]) for picture, _ in seen]
    assert not alarms(still, BLIND["covered"])
