#!/usr/bin/env bash
# Sets the project up: finds a Python, makes the virtual environment, installs the package with the
# exact versions of constraints.txt, and makes sure that MuJoCo can render without a screen.
#
#   scripts/setup.sh [core|dev]     core: what the demo needs. dev: also LIBERO and the test tools.
#
# Variables: PYTHON (interpreter to use), VENV (folder of the virtual environment, default .venv).
# Running it again costs under a second: a stamp remembers what was installed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
LEVEL="${1:-core}"
VENV="${VENV:-.venv}"
GL_PACKAGES="libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libopengl0"
# hf-libero compiles a small C++ program (egl_probe); its opencv needs GLib.
DEV_PACKAGES="g++ make libglib2.0-0"

say() { printf '%s\n' "$*" >&2; }
fail() { printf '\nset-up stopped: %s\n' "$*" >&2; exit 1; }

# ---------------------------------------------------------------- system packages

is_root() { [ "$(id -u)" = 0 ]; }
has_apt() { command -v apt-get >/dev/null 2>&1; }

# apt_install WHY PACKAGE...: installs them when root; otherwise says how to, and stops.
apt_install() {
    local why="$1"
    shift
    if ! has_apt; then
        fail "$why. Install your system's packages for: $* (those are the Debian names), then run this again."
    fi
    if ! is_root; then
        fail "$why. Run this, then try again:

    sudo apt-get update && sudo apt-get install -y --no-install-recommends $*
"
    fi
    say "installing system packages: $*"
    local log
    log="$(mktemp)"
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
        >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        rm -f "$log"
        fail "apt-get could not install: $* (its last lines are above)."
    fi
    rm -f "$log"
}

# ---------------------------------------------------------------- Python

# True for an interpreter that really runs and is new enough (pyenv's shims exist without one behind them).
is_good_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the interpreter to use, or nothing. uv's is asked for last, because it may have to be downloaded.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_good_python "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.12 or newer."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.12 python3.13 python3 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/*/bin/python; do
        if is_good_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    local uv
    uv="$(command -v uv || true)"
    [ -n "$uv" ] || uv="${HOME:-}/.local/bin/uv"
    if [ -x "$uv" ]; then
        if ! candidate="$("$uv" python find '>=3.12' 2>/dev/null)"; then
            say "no Python 3.12 here; asking uv for one"
            "$uv" python install 3.12 >&2 || return 0
            candidate="$("$uv" python find '>=3.12' 2>/dev/null)" || return 0
        fi
        if is_good_python "$candidate"; then
            printf '%s\n' "$candidate"
        fi
    fi
}

# The Python 3.12 or newer that this release of the system packages itself, if it does.
system_python() {
    case "$(. /etc/os-release 2>/dev/null && printf '%s:%s' "$ID" "$VERSION_ID")" in
    ubuntu:24.04) echo python3.12 ;;
    debian:13 | ubuntu:25.*) echo python3.13 ;;
    esac
}

make_venv() {
    if [ -x "$VENV/bin/python" ] && is_good_python "$VENV/bin/python"; then
        return
    fi
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
        fail "$VENV exists and is not a virtual environment. Move it away, or name another folder: make VENV=folder ..."
    fi
    local python
    python="$(find_python)"
    if [ -z "$python" ]; then
        local what="no Python 3.12 or newer found (looked for python3.12, python3.13 and python3 on PATH, in pyenv's versions, and for uv)"
        local package
        package="$(system_python)"
        [ -n "$package" ] || fail "$what.
Install one of these, then run this again:
    uv, which fetches a Python by itself:  sudo apt-get update && sudo apt-get install -y pipx && pipx install uv
    pyenv:                                 pyenv install 3.12
    any other Python 3.12:                 make PYTHON=/path/to/python3.12 ...
(Debian 12's own Python is 3.11; Ubuntu 24.04 has python3.12, Debian 13 has python3.13.)"
        apt_install "$what" "$package" "$package-venv"
        python="$package"
    fi
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        local version
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        apt_install "$python cannot make virtual environments (its venv module is a package of its own)" \
            "python$version-venv"
    fi
    say "making the virtual environment $VENV with $("$python" --version) ($python)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || { rm -rf "$VENV"; fail "$python could not make the virtual environment $VENV."; }
}

# ---------------------------------------------------------------- the package

# install_package LEVEL: pip-installs the package with that level's extras, unless the stamp says it is there.
install_package() {
    local level="$1" extras="" want
    want="$(cat pyproject.toml constraints.txt | cksum) $PWD"
    if [ "$(cat "$VENV/.installed-$level" 2>/dev/null)" = "$want" ]; then
        return
    fi
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -c constraints.txt)
    [ -t 2 ] || pip+=(--quiet --quiet)
    if [ "$level" = core ]; then
        if has_torch; then
            say "bringing $VENV up to date (pyproject.toml or constraints.txt changed)"
        else
            check_disk
            say "installing vla-rl into $VENV (once: 3 GB to download, mostly PyTorch; 2 to 10 minutes)"
        fi
        "${pip[@]}" --upgrade pip ||
            fail "pip could not be renewed (its message is above). Is there a network, or a package mirror in pip's settings?"
    else
        extras="[dev,docs,libero,robot,ros,flow,low_memory]"
        if ! { command -v c++ && command -v make; } >/dev/null 2>&1; then
            apt_install "LIBERO's egl_probe is compiled on this machine, which needs a C++ compiler and make" \
                $DEV_PACKAGES
        fi
        say "installing LIBERO and the test tools into $VENV (once)"
        # egl_probe is built by CMake, with the one that came with the core. It asks for a CMake from 2013.
        PATH="$("$VENV/bin/python" -c 'import cmake; print(cmake.CMAKE_BIN_DIR)'):$PATH"
        export PATH CMAKE_POLICY_VERSION_MINIMUM=3.5
    fi
    "${pip[@]}" -e ".$extras" || fail "pip could not install the package (its message is above)."
    if [ "$level" = dev ] && ! "$VENV/bin/python" -c 'import cv2' >/dev/null 2>&1; then
        apt_install "OpenCV cannot be imported: it misses system libraries" $GL_PACKAGES $DEV_PACKAGES
    fi
    printf '%s\n' "$want" >"$VENV/.installed-$level"
}

has_torch() { [ -n "$(find "$VENV" -maxdepth 5 -type d -name torch -print -quit)" ]; }

# Stops before a first install that would fill the disk.
check_disk() {
    local free
    free="$(df -Pk "$VENV" | awk 'NR == 2 { print int($4 / 1048576) }')"
    if [ "$free" -lt 12 ]; then
        fail "$free GB free where $VENV lies; PyTorch and the rest need 7 GB, and as much as 4 GB more while they are unpacked.
Free some space, or put the environment on another disk: make VENV=/big/disk/venv ..."
    fi
}

# ---------------------------------------------------------------- rendering without a screen

# Prints the first MuJoCo back end that renders a frame.
working_gl() { "$VENV/bin/python" -m vla_rl.workflows.doctor --gl; }

ensure_gl() {
    if [ -s "$VENV/.mujoco_gl" ] && [ "$VENV/.mujoco_gl" -nt "$VENV/pyvenv.cfg" ]; then
        return
    fi
    local found
    if ! found="$(working_gl 2>/dev/null)"; then
        apt_install "MuJoCo cannot render here: neither EGL nor OSMesa makes a picture" $GL_PACKAGES
        if ! found="$(working_gl 2>/dev/null)"; then
            apt_install "MuJoCo cannot render with EGL here; trying OSMesa" libosmesa6
            found="$(working_gl)" || fail "MuJoCo still cannot render a frame (the reasons are above). See docs/quickstart.md."
        fi
    fi
    say "MuJoCo renders with: $found"
    printf '%s\n' "$found" >"$VENV/.mujoco_gl"
}

# ---------------------------------------------------------------- ROS 1, for the robot's tests

# Unpacks ROS 1's Python packages beside the virtual environment. Without them the tests that need ROS 1 are skipped.
ensure_ros() {
    [ ! -d "$VENV/ros1/usr/share/doc/python3-std-srvs" ] || return 0  # the last of its packages
    if ! "$VENV/bin/python" -m real_robot.transports.ros.install >/dev/null; then
        say "ROS 1 is not set up (the reason is above): the tests that need it will be skipped."
    fi
}

# ---------------------------------------------------------------- ROS 2, for the robot's tests

# Installs Jazzy's rclpy into $VENV/ros2, which sees the packages of $VENV too, and builds the messages that its wheels lack.
# Without it the tests that need it are skipped.
ensure_ros2() {
    local wheels inside="$VENV/ros2"
    if [ ! "$inside/.installed" -nt "$VENV/.installed-dev" ]; then
        wheels="$("$VENV/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ros2"])')"
        say "installing ROS 2's rclpy into $inside (once: a minute)"
        local packages='import sysconfig; print(sysconfig.get_path("purelib"))'
        if ! { "$VENV/bin/python" -m venv --clear "$inside" &&
            printf 'import site; site.addsitedir("%s")\n' "$("$VENV/bin/python" -c "$packages")" \
                >"$("$inside/bin/python" -c "$packages")/vla_rl_environment.pth" &&
            "$inside/bin/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt $wheels &&
            "$inside/bin/python" -m pip --disable-pip-version-check install --quiet \
                -c <(grep -v '^setuptools=' constraints.txt) colcon-ros colcon-bash; }; then # they want an older one
            rm -rf "$inside"
            say "ROS 2 is not set up (the reason is above): the tests that need it will be skipped."
            return 0
        fi
        touch "$inside/.installed"
    fi
    if [ -e "$inside/.messages" ] && [ ! "$inside/.installed" -nt "$inside/.messages" ] &&
        [ ! real_robot/transports/ros/definitions.py -nt "$inside/.messages" ]; then
        return 0
    fi
    if "$inside/bin/python" -m real_robot.transports.ros.ros2_messages >/dev/null; then
        touch "$inside/.messages"
    else
        say "ROS 2 has no control_msgs (the reason is above): the tests that need it will be skipped."
    fi
}

main() {
    case "$LEVEL" in
    core | dev) ;;
    *) fail "unknown level '$LEVEL'; allowed: core, dev" ;;
    esac
    local new=""
    [ -s "$VENV/.mujoco_gl" ] || new=yes
    make_venv
    install_package core
    if [ "$LEVEL" = dev ]; then
        install_package dev
    fi
    ensure_gl
    if [ "$LEVEL" = dev ]; then
        ensure_ros2
        ensure_ros
    fi
    if [ -n "$new" ]; then
        say "Installed. To have the command vla-rl in this terminal: source $VENV/bin/activate"
    fi
}

# The tests source this file for its functions.
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    main
fi
