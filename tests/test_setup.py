"""Set-up: which Python it takes, what it installs, what it says when something is missing.

The script runs against stand-ins for python, apt-get and id, so nothing is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import threading
import tomllib
from pathlib import Path

import pytest
import slow_tests
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "scripts" / "setup.sh"
TOOLS = ("bash", "sh", "dirname", "cat", "cksum", "awk", "find", "mktemp", "rm", "tail", "mkdir", "touch", "c++")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="set-up needs bash")


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Machine:
    """A PATH of a few real tools and stand-ins; what they were asked is in `log`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.log = folder, folder / "bin", folder / "log"
        self.bin.mkdir()
        self.log.touch()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        for tool in ("make", "c++"):
            if not (self.bin / tool).exists():
                script(self.bin / tool, "exit 0")
        self.user(1000)
        self.free_disk(50)
        script(self.bin / "apt-get", f'echo "apt-get $*" >>{self.log}')

    def user(self, number: int) -> None:
        script(self.bin / "id", f"echo {number}")

    def free_disk(self, gigabytes: int) -> None:
        line = f"/dev/disk 999999999 1 {gigabytes * 1024**2} 1% /"
        script(self.bin / "df", f"echo 'Filesystem 1024-blocks Used Available Capacity Mounted on'; echo '{line}'")

    def venv(self, body: str = "exit 0") -> Path:
        """A virtual environment whose python logs its arguments, then runs `body`."""
        folder = self.folder / "venv"
        script(folder / "bin" / "python", f'echo "python $*" >>{self.log}\n{body}')
        (folder / "pyvenv.cfg").touch()
        os.utime(folder / "pyvenv.cfg", (0, 0))
        return folder

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        base = {"PATH": str(self.bin), "HOME": str(self.folder / "home"), "VENV": str(self.folder / "venv")}
        return subprocess.run(command, env={**base, **env}, capture_output=True, text=True, check=False, timeout=60)

    def setup(self, level: str = "core", **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", str(SETUP), level, **env)

    def find_python(self, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", f"source {SETUP}; find_python", **env)

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---------------------------------------------------------------- which Python


def test_a_python_on_the_path_is_taken(machine: Machine) -> None:
    script(machine.bin / "python3.12", "exit 1")  # As pyenv's shims are, without a version behind them.
    script(machine.bin / "python3.13", "exit 0")
    script(machine.bin / "python3", "exit 0")
    assert machine.find_python().stdout.strip() == "python3.13"


def test_else_one_of_pyenvs(machine: Machine) -> None:
    script(machine.bin / "python3", "exit 1")
    for version, code in (("3.11.7", 1), ("3.12.1", 0), ("3.13.0", 0)):
        script(machine.folder / "home" / ".pyenv" / "versions" / version / "bin" / "python", f"exit {code}")
        script(machine.folder / "other" / "versions" / version / "bin" / "python", f"exit {code}")
    assert machine.find_python().stdout.strip().endswith("home/.pyenv/versions/3.12.1/bin/python")
    found = machine.find_python(PYENV_ROOT=str(machine.folder / "other")).stdout.strip()
    assert found.endswith("other/versions/3.12.1/bin/python")


def test_else_uv_makes_one(machine: Machine) -> None:
    made = machine.folder / "made"
    script(
        machine.bin / "uv",
        f'echo "uv $*" >>{machine.log}\n'
        f'if [ "$2" = install ]; then printf "#!/bin/sh\\nexit 0\\n" >{made}; chmod +x {made}; fi\n'
        f"[ -e {made} ] && echo {made}",
    )
    (machine.bin / "chmod").symlink_to(shutil.which("chmod") or "/bin/chmod")
    assert machine.find_python().stdout.strip() == str(made)
    assert "uv python install 3.12" in machine.asked()


def test_else_it_says_what_to_install(machine: Machine) -> None:
    script(machine.bin / "uv", "exit 1")
    done = machine.run("bash", "-c", f"source {SETUP}; system_python() {{ :; }}; make_venv")
    assert done.returncode == 1
    for part in ("no Python 3.12 or newer found", "pipx install uv", "pyenv install 3.12", "make PYTHON="):
        assert part in done.stderr


def test_where_the_system_packages_one_that_is_the_advice(machine: Machine) -> None:
    call = f"source {SETUP}; system_python() {{ echo python3.12; }}; make_venv"
    done = machine.run("bash", "-c", call)
    assert done.returncode == 1
    assert "sudo apt-get install -y --no-install-recommends python3.12 python3.12-venv" in done.stderr
    machine.user(0)
    machine.run("bash", "-c", call)
    assert "apt-get install -y --no-install-recommends python3.12 python3.12-venv" in machine.asked()


def test_a_python_without_venv_gets_its_package_named(machine: Machine) -> None:
    script(machine.bin / "python3.12", 'case "$2" in *ensurepip*) exit 1 ;; *print*) echo 3.12 ;; esac')
    done = machine.setup()
    assert done.returncode == 1
    assert "cannot make virtual environments" in done.stderr and "python3.12-venv" in done.stderr


def test_a_bad_python_is_named(machine: Machine) -> None:
    done = machine.setup(PYTHON="/no/such/python")
    assert done.returncode == 1 and "PYTHON=/no/such/python is not a working Python 3.12" in done.stderr


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    (machine.folder / "venv").mkdir()
    (machine.folder / "venv" / "thesis.txt").touch()
    done = machine.setup()
    assert done.returncode == 1 and "is not a virtual environment" in done.stderr
    assert (machine.folder / "venv" / "thesis.txt").exists()


# ---------------------------------------------------------------- what it installs


def test_it_installs_once_with_the_constraints(machine: Machine) -> None:
    ros = f"mkdir -p {machine.folder}/venv/ros1/usr/share/doc/python3-std-srvs"
    ros2 = machine.folder / "venv" / "ros2"
    known = f"*doctor*) echo egl ;; *CMAKE_BIN_DIR*) echo /cmake ;; *ros.install) {ros} ;; *tomllib*) echo rclpy ;;"
    machine.venv(f'case "$*" in {known} esac')
    script(ros2 / "bin" / "python", f'echo "python $*" >>{machine.log}; case "$*" in *sysconfig*) echo {ros2} ;; esac')
    done = machine.setup("dev")
    assert done.returncode == 0, done.stderr
    assert [line for line in machine.asked() if "-m real_robot" in line] == [
        "python -m real_robot.transports.ros.ros2_messages",
        "python -m real_robot.transports.ros.install",
    ]
    installs = [line for line in machine.asked() if " install " in line]
    assert len(installs) == 5 and all("-c constraints.txt" in line for line in installs[:4])
    assert installs[0].endswith("--upgrade pip")
    assert installs[1].endswith("-e .") and installs[2].endswith("-e .[dev,docs,libero,robot,ros,flow,low_memory]")
    assert installs[3].endswith("-c constraints.txt rclpy")
    assert installs[4].endswith(" colcon-ros colcon-bash")
    assert (machine.folder / "venv" / ".mujoco_gl").read_text() == "egl\n"
    assert done.stderr.rstrip().endswith(f"source {machine.folder}/venv/bin/activate")

    machine.log.write_text("")
    again = machine.setup("dev")
    assert again.returncode == 0 and again.stderr == "" and machine.asked() == [machine.asked()[0]]


def test_without_ros_it_says_that_tests_are_skipped(machine: Machine) -> None:
    machine.venv('case "$*" in *doctor*) echo egl ;; *ros.install) exit 1 ;; esac')
    done = machine.setup("dev")
    assert done.returncode == 0 and "tests that need it will be skipped" in done.stderr


def test_a_failed_install_leaves_no_stamp(machine: Machine) -> None:
    venv = machine.venv('case "$*" in *" -e "*) exit 1 ;; esac')
    done = machine.setup()
    assert done.returncode == 1 and "pip could not install the package" in done.stderr
    assert not list(venv.glob(".installed-*"))


def test_a_full_disk_is_told_before_anything_is_downloaded(machine: Machine) -> None:
    machine.venv()
    machine.free_disk(11)
    done = machine.setup()
    assert done.returncode == 1 and "11 GB free" in done.stderr and "VENV=/big/disk/venv" in done.stderr
    assert not [line for line in machine.asked() if " install " in line]


def test_an_unknown_level_is_refused(machine: Machine) -> None:
    done = machine.setup("everything")
    assert done.returncode == 1 and "allowed: core, dev" in done.stderr


# ---------------------------------------------------------------- rendering without a screen

NO_GL = 'case "$*" in *doctor*) echo "egl: no libEGL" >&2; exit 1 ;; esac'


def test_without_gl_a_user_gets_the_command(machine: Machine) -> None:
    machine.venv(NO_GL)
    done = machine.setup()
    assert done.returncode == 1
    assert "sudo apt-get update && sudo apt-get install -y --no-install-recommends libegl1 libegl-mesa0" in done.stderr
    assert not any(line.startswith("apt-get") for line in machine.asked())


def test_without_gl_root_gets_it_installed(machine: Machine) -> None:
    machine.user(0)
    machine.venv(f'if ! grep -q libegl1 {machine.log}; then {NO_GL}; fi\ncase "$*" in *doctor*) echo egl ;; esac')
    (machine.bin / "grep").symlink_to(shutil.which("grep") or "/bin/grep")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert "apt-get update" in machine.asked()
    assert not any("osmesa" in line for line in machine.asked())


def test_where_egl_never_works_osmesa_is_tried_and_the_reason_is_shown(machine: Machine) -> None:
    machine.user(0)
    machine.venv(NO_GL)
    done = machine.setup()
    assert done.returncode == 1
    assert any("libosmesa6" in line for line in machine.asked())
    assert "egl: no libEGL" in done.stderr and "still cannot render" in done.stderr


def test_without_apt_the_packages_are_named(machine: Machine) -> None:
    (machine.bin / "apt-get").unlink()
    machine.venv(NO_GL)
    done = machine.setup()
    assert done.returncode == 1 and "Debian names" in done.stderr and "libegl1" in done.stderr


# ---------------------------------------------------------------- constraints, Makefile, CI


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_are_exact_versions_without_addresses() -> None:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_every_dependency_is_pinned_inside_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]
    pinned = {canonicalize_name(name): version for name, version in pins().items()}
    for text in wanted:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not in constraints.txt: run `make constraints`"
        assert requirement.specifier.contains(version, prereleases=True), f"{text} does not admit the pinned {version}"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_make_targets_run_what_they_say() -> None:
    def plan(*arguments: str) -> str:
        command = ["make", "--no-print-directory", "-n", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "vla-rl demo" in plan("demo") and "--from-scratch" not in plan("demo", "FROM_SCRATCH=0")
    assert "vla-rl demo --from-scratch" in plan("demo", "FROM_SCRATCH=1")
    test_plan = plan("test")
    for part in ("setup.sh dev", "ruff check", "ruff format --check", "basedpyright", "pytest"):
        assert part in test_plan
    assert "-m 'slow" in plan("test-slow")


def test_ci_runs_the_readmes_test_command_then_slow_tests_that_changes_reach() -> None:
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    commands = [line for line in ci.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make test", "make test-slow-changed ARGS='--known --minutes 20'"]


def test_a_slow_test_is_due_when_it_or_what_it_imports_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "tests/test_a.py": "import pytest\nfrom helper import x\n@pytest.mark.slow\ndef test_a():\n    assert x == 1\n",
        "tests/helper.py": "from vla_rl.a import x\n",
        "tests/test_b.py": "def test_b():\n    from vla_rl import b\n",
        "vla_rl/a.py": "x = 1\n",
        "vla_rl/b.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(slow_tests, "ROOT", tmp_path)
    monkeypatch.setattr(slow_tests, "PASSED", tmp_path / "tests" / "slow_passed.json")
    monkeypatch.setattr(slow_tests, "run", lambda file, is_live: (True, True, "1 passed"))

    def due(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["slow_tests.py", *arguments])
        assert slow_tests.main() == 0
        return capsys.readouterr().out

    assert "0 of 1 files" not in due("--known") and not slow_tests.PASSED.read_text().count("test_a")
    assert due().startswith("1 of 1 files") and due().startswith("0 of 1 files")
    (tmp_path / "vla_rl" / "b.py").write_text("y = 2\n")
    assert due().startswith("0 of 1 files")
    (tmp_path / "vla_rl" / "a.py").write_text("x = 2\n")
    monkeypatch.setattr(slow_tests, "run", lambda file, is_live: (False, False, "1 failed"))
    monkeypatch.setattr("sys.argv", ["slow_tests.py"])
    assert slow_tests.main() == 1 and "failed: tests/test_a.py" in capsys.readouterr().out
    assert due("--list").startswith("1 of 1 files"), "a failure is no pass"


def test_files_with_live_tests_run_after_the_others_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a": "mark.live on_both_graphs", "b": "mark.slow mark.live", "c": "mark.slow", "d": "variants(", "e": ""}
    (tmp_path / "tests").mkdir()
    for name, marks in files.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(f'"""{marks}"""\n')
    both, log = threading.Barrier(2, timeout=60), list[str]()

    def run(file: Path, is_live: bool) -> tuple[bool, bool, str]:
        log.append(f"{file.stem} begins")
        if file.stem in ("test_c", "test_d"):
            both.wait()
        log.append(f"{file.stem} ends")
        return True, True, "1 passed"

    monkeypatch.setattr(slow_tests, "ROOT", tmp_path)
    monkeypatch.setattr(slow_tests, "PASSED", tmp_path / "tests" / "slow_passed.json")
    monkeypatch.setattr(slow_tests, "run", run)
    monkeypatch.setattr("sys.argv", ["slow_tests.py"])
    assert slow_tests.main() == 0
    assert {line[:6] for line in log[:4]} == {"test_c", "test_d"}
    assert log[4:] == ["test_a begins", "test_a ends", "test_b begins", "test_b ends"]
