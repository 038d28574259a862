"""What most tests of fitting begin with, made once: nobody changes it, copies are changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from dummy_fit import SPEC, collect, config

from world_model.fit.fit import fit


@pytest.fixture(scope="session")
def episodes(tmp_path_factory) -> Path:
    """Of a noisy expert, which fails now and then."""
    return collect(tmp_path_factory.mktemp("fit") / "episodes", noise=1.5, noise_hold=4)


@pytest.fixture(scope="session")
def held_out(tmp_path_factory) -> Path:
    """The same from other initial states."""
    return collect(tmp_path_factory.mktemp("fit") / "held_out", noise=1.5, noise_hold=4, start_index=700)


@pytest.fixture(scope="session")
def plain(episodes, tmp_path_factory) -> Path:
    """A world model fitted on `episodes` with seed 1."""
    return fit(config(episodes), SPEC, tmp_path_factory.mktemp("fit") / "run", seed=1)
