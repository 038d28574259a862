"""Speed of the simulators: control steps per second, and against LeRobot's own LIBERO environment.

    vla-rl bench env                       (or: python -m sim.bench --help)

Everything that is compared runs in the same process, in turns, with the same number of environments,
workers and pixels, and the same actions. Resets are not counted. LeRobot renders both of LIBERO's
cameras at every step, whichever are asked for; ours renders those that the policy reads, once a chunk.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

from sim.libero.library import import_library
from sim.robosuite.expert import WITH_EXPERT
from vla_rl.config import build_component
from vla_rl.interfaces import VecEnv
from vla_rl.types import EpisodeSpec

KINDS = ("tabletop", "robosuite", "libero")
NUM_TURNS = 3
LIBERO_SUITE, LIBERO_TASK = "libero_spatial", 0


class Runner(Protocol):
    """Something whose control steps are counted."""

    def run(self, seconds: float) -> tuple[int, float]:
        """Step for about this long. Returns control steps executed, of all environments, and seconds spent stepping."""
        ...


class OursRunner:
    """One of our environments, `chunk` steps per call, the observation rendered once per call."""

    def __init__(self, env: VecEnv, chunk: int) -> None:
        self.env, self.chunk = env, chunk
        self._next_index = 0

    def _reset(self, env_ids: Sequence[int]) -> None:
        task = next(iter(self.env.spec.tasks))
        specs = [EpisodeSpec(task, "train", self._next_index + k) for k in range(len(env_ids))]
        self._next_index += len(env_ids)
        self.env.reset(specs, env_ids)

    def run(self, seconds: float) -> tuple[int, float]:
        """See `Runner`."""
        self._reset(range(self.env.num_envs))
        rng = np.random.default_rng(0)
        steps, spent = 0, 0.0
        while spent < seconds:
            actions = draw_actions(rng, self.env.num_envs, self.chunk)
            start = time.perf_counter()
            result = self.env.step(actions)
            spent += time.perf_counter() - start
            steps += int(result.num_steps.sum())
            if result.done.any():
                self._reset(np.flatnonzero(result.done).tolist())
        return steps, spent


def draw_actions(rng: np.random.Generator, num_envs: int, length: int) -> np.ndarray:
    """float32 (num_envs, length, 7): gentle random motions with an open gripper, which move the arm and end nothing."""
    actions = rng.uniform(-0.3, 0.3, (num_envs, length, 7)).astype(np.float32)
    actions[..., 6] = -1.0
    return actions


class LeRobotRunner:
    """LeRobot's LiberoEnv in the vector environment that its `make_env` builds: a process each, or one for all."""

    def __init__(self, num_envs: int, in_processes: bool, image_size: int, prepare: Callable[[], None]) -> None:
        from lerobot.envs.libero import create_libero_envs
        from lerobot.envs.utils import freeze_after_episode_end

        def build(make_each: Sequence[Callable[[], Any]]) -> gym.vector.VectorEnv:
            reset_mode = gym.vector.AutoresetMode.NEXT_STEP
            if not in_processes:
                return gym.vector.SyncVectorEnv(make_each, autoreset_mode=reset_mode)
            prepared = [_Prepared(prepare, freeze_after_episode_end(make)) for make in make_each]
            return gym.vector.AsyncVectorEnv(
                prepared, context="forkserver", shared_memory=True, autoreset_mode=reset_mode
            )

        options = {
            "obs_type": "pixels_agent_pos",
            "observation_height": image_size,
            "observation_width": image_size,
            "task_ids": [LIBERO_TASK],
        }
        self.env = create_libero_envs(LIBERO_SUITE, num_envs, options, env_cls=build)[LIBERO_SUITE][LIBERO_TASK]
        self.env.reset(seed=0)

    def run(self, seconds: float) -> tuple[int, float]:
        """See `Runner`. Its environments do not truncate, and random motions solve nothing, so none ends."""
        rng = np.random.default_rng(0)
        steps, spent = 0, 0.0
        while spent < seconds:
            actions = draw_actions(rng, self.env.num_envs, 1)[:, 0]
            start = time.perf_counter()
            self.env.step(actions)
            spent += time.perf_counter() - start
            steps += self.env.num_envs
        return steps, spent

    def close(self) -> None:
        """End its processes."""
        self.env.close()


class _Prepared:
    """Makes one environment after preparing the process that it will live in."""

    def __init__(self, prepare: Callable[[], None], make: Callable[[], Any]) -> None:
        self._prepare, self._make = prepare, make

    def __call__(self) -> Any:
        self._prepare()
        return self._make()


def prepare_libero() -> None:
    """Let the LIBERO library find its files, without a question."""
    import_library(None)


def run_bench(
    kinds: Sequence[str], num_envs: int, num_workers: int, chunk: int, seconds: float, image_size: int
) -> list[dict[str, Any]]:
    """Measure each kind of environment, rendered per step and per chunk; for libero also LeRobot's.

    Args:
        num_workers: 0 runs all environments in this process, else each kind gets this many. LeRobot's has
            a process per environment, so ours gets as many when it is compared.
        seconds: of stepping, for each line of the table.

    Returns:
        One row a line: environment, cameras, rendered ("each step" or "each N"), num_envs, num_workers,
        image_size, steps_per_second, and for libero's rows `ratio` to LeRobot's; or `skipped`, the reason.
    """
    rows = []
    for kind in kinds:
        try:
            rows += _bench_kind(kind, num_envs, num_workers, chunk, seconds, image_size)
        except (ImportError, RuntimeError) as error:  # a simulator that is not here costs only its own lines
            rows.append({"environment": kind, "skipped": str(error)})
    return rows


def _bench_kind(
    kind: str, num_envs: int, num_workers: int, chunk: int, seconds: float, image_size: int
) -> list[dict[str, Any]]:
    workers = num_envs if kind == "libero" and num_workers else num_workers
    values: dict[str, Any] = {"kind": kind, "image_size": image_size, "num_workers": workers}
    if kind == "robosuite":
        values["tasks"] = WITH_EXPERT
    if kind == "libero":
        prepare_libero()
        values |= {"suite": LIBERO_SUITE, "tasks": [str(LIBERO_TASK)]}
    if (
        workers == 0
    ):  # both may draw with all cores; in processes ours draw with one thread each, LeRobot's as Mesa likes
        os.environ.setdefault("LP_NUM_THREADS", str(os.cpu_count() or 1))
    closing: list[Any] = []
    runners: list[tuple[dict[str, Any], Runner]] = []
    try:
        for cameras in (["agentview"], ["agentview", "wrist"]):
            env = build_component("env", {**values, "cameras": cameras}).build(num_envs)
            closing.append(env)
            for length in (1, chunk):
                row = {"environment": kind, "cameras": len(cameras), "rendered": _rendered(length)}
                runners.append((row, OursRunner(env, length)))
        if kind == "libero":
            theirs = LeRobotRunner(num_envs, workers > 0, image_size, prepare_libero)
            closing.append(theirs)
            runners.append(({"environment": "libero by LeRobot", "cameras": 2, "rendered": _rendered(1)}, theirs))
        rates = measure([runner for _, runner in runners], seconds)
    finally:
        for each in closing:
            each.close()
    size = {"num_envs": num_envs, "num_workers": workers, "image_size": image_size}
    rows = [{**row, **size, "steps_per_second": rate} for (row, _), rate in zip(runners, rates, strict=True)]
    if kind == "libero":
        for row in rows:
            row["ratio"] = row["steps_per_second"] / rates[-1]
    return rows


def _rendered(length: int) -> str:
    return "each step" if length == 1 else f"each {length}"


def measure(runners: Sequence[Runner], seconds: float) -> list[float]:
    """Steps per second of each, measured in turns, so that a machine that slows down slows all alike."""
    steps, spent = np.zeros(len(runners)), np.zeros(len(runners))
    for runner in runners:
        runner.run(1e-9)  # one call: loads, compiles, draws for the first time
    for _ in range(NUM_TURNS):
        for i, runner in enumerate(runners):
            more_steps, more_spent = runner.run(seconds / NUM_TURNS)
            steps[i] += more_steps
            spent[i] += more_spent
    return (steps / spent).tolist()


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, with each simulator's set-up in words."""
    lines = [f"{'environment':<20}{'cameras':>8}  {'rendered':<10}{'steps/s':>9}  {'of LeRobot':>10}   set-up"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['environment']:<20}skipped: {row['skipped']}")
            continue
        ratio = f"{row['ratio']:.1f}x" if "ratio" in row else ""
        where = f"{row['num_workers']} processes" if row["num_workers"] else "this process"
        lines.append(
            f"{row['environment']:<20}{row['cameras']:>8}  {row['rendered']:<10}{row['steps_per_second']:>9.1f}"
            f"  {ratio:>10}   {row['num_envs']} environments in {where}, {row['image_size']} px"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of `vla-rl bench env`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="vla-rl bench env", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", default=list(KINDS), choices=[*KINDS, "sim.dummy:DummyConfig"], metavar="KIND"
    )
    parser.add_argument("--num-envs", type=int, default=2, help="environments stepped together (2)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes; 0: all in this one (0)")
    parser.add_argument("--chunk", type=int, default=8, help="steps per chunk (8)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of stepping for each line (6)")
    parser.add_argument("--image-size", type=int, default=256, help="pixels (256)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args(argv)
    for name in ("num_envs", "chunk", "seconds", "image_size"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    rows = run_bench(args.kinds, args.num_envs, args.num_workers, args.chunk, args.seconds, args.image_size)
    print(json.dumps(rows, indent=2) if args.json else format_table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
