"""Errors of recipes, and of packages of ours that a user's file hides."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path


class ConfigError(ValueError):
    """A recipe that cannot be used; the message names the field, the value and what is allowed."""


def check_packages(names: Iterable[str]) -> None:
    """Refuse a user's own `sim.py`, or a folder of such a name, that Python finds in place of the package beside us."""
    ours = Path(__file__).resolve().parents[2]
    for name in names:
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
        found = next((path for path in map(Path, places) if path.exists()), None)
        if found is not None and (ours / name) not in (found.resolve(), *found.resolve().parents):
            raise ConfigError(
                f"{found}: Python finds this as {name!r}, in place of vla-rl's own package {ours / name}. Rename or "
                f"move yours, or take {found.parent} off Python's path (PYTHONPATH, the script's folder, and with "
                "`python -m` the current one)."
            )
