"""Simulators that run in a Python of their own, in another process or on another machine."""

from sim.remote.client import EnvFacts
from sim.remote.env import RemoteConfig

__all__ = ["EnvFacts", "RemoteConfig"]
