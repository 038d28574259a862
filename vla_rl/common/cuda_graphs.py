"""CUDA graphs of passes without gradients, one for each batch size.

At small batches a large network keeps a GPU waiting for the host, which launches thousands of kernels one by one.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registrations
from torch.overrides import TorchFunctionMode

MOST = 16  # Graphs that are kept at a time; inputs of still other shapes are computed without.
_WARM_UP = 2  # Calls before a recording, in which libraries set themselves up.

Result = tuple[Tensor | None, ...]


class KeptConstants(TorchFunctionMode):
    """In the block `torch.tensor` copies the same Python numbers to a device once: a graph cannot read the host's."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[str, ...], Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.tensor or kwargs.get("device") is None or not _is_plain(args):
            return func(*args, **kwargs)
        key = (repr(args), repr(sorted(kwargs.items())))
        if key not in self._kept:
            self._kept[key] = func(*args, **kwargs)
        return self._kept[key].clone()


def _is_plain(data: object) -> bool:
    """Whether it is of Python's own numbers alone, whose text tells all of them."""
    return all(map(_is_plain, data)) if isinstance(data, list | tuple) else type(data) in (bool, int, float)


class KeptParameters:
    """A network's parameters, found once: to walk over those of a large one takes longer than to launch its graph.

    Whichever parameter stands in a found one's place is read. `is_current` is False once a module or a parameter has
    been registered in this network, or another one that is kept; what is deleted, or put in past torch, goes unnoticed.

    Args:
        modules: those whose own parameters are wanted; None: all of the network's.
    """

    _watched: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    _registered: ClassVar[int] = 0  # In those.

    def __init__(self, network: nn.Module, modules: Iterable[nn.Module] | None = None) -> None:
        every = list(network.modules())
        KeptParameters._watched.update(every)
        self._at = KeptParameters._registered
        own = [module._parameters for module in (every if modules is None else modules)]
        self._places = [(held, name) for held in own for name, parameter in held.items() if parameter is not None]

    @property
    def is_current(self) -> bool:
        return self._at == KeptParameters._registered

    def read(self) -> list[Any]:
        return [held[name] for held, name in self._places]

    @classmethod
    def _note(cls, module: nn.Module, *_: object) -> None:
        cls._registered += module in cls._watched


registrations.register_module_module_registration_hook(KeptParameters._note)
registrations.register_module_parameter_registration_hook(KeptParameters._note)


@dataclass
class _Recording:
    """A graph, where it reads its inputs and writes its results, and what of its inputs it has read already."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    results: Result
    seen: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)

    def replay(self, given: tuple[Tensor | None, ...]) -> Result:
        for place, (own, tensor) in enumerate(zip(self.inputs, given, strict=True)):
            if own is None or tensor is None:
                continue
            known, version = self.seen.get(place, (None, -1))
            if known is None or known() is not tensor or version != tensor._version:
                own.copy_(tensor)
                self.seen[place] = weakref.ref(tensor), tensor._version
        self.graph.replay()
        return tuple(None if result is None else result.clone() for result in self.results)


class ReplayedPass:
    """A function of tensors that calls a network, on a CUDA device recorded at each first set of shapes.

    It reads the network's weights where they lay then: one that changes in place counts at the next call, and where
    one lies elsewhere, another graph is recorded. Its working memory stays taken. On other devices it is the plain
    function.

    Args:
        function: of tensors on the device, or None; gives a tuple of them. Without random numbers, without waiting for
            the device, and without copies to it but by `torch.tensor` of the same numbers each time.
        network: whose weights it reads.

    Attributes:
        constants: the numbers that it has copied; it is called in their block.
    """

    def __init__(self, function: Callable[..., Result], network: nn.Module) -> None:
        self.function, self.constants, self._network = function, KeptConstants(), network
        self._weights: KeptParameters | None = None
        self._recordings: dict[tuple[object, object], _Recording] = {}  # By the weights' places, and the shapes.

    def __deepcopy__(self, memo: Any) -> Self:
        """Of the copied network, with nothing recorded."""
        return type(self)(copy.deepcopy(self.function, memo), copy.deepcopy(self._network, memo))

    @torch.no_grad()
    def __call__(self, *inputs: Tensor | None) -> Result:
        """The function's results, of their own, not the graph's."""
        if not any(tensor is not None and tensor.is_cuda for tensor in inputs):
            return self.function(*inputs)
        places = self._places()
        key = places, tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        recording = self._recordings.get(key)
        if recording is None and not self._has_room(places):
            return self.function(*inputs)
        if recording is None:
            recording = self._recordings[key] = self._record(inputs)
        return recording.replay(inputs)

    def _places(self) -> tuple[int, ...]:
        """Where each weight lies now."""
        if self._weights is None or not self._weights.is_current:
            self._weights = KeptParameters(self._network)
        return tuple([weight.data_ptr() for weight in self._weights.read()])

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
        with torch.cuda.stream(stream), self.constants:
            for _ in range(_WARM_UP):
                self.function(*own)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=others), self.constants:
            results = self.function(*own)
        return _Recording(graph, own, results)


_RECOMPILATIONS = 64  # Of one code: layers of several kinds share it, and beyond torch's 8 they would run uncompiled.


def compile_modules(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Compile each module's call in place, at its first use. Names of parameters and checkpoints stay as they are.

    Sizes that change (the last batch of a rollout, prompts of other lengths) are left open, so that they do not
    compile anew.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILATIONS)
    for module in modules:
        module.compile(dynamic=True, backend=backend)
