"""Two iterations' rollouts in imagination, for `test_imagined_together.py`: alone, or as one of several processes.

torchrun --nproc-per-node 2 tests/vla_rl/common/distributed/imagined_together.py OUTPUT
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from tiny_run import make_recipe

from vla_rl.common.distributed.launched import launched_group
from vla_rl.common.distributed.process_group import ALONE, num_launched
from vla_rl.training.run import TrainingRun

# As good as greedy, so that actions do not depend on the batch; states come again, in other groups.
OPTIONS = (
    "env={kind: world_model, path: pretrained:tabletop, tasks: [stack], first_frames: {kind: tabletop}, num_envs: 3, "
    "device: cpu, trust: {ignore: true}, imagination: {dual_noise: 1, horizon: 16, precision: fp32}}",
    "sampling={train_states: 2}",
    "train.groups=3",
    "train.group_size=2",
    "train.temperature=1e-6",
    "train.allow_no_success=true",
)


def roll_out(folder: Path) -> None:
    """Write what each episode went through to `folder`, a file for each iteration and group of this process."""
    recipe = make_recipe(Path("pretrained:tabletop_base"), *OPTIONS)
    with launched_group(recipe) if num_launched() > 1 else nullcontext(ALONE) as world:
        rank = world.rank
        (folder / f"run{rank}").mkdir()
        run = TrainingRun(recipe, folder / f"run{rank}", resume=False)
        for iteration in range(2):
            episodes = run.roll_out()
            for group_number in sorted({e.group for e in episodes}):
                own = [e for e in episodes if e.group == group_number]
                names = [f"{e.spec.task} {e.spec.index}" for e in own]
                states = [np.concatenate([e.obs.state, e.final_obs.state]).tolist() for e in own]
                (folder / f"{iteration}_{group_number}.json").write_text(json.dumps([names, states]))
            run.iteration += 1
        state = run.env.state()  # type: ignore[attr-defined]
        (folder / f"begun{rank}.txt").write_text(str(sorted(state.items())))
        run.env.close()


if __name__ == "__main__":
    roll_out(Path(sys.argv[1]))
