"""The device itself: tensors whose values lie on the host, and what torch asks of a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch._ops import OpOverload
from torch.overrides import _pop_mode_temporarily
from torch.utils import backend_registration

from pretend_device import counts, rules
from pretend_device.rules import NAME, names_device, on_device, op_name
from vla_rl.common import row_noise  # Before `pretend` replaces torch.Generator, of which it makes a class.

assert issubclass(row_noise.RowGenerator, torch.Generator)
_aten, _HostGenerator = torch.ops.aten, torch.Generator
_NO_NUMPY = (
    f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on the device; `raw` has its values, on the host."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        self.raw = raw
        return self

    def __init__(self, *_: Any, **__: Any):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, *args, **(kwargs or {}))

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.raw!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: Any = DeviceTensor(self.raw.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        elif self.requires_grad and self.is_leaf:
            copied.requires_grad_(True)
        memo[id(self)] = copied
        return copied

    def __array__(self, *_: Any, **__: Any):
        raise TypeError(_NO_NUMPY)

    def numpy(self, *_: Any, **__: Any):
        raise TypeError(_NO_NUMPY)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        parts = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
        return super().__getitem__(parts if isinstance(index, tuple) else parts[0])

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def new_tensor(self, data: Any, dtype=None, device=None, requires_grad=False, pin_memory=False) -> torch.Tensor:
        made = torch.tensor(data, dtype=dtype or self.dtype).to(self.device if device is None else device)
        return made.requires_grad_(requires_grad)

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)  # pyright: ignore[reportAttributeAccessIssue]
        self.raw = cast(DeviceTensor, new).raw


class DeviceGenerator(torch.Generator):
    """A random generator that says it is the device's. Its numbers are the host's, so results can be compared."""

    # By address of what is behind them: an operation is given another Python object for the same generator.
    known: ClassVar[WeakValueDictionary[int, DeviceGenerator]] = WeakValueDictionary()

    def __init__(self) -> None:
        self.known[self._cdata] = self  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)


def _dispatch(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the raw tensors, by the rules of a GPU, and wrap what lies on the device."""
    name, leaves = op_name(op), [*_leaves(args), *_leaves(kwargs.values())]
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    wanted, is_given = kwargs.get("device"), any(map(on_device, tensors))
    if not is_given and not names_device(wanted):
        return op(*args, **kwargs)
    for generator in (x for x in leaves if isinstance(x, _HostGenerator)):
        rules.check_generator(op, DeviceGenerator.known.get(cast(Any, generator)._cdata, generator))
    if is_given:
        rules.check_devices(op, args, tensors)
    if name == "_fused_sdp_choice":
        return 0  # The plain kernel.
    leaves_device = wanted is not None and not names_device(wanted)
    _count(op, name, args, kwargs, leaves_device)
    raw_args, raw_kwargs = _mapped(_raw, args), {key: _mapped(_raw, value) for key, value in kwargs.items()}
    if names_device(wanted):
        raw_kwargs["device"] = torch.device("cpu")
    if raw_kwargs.get("pin_memory"):
        raw_kwargs["pin_memory"] = False
    out = op(*raw_args, **raw_kwargs)
    result = _mapped(_unshared if leaves_device else _wrapper(tensors), out)
    if leaves_device and kwargs.get("pin_memory"):
        result.pretend_pinned = True
    return result


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What lists and tuples hold; torch's own trees take most of the time of an operation."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _leaves(value)
        else:
            yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same lists and tuples, of changed values."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, part) for part in value])
    return change(value)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, DeviceTensor) else value


def _count(op: OpOverload, name: str, args: tuple, kwargs: dict[str, Any], leaves_device: bool) -> None:
    """Count the launch, the host's waits and the copies between host and device of an operation."""
    if rules.launches(op):
        counts.add_kernel(name)
    for _ in range(rules.num_syncs(op, args, kwargs)):
        counts.add_sync(name)
    if name == "_to_copy" and leaves_device:
        _count_download(args[0], waits=not kwargs.get("non_blocking"))  # To pinned memory where it does not wait.
    elif name == "copy_":
        target, source = args[0], args[1]
        waits = not (len(args) > 2 and args[2])
        if on_device(target) and not on_device(source):
            counts.add_upload(source.nbytes, waits)
        elif on_device(source) and not on_device(target):
            _count_download(source, waits or not getattr(target, "pretend_pinned", False))
    elif name in rules.INDEXING:
        for index in args[1]:
            if index is not None and not on_device(index):
                counts.add_upload(index.nbytes, True)


def _count_download(source: torch.Tensor, waits: bool) -> None:
    counts.add_download(source.nbytes)
    if waits and source.nbytes:
        counts.add_sync("to the host")


def _unshared(value: Any) -> Any:
    """What leaves the device shares no memory with it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _wrapper(given: list[torch.Tensor]) -> Callable[[Any], Any]:
    """A function that wraps results: what was written in place is the tensor that was given."""
    wrappers = {id(t.raw): t for t in given if isinstance(t, DeviceTensor)}
    strangers = {id(t) for t in given if not isinstance(t, DeviceTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in strangers:
            return value
        if (known := wrappers.get(id(value))) is None:
            return DeviceTensor(value)
        if known.shape != value.shape or known.stride() != value.stride():
            known.data = DeviceTensor(value)  # It was given another shape, as `arange` does to what it writes to.
        return known

    return wrap


# --- what torch asks of a backend ---------------------------------------------------------------


class _DeviceModule(backend_registration._DummyBackendModule):
    """`torch.pretend`: one device, which is always there."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def set_device(self, device: Any) -> None:
        """There is only one."""

    def synchronize(self, device: Any = None) -> None:
        counts.add_sync("synchronize")

    def empty_cache(self) -> None:
        """There is none."""


# What CUDA's autocast computes in the low precision, and what in float32.
_LOW = (
    "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "conv1d", "conv2d", "conv3d", "_convolution",
    "scaled_dot_product_attention", "einsum",
)  # fmt: skip
_FLOAT32 = (
    "layer_norm", "group_norm", "softmax.int", "log_softmax.int", "rsqrt", "exp", "log", "mse_loss", "l1_loss",
    "smooth_l1_loss", "pow.Tensor_Scalar",
)  # fmt: skip
_AUTOCAST = cast(Any, torch._C.DispatchKey).AutocastPrivateUse1
_installed: list[torch.library.Library] = []


def install() -> None:
    """Make the device known to torch, for the rest of the process: torch cannot forget a backend."""
    if _installed:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_dispatch, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for names, dtype in ((_LOW, None), (_FLOAT32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            aten.impl(name, _cast_inputs(getattr(getattr(_aten, packet), overload or "default"), dtype), _AUTOCAST.name)
    _installed.extend((everything, aten))


def _cast_inputs(op: OpOverload, dtype: torch.dtype | None) -> Callable[..., Any]:
    """The operation with its floating-point inputs in `dtype`; None: autocast's. Keeps no copies of cast weights."""

    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = torch.get_autocast_dtype(NAME) if dtype is None else dtype

        def cast_one(t: Any) -> Any:
            fits = on_device(t) and t.is_floating_point() and t.dtype != torch.float64
            return t.to(wanted) if fits else t

        args, kwargs = _mapped(cast_one, args), {key: _mapped(cast_one, value) for key, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return op(*args, **kwargs)

    return call


@contextmanager
def pretending() -> Iterator[str]:
    """Use the device inside the block, which gets its name.

    Torch makes tensors from Python data, generators and pinned memory without asking a backend that is written in
    Python; inside the block `torch.tensor`, `torch.as_tensor`, `torch.Generator` and `Tensor.pin_memory` do. A module
    that moves keeps its parameters, as it does on the way to CUDA: tied ones stay tied.
    """
    install()
    make, take = torch.tensor, torch.as_tensor

    def tensor(data: Any, *, device: Any = None, requires_grad: bool = False, **options: Any) -> torch.Tensor:
        options["requires_grad"] = requires_grad
        if not names_device(device) or isinstance(data, torch.Tensor):
            return make(data, device=device, **options)
        if torch._C._len_torch_function_stack():  # Torch's own asks the modes that are on, which may answer.
            with _pop_mode_temporarily() as mode:
                return mode.__torch_function__(torch.tensor, (), (data,), {"device": device, **options})
        requires_grad = options.pop("requires_grad")
        return make(data, **options).to(device).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        if not names_device(device) or isinstance(data, torch.Tensor):
            return take(data, dtype=dtype, device=device)
        return take(data, dtype=dtype).to(device)

    class AnyGenerator(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, _HostGenerator)

        def __call__(cls, device: Any = "cpu") -> torch.Generator:
            return DeviceGenerator() if names_device(device) else _HostGenerator(device)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        pinned = self.clone()
        pinned.pretend_pinned = True  # pyright: ignore[reportAttributeAccessIssue]
        return pinned

    shims = {"tensor": tensor, "as_tensor": as_tensor, "Generator": AnyGenerator("Generator", (), {})}
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with patch.multiple(torch, **shims), patch.object(torch.Tensor, "pin_memory", pin_memory):
            yield NAME
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
