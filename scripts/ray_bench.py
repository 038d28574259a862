"""What rollouts by Ray cost, and what working ahead gains, on this machine with simulated environments.

python scripts/ray_bench.py throughput   # staleness 2 against 0, environments that sleep 10 to 100 ms with a heavy tail
python scripts/ray_bench.py overhead     # 1,000 cheap environments: the trainer's time and memory per episode

The policy is docs/examples/my_policy.py; the update is real, then pauses (--update-s) as long as a GPU might take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "docs" / "examples")]

from vla_rl.config import validate  # noqa: E402
from vla_rl.recipe.recipe import Recipe  # noqa: E402
from vla_rl.training.run import TrainingRun  # noqa: E402


def recipe(num_envs: int, groups: int, size: int, iterations: int, rollout: dict[str, Any], **env: Any) -> Recipe:
    """A GRPO run in the dummy environment."""
    values = {
        "name": "ray_bench",
        "num_threads": 1,
        "env": {"kind": "dummy", "num_envs": num_envs, "horizon": 16, **env},
        "policy": {"kind": "my_policy:BinsConfig"},
        "algo": {"kind": "grpo", "minibatch_size": 256},
        "train": {"iterations": iterations, "groups": groups, "group_size": size, "allow_no_success": True},
        "rollout": {"kind": "ray", "object_store_mb": 100, **rollout},
        "log": {"tensorboard": False, "console": False},
    }
    return validate(Recipe, values)


def iterate(run: TrainingRun, update_s: float, learn: bool) -> int:
    """One iteration; returns its episodes."""
    episodes = run.roll_out()
    if learn:
        with contextlib.suppress(ValueError):  # All groups without contrast.
            run.learner.update(run.learner.prepare(episodes))
    time.sleep(update_s)
    run.iteration += 1
    return len(episodes)


def throughput(options: argparse.Namespace) -> None:
    """Episodes per second with staleness 0 and 2; the clock starts when all hosts have, and two iterations are over."""
    rates = {}
    for staleness in (0, 2):
        rollout = {"hosts": options.envs, "staleness": staleness}
        plan = recipe(options.envs, 2, 8, 10_000, rollout, sleep_ms=(10, 100))
        with tempfile.TemporaryDirectory() as folder, TrainingRun(plan, Path(folder), resume=False) as run:
            while run.iteration < 2 or run.source.metrics().get("rollout/hosts", options.envs) < options.envs:
                iterate(run, options.update_s, learn=True)
            started = time.monotonic()
            num = sum(iterate(run, options.update_s, learn=True) for _ in range(options.iterations))
            rates[staleness] = num / (time.monotonic() - started)
            print(json.dumps({"staleness": staleness, "episodes_per_s": rates[staleness], **run.source.metrics()}))
    print(f"staleness 2 / staleness 0: {rates[2] / rates[0]:.2f}")


ROLES = {"ray::AheadWorker": "worker", "ray::EnvHost": "hosts", "raylet": "raylet", "gcs_server": "gcs"}


def memory() -> dict[str, float]:
    """MiB of this process and of Ray's under it, by role, without what they share; 0 where there is no /proc."""
    found, pids = dict.fromkeys(["trainer", *ROLES.values()], 0.0), [os.getpid()]
    for pid in pids:  # Grows: children of children.
        with contextlib.suppress(OSError):  # It has just ended.
            place = Path(f"/proc/{pid}")
            pids += [int(child) for task in place.glob("task/*/children") for child in task.read_text().split()]
            program = place.joinpath("cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]
            role = "trainer" if pid == os.getpid() else next((r for n, r in ROLES.items() if program.startswith(n)), "")
            if role:
                _, resident, shared = place.joinpath("statm").read_text().split()[:3]
                found[role] += (int(resident) - int(shared)) * resource.getpagesize() / 2**20
    return found


def overhead(options: argparse.Namespace) -> None:
    """The trainer process's CPU time, and all processes' own memory, over many episodes."""
    per_iteration, rows = 1000, list[dict[str, float]]()
    rollout = {"hosts": 2, "staleness": 1, "batch": 500, "timeout_s": 600}
    plan = recipe(options.envs, 125, 8, options.episodes // per_iteration, rollout, horizon=options.horizon)
    with tempfile.TemporaryDirectory() as folder, TrainingRun(plan, Path(folder), resume=False) as run:
        for number in range(plan.train.iterations):
            cpu, started = time.process_time(), time.monotonic()
            num = iterate(run, 0.0, learn=False)
            cost = {"cpu_ms": 1e3 * (time.process_time() - cpu) / num, "per_s": num / (time.monotonic() - started)}
            rows.append({"episodes": (number + 1) * num, **cost, **memory()})
            print(json.dumps({name: round(value, 2) for name, value in rows[-1].items()}), flush=True)
    late = rows[len(rows) // 2 :]
    if len(late) > 1:
        thousands = np.array([row["episodes"] for row in late]) / 1000
        for name in ("cpu_ms", "trainer", *ROLES.values()):
            slope, _ = np.polyfit(thousands, [row[name] for row in late], 1)
            print(f"{name}: {late[-1][name]:.2f}, in the second half {slope:+.4f} per 1,000 episodes")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("throughput")
    first.add_argument("--envs", type=int, default=8, help="environments, each in a host of its own")
    first.add_argument("--iterations", type=int, default=6)
    first.add_argument("--update-s", type=float, default=2.0, help="seconds that stand for a GPU's update")
    first.set_defaults(run=throughput)
    second = commands.add_parser("overhead")
    second.add_argument("--envs", type=int, default=1000)
    second.add_argument("--episodes", type=int, default=100_000)
    second.add_argument("--horizon", type=int, default=16, help="control steps of an episode; 4 are one chunk")
    second.set_defaults(run=overhead)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
