"""Reaching a Ray cluster, starting one here, and what every actor's process needs first."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.config import ConfigError

if TYPE_CHECKING:
    import torch

    from vla_rl.distributed.actors.config import RayRolloutConfig

LOOPBACK = "127.0.0.1"


def connect(config: RayRolloutConfig) -> bool:
    """Join the cluster that the options name, or start a Ray here; whether this call did, so that we end it.

    Raises:
        ConfigError: Ray is not installed, or no cluster is there.
    """
    try:
        import ray
    except ImportError:
        raise ConfigError("rollout.kind: 'ray' needs the package ray: pip install 'vla-rl[ray]'") from None
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if config.address is not None:
        try:
            ray.init(address=config.address, **options)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"rollout.address: got {config.address!r}, where no Ray answers ({error}); start it there (`ray start "
                "--head`), or set it to null for a Ray on this machine"
            ) from None
        return True
    cpus = config.workers * (config.worker_cpus + config.hosts * config.host_cpus)
    if config.object_store_mb:
        options["object_store_memory"] = config.object_store_mb * 2**20
    # As many CPUs as the actors reserve: here processes may share cores.
    options |= {"num_cpus": max(1, math.ceil(cpus)), "include_dashboard": False, "_node_ip_address": LOOPBACK}
    ray.init(address="local", **options)  # Also where another one runs on this machine.
    return True


@dataclass(frozen=True)
class Setting:
    """What an actor's process takes over from the one that made the run.

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
    import ray

    return ray.get_runtime_context().get_node_id(), os.getpid()


Packed = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


def pack(tensors: Mapping[str, torch.Tensor]) -> Packed:
    """Tensors as bytes, which the object store shares without a copy: name -> (dtype, shape, uint8)."""
    import torch

    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy())
        for name, t in flat.items()
    }


def unpack(packed: Packed) -> dict[str, torch.Tensor]:
    """Undo `pack`."""
    import torch

    return {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, data) in packed.items()
    }
