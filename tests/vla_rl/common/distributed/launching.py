"""Several processes of a script or module, for the tests of this folder."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from accelerate.state import AcceleratorState

TIME_LIMIT = 900
_TESTS = Path(__file__).resolve().parents[2]


def launch(*arguments: str, module: bool = False, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script (or a module) in several processes; after the time limit the launcher is asked to end them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join(
        str(path)
        for path in (_TESTS.parent.parent, _TESTS, *(_TESTS / f for f in ("training", "common/distributed")), *sys.path)
    )
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, *(["-m"] if module else []), *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # A killed launcher would leave its processes behind.
            raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)


def fork(work: Callable[[], None], processes: int = 2) -> None:
    """Do the work in several processes that know one another as `launch`'s do, without importing everything anew.

    A forked process must not differentiate if this one has: torch's threads do not come along.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def work_as(rank: int) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # This process may have found itself alone before.
        os.environ.update(launched, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        work()

    context = multiprocessing.get_context("fork")
    forked = [context.Process(target=work_as, args=(rank,)) for rank in range(processes)]
    for process in forked:
        process.start()
    for process in forked:
        process.join(TIME_LIMIT)
        process.kill()
    assert [process.exitcode for process in forked] == [0] * processes, "see what they wrote to standard error"
