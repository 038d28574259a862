"""`torch.compile` of a network's repeated layers, each by itself: compiled once, it serves all that are alike."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Compile each module's call in place, at its first use. Names of parameters and checkpoints stay as they are.

    Sizes that change (the last batch of a rollout, prompts of other lengths) are left open, so that they do not
    compile anew.
    """
    for module in modules:
        module.compile(dynamic=True)
