"""Whole commands as Ray tasks, on whichever machine has room; their files lie in a folder that all machines share."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vla_rl.common.child_process import start_child
from vla_rl.config import ConfigError
from vla_rl.rollout.actors.cluster import Setting, cause_of, join, ray

OPTION = "--ray"


class LostError(RuntimeError):
    """The machine that ran a command, or the process there, is gone; the command may be begun again."""


class Programs:
    """Runs commands on the machines of a cluster.

    Args:
        address: of the cluster: auto, or HOST:PORT.
        folder: which all machines see at the same path.
        cpus, gpus: that Ray reserves for each command.

    Attributes:
        is_over: `stop` was called.

    Raises:
        ConfigError: Ray is not installed, no cluster is there, or none of its machines has so many CPUs and GPUs.
    """

    def __init__(self, address: str, folder: Path, cpus: int, gpus: float) -> None:
        self._connection = join(address, OPTION, "leave it out to run on this machine")
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(found.get("CPU", 0) >= cpus and found.get("GPU", 0) >= gpus for found in machines):
            self._connection.end()
            raise ConfigError(
                f"--job-cpus, --job-gpus: got {cpus} and {gpus:g}, but no machine of the cluster has as many: "
                + ", ".join(f"{found.get('CPU', 0):g} CPUs and {found.get('GPU', 0):g} GPUs" for found in machines)
            )
        self._mark = folder.resolve() / f".shared-{secrets.token_hex(8)}"
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.touch()
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._run = ray.remote(run_here).options(**options)
        self._threads, self._refs, self._lock = cpus, set[Any](), threading.Lock()
        self.is_over = False

    def run(self, command: Sequence[str], log: Path) -> int:
        """Run a command, whose output is added to a file; returns its exit code. For several threads at a time.

        Raises:
            LostError: its machine is gone, or its process was killed.
            ConfigError: the machine that took it does not see the folder.
        """
        with self._lock:
            if self.is_over:
                raise LostError("the commands were stopped")
            own = ["" if part == sys.executable else part for part in command]
            ref = self._run.remote(own, str(log.resolve()), str(self._mark), self._threads, Setting.here())
            self._refs.add(ref)
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None
        except ray.exceptions.RayError as error:
            raise LostError(f"{type(error).__name__}: its machine or its process there is gone") from None
        finally:
            with self._lock:
                self._refs.discard(ref)

    def stop(self) -> None:
        """Stop the commands that run; no further one begins."""
        with self._lock:
            self.is_over = True
            for ref in self._refs:
                ray.cancel(ref, force=True)

    def close(self) -> None:
        """Leave the cluster; nothing runs any more."""
        self._mark.unlink(missing_ok=True)
        self._connection.end()


def run_here(command: Sequence[str], log: str, mark: str, threads: int, setting: Setting) -> int:
    """Run a command on this machine; "" in it is this machine's Python."""
    if not (os.path.exists(mark) and os.path.isdir(setting.folder)):
        raise ConfigError(
            f"--ray: the machine {socket.gethostname()} lacks {os.path.dirname(mark)} or {setting.folder}; give "
            "--output, and work in, folders that all machines of the cluster share, at the same paths"
        )
    setting.enter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    with open(log, "ab") as out:
        program = [part or sys.executable for part in command]
        return start_child(program, stdout=out, stderr=out, env=environment).wait()
