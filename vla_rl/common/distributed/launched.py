"""Process group of a launcher such as torchrun: its exchanges, and the recipes that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.device_mesh import init_device_mesh

from vla_rl.common.distributed import fsdp, tensor_files
from vla_rl.common.distributed.process_group import ProcessGroup, Strategy, entered, num_launched, resolve_device
from vla_rl.common.distributed.process_watch import Watch
from vla_rl.config import ConfigError
from vla_rl.interfaces import PolicyOutput
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Keyframe, Observation


def _outline(episode: Episode) -> dict[str, Any]:
    """What statistics need of an episode, JSON-able: all but its pixels and actions."""
    spec = episode.spec
    names = ("task", "split", "index", "instruction", "perturbation")
    return {
        "spec": {name: getattr(spec, name) for name in names},
        "keyframe": None if spec.keyframe is None else {"env": spec.keyframe.env, "step": spec.keyframe.step},
        "arrays": {n: getattr(episode, n).tolist() for n in ("reward", "terminated", "truncated", "num_steps")},
        "success": bool(episode.success),
        "group": int(episode.group),
        "lost": bool(episode.lost),
        "info": {name: np.asarray(values).tolist() for name, values in episode.info.items()},
    }


def _episode(values: Mapping[str, Any]) -> Episode:
    task, arrays = values["spec"]["task"], values["arrays"]
    keyframe = None if values["keyframe"] is None else Keyframe(task=task, arrays={}, **values["keyframe"])
    nothing = Observation(images={}, state=np.zeros((0, 0), np.float32), instruction=[])
    return Episode(
        spec=EpisodeSpec(**values["spec"], keyframe=keyframe),
        obs=nothing,
        chunks=ActionChunk(np.zeros((0, 0, 0), np.float32)),
        reward=np.array(arrays["reward"], np.float32),
        terminated=np.array(arrays["terminated"], bool),
        truncated=np.array(arrays["truncated"], bool),
        num_steps=np.array(arrays["num_steps"], np.int64),
        success=values["success"],
        final_obs=nothing,
        group=values["group"],
        lost=values["lost"],
        info={name: np.array(row) for name, row in values["info"].items()},
    )


class Launchable(Protocol):
    """What several processes are told of the run that they share: a recipe, of whatever kind."""

    @property
    def device(self) -> str: ...
    @property
    def parallel(self) -> Strategy: ...
    @property
    def hang_minutes(self) -> float: ...


@dataclass(frozen=True)
class LaunchedGroup(ProcessGroup):
    """Several processes; see `ProcessGroup` for what each method promises.

    Attributes:
        watch: notices one that hangs. A process that dies is noticed by the launcher, which ends the rest.
        on_host: torch's group for what is exchanged outside the device; None: the one for all.
    """

    watch: Watch | None = field(default=None, compare=False, repr=False)
    on_host: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def share(self, num: int) -> slice:
        each, more = divmod(num, self.size)  # Earlier parts are larger.
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    # --- exchanging what is small -----------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(part) for part in self._gather_bytes(json.dumps(value).encode())]

    def all_gather_rows(self, array: np.ndarray) -> tuple[np.ndarray, slice]:
        raw = self._gather_bytes(np.ascontiguousarray(array).tobytes())
        parts = [np.frombuffer(part, array.dtype).reshape(-1, *array.shape[1:]) for part in raw]
        start = sum(len(part) for part in parts[: self.rank])
        return np.concatenate(parts), slice(start, start + len(array))

    def exchange(self, parcels: Sequence[bytes]) -> list[bytes]:
        self.wait()
        out = torch.tensor([len(parcel) for parcel in parcels])
        into = torch.empty_like(out)
        dist.all_to_all_single(into, out, group=self.on_host)
        sizes = into.tolist()
        came = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(parcels)), dtype=torch.uint8) if out.any() else came[:0]
        dist.all_to_all_single(came, sent, sizes, out.tolist(), group=self.on_host)
        return [part.numpy().tobytes() for part in came.split(sizes)]

    def broadcast_from_main(self, call: Callable[[], Any]) -> Any:
        return self.gather(call() if self.is_main else None)[0]

    def gather_outcomes(self, episodes: Sequence[Episode]) -> list[Episode]:
        return [_episode(values) for part in self.gather([_outline(e) for e in episodes]) for values in part]

    def wait(self, patient: bool = False) -> None:
        if self.watch is not None:
            self.watch.meet(patient)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        if not self.is_main:
            self.wait(patient=True)
        yield
        if self.is_main:
            self.wait(patient=True)

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        self.wait()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self.on_host)
        longest = max(1, *(int(size) for size in sizes))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.on_host)
        return [part.numpy().tobytes()[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    # --- the policy -------------------------------------------------------------------------

    def distribute(self, policy: Any) -> None:
        self.wait()
        for tensor in (*policy.parameters(), *policy.buffers()):
            if not tensor_files.is_placeholder(tensor):
                dist.broadcast(tensor.detach(), src=0)
        if self.is_sharded:
            awaited = tensor_files.sources(policy)
            fsdp.shard(policy, init_device_mesh(self.device.partition(":")[0], (self.size,)), PolicyOutput)
            tensor_files.read_parts(policy, awaited)

    def reading_parts(self) -> AbstractContextManager[None]:
        return tensor_files.deferred() if self.is_sharded else nullcontext()

    def load(self, make: Callable[[], Any]) -> Any:
        with self.reading_parts():
            policy = make()
        self.distribute(policy)
        return policy

    def all_reduce_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.is_sharded:
            return
        present = np.any(self.gather([parameter.grad is not None for parameter in parameters]), axis=0)
        for parameter, is_present in zip(parameters, present, strict=True):
            if is_present and parameter.grad is None:  # Here nothing was computed, elsewhere it was.
                parameter.grad = torch.zeros_like(parameter)
            if is_present:
                dist.all_reduce(parameter.grad)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return fsdp.local(tensor) if self.is_sharded else tensor

    def unsharded(self, policy: Any) -> AbstractContextManager[None]:
        return fsdp.unsharded(policy) if self.is_sharded else nullcontext()

    def gathers(self, tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
        return fsdp.gathers(tensors) if self.is_sharded else nullcontext()

    def saving(self, policy: Any) -> AbstractContextManager[None]:
        return fsdp.saving(policy) if self.is_sharded else nullcontext()


@contextmanager
def launched_group(recipe: Launchable) -> Iterator[LaunchedGroup]:
    """Join the launched processes, for the block; accelerate finds the backend and this one's GPU.

    Raises:
        ConfigError: the recipe has what does not work in several processes.
    """
    check(recipe, num_launched())
    on_cpu = resolve_device(recipe.device) == "cpu"
    limit = timedelta(minutes=recipe.hang_minutes)
    state = PartialState(cpu=on_cpu, timeout=limit)
    device = "cpu" if on_cpu else f"cuda:{state.local_process_index}"
    on_host = None if on_cpu else cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=limit))
    rank, size = state.process_index, state.num_processes
    watch = Watch(dist.distributed_c10d._get_default_store(), rank, size, limit)
    group = LaunchedGroup(rank, size, recipe.parallel, device, watch, on_host)
    try:
        with entered(group), watch.explained():
            yield group
            group.wait()
            state.destroy_process_group()
    finally:
        watch.close()


def check(recipe: Launchable, size: int) -> None:
    """Refuse what does not work in several processes.

    Raises:
        ConfigError: naming the field and what to do.
    """
    algo, sft = getattr(recipe, "algo", None), getattr(recipe, "sft", None)
    if ":" in recipe.device:
        raise ConfigError(
            f"device: got {recipe.device!r}, but each of {size} processes has a GPU of its own; set device=cuda or auto"
        )
    train = getattr(recipe, "train", None)
    if train is not None and train.groups < size:
        raise ConfigError(
            f"train.groups: got {train.groups} for {size} processes; a group stays in one process, so each "
            "needs one at least"
        )
    if sft is not None and sft.batch_size < size:
        raise ConfigError(f"sft.batch_size: got {sft.batch_size} for {size} processes; each needs one example at least")
    for section, options in (("algo", algo), ("sft", sft)):
        if recipe.parallel == "fsdp" and options is not None and options.optim.name != "adamw":
            raise ConfigError(
                f"{section}.optim.name: got {options.optim.name!r}, but with parallel=fsdp only adamw knows parameters "
                "that are cut up; set it to adamw, or parallel=ddp"
            )
