"""Self-test of RoboTwin on this machine: seeds, steps, success, memory.

    python -m sim.robotwin.check tasks=[stack_blocks_two] setting=demo_clean

Arguments are options of the environment (`sim.robotwin.RoboTwinConfig`), as in a recipe's env section.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sim.remote.env import RemoteVecEnv
from sim.robotwin.config import RoboTwinConfig
from vla_rl.config import apply_overrides, validate
from vla_rl.types import EpisodeSpec

CHUNK = 8


def memory_mb(pid: int) -> float:
    """Resident memory of a process, MB."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1000


def check_resets(env: RemoteVecEnv, task: str, num_seeds: int) -> None:
    """Reset over seeds, the first of them twice, and print what was found."""
    starts = []
    begin = time.monotonic()
    for index in range(num_seeds):
        starts.append(env.reset([EpisodeSpec(task, "eval", index)], [0]))
        assert all(np.ptp(image) > 0 for image in starts[-1].images.values()), f"eval {index} shows one flat color"
    seconds = (time.monotonic() - begin) / num_seeds
    again = env.reset([EpisodeSpec(task, "eval", 0)], [0])
    same = all(np.array_equal(again.images[name], starts[0].images[name]) for name in again.images)
    distinct = len({start.images[next(iter(start.images))].tobytes() for start in starts})
    print(
        f"{task}: {num_seeds} resets, {distinct} different first images, {seconds:.2f} s each, "
        f"{memory_mb(env.worker_pids[0]):.0f} MB; the first one again is the same: {'yes' if same else 'NO'}"
    )
    print(f"  e.g. {starts[0].instruction[0]!r}")


def check_steps(env: RemoteVecEnv, task: str, num_chunks: int) -> None:
    """Small random motions, chunk by chunk, with the memory along the way."""
    rng = np.random.default_rng(0)
    index, memory, steps, spent = 0, [], 0, 0.0
    obs = env.reset([EpisodeSpec(task, "train", index)], [0])
    for chunk in range(num_chunks):
        noise = rng.normal(0, 0.03, (1, CHUNK, env.spec.action_dim)).astype(np.float32)
        begin = time.monotonic()
        result = env.step(obs.state[:, None, : env.spec.action_dim] + noise, [0])
        spent += time.monotonic() - begin
        steps += int(result.num_steps[0])
        assert not result.lost[0], "an episode was lost; see the warning above"
        obs = result.obs
        if result.done[0]:
            index += 1
            obs = env.reset([EpisodeSpec(task, "train", index)], [0])
        if chunk % max(1, num_chunks // 5) == 0:
            memory.append(f"{memory_mb(env.worker_pids[0]):.0f}")
    memory.append(f"{memory_mb(env.worker_pids[0]):.0f}")
    print(f"{task}: {num_chunks} chunks, {steps} steps, {1000 * spent / steps:.0f} ms a step, MB {', '.join(memory)}")


def check_success(env: RemoteVecEnv, task: str, num_episodes: int) -> None:
    """Episodes under RoboTwin's own expert, whose joint targets are played back as actions."""
    successes, lengths = 0, []
    for index in range(num_episodes):
        env.reset([EpisodeSpec(task, "train", index)], [0])
        result, length = None, 0
        while result is None or not result.done[0]:
            result = env.step(env.expert_action([0])[:, None], [0])
            length += int(result.num_steps[0])
        successes += bool(result.success[0])
        lengths.append(length)
    print(f"{task}: check_success in {successes} of {num_episodes} episodes of the expert, lengths {lengths}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sim.robotwin.check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("options", nargs="*", metavar="key=value", help="options of the environment")
    parser.add_argument("--seeds", type=int, default=20, help="resets (20)")
    parser.add_argument("--chunks", type=int, default=200, help="chunks of 8 steps (200)")
    parser.add_argument("--episodes", type=int, default=3, help="of the expert, which needs the planner (3)")
    args = parser.parse_args(argv)
    config = validate(RoboTwinConfig, apply_overrides({"kind": "robotwin"}, args.options), prefix="env")
    begin = time.monotonic()
    env = config.build(1)
    try:
        print(
            f"started in {time.monotonic() - begin:.0f} s: {len(env.spec.tasks)} tasks, actions {env.spec.action_dim}-D"
        )
        for task in env.spec.tasks:
            if args.seeds:
                check_resets(env, task, args.seeds)
            if args.chunks:
                check_steps(env, task, args.chunks)
            if args.episodes:
                check_success(env, task, args.episodes)
    finally:
        env.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
