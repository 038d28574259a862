"""A pass without gradients as a CUDA graph: recorded once for each batch size, then replayed without host launches.

At small batches a large network keeps a GPU waiting for the host, which launches thousands of kernels one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

MOST = 16  # Graphs that are kept at a time; inputs of still other shapes are computed without.
_WARM_UP = 2  # Calls before a recording, in which libraries set themselves up.


@dataclass(frozen=True)
class _Recording:
    """A graph, where it reads its inputs, and where it writes its result."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    result: Tensor


class ReplayedPass:
    """A function of tensors that calls a network, on a CUDA device recorded at each first set of shapes.

    It reads the network's weights where they lay then: one that changes in place counts at the next call, and where
    one lies elsewhere, another graph is recorded. Its working memory stays taken. On other devices it is the plain
    function.

    Args:
        function: of tensors on the device; without random numbers, and without waiting for the device.
        network: whose weights it reads.
    """

    def __init__(self, function: Callable[..., Tensor], network: nn.Module) -> None:
        self._function, self._network = function, network
        self._recordings: dict[tuple[object, object], _Recording] = {}  # By the weights' places, and the shapes.

    def __deepcopy__(self, memo: Any) -> Self:
        """Of the copied network, with nothing recorded."""
        return type(self)(copy.deepcopy(self._function, memo), copy.deepcopy(self._network, memo))

    @torch.no_grad()
    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """The function's result, of its own, not the graph's."""
        if not any(tensor is not None and tensor.is_cuda for tensor in inputs):
            return self._function(*inputs)
        places = tuple(parameter.data_ptr() for parameter in self._network.parameters())
        key = places, tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        recording = self._recordings.get(key)
        if recording is None and not self._has_room(places):
            return self._function(*inputs)
        if recording is None:
            recording = self._recordings[key] = self._record(inputs)
        for own, given in zip(recording.inputs, inputs, strict=True):
            if own is not None and given is not None:
                own.copy_(given)
        recording.graph.replay()
        return recording.result.clone()

    def _has_room(self, places: tuple[int, ...]) -> bool:
        """Whether one more may be kept, those of weights that lie elsewhere dropped first."""
        if len(self._recordings) >= MOST:
            self._recordings = {key: made for key, made in self._recordings.items() if key[0] == places}
        return len(self._recordings) < MOST

    def _record(self, inputs: tuple[Tensor | None, ...]) -> _Recording:
        own = [None if tensor is None else tensor.clone() for tensor in inputs]
        others = next((made.graph.pool() for made in self._recordings.values()), None)  # They never run together.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._function(*own)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=others):
            result = self._function(*own)
        return _Recording(graph, own, result)
