"""Measures the scripted experts: `python -m sim.libero.measure --suite libero_spatial --states 10`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sim.libero.config import LiberoConfig
from vla_rl.config import validate
from vla_rl.types import EpisodeSpec, Split

if TYPE_CHECKING:
    from sim.libero.env import LiberoEnv


@dataclass(frozen=True)
class ExpertResult:
    """One task: successes among `num_states` initial states, and the steps of each success."""

    task: str
    num_states: int
    failed: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def num_success(self) -> int:
        return len(self.steps)


def measure_experts(
    suite: str,
    num_states: int,
    tasks: Sequence[str] = (),
    split: Split = "eval",
    noise: float = 0.0,
    assets_path: Path | None = None,
) -> list[ExpertResult]:
    """Run the expert from the first `num_states` initial states of each task; prints a line a task and the total.

    Args:
        noise: standard deviation of Gaussian noise added to the six motion components.
    """
    values = {"suite": suite, "tasks": tuple(tasks), "assets_path": assets_path, "image_size": 8}
    env = validate(LiberoConfig, values, prefix="env").make()
    results = []
    for task in env.spec.tasks:
        rng = np.random.default_rng(0)
        steps: list[int] = []
        failed: list[int] = []
        for index in range(num_states):
            taken = _run_expert(env, EpisodeSpec(task, split, index), noise, rng)
            if taken is None:
                failed.append(index)
            else:
                steps.append(taken)
        result = ExpertResult(task, num_states, tuple(failed), tuple(steps))
        results.append(result)
        print(
            _line(task, result.num_success, num_states, steps) + (f"  failed: {failed}" if failed else ""), flush=True
        )
    all_steps = [count for result in results for count in result.steps]
    print(_line(f"{suite}, {split}, noise {noise:g}", len(all_steps), num_states * len(results), all_steps), flush=True)
    return results


def _line(name: str, num_success: int, total: int, steps: Sequence[int]) -> str:
    mean = f"{np.mean(steps):.0f} steps" if steps else "-"
    return f"{num_success:4d} of {total:4d} ({num_success / total:6.1%})  {mean:>9s}  {name}"


def _run_expert(env: LiberoEnv, spec: EpisodeSpec, noise: float, rng: np.random.Generator) -> int | None:
    """Steps until success, None at the horizon. Renders nothing after the reset."""
    env.reset(spec)
    for step in range(env.horizon):
        action = env.expert_action()
        action[:6] += noise * rng.standard_normal(6)
        if env.apply(np.clip(action, -1, 1)):
            return step + 1
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--states", type=int, default=10, help="initial states a task")
    parser.add_argument("--tasks", nargs="*", default=[], help="names or numbers; all if none")
    parser.add_argument("--split", default="eval", choices=("train", "validation", "eval"))
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of action noise")
    parser.add_argument("--assets", type=Path, default=None, help="LIBERO's assets; else $LIBERO_ASSETS")
    args = parser.parse_args()
    measure_experts(args.suite, args.states, args.tasks, args.split, args.noise, args.assets)


if __name__ == "__main__":
    main()
