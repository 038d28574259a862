"""Plan runs and make them: is the time of an iteration that `vla-rl plan` simulates the one that it takes?

    PYTHONPATH=. python scripts/validate_plan.py                   # all cases, about ten minutes
    PYTHONPATH=. python scripts/validate_plan.py --case halves

The dummy environment and a small policy sleep as long as larger ones compute, so that the shape of a run is that of a
large machine's, and two cores are enough for four processes. Costs are measured once, as `vla-rl plan` measures them;
each case is then planned from them and run by `vla-rl train`. The first iteration, which warms up, is left out. The
last column, length, is planned / made decisions: a plan draws the episodes' lengths from the few that it measured.
Cases with Ray need the extra `ray`, and run on three nodes of it on this machine.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "docs" / "examples")]

from my_policy import Bins, BinsConfig  # noqa: E402

from sim.dummy import DummyConfig, DummyEnv  # noqa: E402
from vla_rl.config import apply_overrides, dump_yaml, validate  # noqa: E402
from vla_rl.recipe.recipe import Recipe  # noqa: E402
from vla_rl.workflows.plan.command import gather  # noqa: E402
from vla_rl.workflows.plan.plan import work_of  # noqa: E402
from vla_rl.workflows.plan.simulate import Placement, play  # noqa: E402

STEP_SECONDS, RESET_SECONDS = 0.03, 0.1  # Of a control step, on average; some take five times as long.
ACT, FORWARD = (0.1, 0.02), (0.05, 0.015)  # Seconds of a batch, and of each decision in it.

RECIPE: dict[str, Any] = {
    "name": "sleeping",
    "num_threads": 1,
    "env": {"kind": "validate_plan:SleepingEnvConfig", "num_envs": 8, "tasks": ["reach_red"], "horizon": 20},
    "policy": {"kind": "validate_plan:SleepingPolicyConfig"},
    "algo": {"kind": "grpo", "lr": 1e-6, "minibatch_size": 32, "micro_batch_size": 16, "filter_groups": False,
             "skip_zero_advantage": False},
    "train": {"iterations": 4, "groups": 4, "group_size": 4, "evaluate": "never", "allow_no_success": True,
              "save_every": 100},
    "log": {"tensorboard": False, "console": False},
}  # fmt: skip
RAY = ("rollout.kind=ray", "rollout.staleness=1", "train.iterations=7")
# Name -> processes that train, and the recipe's options.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "no workers": (1, ()),
    "1 worker": (1, ("env.num_workers=1",)),
    "2 workers": (1, ("env.num_workers=2",)),
    "4 workers": (1, ("env.num_workers=4",)),
    "halves": (1, ("env.num_workers=4", "env.in_halves=true")),
    "2 epochs, 4 environments": (1, ("env.num_workers=4", "env.num_envs=4", "algo.epochs=2")),
    "torchrun, 2 processes": (2, ("env.num_workers=2", "env.num_envs=4")),
    "ray, 8 hosts, staleness 1": (1, (*RAY, "rollout.hosts=8")),
    "ray, 4 hosts, staleness 1": (1, (*RAY, "rollout.hosts=4")),
}


class SleepingEnvConfig(DummyConfig):
    kind: Literal["validate_plan:SleepingEnvConfig"] = "validate_plan:SleepingEnvConfig"

    def make(self, record_frames: bool = False) -> DummyEnv:
        return SleepingEnv(self, record_frames)


class SleepingEnv(DummyEnv):
    """The dummy, whose steps take as long as a simulator's, now and then five times as long."""

    def reset(self, spec: Any) -> Any:
        time.sleep(RESET_SECONDS)
        self._rng = np.random.default_rng(spec.index)
        return super().reset(spec)

    def apply(self, action: np.ndarray) -> bool:
        time.sleep(STEP_SECONDS * (5.0 if self._rng.random() < 0.05 else 0.79))
        return super().apply(action)


class SleepingPolicyConfig(BinsConfig):
    kind: str = "validate_plan:SleepingPolicyConfig"

    def build(self, env_spec: Any, device: Any = "cpu", seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return SleepingPolicy(env_spec.state_dim, env_spec.action_dim)


class SleepingPolicy(Bins):
    """A small policy that takes its time; the backward pass twice as long as the forward one."""

    def act(self, obs: Any, generator: Any = None, temperature: float = 1.0) -> Any:
        time.sleep(ACT[0] + ACT[1] * obs.batch_size)
        return super().act(obs, generator, temperature)

    def evaluate(self, obs: Any, chunk: Any, temperature: float = 1.0) -> Any:
        time.sleep((3 if torch.is_grad_enabled() else 1) * (FORWARD[0] + FORWARD[1] * obs.batch_size))
        return super().evaluate(obs, chunk, temperature)


def recipe_of(overrides: tuple[str, ...]) -> Recipe:
    return validate(Recipe, apply_overrides(RECIPE, overrides))


def planned(costs: Any, recipe: Any, processes: int) -> list[float]:
    """Seconds of an iteration, of its rollout and of learning, simulated; and its decisions."""
    env, rollout = recipe.env, recipe.rollout
    placement = Placement("halves" if env.in_halves else "synchronous", processes, env.num_envs, env.num_workers)
    if rollout.kind == "ray":
        placement = Placement("asynchronous", 2, env.num_envs, rollout.hosts, 1, rollout.staleness)
    played = [play(costs, work_of(recipe), placement, seed) for seed in range(10)]
    seconds = np.mean([(p.seconds, p.rollout, p.learning) for p in played], axis=0).tolist()
    return [*seconds, float(np.mean(costs.chunks)) * work_of(recipe).episodes]


@contextlib.contextmanager
def three_raylets() -> Iterator[str]:
    """The address of a Ray of three nodes, all of them on this machine."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "200")  # A busy machine starts one slowly.
    cluster = Cluster()
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=4, object_store_memory=80 * 2**20)
        yield cluster.address
    finally:
        cluster.shutdown()


def made(recipe: Any, processes: int) -> list[Any]:
    """The same of each iteration but the first, run; of several processes the first's; of Ray's but the first three."""
    if recipe.rollout.kind == "ray" and recipe.rollout.address is None:
        with three_raylets() as address:
            values = recipe.rollout.model_copy(update={"address": address})
            return made(recipe.model_copy(update={"rollout": values}), processes)[2:]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(dump_yaml(recipe))
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), "-m", "vla_rl", "train", str(file)]
        paths = os.pathsep.join([str(ROOT), *sys.path[-2:], os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [*command, "--output", f"{folder}/run"],
            check=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    stages = (("time/total",), ("time/simulation", "time/inference"), ("time/forward_backward", "time/optimizer"))
    found = (*stages, ("advantage/decisions",))
    return [[sum(row[name] for name in names) for names in found] for row in rows if "time/total" in row][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="one case alone")
    parser.add_argument("--output", type=Path, help="where to write all figures as JSON")
    chosen = parser.parse_args()
    costs = gather(recipe_of(()), (), roofline=False, seconds=30.0, say=lambda text: print(text, flush=True))
    found = {}
    print(f"{'case':<28}{'planned, s':>12}{'measured, s':>12}{'planned / measured':>20}    rollout, learning, length")
    for name in [chosen.case] if chosen.case else CASES:
        processes, overrides = CASES[name]
        recipe = recipe_of(overrides)
        plan, rows = planned(costs, recipe, processes), made(recipe, processes)
        found[name] = {"planned": plan, "measured": rows}
        mean = np.mean(rows, axis=0)
        ratio, *of_parts = np.array(plan) / mean
        # Rollouts apart from training are no stage of the trainer's.
        parts = ", ".join("-" if took < 0.1 else f"{part:.2f}" for part, took in zip(of_parts, mean[1:], strict=True))
        print(f"{name:<28}{plan[0]:>12.2f}{mean[0]:>12.2f}{ratio:>20.3f}    {parts}", flush=True)
        if chosen.output:
            chosen.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
