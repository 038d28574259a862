"""`torch.compile` of a network's repeated layers, each by itself: compiled once, it serves all that are alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

_RECOMPILATIONS = 64  # Of one code: layers of several kinds share it, and beyond torch's 8 they would run uncompiled.


def compile_modules(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each module's call in place, at its first use. Names of parameters and checkpoints stay as they are.

    Sizes that change (the last batch of a rollout, prompts of other lengths) are left open, so that they do not
    compile anew.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILATIONS)
    for module in modules:
        module.compile(dynamic=True, backend=backend)
