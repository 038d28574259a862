"""A policy server, in a thread or a process of its own, whose policy does what the instruction says. Needs no torch.

The instruction is words: `wait` (until its `gate` is opened), `fail`, `nan`, in any number; else it just answers.
Action i of the answer to state [x, ...] is x + i in each dimension.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from served import PATIENCE, server_thread

from real_robot.serving.requests import PolicyFacts
from real_robot.serving.server import PolicyServer, ServeConfig, run
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, ActionPrefix, Observation

ROOT = Path(__file__).resolve().parents[2]
CAMERAS = ("agentview", "wrist")


class ToyPolicy(Policy):
    """See the module. `arrived` counts those that came to the gate, `gate` those that may pass."""

    chunk_size, action_dim, cameras, uses_state = 4, 3, CAMERAS, True

    def __init__(self) -> None:
        self.arrived, self.gate = threading.Semaphore(0), threading.Semaphore(0)

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        words = obs.instruction[0].split()
        if "wait" in words:
            self.arrived.release()
            self.gate.acquire()
        if "fail" in " ".join(obs.instruction):
            raise RuntimeError("told to fail")
        actions = obs.state[:, :1, None] + np.arange(self.chunk_size)[None, :, None] + np.zeros(self.action_dim)
        if "nan" in words:
            actions[:] = np.nan
        return ActionChunk(actions.astype(np.float32))

    def act_with_prefix(self, obs: Observation, prefix: ActionPrefix, generator: Any = None) -> ActionChunk:
        """The prefix's frozen actions, then the usual."""
        actions = self.act(obs).actions.copy()
        actions[:, : prefix.num_frozen] = prefix.actions[:, : prefix.num_frozen]
        return ActionChunk(actions)

    def embed(self, obs: Observation) -> Any:
        return obs.state * 2


FACTS = PolicyFacts("toy", "1", CAMERAS, (32, 32), 5, True, 4, 3, ("x", "y", "z"), 20.0, True, True)


def observation(x: float = 0.0, instruction: str = "go", size: int = 32) -> dict[str, Any]:
    """A good request."""
    image = np.zeros((size, size, 3), np.uint8)
    state = np.array([x, 0, 0, 0, 0], np.float32)
    return {"images": dict.fromkeys(CAMERAS, image), "state": state, "instruction": instruction}


class ToyThread:
    """A server in this process, its policy and its port."""

    def __init__(self, server: PolicyServer, policy: ToyPolicy) -> None:
        self.server, self.policy, self.port = server, policy, server.port
        self.address = f"127.0.0.1:{self.port}"

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While a request that says `wait`, and was sent, is computed: that ends with this."""
        assert self.policy.arrived.acquire(timeout=PATIENCE)
        try:
            yield
        finally:
            self.policy.gate.release()


@contextmanager
def toy_thread(wait: bool = True, may_load: Callable[[], object] = lambda: None, **config: Any) -> Iterator[ToyThread]:
    """Start one in a thread. `may_load` returns when the policy may be loaded; `config`: of its `ServeConfig`."""
    policy = ToyPolicy()
    options = {"max_batch": 8, "max_message_bytes": 1024 * 1024, **config}
    with server_thread(lambda: (may_load(), (policy, FACTS))[1], wait, **options) as server:
        yield ToyThread(server, policy)


class ToyServer:
    """The process and its port."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port
        self.address = f"127.0.0.1:{port}"

    def memory(self) -> int:
        """Resident bytes."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def toy_server(*options: str, port: int = 0) -> Iterator[ToyServer]:
    """Start one in a process; killed at the end."""
    command = [sys.executable, __file__, "--port", str(port), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        listening = process.stdout.readline()
        server = ToyServer(process, int(listening.partition(";")[0].rpartition(":")[2]))
        assert process.stdout.readline().startswith("ready")
        yield server
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--certificate", type=Path, default=None)
    parser.add_argument("--key", type=Path, default=None)
    parser.add_argument("--hang-after", type=float, default=60.0)
    config = ServeConfig(**vars(parser.parse_args()), max_message_bytes=1024 * 1024)
    asyncio.run(run(lambda: (ToyPolicy(), FACTS), config, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
