"""What the commands do: each puts core, simulators, world model and robot side together."""

from vla_rl.config import check_packages

check_packages()
