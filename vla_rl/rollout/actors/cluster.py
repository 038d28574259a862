"""Connection to a Ray cluster, joined or started here, and the set-up of actors' processes."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from vla_rl.config import ConfigError
from vla_rl.rollout.actors.config import WORKER_CPUS, RayOptions

try:
    import ray
    import ray.exceptions
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError
except ImportError:
    raise ConfigError("rollout.kind: 'ray' and --ray need the package ray: pip install '.[ray]'") from None

from ray.exceptions import RayError, RayTaskError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# Ray keeps an account of each call for its dashboard: here several a step, which would fill the first machine's memory.
UNRECORDED: dict[str, Any] = {"enable_task_events": False}
ROOM_SECONDS = 5.0  # between looks at whether enough machines have joined

_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}


class Connection:
    """This process's with a Ray. One that we joined is left when the last of its connections has ended.

    Args:
        is_ours: to end; else somebody had joined before.

    Attributes:
        dashboard: address of the page that Ray has of its machines; empty: it has none.
    """

    _open: ClassVar[list[Connection]] = []  # Those that are ours.

    def __init__(self, is_ours: bool, dashboard: str = "") -> None:
        self.dashboard = dashboard
        if is_ours:
            self._open.append(self)

    @classmethod
    def another(cls) -> Connection:
        """One with the Ray that this process has joined already."""
        return cls(is_ours=bool(cls._open), dashboard=cls._open[0].dashboard if cls._open else "")

    def end(self) -> None:
        """Leave Ray, where we joined it and nobody here uses it any more. May be called twice."""
        if self in self._open:
            self._open.remove(self)
            if not self._open:
                ray.shutdown()


def connect(config: RayOptions) -> Connection:
    """Join the cluster that the options name, or start a Ray here; nothing where this process has joined one.

    Raises:
        ConfigError: Ray is not installed, or no cluster is there.
    """
    if config.address is not None:
        return join(config.address, "rollout.address", "set it to null for a Ray on this machine")
    if ray.is_initialized():
        return Connection.another()
    cpus = config.workers * (WORKER_CPUS + config.hosts * config.host_cpus)
    options: dict[str, Any] = {"object_store_memory": config.object_store_mb * 2**20} if config.object_store_mb else {}
    # As many CPUs as the actors reserve: here processes may share cores.
    options |= {"num_cpus": max(1, math.ceil(cpus)), "include_dashboard": False, "_node_ip_address": LOOPBACK}
    _start_here(options | {"address": "local"} | _QUIET)  # Also where another one runs on this machine.
    return Connection(is_ours=True)


def _start_here(options: Mapping[str, Any]) -> None:
    """Start a Ray.

    Raises:
        ConfigError: it did not start within Ray's 30 s, which are few on a busy machine.
    """
    try:
        ray.init(**options)
    except Exception as error:  # Ray raises no class of its own.
        if "timed out during startup" not in str(error):
            raise
        raise ConfigError(
            "rollout.kind: got 'ray', but no Ray started here within 30 s; is the machine busy? Run it again, or start "
            "one before (`ray start --head`) and give rollout.address=auto"
        ) from None


def join(address: str, option: str, otherwise: str) -> Connection:
    """Join the cluster at an address, which `option` gave; nothing where this process has joined one.

    Args:
        otherwise: what to do where there is none.

    Raises:
        ConfigError: Ray is not installed, or no cluster is there.
    """
    if ray.is_initialized():
        return Connection.another()
    try:
        found = ray.init(address=address, **_QUIET).dashboard_url
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"{option}: got {address!r}, where no Ray answers ({error}); start it there (`ray start --head`), or "
            f"{otherwise}"
        ) from None
    return Connection(is_ours=True, dashboard=f"http://{found}" if found else "")


def shortage(config: RayOptions) -> str:
    """What the cluster has, what is free of it, and what a worker and a host ask for."""

    def text(found: Mapping[str, float]) -> str:
        return f"{found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs"

    return (
        f"the cluster has {text(ray.cluster_resources())}, free {text(ray.available_resources())}; a worker asks for "
        f"{WORKER_CPUS:g} CPU and worker_gpus={config.worker_gpus:g}, a host for "
        f"host_cpus={config.host_cpus:g}, host_gpus={config.host_gpus:g}"
    )


def wait_for_room(config: RayOptions, num_trainers: int) -> None:
    """Wait until the cluster's machines can hold all workers with a host each, for `start_timeout_s` at most.

    What others have reserved counts as room, since they may end. A Ray of this machine alone gets no more machines.

    Raises:
        ConfigError: they cannot.
    """
    deadline = time.monotonic() + config.start_timeout_s
    while lack := _lack(config, config.workers * num_trainers):
        if config.address is None or time.monotonic() >= deadline:
            raise ConfigError(f"rollout: {lack}: {shortage(config)}; ask for less, or start Ray on more machines")
        log.warning("waiting for machines: %s", lack)
        time.sleep(min(ROOM_SECONDS, config.start_timeout_s))


def _lack(config: RayOptions, num_workers: int) -> str:
    """What the cluster's machines cannot hold; empty: nothing."""
    machines = [(n["Resources"].get("CPU", 0), n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]]
    worker, host = (WORKER_CPUS, config.worker_gpus), (config.host_cpus, config.host_gpus)
    for kind, (cpus, gpus) in {"worker": worker, "host": host}.items():
        if not any(cpus <= has_cpus and gpus <= has_gpus for has_cpus, has_gpus in machines):
            return f"no machine has room for one {kind}"
    for wanted, found in zip(zip(worker, host, strict=True), zip(*machines, strict=True), strict=True):
        if num_workers * sum(wanted) > sum(found) + 1e-6:
            return f"there is no room for {num_workers} workers with a host each"
    return ""


class StoreFullError(RuntimeError):
    """Ray has no room for an episode, in memory or on disk."""

    def __init__(self, found: Exception) -> None:
        super().__init__(
            f"a machine's object store is full, and so is the disk for what does not fit ({type(found).__name__}). "
            "Free the disk under Ray's folder (/tmp/ray, or RAY_TMPDIR), raise rollout.object_store_mb, or make "
            "rollouts smaller: train.groups, train.group_size, the environment's images. Then resume the run"
        )


@contextmanager
def full_store_said() -> Iterator[None]:
    """Say what to do where Ray has no room.

    Raises:
        StoreFullError: it has none.
    """
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise StoreFullError(error) from None


def cause_of(error: RayTaskError) -> BaseException:
    """What an actor raised. Ray's account of where is logged, unless what was asked is wrong: only then is it known."""
    cause = error.cause if isinstance(error.cause, BaseException) else error
    if not isinstance(cause, ValueError):
        log.error("%s", error)
    return cause


def how_gone(error: RayError) -> str:
    """In a few words how an actor or an object was lost."""
    name = type(error).__name__
    # What its class or module said where it was to start: the last line of Ray's account.
    return f"{name}: {str(error).strip().splitlines()[-1]}" if getattr(error, "actor_init_failed", False) else name


def is_the_callers(error: BaseException | None) -> bool:
    """Whether an error in an actor would come again in any other: what was asked is wrong, or there is no room."""
    return isinstance(error, ValueError | NotImplementedError | ObjectStoreFullError | OutOfDiskError)


@dataclass(frozen=True)
class Setting:
    """Settings that an actor's process takes over from the one that made the run.

    Attributes:
        folder: the working folder, for relative paths in recipes; where it exists.
        modules: where Python finds modules, for a user's own classes; those that exist.
        num_threads: torch's.
    """

    folder: str
    modules: tuple[str, ...]
    num_threads: int

    @staticmethod
    def here() -> Setting:
        """This process's."""
        import torch

        return Setting(os.getcwd(), tuple(map(os.path.abspath, sys.path)), torch.get_num_threads())

    def enter(self) -> None:
        """Make it this process's, and this thread's."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        sys.path += [folder for folder in self.modules if folder not in sys.path and os.path.exists(folder)]


def where_here() -> tuple[str, int]:
    """The id of the node that this actor is on, and its process's number there."""
    return ray.get_runtime_context().get_node_id(), os.getpid()


def release_freed_memory() -> None:
    """Give memory that this process has freed back to the system; nothing where its C library is not glibc.

    glibc keeps it, in ever more places: each call that waits in an actor has a stack of its own, and thousands do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
