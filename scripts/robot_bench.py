"""Jitter and added latency of the robot's control loop, over a policy server in a process of its own.

    python scripts/robot_bench.py [--seconds 30]

A tick makes an observation from camera frames that are ready, shows it to the supervisor and to the executor, and
sends what the supervisor allows. The server computes a tiny policy with fresh weights; what is measured is everything
around it: wire format, sockets, batching, threads, supervisor. Jitter is how late a tick begins.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from real_robot.contract.safety import SafetyConfig
from real_robot.contract.sections import ExecutionConfig
from real_robot.control.chunk_executor import ChunkExecutor
from real_robot.control.supervisor import Supervisor
from real_robot.serving.client import PolicyClient
from real_robot.types import RobotObservation
from vla_rl.policies.fake_input import fake_env_spec, fake_statistics
from vla_rl.policies.openvla.config import OpenVLAConfig

CAMERAS = ("front", "wrist")
ACTION_DIM, STATE_DIM = 7, 8


def write_policy(folder: Path) -> None:
    """A tiny policy with fresh weights and two cameras."""
    spec = fake_env_spec(CAMERAS, state_dim=STATE_DIM, action_dim=ACTION_DIM)
    policy = OpenVLAConfig(kind="openvla", cameras=CAMERAS, decoder="parallel").build(spec)
    policy.set_norm_stats(action=fake_statistics(ACTION_DIM), state=fake_statistics(STATE_DIM, gripper=False))
    policy.save(folder)


@contextlib.contextmanager
def served(folder: Path, threads: int) -> Iterator[str]:
    """Address of a server of the policy in `folder`, in a process of its own."""
    code = (
        "import sys; from real_robot.serving.server import ServeConfig, main; "
        "main(sys.argv[1], ServeConfig(port=0, device='cpu'))"
    )
    command = [sys.executable, "-u", "-c", code, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        assert process.stdout is not None
        listening, ready = process.stdout.readline(), process.stdout.readline()
        if not ready.startswith("ready"):
            raise RuntimeError(f"the policy server did not start: {listening}{ready}")
        yield f"127.0.0.1:{listening.partition(';')[0].rpartition(':')[2]}"
    finally:
        process.terminate()
        process.wait(20)


def supervisor(hz: float) -> Supervisor:
    """One with every kind of limit at work: six velocities in a workspace, and a gripper."""
    twist = [
        {"name": name, "kind": "velocity", "low": -1, "high": 1, "max_acceleration": 8.0, "max_step": 0.3}
        for name in ("x", "y", "z", "roll", "pitch", "yaw")
    ]
    gripper = {"name": "gripper", "kind": "position", "low": -1, "high": 1, "max_velocity": 10, "start": -1}
    workspace = {"state": [0, 1, 2], "commands": [0, 1, 2], "low": [-1, -1, -1], "high": [1, 1, 1]}
    values = {"control_hz": hz, "dimensions": [*twist, gripper], "workspace": workspace, "command_timeout": 1.0}
    return Supervisor(SafetyConfig.model_validate(values))


def measure(address: str, hz: float, seconds: float, image_size: int) -> dict[str, Any]:
    """Run the loop.

    Returns:
        milliseconds, each as [median, 99th percentile]: `jitter`, `tick`, `round_trip`, `inference` (the server's own
        forward pass), `added` (round trip without it); and counts.
    """
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (10, len(CAMERAS), image_size, image_size, 3), dtype=np.uint8)
    round_trips: list[float] = []
    inferences: list[float] = []

    def infer(seen: RobotObservation) -> np.ndarray:
        start = time.perf_counter()
        reply = client.act(seen)
        round_trips.append(time.perf_counter() - start)
        inferences.append(reply["server_timing"]["infer_ms"] / 1000)
        return reply["actions"]

    jitter, ticks = [], []
    modes = {"running": 0, "holding": 0, "stopped": 0}
    with PolicyClient(address, infer_timeout=10.0) as client:
        executor, guard = ChunkExecutor(infer, ExecutionConfig(control_hz=hz, kind="velocity")), supervisor(hz)
        due = time.monotonic() + 1 / hz
        for step in range(round(seconds * hz)):
            time.sleep(max(0.0, due - time.monotonic()))
            start = time.monotonic()
            jitter.append(start - due)
            images = {name: frames[step % len(frames), i] for i, name in enumerate(CAMERAS)}
            seen = RobotObservation(images, np.zeros(STATE_DIM, np.float32), "pick up the block", start)
            guard.observe(seen)
            executor.submit(seen, step)
            modes[guard.filter(executor.next_action(step)).mode] += 1
            ticks.append(time.monotonic() - start)
            due += 1 / hz
        executor.close()
        starved = executor.statistics().num_starved
    added = np.subtract(round_trips, inferences)
    parts = {"jitter": jitter, "tick": ticks, "round_trip": round_trips, "inference": inferences, "added": added}
    result: dict[str, Any] = {
        name: (np.quantile(np.asarray(values), [0.5, 0.99]) * 1000).tolist() for name, values in parts.items()
    }
    return result | {"ticks": len(ticks), "chunks": len(round_trips), "starved": starved, **modes}


ROWS = {
    "jitter": "a tick begins late by",
    "tick": "work in a tick (observe, submit, next action, supervisor)",
    "round_trip": "observation to chunk",
    "inference": "of which the policy's forward pass",
    "added": "of which everything else",
}


def format_table(result: dict[str, Any]) -> str:
    """The measurement as text."""
    lines = [f"{'milliseconds':<60}{'median':>9}{'p99':>9}"]
    lines += [f"{text:<60}{result[name][0]:>9.2f}{result[name][1]:>9.2f}" for name, text in ROWS.items()]
    lines.append(
        f"{result['ticks']} ticks: {result['running']} running, {result['holding']} holding, {result['starved']} "
        f"without an action after the first chunk; {result['chunks']} chunks"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--hz", type=float, default=20.0, help="control ticks a second (20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measurement (30)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels a side, of two cameras (224)")
    parser.add_argument("--threads", type=int, default=1, help="of the server's forward pass (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        write_policy(Path(folder) / "policy")
        with served(Path(folder) / "policy", args.threads) as address:
            measure(address, args.hz, 1.0, args.image_size)  # connects, loads, computes for the first time
            result = measure(address, args.hz, args.seconds, args.image_size)
    print(json.dumps(result, indent=1) if args.json else format_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
