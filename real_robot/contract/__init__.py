"""A robot's contract, one YAML file: its topics, limits, model, execution and teleoperation."""
