"""The bridge: ros2 launch vla_rl_bridge bridge.launch.py robot:=my_arm.yaml server:=gpu-box:8000 instruction:="...".

Further parameters are in config/bridge.yaml; give a file of your own with params:=FILE.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (ROS 2's launch does not come from PyPI.)

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

ARGUMENTS = {
    "robot": ("", "A contract (YAML), or the name of a shipped one."),
    "server": ("127.0.0.1:8000", "The policy server."),
    "instruction": ("", "What the robot is asked to do."),
    "console": ("8080", "Port of the operator's page."),
    "dry_run": ("false", "Do everything but send commands."),
}
KINDS = {"console": int, "dry_run": bool}
DEFAULTS = get_package_share_directory("vla_rl_bridge") + "/config/bridge.yaml"


def generate_launch_description() -> LaunchDescription:
    """The node, with config/bridge.yaml (or `params`) and the arguments on top."""
    arguments = [DeclareLaunchArgument(n, default_value=d, description=t) for n, (d, t) in ARGUMENTS.items()]
    params = DeclareLaunchArgument("params", default_value=DEFAULTS, description="A file with further parameters.")
    given = {n: ParameterValue(LaunchConfiguration(n), value_type=KINDS.get(n, str)) for n in ARGUMENTS}
    node = Node(
        package="vla_rl_bridge",
        executable="bridge",
        name="vla_rl_bridge",
        output="screen",
        emulate_tty=True,
        sigterm_timeout="30",  # it brakes at once, but may still finish a recording
        parameters=[LaunchConfiguration("params"), given],
    )
    return LaunchDescription([params, *arguments, node])
