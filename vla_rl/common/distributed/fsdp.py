"""FSDP: a policy's parameters, gradients and optimizer state cut into one part per process.

This calls torch's `fully_shard` (FSDP2) itself. accelerate's own wrapping takes a model's `forward` alone, whereas
policies are called by `act`, `evaluate` and `bc_loss`; and on CPUs, where this is tested, it silently leaves FSDP out.

    shard(policy, mesh)
    with unsharded(policy): ...       # forward passes without gradient, as many as each process likes
    with gathers(tensors): ...        # process 0 gets one after the other `whole`
    with saving(policy): ...          # and saves a policy
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from vla_rl.config import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

_METHODS = ("act", "evaluate", "bc_loss", "embed")  # of a `Policy`: what gathers the parameters before it runs
_NO_MORE = -1
_asked_for: dict[tuple[int, tuple[int, ...]], int] = {}  # In process 0: the tensors of the `gathers` block it is in.
_unsharded = WeakSet[nn.Module]()  # The policies of the `unsharded` blocks that this process is in.


def shard(policy: Any, mesh: DeviceMesh, output: type) -> None:
    """Cut the policy's parameters over the processes of the mesh, in place; all have the same ones before.

    What a policy names in `sharding_units()` is gathered a unit at a time, in its `sharding_dtype`; the rest, or all
    of a policy that names none, whenever the policy is at work. What is held, summed and stepped on keeps its dtype.
    Optimizers and name -> parameter mappings are to be made afterwards.

    Args:
        output: the dataclass that `evaluate` returns.

    Raises:
        ConfigError: trained parameters of several dtypes, which one reduction cannot carry; a policy that acts by CUDA
            graphs, which read weights where they once lay.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if getattr(getattr(policy, "config", None), "cuda_graphs", False):
        raise ConfigError(
            "policy.cuda_graphs: got true, but with parallel=fsdp weights are gathered anew for each pass; set it to "
            "false, or parallel=ddp"
        )
    dtypes = sorted({str(p.dtype) for p in policy.parameters() if p.requires_grad})
    if len(dtypes) > 1:
        raise ConfigError(
            f"parallel: 'fsdp' needs trained parameters of one dtype, found {', '.join(dtypes)}; "
            "set policy.weights=auto, which trains float32 weights, or parallel=ddp"
        )
    if output not in _pytree.SUPPORTED_NODES:  # So that FSDP finds the tensors in it, and with them their backward.
        _pytree.register_dataclass(output)
    # Autocast would gather float32, and keep copies in bfloat16 of all of them until the backward pass.
    dtype = policy.sharding_dtype
    reduced = None if dtype is None else torch.float32
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
    for unit in units(policy):
        _make_room(unit)
        fully_shard(unit, mesh=mesh, mp_policy=mixed)
    _make_room(policy)
    fully_shard(policy, mesh=mesh)
    for module in _sharded_modules(policy):
        module.set_gradient_divide_factor(1.0)  # Losses are shares of the whole batch's: gradients add up.
        module.set_force_sum_reduction_for_comms(True)  # Else NCCL's own operation scales, which gloo has not.
    for name in _METHODS:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)


def _make_room(module: nn.Module) -> None:
    """Give parameters without memory (see `parts.py`) some to cut up; of what is never written, none is taken."""
    for parameter in module.parameters():
        if not is_sharded(parameter) and not parameter.is_contiguous():
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)


def units(policy: Any) -> list[nn.Module]:
    """The modules that are gathered one at a time: those that the policy calls as a whole, such as its layers."""
    return list(policy.sharding_units())


def _sharded_modules(policy: nn.Module) -> list[FSDPModule]:
    """The policy itself first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


@contextmanager
def unsharded(policy: nn.Module) -> Iterator[None]:
    """Inside the block every process has all parameters, so that forward passes without gradient wait for no other.

    Entered and left by all processes together. A policy that is not sharded is left alone. May be nested.
    """
    modules = [] if policy in _unsharded else _sharded_modules(policy)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    if modules:
        _unsharded.add(policy)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(module is not policy, recurse=False)
            module.reshard()
        if modules:
            _unsharded.discard(policy)


@contextmanager
def gathers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block process 0 may ask for any of the sharded tensors `whole`; the others answer at the block's end.

    Entered by all processes together, with the same tensors in the same order (those that are not sharded do not
    count). The others do nothing in it that process 0 waits for: they are past it when process 0 is.
    """
    sharded = [cast("DTensor", tensor.detach()) for tensor in tensors if is_sharded(tensor)]
    if not sharded:
        yield
        return
    assert not _asked_for, "gathers(): one block at a time"
    mesh = sharded[0].device_mesh
    if mesh.get_rank() == 0:
        _asked_for.update({_storage(tensor): number for number, tensor in enumerate(sharded)})
        try:
            yield
        finally:
            _asked_for.clear()
            _ask(mesh, _NO_MORE)
    else:
        yield
        while (number := _ask(mesh, _NO_MORE)) != _NO_MORE:
            sharded[number].full_tensor()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, on the CPU: for process 0, in a `gathers` block that it was named to.

    One that is not sharded is returned as it is.
    """
    if not is_sharded(tensor):
        return tensor
    sharded = cast("DTensor", tensor.detach())
    if not sharded.numel():
        return sharded.to_local().new_empty(sharded.shape, device="cpu")
    number = _asked_for.get(_storage(sharded))
    assert number is not None, f"whole(): a tensor of shape {tuple(sharded.shape)} was not named to gathers()"
    _ask(sharded.device_mesh, number)
    return sharded.full_tensor().cpu()


@contextmanager
def saving(policy: Any) -> Iterator[None]:
    """Inside the block process 0 can save the policy. Entered by all processes together, left alone by the others.

    A policy that `saves_sharded` is gathered a tensor at a time; another is whole in process 0 meanwhile, on the CPU.
    """
    parameters: list[nn.Parameter] = list(policy.parameters())
    with gathers(parameters):
        is_asking = any(is_sharded(p) and p.device_mesh.get_rank() == 0 for p in parameters)
        with _whole_weights(policy) if is_asking and not policy.saves_sharded else nullcontext():
            yield


@contextmanager
def _whole_weights(policy: nn.Module) -> Iterator[None]:
    own: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_sharded(parameter):
                own.append((module, name, parameter))
    try:
        found: dict[int, nn.Parameter] = {}  # Tied parameters stay tied.
        for module, name, parameter in own:
            if id(parameter) not in found:
                found[id(parameter)] = nn.Parameter(whole(parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = found[id(parameter)]
        yield
    finally:
        for module, name, parameter in own:
            module._parameters[name] = parameter


def _storage(sharded: Any) -> tuple[int, tuple[int, ...]]:
    """What tells a sharded tensor from others in process 0, which has a part of each that is not empty."""
    return sharded.to_local().data_ptr(), tuple(sharded.shape)


def _ask(mesh: DeviceMesh, number: int) -> int:
    """Process 0's number, in every process."""
    asked = torch.tensor([number], device=mesh.device_type)
    dist.broadcast(asked, group=mesh.get_group(), group_src=0)
    return int(asked)


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether this is a DTensor; asked so that a single process need not import that class."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its storage; of one that is not sharded, the tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(tensor: Tensor, wanted: Tensor) -> Tensor:
    """A whole tensor, which every process has, cut up as `wanted` is."""
    if not is_sharded(wanted) or is_sharded(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(wanted.device), wanted.device_mesh, wanted.placements, src_data_rank=None)


@torch.no_grad()
def swap_weights(parameters: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Swap the values of `others` with those of the parameters of the same names, in place."""
    for name, other in others.items():
        mine, theirs = local(parameters[name]), local(other)
        kept = mine.clone()
        mine.copy_(theirs)
        theirs.copy_(kept)
