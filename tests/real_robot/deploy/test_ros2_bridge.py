"""The package vla_rl_bridge as ROS 2 uses it: built by colcon, run with ROS arguments, and by `ros2 launch`.

PyPI has no `launch`: that test is skipped where `launch_ros` is not beside rclpy.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deployment import CONTRACT, RATE
from page_socket import Browser
from processes import ROOT, Child, Ros2Graph, json_lines, missing_ros2, until

from real_robot.deploy.ament import copy_package
from real_robot.transports.ros.master import free_port

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_ros2("colcon")), reason=missing_ros2("colcon") or "ROS 2 is there"),
]
TWIST = "/arm/servo/twist"  # in the contract; the node is remapped to what the robot hears


class Bridge:
    """A robot of ROS 2, a policy server, and a workspace with the built package."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.graph = folder, Ros2Graph(folder)
        self.bridges = list[Child]()
        self.port, self.server = 0, free_port()  # of the console, and of the policy
        self.trace, self.ticks = folder / "trace.jsonl", folder / "ticks.jsonl"
        self.contract = folder / "my_arm.yaml"
        shipped = (ROOT / "real_robot/contract/robots/sim_robot.yaml").read_text()
        self.contract.write_text(shipped.replace("topic: /twist_command", f"topic: {TWIST}"))
        (folder / "ws/src").mkdir(parents=True)
        copy_package(folder / "ws/src")
        done = subprocess.run(
            [self.graph.python, "-m", "colcon", "build"],
            cwd=folder / "ws", env=self.graph.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        scene = ["env.horizons.push_to_zone=1000000", "env.success.hold_steps=1000000", f"speed={RATE / 20}"]
        self.graph.cli("sim", "robot", "sim", *scene, f"trace={self.trace}", *self.graph.sim)
        self.graph.start("server", "tests/real_robot/light_server.py", str(self.server), "normal")

    def start(self, name: str, command: str, sign: str, *words: str) -> tuple[Child, Browser]:
        """Start a command of the shell in the sourced workspace, with parameters such as `robot:=...`, `sign` before
        each, and with `words`. Returns it, and a person at its console who can press Start."""
        self.port = free_port()
        given = {
            "robot": self.contract,
            "server": f"127.0.0.1:{self.server}",
            "console": self.port,
            "instruction": "go",
        }
        line = [command, *words, *(f"{sign}{key}:={value}" for key, value in given.items())]
        script = f"cd {self.folder} && source ws/install/setup.bash && exec {' '.join(line)}"
        env = self.graph.env | {"PATH": f"{Path(self.graph.python).parent}{os.pathsep}{os.environ['PATH']}"}
        child = Child(["bash", "-c", script], self.folder / f"{name}.log", env)
        self.bridges.append(child)
        until(lambda: child.says("console:"), "the console")
        page = Browser(self)
        page.take_control()
        page.until(lambda status: "start" in status["can"])
        return child, page

    def parameters(self) -> Path:
        """A file with what the launch file has no arguments for."""
        overrides = "\n".join(f'      - "{o}"' for o in CONTRACT)
        file = self.folder / "params.yaml"
        file.write_text(f"vla_rl_bridge:\n  ros__parameters:\n    log: {self.ticks}\n    overrides:\n{overrides}\n")
        return file

    def moves(self) -> bool:
        self.graph.check_alive()
        return any(line["twist"] and np.any(line["twist"]) for line in json_lines(self.trace))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    bridge = Bridge(tmp_path_factory.mktemp("bridge"))
    try:
        yield bridge
    finally:
        bridge.graph.close()


@pytest.fixture
def built(workspace: Bridge) -> Iterator[Bridge]:
    yield workspace
    workspace.bridges.pop().kill()


def test_the_node_drives_the_robot_through_remapped_topics(built: Bridge) -> None:
    executable = "ws/install/vla_rl_bridge/lib/vla_rl_bridge/bridge --ros-args"
    remapped = f"-r {TWIST}:=/twist_command"
    bridge, page = built.start("node", executable, "-p ", "--params-file", str(built.parameters()), remapped)
    assert not built.moves(), "it waits for a person"
    page.press("start")
    page.until(lambda _: built.moves())
    assert bridge.end() == 128 + signal.SIGTERM
    time.sleep(0.5)
    assert not np.any(json_lines(built.trace)[-1]["twist"]), "it was told to stand"


@pytest.mark.skipif(bool(missing_ros2("launch_ros")), reason=missing_ros2("launch_ros") or "launch is there")
def test_ros2_launch_starts_it_in_a_dry_run_and_ends_it(built: Bridge) -> None:
    command = f"ros2 launch vla_rl_bridge bridge.launch.py params:={built.parameters()} dry_run:=true"
    bridge, page = built.start("launch", command, "")
    since = time.monotonic()
    page.press("start")
    page.until(lambda _: any(t["source"] == "policy" and t["time"] > since for t in json_lines(built.ticks)))
    time.sleep(1.0)
    moved = [
        line for line in json_lines(built.trace) if line["time"] > since and line["twist"] and np.any(line["twist"])
    ]
    assert not moved
    bridge.signal(signal.SIGINT)
    assert bridge.process.wait(30) == 0 and "process has finished cleanly" in bridge.output()
