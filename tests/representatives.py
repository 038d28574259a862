"""Which cases of a grid the fast tests ask; the slow ones ask them all.

Of `policy_matrix`'s policies, one of each kind of network and decoder: the others differ from them by options of which
tests/vla_rl/policies has tests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

REPRESENTATIVES = {
    "openvla-parallel", "openvla-autoregressive", "openvla-l1", "smolvla-sde", "pi0-lora", "pi05-noise", "xvla-sde",
    "diffusion-ddim", "act", "pi0-fast",
}  # fmt: skip


def slow_but_for(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters, all but these marked slow; a tuple is a case of several parameters."""

    def as_slow(case: Any) -> Any:
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)

    return [case if case in fast else as_slow(case) for case in cases]


def variants(names: Iterable[str]) -> list[Any]:
    """The names as parameters, slow but for the representatives."""
    return slow_but_for(REPRESENTATIVES, names)
