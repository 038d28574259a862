"""The policy gate: of a policy that the server swaps in mid-run, nothing acts until somebody agrees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from real_robot.client_package.vla_rl_client import PolicyClientError
from real_robot.contract.contract import RobotContract
from real_robot.control.robot_loop import Tick
from real_robot.deploy.options import check_fit
from real_robot.failure.detector import FailureDetector
from real_robot.serving.client import PolicyClient
from real_robot.serving.requests import UNKNOWN, PolicyIdentity
from real_robot.types import RobotObservation


class PolicyChanged(PolicyClientError):
    """Another policy answered than the one in force; its actions are not executed."""


class PolicyGate:
    """See the module. `act` is called by the executor's thread, the rest by the control loop's.

    The policy that answers first is in force. The first answer of another is never let through, so what is queued of
    the old one is dropped before anything of the new one is played: an action that is played is of the policy in force.

    Args:
        act: `PolicyClient.act`.
        allow_change: agree at once with another policy, where `check` lets it pass.
        check: raises `PolicyClientError` where a policy cannot take over: other sizes, another detector.
    """

    def __init__(
        self,
        act: Callable[..., dict[str, Any]],
        allow_change: bool = False,
        check: Callable[[PolicyIdentity], None] = lambda policy: None,
    ) -> None:
        self._act, self._allow, self._check = act, allow_change, check
        self._policy: PolicyIdentity | None = None
        self._other: PolicyIdentity | None = None
        self._refusal = ""  # why the other one cannot take over
        self._failure = self._news = ""  # of the last request; of the last change, until it is taken
        self._lock = threading.Lock()

    @property
    def policy(self) -> PolicyIdentity:
        """The one in force, whose actions are executed; unknown before the first answer."""
        return self._policy or UNKNOWN

    @property
    def has_answered(self) -> bool:
        """A policy is in force."""
        return self._policy is not None

    @property
    def trouble(self) -> str:
        """Why nothing goes through: another policy, or what the last request failed with; else empty."""
        with self._lock:
            return self._told() or self._failure

    def take_news(self) -> str:
        """What changed since this was last asked; empty where nothing did."""
        with self._lock:
            news, self._news = self._news, ""
            return news

    @property
    def waits_for_a_person(self) -> bool:
        """Another policy answers, and it takes a person to go on."""
        with self._lock:
            return self._other is not None and (not self._allow or bool(self._refusal))

    def _told(self) -> str:
        if self._other is None:
            return ""
        before = f", in place of {self._policy}" if self._policy else ""
        then = self._refusal or ("" if self._allow else "it acts from the next episode on")
        return f"the policy server now serves {self._other}{before}" + (f": {then}" if then else "")

    def act(self, observation: RobotObservation, **options: Any) -> dict[str, Any]:
        """As `PolicyClient.act`, for the policy in force.

        Raises:
            PolicyChanged: another one answered.
        """
        try:
            answer = self._act(observation, **options)
        except PolicyClientError as error:
            self._failure = str(error)
            raise
        found: PolicyIdentity = answer["policy"]
        with self._lock:
            self._failure = ""
            if found == self._policy:
                self._other = None
                return answer
            is_news = found != self._other
            if is_news:
                self._other, self._refusal = found, self._why_not(found)
            if not self._refusal and (self._policy is None or (self._allow and not is_news)):
                self._policy, self._other = found, None
                return answer
            self._news = self._told() if is_news else self._news
            raise PolicyChanged(self._told())

    def agree(self) -> None:
        """Go on with the policy that answers now, if it can take over: a new episode begins."""
        with self._lock:
            if self._other is not None:
                self._refusal = self._why_not(self._other)
                if not self._refusal:
                    self._policy, self._other = self._other, None

    def _why_not(self, policy: PolicyIdentity) -> str:
        try:
            self._check(policy)
        except PolicyClientError as error:
            return str(error)
        return ""


def open_gate(
    client: PolicyClient,
    contract: RobotContract,
    detector: FailureDetector | None,
    allow_change: bool,
) -> PolicyGate:
    """The gate through which a server's answers go. No policy passes that does not fit the robot or the detector."""

    def check(policy: PolicyIdentity) -> None:
        if detector is not None and policy.hash != detector.identity.policy_hash:
            raise PolicyClientError(
                f"the failure detector was fitted on {detector.identity.policy_hash[:12]}; serve that one again, or "
                "restart deploy with another detector, or without"
            )
        check_fit(contract, client.metadata)

    return PolicyGate(client.act, allow_change, check)


def hold_on_change(
    gate: PolicyGate, hold: Callable[[str], object], tell: Callable[[str], object], is_watched: bool
) -> Callable[[Tick], None]:
    """An observer of the loop. It tells of a change once, and calls `hold` with the reason while the policy waits.

    Args:
        is_watched: by a person, who agrees with the change by beginning an episode. A script never does.
    """

    def observe(tick: Tick) -> None:
        wanted = tick.operator_command
        if wanted.begin and is_watched:
            gate.agree()
        if news := gate.take_news():
            tell(news)
        if wanted.active and wanted.command is None and gate.waits_for_a_person:
            hold(gate.trouble)

    return observe
