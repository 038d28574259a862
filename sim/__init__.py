"""Physics simulators as vector environments."""
