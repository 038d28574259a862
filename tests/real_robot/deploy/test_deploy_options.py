"""Options of deploy that contradict one another are refused before anything is opened."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from real_robot.client_package.vla_rl_client import PolicyClientError, ServerUnavailable
from real_robot.client_package.vla_rl_client.wire import DEFAULT_LIMITS
from real_robot.contract.load import load_contract
from real_robot.deploy.deploy import deploy
from real_robot.deploy.options import DeployOptions, check_fit, check_options
from real_robot.operator.console.access import ConsoleConfig
from real_robot.serving.server import ServeConfig, load_for_serving
from vla_rl.config import ConfigError
from vla_rl.data.lerobot_assembly import METADATA


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


def test_what_finishes_a_recording_is_loaded_before_anything_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seconds that a person would wait for at the end, or an error after hours of episodes."""
    monkeypatch.setitem(sys.modules, METADATA, None)  # as where it is not installed
    with pytest.raises(ImportError, match="lerobot"):
        deploy(DeployOptions("sim_robot", server="127.0.0.1:1", wait=0.0, episodes=1, record=tmp_path / "set"), print)


def told(name: str, scale: float, **changes: Any) -> dict[str, Any]:
    """What the server of a policy says that uses this share of each of the contract's limits."""
    limits = load_contract(name).safety.dimensions
    low, high = ([scale * getattr(d, side) for d in limits] for side in ("low", "high"))
    low[-1] = high[-1]  # a gripper that passes as it is
    return {"action_dim": len(limits), "action_range": [low, high], **changes}


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        (
            "ur5e_ros2",
            math.degrees(0.5),
            r"^shoulder_pan: .* from -180 to 180, ur5e_ros2's limits .* degrees, .* radians",
        ),
        (
            "so101",
            math.radians(0.9),
            r"^shoulder_pan: .* from -1.73 to 1.73, .* looks like radians, the .* like degrees",
        ),
        ("franka_servo", 1000 * 0.7, "^x: .* looks like millimeters, the contract's like meters.*convert"),
        ("sim_robot", 7.0, "^x: .* from -7 to 7, .* from -1 to 1: is it another unit"),
        ("sim_robot", 0.01, "^x: .* looks like meters, the contract's like centimeters"),
    ],
)
def test_a_policy_of_another_unit_is_refused_before_anything_moves(name: str, scale: float, message: str) -> None:
    with pytest.raises(PolicyClientError, match=message):
        check_fit(load_contract(name), told(name, scale))


@pytest.mark.parametrize("uses", [1, 0])
def test_a_gripper_in_its_own_unit_hides_nothing(uses: float) -> None:
    """Radians for degrees, of an arm whose gripper goes from limit to limit; so does one joint of its motion in x."""
    facts, contract = told("so101", math.radians(0.9)), load_contract("so101")
    facts["action_range"][1][-1] = uses * contract.safety.dimensions[-1].high
    with pytest.raises(PolicyClientError, match=r"^\w+: .* looks like radians, the contract's like degrees"):
        check_fit(contract, facts)
    twist = told("franka_servo", 0.0)  # a task that moves in x and y alone
    for number in (0, 1):
        twist["action_range"][1][number] = 0.5 * load_contract("franka_servo").safety.dimensions[number].high
    check_fit(load_contract("franka_servo"), twist)


@pytest.mark.parametrize("name", ["ur5e_ros2", "so101", "franka_servo", "sim_robot", "aloha"])
@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 2.0])
def test_a_policy_of_the_robots_own_unit_fits(name: str, scale: float) -> None:
    check_fit(load_contract(name), told(name, scale))


def test_one_number_in_another_unit_is_enough_and_what_is_not_told_is_not_judged() -> None:
    contract, facts = load_contract("ur5e_ros2"), told("ur5e_ros2", 0.5)
    facts["action_range"][1][5] = 100.0
    with pytest.raises(PolicyClientError, match=r"^wrist_3: .* to 100, "):
        check_fit(contract, facts)
    for unknown in (None, "x", [[1.0], [2.0]], [[0.0] * 7, [float("nan")] * 7]):
        check_fit(contract, told("ur5e_ros2", 1.0, action_range=unknown))


def test_the_shipped_policy_tells_its_actions_range_and_fits_the_simulated_robot() -> None:
    _, facts = load_for_serving("pretrained:tabletop_base", ServeConfig(device="cpu"))
    assert facts.action_range is not None and len(facts.action_range[0]) == 7
    check_fit(load_contract("sim_robot"), {"action_range": facts.metadata(DEFAULT_LIMITS)["action_range"]})
