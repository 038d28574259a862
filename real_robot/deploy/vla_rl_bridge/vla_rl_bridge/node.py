"""The node `bridge`: `vla-rl deploy` with ROS parameters as its options, and this process's node as its transport.

ros2 run vla_rl_bridge bridge --ros-args -p robot:=my_arm.yaml -p server:=gpu-box:8000
"""

# pyright: reportMissingImports=false
# (rclpy comes from ROS 2, not from PyPI.)

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from real_robot.deploy.deploy import deploy
from real_robot.deploy.options import DeployOptions
from real_robot.operator.console.access import ConsoleConfig
from real_robot.serving.network import read_token
from vla_rl.config import ConfigError, validate

NODE = "vla_rl_bridge"
PARAMETERS: dict[str, Any] = {
    "robot": "",
    "overrides": [""],
    "server": "127.0.0.1:8000",
    "token_file": "",
    "ca": "",
    "instruction": "",
    "console": 8080,
    "console_host": "127.0.0.1",
    "console_token_file": "",
    "record": "",
    "detector": "",
    "log": "",
    "dry_run": False,
    "guarded": False,
}


def options_of(parameters: Mapping[str, Any]) -> DeployOptions:
    """The node's parameters as the options of deploy.

    Raises:
        ConfigError: no robot, or an impossible console. ValueError: a token's file that cannot be used.
    """
    if not parameters["robot"]:
        raise ConfigError("robot: which contract? Set the parameter robot:=my_arm.yaml")
    token_file = parameters["console_token_file"]
    console = {
        "port": parameters["console"],
        "host": parameters["console_host"],
        "token": read_token(Path(token_file)) if token_file else None,
    }

    def path(name: str) -> Path | None:
        return Path(parameters[name]) if parameters[name] else None

    return DeployOptions(
        robot=parameters["robot"],
        overrides=("transport={kind: rclpy}", *filter(None, parameters["overrides"])),
        server=parameters["server"],
        instruction=parameters["instruction"],
        console=validate(ConsoleConfig, console, prefix="console"),
        dry_run=parameters["dry_run"],
        guarded=parameters["guarded"],
        token_file=path("token_file"),
        ca=path("ca"),
        record=path("record"),
        detector=path("detector"),
        log=path("log"),
    )


def read_parameters(arguments: list[str]) -> dict[str, Any]:
    """The parameters that the node was given. rclpy stays up, with the arguments' remappings, for the transport."""
    import rclpy
    from rclpy.signals import SignalHandlerOptions

    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    node = rclpy.create_node(NODE)
    try:
        return {name: node.declare_parameter(name, default).value for name, default in PARAMETERS.items()}
    finally:
        node.destroy_node()


def main() -> None:
    """Run deploy until it is told to end."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        deploy(options_of(read_parameters(sys.argv)), lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, RuntimeError, OSError) as error:  # ours name what to do; rclpy's say what failed
        sys.exit(f"error: {error}")
    finally:
        import rclpy

        rclpy.try_shutdown()
