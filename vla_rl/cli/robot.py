"""`vla-rl robot`: what runs beside a robot, a simulated one, and what ROS needs."""

from __future__ import annotations

import importlib.util
import re
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from real_robot.bridge.sim_robot import SimRobotConfig, run_sim_robot
from real_robot.contract.load import load_contract
from real_robot.deploy.ament import copy_package
from real_robot.guard.robot_guard import run_guard
from real_robot.transports.ros.install import install as install_ros1
from real_robot.transports.ros.master import Master
from real_robot.transports.ros.ros2_messages import install as build_messages
from vla_rl.cli.options import ContractOverrides, say
from vla_rl.config import apply_overrides, validate

SimOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example task=pick_place speed=0.5"),
]

app = typer.Typer(no_args_is_help=True, help="Beside a robot: its guard, a simulated one, what ROS needs.")


@app.command()
def guard(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    overrides: ContractOverrides = None,
) -> None:
    """Beside the robot's driver: forward what `deploy --guarded` sends, and brake when it stops coming."""
    run_guard(load_contract(robot, overrides or ()), say)


@app.command()
def sim(
    overrides: SimOverrides = None,
    master: Annotated[
        str,
        typer.Option(
            help="ROS master: an address; new: start one on port 11311; only, only:PORT: one without a robot."
        ),
    ] = "http://127.0.0.1:11311",
) -> None:
    """A simulated robot as a node of ROS 1, or with graph=rclpy of ROS 2, to try `vla-rl deploy` on.

    With --master only it runs a ROS 1 master alone, for a robot that has none, until Ctrl-C or SIGTERM.
    """
    if only := re.fullmatch(r"only(?::([0-9]{1,5}))?", master):
        _run_master(int(only[1] or 11311))
        return
    values = apply_overrides({"env": {"kind": "tabletop"}}, overrides or ())
    run_sim_robot(validate(SimRobotConfig, values, prefix="sim"), master)


@app.command()
def install(
    sources: Annotated[
        Path | None, typer.Argument(metavar="[WORKSPACE/src]", help="The src folder of a ROS 2 workspace.")
    ] = None,
) -> None:
    """Unpack ROS 1's Python packages beside the virtual environment; where rclpy is, build control_msgs for it.

    Neither needs root. With WORKSPACE/src, copy the ROS 2 package vla_rl_bridge there instead, for colcon to build:
    node, launch file, parameters.
    """
    if sources is not None:
        typer.echo(f"package: {copy_package(sources)}")
    elif importlib.util.find_spec("rclpy") is not None:
        typer.echo(f"ROS 2: {', '.join(build_messages(report=say))}")
    else:
        typer.echo(f"ROS 1: {install_ros1(report=say)}")


def _run_master(port: int) -> None:
    master = Master(port)
    signal.signal(signal.SIGTERM, lambda *_: master.process.terminate())
    typer.echo(f"ROS master: {master.uri}", err=True)
    try:
        # Not wait(): it would sleep on where a signal comes just before its system call.
        while master.process.poll() is None:
            time.sleep(0.1)
    finally:
        master.close()
