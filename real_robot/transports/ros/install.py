"""ROS 1's Python packages from Debian, unpacked beside the virtual environment. Needs no root and no ROS.

`vla-rl robot install` and `scripts/setup.sh dev` run this; `python -m real_robot.transports.ros.install` does the same.
The packages are pure Python (rospy, rosmaster, actionlib and message classes), 0.5 MB to download, 4 MB on disk.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from vla_rl.common.atomic import atomic_folder

PACKAGES = tuple(
    f"python3-{name}"
    for name in (
        *("rospy", "rosmaster", "rosgraph", "roslib", "rospkg", "genpy", "genmsg", "catkin", "catkin-pkg"),
        *("std-msgs", "sensor-msgs", "geometry-msgs", "trajectory-msgs", "rosgraph-msgs", "roscpp-msg"),
        *("actionlib", "actionlib-msgs", "std-srvs"),
    )
)
FOLDER_VARIABLE = "VLA_RL_ROS"
_PROBE = "import rospy, rosmaster, actionlib, sensor_msgs.msg, geometry_msgs.msg, trajectory_msgs.msg, std_srvs.srv"


class RosInstallError(RuntimeError):
    """Packages of ROS are not here, cannot be fetched or do not build; the message says what to do."""


def ros_folder() -> Path:
    """Where the packages are unpacked: $VLA_RL_ROS, else `ros1` in the virtual environment's folder."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(sys.prefix) / "ros1")


def python_path(folder: Path | None = None) -> Path:
    """The folder with the packages' Python modules."""
    return (folder or ros_folder()) / "usr/lib/python3/dist-packages"


def is_installed(folder: Path | None = None) -> bool:
    """Whether all of `PACKAGES` were unpacked there."""
    documents = (folder or ros_folder()) / "usr/share/doc"  # Each package has a folder of its name there.
    return all((documents / name).is_dir() for name in PACKAGES)


def enable() -> None:
    """Make `import rospy` work in this process: a ROS installation that is already on the path, or ours.

    Raises:
        RosInstallError: neither is there.
    """
    os.environ.setdefault("ROS_PYTHON_LOG_CONFIG_FILE", str(Path(__file__).parent / "logging.yaml"))
    if importlib.util.find_spec("rospy") is not None:
        return
    if not is_installed():
        raise RosInstallError(
            f"rospy is not installed: nothing on Python's path, nothing in {ros_folder()}. "
            "Run `vla-rl robot install` (Debian or Ubuntu, no root needed), or source your ROS installation"
        )
    sys.path.append(str(python_path()))


def install(folder: Path | None = None, report: Callable[[str], None] = print) -> Path:
    """Download and unpack the packages, unless they are there. Returns their folder.

    Raises:
        RosInstallError: no apt here, a package that apt does not find, or modules that do not import.
    """
    folder = folder or ros_folder()
    if is_installed(folder):
        return folder
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise RosInstallError(
                f"{tool} not found: ROS 1's packages come from Debian's or Ubuntu's archive. On another system, "
                "install ROS 1 (noetic, for example from robostack) and source it, or use the ros2 or rosbridge "
                "transport, which need none of this"
            )
    report(f"fetching {len(PACKAGES)} ROS 1 packages (0.5 MB) into {folder}")
    with tempfile.TemporaryDirectory(prefix="vla-rl-ros-") as temporary:
        debs = _download(Path(temporary))
        with atomic_folder(folder, what="ROS 1 packages", replace=True) as partial:
            for deb in debs:
                _run(["dpkg-deb", "-x", str(deb), str(partial)], f"unpacking {deb.name}")
            _check_imports(partial)
    return folder


def _download(folder: Path) -> list[Path]:
    """The packages' archives. Where apt's own lists are empty or stale, fetches lists of its own first."""
    options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
    command = ["apt-get", *options, "download", *PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lists, cache = folder / "lists", folder / "cache"
        for part in (lists / "partial", cache / "archives" / "partial"):
            part.mkdir(parents=True)
        options += ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
        _run(["apt-get", *options, "update"], "apt-get update", folder)
        _run(["apt-get", *options, "download", *PACKAGES], "downloading ROS 1's packages", folder)
    debs = sorted(folder.glob("*.deb"))
    if len(debs) != len(PACKAGES):
        raise RosInstallError(
            f"apt-get fetched {len(debs)} archives, expected {len(PACKAGES)}: {[d.name for d in debs]}"
        )
    return debs


def _run(command: list[str], what: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise RosInstallError(
            f"{what} failed:\n  " + "\n  ".join(lines) + "\nIs there a network, and does this release package ROS 1? "
            "(Debian 12 and Ubuntu 22.04 and 24.04 do.)"
        )


def _check_imports(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(python_path(folder))}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RosInstallError(f"ROS 1's modules do not import: {last}. Run `pip install '.[ros]'`, then try again")


if __name__ == "__main__":
    try:
        print(install(report=lambda text: print(text, file=sys.stderr)))
    except RosInstallError as error:
        sys.exit(f"error: {error}")
