"""What a simulator in a Python of its own costs: control steps per second in our processes, and behind `sim.remote`.

    python scripts/remote_speed.py --num-envs 8 --image-size 128 --python PYTHON3.10 --seconds 40

Both take turns in one process, with the same number of environments and pixels, and the same actions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from sim.bench import OursRunner
from sim.remote import RemoteConfig
from vla_rl.config import build_component

NUM_PAIRED_TURNS, NUM_RESAMPLES = 60, 2000


def compare_remote(
    kind: str, python: str, num_envs: int, num_workers: int, chunk: int, seconds: float, image_size: int
) -> dict[str, Any]:
    """Control steps per second in our processes and behind the hosts of `sim.remote`, and their ratio.

    Args:
        kind: one of ours, such as "tabletop". python: the hosts' interpreter; "" for this one.
        num_workers: 0 compares this process with one host, else as many workers with as many hosts.
        seconds: of stepping for each of both.

    Returns:
        environment, num_envs, num_workers, image_size, chunk, here and there (steps per second, medians over turns),
        ratio: median over pairs of turns of there / here, which other work on the machine disturbs least; low and high:
        its 95 % interval, from resampling the pairs.
    """
    local = build_component("env", {"kind": kind, "image_size": image_size, "num_workers": num_workers})
    target = f"{type(local).__module__}:{type(local).__qualname__}"
    remote = RemoteConfig(
        env=target, kwargs=local.model_dump(mode="json"), python=python, num_hosts=max(1, num_workers)
    )
    here, there = local.build(num_envs), remote.build(num_envs)
    try:
        runners = [OursRunner(here, chunk), OursRunner(there, chunk)]
        for runner in runners:
            runner.run(1e-9)  # loads, draws for the first time
        counts = np.zeros((NUM_PAIRED_TURNS, 2, 2))  # turn, here or there, steps and seconds
        for turn in range(NUM_PAIRED_TURNS):
            for side in (turn % 2, 1 - turn % 2):
                counts[turn, side] = runners[side].run(seconds / NUM_PAIRED_TURNS)
    finally:
        here.close()
        there.close()
    turns = counts[..., 0] / counts[..., 1]
    ratios = turns[:, 1] / turns[:, 0]
    draws = np.random.default_rng(0).integers(NUM_PAIRED_TURNS, size=(NUM_RESAMPLES, NUM_PAIRED_TURNS))
    low, high = np.quantile(np.median(ratios[draws], 1), (0.025, 0.975))
    rates = np.median(turns, 0)
    return {
        "environment": kind,
        "num_envs": num_envs,
        "num_workers": num_workers,
        "image_size": image_size,
        "chunk": chunk,
        "here": float(rates[0]),
        "there": float(rates[1]),
        "ratio": float(np.median(ratios)),
        "low": float(low),
        "high": float(high),
    }


def describe_remote(row: dict[str, Any]) -> str:
    """A row of `compare_remote` as a sentence."""
    where = f"{row['num_workers']} processes" if row["num_workers"] else "this process"
    return (
        f"{row['environment']}, {row['num_envs']} environments, {row['image_size']} px, {row['chunk']} a chunk: "
        f"{row['here']:.1f} steps/s in {where}, {row['there']:.1f} behind as many hosts: "
        f"{row['ratio']:.1%} [{row['low']:.1%}, {row['high']:.1%}]"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["tabletop"], metavar="KIND", help="environments (tabletop)")
    parser.add_argument("--python", default="", help="the hosts' interpreter; this one if not given")
    parser.add_argument("--num-envs", type=int, default=2, help="environments stepped together (2)")
    parser.add_argument("--num-workers", type=int, default=0, help="processes; 0: this one against one host (0)")
    parser.add_argument("--chunk", type=int, default=8, help="steps per chunk (8)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of stepping for each side (6)")
    parser.add_argument("--image-size", type=int, default=256, help="pixels (256)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of sentences")
    args = parser.parse_args(argv)
    sizes = (args.num_envs, args.num_workers, args.chunk, args.seconds, args.image_size)
    compared = [compare_remote(kind, args.python, *sizes) for kind in args.kinds]
    print(json.dumps(compared, indent=2) if args.json else "\n".join(map(describe_remote, compared)))


if __name__ == "__main__":
    main()
