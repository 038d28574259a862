"""Which of `policy_matrix`'s policies the fast tests ask: one of each kind of network and decoder.

The others differ from them by options of which tests/vla_rl/policies has tests; the slow tests ask them too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

REPRESENTATIVES = {
    "openvla-parallel", "openvla-autoregressive", "openvla-l1", "smolvla-sde", "pi0-lora", "pi05-noise", "xvla-sde",
    "diffusion-ddim", "act", "pi0-fast",
}  # fmt: skip


def variants(names: Iterable[str], more: Iterable[str] = ()) -> list[Any]:
    """The names as parameters, slow but for the representatives and `more`."""
    fast = REPRESENTATIVES | {*more}
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
