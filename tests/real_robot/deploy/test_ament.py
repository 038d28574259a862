"""The ament package: what can be said of it without ROS 2. test_ros2_bridge.py builds it and runs it."""

from __future__ import annotations

import json
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import missing_ros

from real_robot.contract.load import load_contract
from real_robot.deploy.ament import PACKAGE, copy_package
from real_robot.transports.base import TransportError
from real_robot.transports.rclpy_node import RclpyConfig
from real_robot.transports.ros.install import python_path
from vla_rl.config import ConfigError

DEPENDS = {"rclpy", "launch_ros", "control_msgs", "trajectory_msgs", "sensor_msgs", "std_srvs", "geometry_msgs"}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PACKAGE))
    import vla_rl_bridge.node

    return vla_rl_bridge.node


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return copy_package(tmp_path)


def test_its_manifest_is_read_by_the_parser_of_ros() -> None:
    """catkin_pkg, which colcon reads manifests with; it checks format 3's rules."""
    if reason := missing_ros():
        pytest.skip(reason)
    code = (
        "import json, sys; from catkin_pkg.package import parse_package; warnings = []; "
        "package = parse_package(sys.argv[1], warnings=warnings); package.validate(); "
        "print(json.dumps([package.name, package.package_format, package.get_build_type(), "
        "[d.name for d in package.exec_depends], package.version, warnings]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(PACKAGE)],
        env={"PYTHONPATH": str(python_path())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    name, form, build_type, depends, version, warnings = json.loads(done.stdout)
    assert (name, form, build_type, warnings) == ("vla_rl_bridge", 3, "ament_python", [])
    assert set(depends) >= DEPENDS and version == "0.1.0"


def test_its_copy_builds_with_what_ros_looks_for(copied: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=copied, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.partition(".data/data/")[2] or name for name in zipfile.ZipFile(wheel).namelist()}
    assert names >= {
        "share/ament_index/resource_index/packages/vla_rl_bridge",
        "share/vla_rl_bridge/package.xml",
        "share/vla_rl_bridge/launch/bridge.launch.py",
        "share/vla_rl_bridge/config/bridge.yaml",
        "vla_rl_bridge/node.py",
    }
    entry_points = zipfile.ZipFile(wheel).read("vla_rl_bridge-0.1.0.dist-info/entry_points.txt").decode()
    assert "bridge = vla_rl_bridge.node:main" in entry_points
    with pytest.raises(FileExistsError):
        copy_package(tmp_path)
    with pytest.raises(NotADirectoryError, match="src folder of a ROS 2 workspace"):
        copy_package(tmp_path / "nowhere")


def test_parameters_become_deploys_options(node: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-long-enough-token")
    (tmp_path / "token").chmod(0o600)
    given = node.PARAMETERS | {
        "robot": "franka_servo",
        "overrides": ["rate=25", ""],
        "server": "gpu-box:8000",
        "instruction": "pick up the cube",
        "record": "data/round1",
        "console": 9000,
        "console_host": "0.0.0.0",
        "console_token_file": str(tmp_path / "token"),
        "dry_run": True,
    }
    options = node.options_of(given)
    assert (options.server, options.instruction, options.dry_run) == ("gpu-box:8000", "pick up the cube", True)
    assert options.console.port == 9000 and options.console.token == "a-long-enough-token"
    assert options.record == Path("data/round1") and options.detector is None and options.token_file is None
    contract = load_contract(options.robot, options.overrides)
    assert contract.transport == RclpyConfig() and contract.rate == 25
    with pytest.raises(ConfigError, match="which contract"):
        node.options_of(node.PARAMETERS)


def test_the_files_name_the_nodes_parameters(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = yaml.safe_load((PACKAGE / "config/bridge.yaml").read_text())
    assert values == {node.NODE: {"ros__parameters": node.PARAMETERS}}
    made = launched(monkeypatch)
    assert made["package"] == node.NODE and made["executable"] == "bridge" and made["name"] == node.NODE
    file, given = made["parameters"]
    assert file == "params" and set(given) <= set(node.PARAMETERS)
    for name, (_, kind) in given.items():
        assert kind is type(node.PARAMETERS[name]), name


def test_without_ros2_the_transport_says_what_to_do() -> None:
    with pytest.raises(TransportError, match=r"Source a ROS 2 .* the transport ros2"):
        RclpyConfig().open()


def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the launch file with stand-ins for ROS 2's launch modules; returns what the node was made of."""
    made: dict[str, Any] = {}
    members = {
        "ament_index_python.packages": {"get_package_share_directory": lambda name: f"/share/{name}"},
        "launch": {"LaunchDescription": list},
        "launch.actions": {"DeclareLaunchArgument": lambda name, default_value, description: name},
        "launch.substitutions": {"LaunchConfiguration": lambda name: name},
        "launch_ros.actions": {"Node": lambda **values: made.update(values)},
        "launch_ros.parameter_descriptions": {"ParameterValue": lambda value, value_type: (value, value_type)},
    }
    for name, names in members.items():
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    scope: dict[str, Any] = {"__name__": "bridge_launch"}
    path = PACKAGE / "launch/bridge.launch.py"
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert len(scope["generate_launch_description"]()) == len(scope["ARGUMENTS"]) + 2
    return made
