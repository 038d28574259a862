"""`vla-rl train` in a process that, after so many iterations, is killed in the middle of the next rollout.

The arguments: recipe, folder, the iteration (0: it is not killed). Writes what each iteration learned from into
learned.jsonl in the run's folder; of several processes each into a file of its own, and the first one is killed. The
recipe's environment is a `faulty_env:FaultyConfig`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from faulty_env import plant

import vla_rl.training.run
from vla_rl.cli.app import app
from vla_rl.common.run_folder import RunFolder
from vla_rl.types import Episode

TrainingRun = vla_rl.training.run.TrainingRun
RECIPE, FOLDER, KILL_AFTER = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


class NotedRun(TrainingRun):
    """Notes what was learned from; plants its own end."""

    def finish_iteration(self, episodes: Sequence[Episode], metrics: dict[str, float]) -> None:
        super().finish_iteration(episodes, metrics)
        row = {"iteration": self.iteration, "episodes": [(e.group, e.spec.index) for e in episodes]}
        name = "learned.jsonl" if self.world.is_main else f"learned-{self.world.rank}.jsonl"
        with (FOLDER / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.iteration == KILL_AFTER and self.world.is_main:
            plant(Path(self.recipe.env.folder), pid=os.getpid(), signal=signal.SIGKILL)  # type: ignore[attr-defined]


vla_rl.training.run.TrainingRun = NotedRun  # type: ignore[misc]
app(["train", RECIPE, "--output", str(FOLDER), *(["--resume"] if RunFolder(FOLDER).exists else [])])
