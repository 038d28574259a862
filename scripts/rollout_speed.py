"""What a rollout costs beside the simulator and the policy, against an earlier revision, in one run.

    python scripts/rollout_speed.py --before REVISION

Both revisions of `vla_rl/rollout/runner.py` collect the same episodes of the dummy environment by turns; what the
environment and the policy take is left out. Printed: the median over the turns of the processor's microseconds a
decision, which other processes disturb less than they disturb the clock.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sim.dummy import DummyConfig
from vla_rl.rollout import runner
from vla_rl.types import ActionChunk, EpisodeSpec

CHUNK, DECISIONS = 8, 24  # Steps of a chunk; chunks of an episode, which a policy that rests never ends.


class Idle:
    """A policy that rests, and the time that its methods and the environment's took."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def modules(self) -> list[Any]:
        return []

    def act(self, obs: Any, *_: Any) -> ActionChunk:
        shape = (obs.batch_size, CHUNK, 7)
        return ActionChunk(np.zeros(shape, np.float32), np.zeros(shape, np.int64), None, np.zeros(shape, np.float32))

    def timed(self, method: Any) -> Any:
        """The method, whose time is counted."""

        def call(*arguments: Any) -> Any:
            start = time.process_time()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.process_time() - start

        return call


def load(revision: str) -> ModuleType:
    """The runner of another revision."""
    code = subprocess.run(
        ["git", "show", f"{revision}:vla_rl/rollout/runner.py"], capture_output=True, text=True, check=True
    ).stdout
    path = Path(tempfile.mkdtemp()) / "runner_before.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("runner_before", path)
    assert spec is not None and spec.loader is not None, "a Python file has a loader"
    module = sys.modules["runner_before"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bookkeeping(module: ModuleType, env: Any, num_episodes: int) -> tuple[float, Any]:
    """Seconds a decision beside the environment and the policy; and the episodes, to be held as a learner does."""
    policy = Idle()
    reset, step, act = env.reset, env.step, policy.act
    env.reset, env.step, policy.act = policy.timed(reset), policy.timed(step), policy.timed(act)  # type: ignore[method-assign]
    start = time.process_time()
    episodes = module.collect(policy, env, [EpisodeSpec("reach_red", "train", i) for i in range(num_episodes)])
    seconds = time.process_time() - start - policy.seconds
    env.reset, env.step = reset, step
    return seconds / sum(episode.num_chunks for episode in episodes), episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="a revision of git, such as HEAD~1")
    parser.add_argument("--pixels", type=int, default=256, help="height and width of the two cameras' images")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    config = DummyConfig(
        tasks=("reach_red",),
        cameras=("agentview", "wrist"),
        image_size=options.pixels,
        horizon=CHUNK * DECISIONS,
        num_envs=options.num_envs,
    )
    env, modules = config.build(), {"before": load(options.before), "after": runner}
    spent: dict[str, list[float]] = {name: [] for name in modules}
    held: dict[str, Any] = {}
    for turn in range(options.turns + 1):  # The first, which imports and fills memory, is not counted.
        for name in list(modules)[:: 1 if turn % 2 else -1]:
            seconds, held[name] = bookkeeping(modules[name], env, 2 * options.num_envs)
            if turn:
                spent[name].append(1e6 * seconds)
    before, after = (statistics.median(spent[name]) for name in modules)
    ratios = [a / b for a, b in zip(spent["after"], spent["before"], strict=True)]
    print(
        f"before {before:.0f} us a decision, after {after:.0f}; ratio {after / before:.2f}, "
        f"by turn {min(ratios):.2f} to {max(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
