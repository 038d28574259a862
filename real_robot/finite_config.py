"""Base of the sections that guard a robot: their numbers are finite."""

from __future__ import annotations

from pydantic import ConfigDict

from vla_rl.config import Config


class FiniteConfig(Config):
    """A config that refuses infinity and NaN in each of its numbers: a time-out of infinity is none."""

    model_config = ConfigDict(allow_inf_nan=False)
