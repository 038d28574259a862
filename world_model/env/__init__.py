"""The world model as an environment, and planning in it."""
