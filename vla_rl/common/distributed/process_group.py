"""Process group of data-parallel training, one process a GPU; with one process every exchange is trivial.

    torchrun --nproc-per-node 4 -m vla_rl train RECIPE parallel=fsdp

Each process rolls out its share of the groups. Everyone knows of all decisions what is small (which count, whose
advantage is not 0), so that minibatches, weights and numbers of optimizer steps are those of one process that had the
whole batch; each computes the losses of an even part, as shares of the minibatch's, and gradients are added up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vla_rl.common.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vla_rl.types import Episode

Strategy = Literal["ddp", "fsdp"]

DEVICES = "auto (a GPU where torch finds one, else the CPU), cpu, cuda, cuda:N, mps"
_DEVICE_NAMES = re.compile(r"auto|(cpu|cuda|mps)(:(0|[1-9][0-9]?))?")
_COMMANDS = ("train", "sft", "eval", "reproduce")
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


def num_launched() -> int:
    """Processes that a launcher, such as torchrun, started together with this one; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in _LAUNCHED) else 1


def check_command(command: str | None) -> None:
    """Refuse, in launched processes, commands that know nothing of others: each would do all of the work.

    Raises:
        ConfigError: naming the commands that do.
    """
    if num_launched() > 1 and command not in _COMMANDS:
        raise ConfigError(
            f"{command}: runs in one process, and a launcher started {num_launched()}; run it without the launcher. "
            f"Several processes: {', '.join(_COMMANDS)}"
        )


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train one policy together: here one alone, for which all exchange is trivial.

    `launched.LaunchedGroup` has the same methods for several.

    Attributes:
        rank: this one's number, from 0, which writes and evaluates.
        size: how many there are.
        strategy: ddp: each holds the whole policy; fsdp: parameters, gradients and optimizer state are cut up.
        device: where it computes.
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

    @property
    def stream(self) -> tuple[int, ...]:
        """What tells this process's random numbers from the others', as a part of a seed; nothing where it is alone."""
        return (self.rank,) if self.size > 1 else ()

    def shard[T](self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's share of the items, in turn: of a kind that comes in a row, an even part."""
        return items[self.rank :: self.size]

    def collect_dealt(self, mine: Sequence[Any]) -> list[Any]:
        """Return the JSON-able results of all items that were sharded, in their order; `mine` are this process's."""
        parts = self.gather(list(mine))
        return [parts[i % self.size][i // self.size] for i in range(sum(map(len, parts)))]

    def share(self, num: int) -> slice:
        """Return this process's contiguous part of `num` things: parts differ by at most one."""
        return slice(0, num)

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON-able value of every process, in order."""
        return [value]

    def all_gather_rows(self, array: np.ndarray) -> tuple[np.ndarray, slice]:
        """Return the rows of every process in one array, and which of them are this one's."""
        return array, slice(0, len(array))

    def exchange(self, parcels: Sequence[bytes]) -> list[bytes]:
        """Give each process its parcel, in order of their numbers; return what each has for this one."""
        return list(parcels)

    def broadcast_from_main(self, call: Callable[[], Any]) -> Any:
        """Return what `call` gives (JSON-able) in process 0, which alone makes it; the others wait for it."""
        return call()

    def gather_outcomes(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return all processes' episodes, process 0's first; those of several without observations and actions."""
        return list(episodes)

    def wait(self) -> None:
        """Wait until every process is here; one that does not come in time ends the run (see `process_watch.py`)."""

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block in process 0, then in the others: it makes files that they find there."""
        yield

    def distribute(self, policy: Any) -> None:
        """Give every process the policy of process 0, or with fsdp its part of it. Before optimizers are made."""

    def reading_parts(self) -> AbstractContextManager[None]:
        """In the block, leave weights of the policies built in their files until these are distributed, with fsdp."""
        return nullcontext()

    def load(self, make: Callable[[], Any]) -> Any:
        """Return the policy that `make` gives, distributed. With fsdp each process reads its part, if it can."""
        return make()

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Add up all processes' gradients, in each. With fsdp the backward pass has done it."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a tensor, sharing its storage; the tensor itself where it is not cut up."""
        return tensor

    def unsharded(self, policy: Any) -> AbstractContextManager[None]:
        """Make the policy whole for rollouts, in the block (see `fsdp.unsharded`)."""
        return nullcontext()

    def gathers(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        """Let process 0 write these tensors, in the block; all enter it, the others do nothing in it."""
        return nullcontext()

    def saving(self, policy: Any) -> AbstractContextManager[None]:
        """Let process 0 save the policy, in the block; all enter it, the others do nothing in it."""
        return nullcontext()


ALONE = ProcessGroup()
_joined: list[ProcessGroup] = [ALONE]  # The innermost last.


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name of all processes' sums; of what is named a maximum, the largest."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        result[name] = max(values) if name.endswith("_max") else sum(values)
    return result


def current() -> ProcessGroup:
    """The processes that this one trains with: those of the innermost `joined` block, else itself alone."""
    return _joined[-1]


@contextmanager
def entered(group: ProcessGroup) -> Iterator[None]:
    """Make `group` the current one, for the block."""
    _joined.append(group)
    try:
        yield
    finally:
        _joined.pop()


# --- devices -----------------------------------------------------------------------------------


def resolve_device(device: str) -> str:
    """Return where to compute: "auto" is "cuda" where torch finds one; each process has its own. See `check_device`."""
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    else:
        check_device(device)
    return current().device if device == "cuda" and current().size > 1 else device


def check_device_name(device: str) -> str:
    """Return a device's name, wherever the device is; see `parse_device`, without whose torch the usual are known."""
    if _DEVICE_NAMES.fullmatch(device) is None:
        parse_device(device)
    return device


def parse_device(device: str, option: str = "device") -> torch.device:
    """The device of that name, here or not.

    Raises:
        ConfigError: naming the option, what it got and what is allowed.
    """
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{option}: got {device!r}, allowed: {DEVICES}") from None
    if wanted.type not in ("cpu", "cuda", "mps", torch._C._get_privateuse1_backend_name()):
        raise ConfigError(f"{option}: got {device!r}, allowed: {DEVICES}")
    return wanted


def check_device(device: str, option: str = "device") -> None:
    """Refuse a device that torch cannot compute on here, before anything is made for it.

    Raises:
        ConfigError: naming the option, what it got, what is allowed or there, and what to do.
    """
    if device in ("auto", "cpu"):
        return
    import torch

    wanted = parse_device(device, option)
    here = f"Set {option}=auto or {option}=cpu to compute here; `vla-rl doctor` says what there is."
    if wanted.type == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"it is built for CUDA {built} and finds no GPU with a driver" if built else "it is a build for CPUs"
        raise ConfigError(f"{option}: got {device!r}, but torch {torch.__version__} has no GPU here: {why}. {here}")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise ConfigError(f"{option}: got {device!r}, but the GPUs here are cuda:0 to cuda:{last}. {here}")
    if wanted.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{option}: got {device!r}, but torch {torch.__version__} finds no Apple GPU here. {here}")
