"""An evaluation and a gate's checks in several processes, for `test_evaluated_together.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny_run import make_recipe

from sim.dummy import DummyConfig
from vla_rl.common.distributed.launched import launched_group
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.evaluation.gate import Gate, GateConfig
from vla_rl.policies.load import load_policy

ENV = DummyConfig(num_envs=3, tasks=("reach_red", "reach_blue"), horizon=8)
EVAL = EvalConfig(episodes_per_task=3, samples_per_state=2, videos=0)


def evaluated(policy: Path, world: ProcessGroup, config: EvalConfig = EVAL) -> dict[str, Any]:
    """The evaluation, and how many episodes each process ran."""
    mine: list[object] = []

    @contextmanager
    def progress(total: int, *, done: int = 0) -> Iterator[Callable[[object], None]]:
        yield mine.append

    loaded = load_policy(policy)
    world.distribute(loaded)
    with world.unsharded(loaded):
        result = evaluate(loaded, ENV, config, progress=progress, world=world)
    return {**result.model_dump(mode="json"), "shares": world.gather(len(mine))}


def gated(policy: Path, other: Path, folder: Path, world: ProcessGroup, temperature: float) -> dict[str, Any]:
    """The gate's check of a policy against another."""
    first, second = load_policy(policy), load_policy(other)
    for each in (first, second):
        world.distribute(each)
    gate = Gate(GateConfig(every=1, pairs=9), folder, first, world)
    with closing(ENV.build()) as env:
        options = {"imagined": 0.5, "temperature": temperature, "seed": 0, "checks_left": 1}
        check = gate.check(second, env, iteration=1, **options)
    assert len({str(found) for found in world.gather(gate.state())}) == 1, "all processes decide alike"
    return check.model_dump(mode="json")


def run(policy: Path, other: Path, output: Path) -> None:
    with launched_group(make_recipe(policy)) as world:
        for strategy in ("ddp", "fsdp"):
            group = replace(world, strategy=strategy)
            found = {
                "evaluation": evaluated(policy, group),
                "greedy_gate": gated(policy, other, output / f"{strategy}-greedy", group, 0.0),
                "gate": gated(policy, other, output / f"{strategy}-sampled", group, 1.0),
            }
            if world.is_main:
                (output / f"{strategy}.json").write_text(json.dumps(found))
