"""Several processes that train one policy together, one to each GPU; with one process everything here does nothing.

    torchrun --nproc-per-node 4 -m vla_rl.cli train RECIPE parallel=fsdp

Each process rolls out its share of the groups. Everyone knows of all decisions what is small (which count, whose
advantage is not 0), so that minibatches, weights and numbers of optimizer steps are those of one process that had the
whole batch; each computes the losses of its own decisions, as shares of the minibatch's, and gradients are added up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vla_rl.config import ConfigError

if TYPE_CHECKING:
    import torch

    from vla_rl.recipe.recipe import Recipe
    from vla_rl.types import Episode


Strategy = Literal["ddp", "fsdp"]

# The others wait while process 0 evaluates. A process that dies is noticed by the launcher, which ends the rest.
_TIMEOUT = timedelta(hours=12)
_COMMANDS = ("train", "sft")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def num_launched() -> int:
    """Processes that a launcher, such as torchrun, started together with this one; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in _LAUNCHED) else 1


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run.

    Attributes:
        rank: this one's number, from 0, which writes and evaluates.
        size: how many there are.
        strategy: ddp: each holds the whole policy; fsdp: parameters, gradients and optimizer state are cut up.
        device: where tensors that are exchanged lie.
    """

    rank: int = 0
    size: int = 1
    strategy: Strategy = "ddp"
    device: str = "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are cut up, so that forward passes with gradient must be made by all together."""
        return self.size > 1 and self.strategy == "fsdp"

    # --- exchanging what is small -----------------------------------------------------------

    def share(self, num: int) -> slice:
        """This process's contiguous part of `num` things: parts differ by one at most, earlier ones are larger."""
        each, more = divmod(num, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def gather(self, value: Any) -> list[Any]:
        """The JSON-able value of every process, in order."""
        return [value] if self.size == 1 else [json.loads(part) for part in self._gather_bytes(json.dumps(value))]

    def all_gather_rows(self, array: np.ndarray) -> tuple[np.ndarray, slice]:
        """The rows of every process in one array, and which of them are this one's."""
        if self.size == 1:
            return array, slice(0, len(array))
        raw = self._gather_bytes(np.ascontiguousarray(array).tobytes())
        parts = [np.frombuffer(part, array.dtype).reshape(-1, *array.shape[1:]) for part in raw]
        start = sum(len(part) for part in parts[: self.rank])
        return np.concatenate(parts), slice(start, start + len(array))

    def broadcast_from_main(self, call: Callable[[], Any]) -> Any:
        """What `call` returns (JSON-able) in process 0, which alone makes it; the others wait for it."""
        return self.gather(call() if self.is_main else None)[0]

    def gather_outcomes(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes of all processes, process 0's first, each without observations, actions and frames.

        With one process: the episodes as they are.
        """
        if self.size == 1:
            return list(episodes)
        from vla_rl.distributed import outcomes

        return outcomes.gather(self, episodes)

    def wait(self) -> None:
        """Until every process is here."""
        self.gather(None)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Process 0 runs the block, then the others: it makes files that they find there."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()

    def _gather_bytes(self, data: str | bytes) -> list[bytes]:
        import torch
        import torch.distributed as dist

        data = data.encode() if isinstance(data, str) else data
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)], device=self.device))
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return [part.cpu().numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    # --- the policy -------------------------------------------------------------------------

    def distribute(self, policy: Any) -> None:
        """Give every process the policy of process 0, or with fsdp its part of it. Before optimizers are made."""
        if self.size == 1:
            return
        import torch.distributed as dist

        for tensor in (*policy.parameters(), *policy.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        if self.is_sharded:
            from torch.distributed.device_mesh import init_device_mesh

            from vla_rl.distributed.fsdp import shard
            from vla_rl.interfaces import PolicyOutput

            shard(policy, init_device_mesh(self.device.partition(":")[0], (self.size,)), PolicyOutput)

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The sum of all processes' gradients, in each. With fsdp the backward pass has done it."""
        if self.size == 1 or self.is_sharded:
            return
        import torch
        import torch.distributed as dist

        present = np.any(self.gather([parameter.grad is not None for parameter in parameters]), axis=0)
        for parameter, is_present in zip(parameters, present, strict=True):
            if is_present and parameter.grad is None:  # Here nothing was computed, elsewhere it was.
                parameter.grad = torch.zeros_like(parameter)
            if is_present:
                dist.all_reduce(parameter.grad)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a tensor, sharing its storage; the tensor itself where it is not cut up."""
        if not self.is_sharded:
            return tensor
        from vla_rl.distributed.fsdp import local

        return local(tensor)

    def unsharded(self, policy: Any) -> AbstractContextManager[None]:
        """See `sharding.unsharded`."""
        if not self.is_sharded:
            return nullcontext()
        from vla_rl.distributed.fsdp import unsharded

        return unsharded(policy)

    def whole_weights(self, policy: Any) -> AbstractContextManager[None]:
        """See `sharding.whole_weights`."""
        if not self.is_sharded:
            return nullcontext()
        from vla_rl.distributed.fsdp import whole_weights

        return whole_weights(policy)


ALONE = ProcessGroup()
_joined: ProcessGroup = ALONE


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name of all processes' sums; of what is named a maximum, the largest."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        result[name] = max(values) if name.endswith("_max") else sum(values)
    return result


def current() -> ProcessGroup:
    """The processes that this one trains with: those of the innermost `joined` block, else itself alone."""
    return _joined


def resolve_device(device: str) -> str:
    """Return where to compute: "auto" is "cuda" where torch finds one, else "cpu"; each process has its own GPU."""
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return current().device if device == "cuda" and current().size > 1 else device


@contextmanager
def join(strategy: Strategy, on_cpu: bool) -> Iterator[ProcessGroup]:
    """Join the processes that a launcher started, for the block; accelerate finds the backend and this one's GPU."""
    global _joined  # noqa: PLW0603
    from accelerate import PartialState

    state = PartialState(cpu=on_cpu, timeout=_TIMEOUT)
    device = "cpu" if on_cpu else f"cuda:{state.local_process_index}"
    _joined = ProcessGroup(state.process_index, state.num_processes, strategy, device)
    try:
        yield _joined
        _joined.wait()
        state.destroy_process_group()
    finally:
        _joined = ALONE


def check_command(command: str | None) -> None:
    """Refuse commands that know nothing of other processes: each would do all of the work, into the same files.

    Raises:
        ConfigError: naming the commands that do.
    """
    if num_launched() > 1 and command not in _COMMANDS:
        raise ConfigError(
            f"{command}: runs in one process, and a launcher started {num_launched()}; run it without the launcher. "
            f"Several processes: {', '.join(_COMMANDS)}"
        )


@contextmanager
def joined(recipe: Recipe) -> Iterator[ProcessGroup]:
    """Join the processes that a launcher started, for the block; without a launcher: this process alone.

    Raises:
        ConfigError: the recipe has what does not work in several processes.
    """
    if num_launched() == 1:
        yield ALONE
        return
    check(recipe, num_launched())
    with join(recipe.parallel, on_cpu=resolve_device(recipe.device) == "cpu") as world:
        yield world


def check(recipe: Recipe, size: int) -> None:
    """Refuse what does not work in several processes.

    Raises:
        ConfigError: naming the field and what to do.
    """
    algo, sft = recipe.algo, recipe.sft
    if recipe.env.is_imagined:
        raise ConfigError(
            "env.kind: a world model's noise comes from one stream, which several processes cannot share; train in it "
            "with one process, or in a simulator with several"
        )
    if ":" in recipe.device:
        raise ConfigError(
            f"device: got {recipe.device!r}, but each of {size} processes has a GPU of its own; set device=cuda or auto"
        )
    if algo is not None and recipe.train.groups < size:
        raise ConfigError(
            f"train.groups: got {recipe.train.groups} for {size} processes; a group stays in one process, so each "
            "needs one at least"
        )
    if sft is not None and sft.batch_size < size:
        raise ConfigError(f"sft.batch_size: got {sft.batch_size} for {size} processes; each needs one example at least")
    for section, options in (("algo", algo), ("sft", sft)):
        if recipe.parallel == "fsdp" and options is not None and options.optimizer != "adamw":
            raise ConfigError(
                f"{section}.optimizer: got {options.optimizer!r}, but with parallel=fsdp only adamw knows parameters "
                "that are cut up; set it to adamw, or parallel=ddp"
            )
