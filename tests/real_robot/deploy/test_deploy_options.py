"""Options of deploy that contradict one another are refused before anything is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from real_robot.client_package.vla_rl_client import ServerUnavailable
from real_robot.contract.load import load_contract
from real_robot.deploy.deploy import deploy
from real_robot.deploy.options import DeployOptions, check_options
from real_robot.operator.console.access import ConsoleConfig
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


def test_results_can_be_written_before_anything_runs(tmp_path: Path) -> None:
    """Else hours of episodes end in an error, and their outcomes are lost."""
    nobody: dict[str, Any] = {"server": "127.0.0.1:1", "wait": 0.0, "episodes": 1}
    with pytest.raises(ServerUnavailable):
        deploy(DeployOptions("sim_robot", results=tmp_path / "new" / "folder" / "r.json", **nobody), print)
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "r.json", tmp_path / "new"):
        with pytest.raises(ConfigError, match=f"--results: {path} cannot be written"):
            deploy(DeployOptions("sim_robot", results=path, **nobody), print)
