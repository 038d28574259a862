#!/usr/bin/env bash
# Writes constraints.txt from the virtual environment: exact versions, sorted, no addresses.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
new="$(mktemp)"
trap 'rm -f "$new"' EXIT
grep '^#' constraints.txt >"$new"
# "name @ address" lines (installed from a file or a repository) have no version to pin; opentelemetry's local tags
# and torch's build tag (+cpu) would tie the file to one machine.
{
    "$VENV/bin/python" -m pip freeze --all --exclude-editable --exclude vla-rl
    "$VENV/ros2/bin/python" -m pip freeze --all | grep -E '^(ros|colcon|catkin)-' # ROS 2's, in its own environment.
} |
    grep -v -e ' @ ' -e '^#' | sed -E 's/\+[a-z0-9.]+$//' | LC_ALL=C sort -f >>"$new"
cat "$new" >constraints.txt
echo "constraints.txt: $(grep -c '==' constraints.txt) packages"
