"""Options of `vla-rl deploy`, and whether they fit together with the robot's contract and the served policy."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.client_package.vla_rl_client import PolicyClientError
from real_robot.contract.contract import RobotContract
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.sim_episodes import VoidRules
from vla_rl.config import ConfigError
from vla_rl.types import Split


@dataclass(frozen=True)
class DeployOptions:
    """The command line of `vla-rl deploy`; its help says what each is."""

    robot: str
    overrides: tuple[str, ...] = ()
    server: str = "127.0.0.1:8000"
    token_file: Path | None = None
    ca: Path | None = None
    instruction: str = ""
    log: Path | None = None
    wait: float = 60.0
    dry_run: bool = False
    synchronous: bool = False
    guarded: bool = False
    episodes: int = 0
    tasks: tuple[str, ...] = ("push_to_zone",)
    split: Split = "eval"
    start: bool = False
    results: Path | None = None
    console: ConsoleConfig | None = None
    record: Path | None = None
    round: int = 0
    detector: Path | None = None
    teleop: str = ""
    allow_policy_change: bool = False
    void_rules: VoidRules = field(default_factory=VoidRules)


def check_options(options: DeployOptions, contract: RobotContract) -> None:
    """
    Raises:
        ConfigError: options that contradict one another, or lack one.
    """
    if options.record is not None and options.console is None and not options.episodes:
        raise ConfigError(
            "--record: begin, end and outcome of an episode come from the console, or from the simulator; give "
            "--console PORT, or --episodes N"
        )
    if options.results is not None and options.console is None and not options.episodes:
        raise ConfigError("--results: of episodes, a person's or the simulator's; give --console PORT, or --episodes N")
    if options.console is not None and options.episodes:
        raise ConfigError("--console and --episodes: one says a person runs the episodes, the other a script; give one")
    if options.dry_run or contract.safety.dry_run:
        if options.record is not None:
            raise ConfigError(
                "--record: a dry run sends nothing, and frames would hold actions that the robot was never told; leave "
                "one out (--log writes what would be sent)"
            )
        if options.episodes:
            raise ConfigError(
                "--episodes: a dry run sends nothing, so the simulated robot would stand and every episode count as "
                "failed; leave one out"
            )
    if options.teleop and options.console is None:
        raise ConfigError("--teleop: the console's buttons say when the person takes over; give --console PORT")
    if options.synchronous and contract.execution.real_time_chunking is not None:
        raise ConfigError(
            "--synchronous: waits for each chunk, so real_time_chunking has nothing to go on from; give one"
        )
    if not options.instruction and not contract.observation.instruction_topic:
        raise ConfigError("--instruction: what shall the robot do? The contract has no observation.instruction_topic")


def prepare_results(path: Path) -> None:
    """Make the folder that results will be written into.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path} is a folder" if path.is_dir() else f"no leave to write in {path.parent}")
    except OSError as error:
        raise ConfigError(f"--results: {path} cannot be written ({error}); give another file") from error


def check_fit(contract: RobotContract, metadata: dict) -> None:
    """
    Raises:
        PolicyClientError: the served policy needs a camera that the contract lacks, has other sizes, another rate or
            another order of the action's numbers, or cannot do what the contract's execution asks of it.
    """
    cameras = [c for c in metadata.get("cameras", []) if c not in contract.observation.images]
    if cameras:
        raise PolicyClientError(
            f"the policy reads camera {cameras[0]!r}; {contract.name}'s contract has: "
            f"{', '.join(contract.observation.images) or 'none'}"
        )
    sizes = [("action", metadata.get("action_dim"), contract.action_dim)]
    if metadata.get("uses_state"):
        sizes.append(("state", metadata.get("state_dim"), contract.observation.state_dim))
    for name, theirs, ours in sizes:
        if theirs is not None and theirs != ours:
            raise PolicyClientError(f"the policy's {name} has {theirs} numbers, {contract.name}'s contract has {ours}")
    rate, names = metadata.get("control_hz"), metadata.get("action_names")
    if isinstance(rate, int | float) and rate != contract.rate:
        raise PolicyClientError(
            f"the policy was trained at {rate:g} steps a second (vla-rl serve --control-hz), {contract.name}'s rate is "
            f"{contract.rate:g}, so it would be played at another speed; set rate={rate:g}, or serve it without"
        )
    if names and sorted(names) == sorted(contract.action_names) and tuple(names) != contract.action_names:
        raise PolicyClientError(
            f"the policy's actions are {', '.join(names)} (vla-rl serve --action-names), {contract.name}'s contract "
            f"has them in another order: {', '.join(contract.action_names)}; change `indices` and safety.dimensions"
        )
    _check_units(contract, metadata.get("action_range"))
    if contract.execution.real_time_chunking is not None and not metadata.get("real_time_chunking"):
        raise PolicyClientError(
            f"execution.real_time_chunking: {contract.name}'s contract asks for it, but the served policy cannot go on "
            "from actions under way (SmolVLA, pi0 and pi0.5 can, served at temperature 0); leave it out, or set it to "
            "false"
        )


UNITS = {math.degrees(1): ("degrees", "radians"), 100.0: ("centimeters", "meters"), 1000.0: ("millimeters", "meters")}
TOO_FAR, TOO_NEAR = 3.0, 1 / 20  # of the policy's numbers against the limits: in any of them; in nearly all
GRIPPERS = 6  # numbers to a gripper, whose unit is its own, at most


def _check_units(contract: RobotContract, action_range: Any) -> None:
    """
    Raises:
        PolicyClientError: the actions that the policy has learned from go far beyond a limit, or nowhere near any but
            one in six (a gripper's).
    """
    try:
        low, high = np.asarray(action_range, np.float64)
    except (TypeError, ValueError):  # a server that tells none
        return
    limits = contract.safety.dimensions
    if low.shape != (len(limits),) or not np.isfinite([low, high]).all():
        return
    told, most = np.maximum(-low, high), np.array([max(-d.low, d.high) for d in limits])
    used = np.flatnonzero(high > low)  # a gripper that passes as it is says nothing of units
    if not len(used):
        return
    ratio = np.abs(told[used]) / most[used]
    near, worst = ratio < TOO_NEAR, int(ratio.argmax())
    if ratio[worst] <= TOO_FAR:
        if np.count_nonzero(~near) > len(ratio) // GRIPPERS:
            return
        worst = int(np.where(near, ratio, 0).argmax())
    i, factor = int(used[worst]), max(ratio[worst], 1 / ratio[worst]) if ratio[worst] else math.inf
    unit = min(UNITS, key=lambda unit: abs(math.log(unit / factor)))
    theirs, ours = UNITS[unit] if ratio[worst] > 1 else UNITS[unit][::-1]
    guess = (
        f"it looks like {theirs}, the contract's like {ours}"
        if 0.3 < unit / factor < 3.3
        else "is it another unit, or another robot"
    )
    raise PolicyClientError(
        f"{limits[i].name}: the actions that the policy has learned from go from {low[i]:.3g} to {high[i]:.3g}, "
        f"{contract.name}'s limits from {limits[i].low:.3g} to {limits[i].high:.3g}: {guess}. Set `convert` of its "
        "action, or limits that fit the policy"
    )
