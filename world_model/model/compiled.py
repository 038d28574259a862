"""Compilation of imagination by `torch.compile`; on CUDA a graph, replayed without host launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch


def compiled[**P, R](function: Callable[P, R], device: torch.device, backend: str = "inductor") -> Callable[P, R]:
    """Return a function that computes the same, compiled at its first call; it gives dataclasses of tensors.

    A replayed CUDA graph writes its results where the last ones were, and what was imagined is remembered from step to
    step: so on CUDA the results are copied out. Graphs are inductor's: another backend makes none.
    """
    as_graph = device.type == "cuda"
    mode = "reduce-overhead" if as_graph and backend == "inductor" else None
    fast: Callable[P, R] = torch.compile(function, mode=mode, backend=backend)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not as_graph:
            return fast(*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        return _copied(fast(*args, **kwargs))

    return call


def _copied(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.clone()
    return replace(value, **{field.name: _copied(getattr(value, field.name)) for field in fields(value)})
