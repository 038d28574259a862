"""A robot's contract held against its live graph: `vla-rl doctor ROBOT.yaml`. It sends nothing."""
