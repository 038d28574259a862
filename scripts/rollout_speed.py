"""What a rollout and its update cost beside simulator and network, with and without what saves it, in one run.

    python scripts/rollout_speed.py bookkeeping --before REVISION
    python scripts/rollout_speed.py images
    python scripts/rollout_speed.py halves --turns 3

bookkeeping: both revisions of `vla_rl/rollout/runner.py` collect the same episodes of the dummy environment by turns;
what the environment and the policy take is left out.

images: an image of 256 pixels through the published chain to 224, and found again; and `update()` of the tiny OpenVLA
network behind that chain, with the rollout's images kept and not, on the same episodes: its weights are compared.

halves: a group of four short episodes of LIBERO, in lockstep and in halves by turns, by the clock: four environments in
two processes and the small OpenVLA network, sampled as in GRPO and greedy as in an evaluation.

Printed: medians over the turns; but for halves of the processor's time, which other processes disturb less than they
do the clock.
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


def compare_bookkeeping(options: argparse.Namespace) -> None:
    """Print processor time a decision before and after."""
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


def compare_images(options: argparse.Namespace) -> None:
    """Print processor time of an update with and without kept images."""
    import torch

    from vla_rl.algorithms.grpo import GRPOConfig
    from vla_rl.policies.openvla.config import OpenVLAConfig
    from vla_rl.policies.openvla.inputs import ChainedImages
    from vla_rl.policies.openvla.options import OPENVLA_CHAIN

    images = np.random.default_rng(0).integers(0, 256, (100, options.pixels, options.pixels, 3), dtype=np.uint8)
    chained, taken = ChainedImages(64), []
    for _ in range(2):
        start = time.process_time()
        chained.apply(images, OPENVLA_CHAIN, 224)
        taken.append(1e3 * (time.process_time() - start) / len(images))
    print(f"an image to 224 pixels: {taken[0]:.2f} ms; found again: {taken[1]:.2f} ms; ratio {taken[1] / taken[0]:.3f}")
    env = DummyConfig(tasks=("reach_red",), image_size=options.pixels, horizon=16, num_envs=options.num_envs).build()
    spent: dict[int, list[float]] = {0: [], 2048: []}
    weights: dict[int, Any] = {}
    for turn in range(options.turns):
        for mib in list(spent)[:: 1 if turn % 2 else -1]:
            config = OpenVLAConfig(precision="fp32", images=OPENVLA_CHAIN, kept_images=mib)
            policy = config.build(env.spec)
            policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
            learner = GRPOConfig(lr=1e-4).build(policy, temperature=1.0)
            seconds = 0.0
            for iteration in range(2):  # The second is measured, as all later ones are.
                specs = [EpisodeSpec("reach_red", "train", iteration)] * 8
                episodes = runner.collect(policy, env, specs, seed=iteration, groups=[0] * 8)
                for number, episode in enumerate(episodes):  # Outcomes are made up, so that the group has both.
                    episode.success = number % 2 == 0
                    episode.reward[-1, 0] = float(episode.success)
                start = time.process_time()
                learner.update(learner.prepare(episodes))
                seconds = time.process_time() - start
            spent[mib].append(seconds)
            weights[mib] = policy.state_dict()
    assert all(torch.equal(weight, weights[2048][name]) for name, weight in weights[0].items()), "equal to the bit"
    without, kept = (statistics.median(spent[mib]) for mib in spent)
    ratios = [a / b for a, b in zip(spent[2048], spent[0], strict=True)]
    print(
        f"update() without {1e3 * without:.0f} ms, kept {1e3 * kept:.0f} ms; ratio {kept / without:.2f}, "
        f"by turn {min(ratios):.2f} to {max(ratios):.2f}; weights equal to the bit"
    )


def compare_halves(options: argparse.Namespace) -> None:
    """Print the seconds of LIBERO rollouts in lockstep and in halves."""
    from sim.libero.config import LiberoConfig
    from vla_rl.policies.openvla.config import OpenVLAConfig

    libero = LiberoConfig(tasks=("0",), image_size=128, num_envs=4, num_workers=2, horizon=4 * CHUNK)
    task = libero.task_names()[0]
    policy = OpenVLAConfig(preset="small", precision="fp32").build(libero.env_spec())
    policy.set_norm_stats({"q01": [-1] * 7, "q99": [1] * 7}, {"q01": [-1] * 8, "q99": [1] * 8})
    envs = {on: libero.model_copy(update={"in_halves": on}).build() for on in (False, True)}
    for name, split, temperature in (("GRPO", "train", 1.0), ("evaluation", "eval", 0.0)):
        specs = [EpisodeSpec(task, split, 0)] * 4
        spent: dict[bool, list[float]] = {on: [] for on in envs}
        for turn in range(options.turns + 1):  # The first, which loads scenes, is not counted.
            for on in list(envs)[:: 1 if turn % 2 else -1]:
                start = time.perf_counter()
                runner.collect(policy, envs[on], specs, temperature=temperature, seed=turn)
                if turn:
                    spent[on].append(time.perf_counter() - start)
        lockstep, halves = (statistics.median(spent[on]) for on in envs)
        ratios = [a / b for a, b in zip(spent[True], spent[False], strict=True)]
        print(
            f"{name}: lockstep {lockstep:.1f} s, in halves {halves:.1f} s; ratio {statistics.median(ratios):.2f}, "
            f"by turn {min(ratios):.2f} to {max(ratios):.2f}"
        )
    for env in envs.values():
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("bookkeeping", "images", "halves"))
    parser.add_argument("--before", default="HEAD~1", help="bookkeeping: a revision of git")
    parser.add_argument("--pixels", type=int, default=256, help="height and width of the cameras' images")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    {"bookkeeping": compare_bookkeeping, "images": compare_images, "halves": compare_halves}[options.part](options)


if __name__ == "__main__":
    main()
