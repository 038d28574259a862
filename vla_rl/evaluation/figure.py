"""A measured figure with its interval and how much it stands on."""

from __future__ import annotations

import math

from vla_rl.config import Config, Number
from vla_rl.evaluation.statistics import Interval

NO_INTERVAL = Interval(math.nan, math.nan)


class Figure(Config):
    """A measured figure: value, 95 % interval (NaN where it has none), and from how many of what."""

    value: Number
    low: Number = math.nan
    high: Number = math.nan
    n: int
    of: str = "episodes"


def figure(value: float, interval: Interval, n: int, of: str = "episodes") -> Figure:
    """A figure with its interval."""
    return Figure(value=value, low=interval.low, high=interval.high, n=n, of=of)
