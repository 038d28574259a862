"""What the commands do: each puts core, simulators, world model and robot side together."""
