"""When goals are sent, given up and excused, by the clock: `GoalSender` with a server that answers as told.

What real servers do with them is in test_actions.py.
"""

from __future__ import annotations

import pytest

from real_robot.bridge.goals import GoalSender
from real_robot.contract.channels import GoalConfig
from real_robot.transports.action_types import GripperCommandGoal, GripperCommandResult
from real_robot.transports.actions import Goal
from real_robot.transports.messages import Message


class Server:
    """Takes down what it is asked."""

    def __init__(self) -> None:
        self.ready = True
        self.goals: list[tuple[float, Goal]] = []
        self.canceled: list[Goal] = []

    def send(self, goal: Message) -> Goal:
        assert isinstance(goal, GripperCommandGoal)
        self.goals.append((goal.position, Goal("")))
        return self.goals[-1][1]

    def cancel(self, goal: Goal) -> None:
        self.canceled.append(goal)


class Scene:
    def __init__(self, config: GoalConfig | None = None) -> None:
        self.now = 100.0
        self.server = Server()
        self.sender = GoalSender("/g", self.server, config or GoalConfig(), lambda: self.now)

    def want(self, position: float, seconds: float = 0.0) -> Goal:
        self.now += seconds
        self.sender.follow(GripperCommandGoal(position=position))
        return self.server.goals[-1][1]

    @property
    def sent(self) -> list[float]:
        return [position for position, _ in self.server.goals]

    @property
    def trouble(self) -> str | None:
        return self.sender.trouble(None, None)  # type: ignore[arg-type]


def test_goals_come_when_numbers_change_and_not_too_often() -> None:
    scene = Scene(GoalConfig(change=0.01, period=0.5))
    for position, seconds in ((0.0, 0), (0.009, 1), (0.02, 1), (0.04, 0.1), (0.05, 0.1), (0.06, 0.4)):
        scene.want(position, seconds).accept()
    assert scene.sent == [0.0, 0.02, 0.06]


def test_a_goal_that_was_reached_is_not_canceled_and_one_under_way_is_sent_anew() -> None:
    scene = Scene()
    scene.want(0.04).end("succeeded")
    scene.sender.halt()
    scene.want(0.04, 1)
    assert scene.server.canceled == [] and scene.sent == [0.04]
    under_way = scene.want(0.0, 1)
    under_way.accept()
    scene.sender.halt()
    scene.sender.halt()
    assert scene.server.canceled == [under_way]
    under_way.end("canceled")
    scene.want(0.0, 1)
    assert scene.sent == [0.04, 0.0, 0.0] and scene.trouble is None


def test_a_server_that_does_not_cancel_is_trouble_until_it_has() -> None:
    scene = Scene(GoalConfig(timeout=2))
    goal = scene.want(0.04)
    goal.accept()
    scene.sender.halt()
    assert scene.trouble is None
    scene.now += 2.1
    assert scene.trouble == "/g: the server has not canceled a goal for 2 s"
    scene.want(0.01)
    assert scene.sent == [0.04], "nothing is asked of it meanwhile"
    goal.end("succeeded")
    assert scene.trouble is None


def test_a_goal_that_is_answered_too_late_stays_given_up() -> None:
    scene = Scene()
    goal = scene.want(0.04)
    scene.now += 1.1
    assert scene.trouble == "/g: goal lost: no answer for 1 s" and scene.server.canceled == [goal]
    goal.accept()
    assert goal.status == "lost" and scene.trouble is not None
    scene.sender.restart()
    assert scene.trouble is None
    scene.want(0.04)
    assert scene.sent == [0.04, 0.04]


def test_a_server_that_goes_away_loses_its_goal() -> None:
    scene = Scene()
    scene.want(0.04).accept()
    scene.server.ready = False
    assert scene.trouble == "/g: no server answers"
    scene.server.ready = True
    assert scene.trouble == "/g: goal lost: the server went away"


@pytest.mark.parametrize(
    ("aborted", "stalled", "is_fault"),
    [
        ("stalled", True, False),
        ("stalled", False, True),
        ("fault", True, True),
        ("fine", False, False),
    ],
)
def test_what_an_aborted_goal_is(aborted: str, stalled: bool, is_fault: bool) -> None:
    scene = Scene(GoalConfig.model_validate({"aborted": aborted}))
    result = GripperCommandResult(position=0.02, effort=0.0, stalled=stalled, reached_goal=False)
    scene.want(0.0).end("aborted", result, "hot")
    assert scene.trouble == ("/g: goal aborted: hot" if is_fault else None)
