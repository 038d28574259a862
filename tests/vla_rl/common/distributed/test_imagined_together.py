"""Imagination in two real processes (gloo, on the CPU): the same episodes as in one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from imagined_together import roll_out
from test_distributed import TIME_LIMIT, launch

SCRIPT = Path(__file__).with_name("imagined_together.py")


@pytest.mark.slow
@pytest.mark.timeout(2 * TIME_LIMIT)
def test_two_processes_imagine_the_episodes_of_one(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    roll_out(alone)
    result = launch(str(SCRIPT), str(together))
    assert result.returncode == 0, result.stderr[-4000:]

    expected = {path.name: json.loads(path.read_text()) for path in sorted(alone.glob("*.json"))}
    assert sorted(path.name for path in together.glob("*.json")) == list(expected) and len(expected) == 6
    futures = []
    for file, (names, episodes) in expected.items():
        names_of_two, episodes_of_two = json.loads((together / file).read_text())
        assert names_of_two == names
        for one, two in zip(episodes, episodes_of_two, strict=True):
            np.testing.assert_allclose(two, one, atol=1e-6)
            futures.append(np.array(one[1]))
    # Each has noise of its own, so that none of the above is true by chance.
    distances = [np.abs(a - b).max() for i, a in enumerate(futures) for b in futures[:i]]
    assert min(distances) > 1e-5
    begun = [(together / f"begun{rank}.txt").read_text() for rank in (0, 1)]
    assert begun[0] == begun[1] == (alone / "begun0.txt").read_text()
