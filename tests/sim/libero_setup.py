"""Whether the LIBERO simulator can run here, for the tests of `sim.libero`."""

import importlib.util
import os
from pathlib import Path

import pytest

from sim.libero.library import ASSETS_VARIABLE, AssetsError, find_assets

BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "libero_assets"


def _assets() -> Path | None:
    if importlib.util.find_spec("libero") is None:
        return None
    try:
        return find_assets(None if os.environ.get(ASSETS_VARIABLE) or not BESIDE.is_dir() else BESIDE)
    except AssetsError:
        return None


ASSETS = _assets()
needs_library = pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="the libero extra is missing")
needs_assets = pytest.mark.skipif(
    ASSETS is None,
    reason=f"LIBERO's assets are not here: set {ASSETS_VARIABLE}, or put them at ../shared/libero_assets",
)
