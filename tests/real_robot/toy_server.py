"""A policy server in a process of its own, whose policy does what the instruction says. Needs no torch.

The instruction is words: `sleep 0.2`, `fail`, `nan`, `hang`, in any number; else the policy just answers.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.serving.requests import PolicyFacts
from real_robot.serving.server import ServeConfig, run
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, ActionPrefix, Observation

ROOT = Path(__file__).resolve().parents[2]
CAMERAS = ("agentview", "wrist")


class ToyPolicy(Policy):
    """See the module."""

    chunk_size, action_dim, cameras, uses_state = 4, 3, CAMERAS, True

    def act(self, obs: Observation, generator: Any = None, temperature: float = 1.0) -> ActionChunk:
        words = obs.instruction[0].split()
        if "sleep" in words:
            time.sleep(float(words[words.index("sleep") + 1]))
        if "hang" in words:
            time.sleep(3600)
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
def toy_server(*options: str, port: int = 0, wait: bool = True) -> Iterator[ToyServer]:
    """Start one; killed at the end."""
    command = [sys.executable, __file__, "--port", str(port), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        listening = process.stdout.readline()
        server = ToyServer(process, int(listening.partition(";")[0].rpartition(":")[2]))
        if wait:
            assert process.stdout.readline().startswith("ready")
        yield server
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--token", default=None)
    parser.add_argument("--certificate", type=Path, default=None)
    parser.add_argument("--key", type=Path, default=None)
    parser.add_argument("--allow-host", action="append", default=[])
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-clients", type=int, default=16)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--hang-after", type=float, default=60.0)
    args = parser.parse_args()

    def load() -> tuple[Any, PolicyFacts]:
        time.sleep(args.load_seconds)
        return ToyPolicy(), FACTS

    config = ServeConfig(
        host=args.host,
        port=args.port,
        token=args.token,
        certificate=args.certificate,
        key=args.key,
        allow_host=tuple(args.allow_host),
        max_batch=args.max_batch,
        max_clients=args.max_clients,
        hang_after=args.hang_after,
        max_message_bytes=1024 * 1024,
    )
    asyncio.run(run(load, config, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    main()
