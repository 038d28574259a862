"""Scene reset around a person's episodes: the services of the contract's section `episode`.

The control loop asks at each tick, and nothing here waits: the robot is inactive until the service has answered and an
observation of the new scene is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from real_robot.bridge.robot import TopicRobot
from real_robot.contract.sections import EpisodeServices
from real_robot.control.robot_loop import Operator, OperatorCommand
from real_robot.operator.intervention import InterventionError
from real_robot.transports.action_types import SERVICES, ServiceDone, TriggerRequest
from real_robot.transports.actions import Answer, GraphTransport, ServiceClient, graph_of
from real_robot.transports.base import TransportError
from real_robot.types import RobotObservation

FRESH = 0.5  # seconds to wait for an observation made after the answer; a simulator that waits for commands makes none


class SceneReset:
    """A person's operator, where an episode begins once the contract's services have been called.

    Args:
        operator: the person's.
        graph: where the services are.
        flush: forgets what the robot was seen to do before that time (monotonic seconds).
        hold: called with why the scene was not laid out; the robot holds, and the person decides. False: nothing held.
        tell: told what happens, a line each.
    """

    def __init__(
        self,
        operator: Operator,
        services: EpisodeServices,
        graph: GraphTransport,
        flush: Callable[[float], None],
        hold: Callable[[str], object],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operator, self._config, self._flush = operator, services, flush
        self._hold, self._tell, self._clock = hold, tell, clock
        self._clients = {name: graph.service(name, SERVICES["std_srvs/Trigger"]) for name in _names(services)}
        self._reset: tuple[_Call, str] | None = None  # under way, and who asked for it
        self._begin: _Call | None = None
        self._is_due = False  # an episode is to begin

    @property
    def can_reset(self) -> bool:
        """There is a service that lays the scene out, and none is at work."""
        return bool(self._config.reset) and self._reset is None and not self._is_due

    def reset(self, who: str) -> None:
        """Lay the scene out anew, from any thread; what comes of it is told.

        Raises:
            InterventionError: no service does that, or one is at work.
        """
        if not self._config.reset:
            raise InterventionError("new scene: the contract's episode.reset names no service; lay it out by hand")
        if not self.can_reset:
            raise InterventionError("new scene: the scene is being laid out")
        self._reset = (self._call(self._config.reset), who)

    def poll(self, observation: RobotObservation | None) -> OperatorCommand:
        """What the person's operator says; inactive while the scene of an episode is laid out."""
        operator_command = self._operator.poll(observation)
        if self._reset is not None and self._reset[0].is_over():
            (call, who), self._reset = self._reset, None
            self._tell(f"new scene ({who}): {call.trouble or call.message or 'laid out'}")
        if operator_command.begin or not operator_command.active:
            self._begin, self._is_due = None, operator_command.begin and operator_command.active
        if not self._is_due:
            return operator_command
        if not self._may_begin(observation):
            return replace(operator_command, active=False, begin=False, replan=False, command=None)
        self._is_due = False
        return replace(operator_command, begin=True)

    def _may_begin(self, observation: RobotObservation | None) -> bool:
        """Call the service, where that is still to be done; whether it has answered, and the new scene is seen."""
        if observation is None or self._reset is not None:
            return False  # The robot, and so its services, may still be on the way.
        if not self._config.begin:
            return True
        call = self._begin = self._begin or self._call(self._config.begin)
        if not call.is_over():
            return False
        if call.trouble:
            if self._hold(call.trouble) is False:
                self._tell(call.trouble)
            return True
        is_fresh = observation.stamp >= call.answered
        if is_fresh or self._clock() - call.answered > FRESH:
            self._flush(call.answered if is_fresh else call.asked)
            return True
        return False

    def _call(self, name: str) -> _Call:
        return _Call(self._clients[name], name, self._config.timeout, self._clock)


class _Call:
    """One call of a Trigger service, looked at until it has answered or its time is over.

    Attributes:
        asked, answered: monotonic seconds. trouble: why it failed, or "". message: the service's word.
    """

    def __init__(self, client: ServiceClient, name: str, seconds: float, clock: Callable[[], float]) -> None:
        self.asked, self.answered = clock(), float("inf")
        self.trouble = self.message = ""
        self._client, self._name, self._seconds, self._clock = client, name, seconds, clock
        self._is_sent = False
        self._got: list[Answer] = []

    def is_over(self) -> bool:
        """Whether it is; the call goes out as soon as the service is there."""
        if not self._is_sent and self._client.ready:
            self._is_sent = True
            self._client.call(TriggerRequest(), self._got.append)
        if self.answered == float("inf"):
            self._look()
        return self.answered < float("inf")

    def _look(self) -> None:
        now = self._clock()
        if self._got:
            answer, self.answered = self._got[0], now
            if not isinstance(answer, ServiceDone):
                self.trouble = str(answer)
            elif answer.success:
                self.message = answer.message
            else:
                self.trouble = f"service {self._name} refused: {answer.message or 'no reason given'}"
        elif now - self.asked > self._seconds:
            what = "has not answered" if self._is_sent else "is not there"
            self.answered, self.trouble = now, f"service {self._name} {what} for {self._seconds:g} s"


def with_scene_reset(
    operator: Operator,
    services: EpisodeServices,
    robot: TopicRobot,
    hold: Callable[[str], object],
    tell: Callable[[str], None],
) -> SceneReset | None:
    """The operator with the contract's services before it; None where it names none.

    Raises:
        TransportError: it names some, and the transport has no services.
    """
    if not _names(services):
        return None
    try:
        graph = graph_of(robot.transport, f"episode: {_names(services)[0]}")
    except TransportError as error:
        raise TransportError(
            f"{error}. Set episode={{begin: '', reset: ''}} where a person lays the scene out"
        ) from error
    return SceneReset(operator, services, graph, robot.flush, hold, tell)


def _names(services: EpisodeServices) -> list[str]:
    return [name for name in (services.begin, services.reset) if name]
