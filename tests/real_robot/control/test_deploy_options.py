"""Options of deploy that contradict one another are refused before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real_robot.bridge.contract import load_contract
from real_robot.control.deploy_options import DeployOptions, check_options
from real_robot.operator.console.config import ConsoleConfig
from vla_rl.config import ConfigError


@pytest.mark.parametrize("by_contract", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": Path("set"), "console": ConsoleConfig()}, "--record: .*dry run sends nothing"),
        ({"episodes": 2}, "--episodes: .*dry run sends nothing"),
    ],
)
def test_a_dry_run_gives_no_dataset_and_no_rate(options: dict[str, Any], message: str, by_contract: bool) -> None:
    """Frames would hold actions that the robot was never told; each episode would count as the policy's failure."""
    contract = load_contract("sim_robot", ["safety.dry_run=true"] if by_contract else [])
    with pytest.raises(ConfigError, match=message):
        check_options(DeployOptions("sim_robot", dry_run=not by_contract, **options), contract)
    check_options(DeployOptions("sim_robot", **options), load_contract("sim_robot"))
    check_options(DeployOptions("sim_robot", dry_run=True, log=Path("ticks.jsonl")), load_contract("sim_robot"))
