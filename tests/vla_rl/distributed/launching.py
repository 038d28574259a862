"""Several processes of a script or module, for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIME_LIMIT = 900
_TESTS = Path(__file__).resolve().parents[1]


def launch(*arguments: str, module: bool = False, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script (or a module) in several processes; after the time limit the launcher is asked to end them."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join(
        str(path)
        for path in (_TESTS.parent.parent, _TESTS, *(_TESTS / f for f in ("training", "distributed")), *sys.path)
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
