"""Processes of which the second hangs in one of several ways, for `test_process_watch.py`.

torchrun --nproc-per-node 2 tests/vla_rl/common/distributed/hung_process.py POLICY WAY LIMIT_SECONDS
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_run import make_recipe

from vla_rl.common.distributed.launched import launched_group
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.progress import Stopwatch


def hang_for_good() -> None:
    time.sleep(600)


def hang(way: str, world: ProcessGroup, limit: float) -> None:
    """What every process does; the second one does not get through it, unless the way is one that is allowed."""
    second = not world.is_main
    if way == "work":  # Longer than the limit, but with signs of getting on.
        for _ in range(6 if second else 0):
            with Stopwatch().measure("simulation"):
                time.sleep(limit / 4)
    elif way == "main_first":
        with world.main_first():
            if world.is_main:
                time.sleep(1.5 * limit)
    elif way == "sleep" and second:
        hang_for_good()
    elif way == "stop" and second:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif way == "stop_in_exchange":
        if second:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.ones(1))
    assert world.gather(world.rank) == [0, 1]


def main(policy: str, ways: str, limit: float) -> None:
    with launched_group(make_recipe(Path(policy), f"hang_minutes={limit / 60}")) as world:
        for way in ways.split(","):
            hang(way, world, limit)
            if world.is_main:
                print(f"{way}: all came", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
