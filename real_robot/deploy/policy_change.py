"""What deploy does where the server serves another policy in mid-run: hold, tell, a new episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from real_robot.contract.contract import RobotContract
from real_robot.control.robot_loop import Tick
from real_robot.deploy.options import check_fit
from real_robot.serving.client import PolicyClient, PolicyClientError
from real_robot.serving.identity import PolicyIdentity
from real_robot.serving.policy_gate import PolicyGate

if TYPE_CHECKING:
    from real_robot.failure.detector import FailureDetector


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
