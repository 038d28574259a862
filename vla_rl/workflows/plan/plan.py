"""Plan of a run: possible placements, the throughput of each, and the bottleneck."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.tables import print_table
from vla_rl.evaluation.report import page_template
from vla_rl.evaluation.report.charts import STAGE_COLORS, Line, line_chart
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.training.memory import estimate_apart, size_text
from vla_rl.workflows.plan.costs import Costs
from vla_rl.workflows.plan.simulate import Mode, Outcome, Placement, Work, learning_seconds, play

MODES: tuple[Mode, ...] = ("synchronous", "asynchronous")
COLUMNS = (
    "placement", "episodes/s", "iteration, s", "rollout, s", "learning, s", "GPUs busy", "environments busy",
    "waits for",
)  # fmt: skip
NOT_IN_IT = (
    "Not in it: the network but for gradients and weights, several processes' contention for memory, lost episodes, "
    "validations and checkpoints."
)


@dataclass(frozen=True)
class Machines:
    """Machines to place a run on.

    Attributes:
        gpus: in all. envs, workers: per GPU that rolls out. staleness: of asynchronous runs.
        bandwidth: GB/s between GPUs, for gradients and weights.
    """

    gpus: int
    envs: int
    workers: int
    staleness: int = 1
    bandwidth: float = 25.0


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        outcomes: of the placements on all GPUs, the fastest first.
        by_gpus, by_envs, by_policy: the same modes with other numbers: (number, outcome).
        memory: what a GPU of the best placement must hold, for people.
    """

    costs: Costs
    work: Work
    machines: Machines
    outcomes: list[Outcome]
    by_gpus: list[tuple[float, Outcome]]
    by_envs: list[tuple[float, Outcome]]
    by_policy: list[tuple[float, Outcome]]
    memory: str = ""

    @property
    def best(self) -> Outcome:
        return self.outcomes[0]

    def save(self, file: Path) -> None:
        """Write all of it as JSON."""
        write_text_atomic(file, json.dumps(asdict(self), indent=1) + "\n")


def work_of(recipe: TrainRecipe) -> Work:
    """What an iteration of the recipe is."""
    algo, train = recipe.algo, recipe.train
    assert algo is not None, "a recipe that trains by RL"
    return Work(
        groups=train.groups,
        group_size=algo.rollouts_per_group(train.group_size),
        minibatch_size=algo.minibatch_size,
        micro_batch_size=algo.micro_batch_size,
        epochs=algo.epochs,
    )


def make_plan(costs: Costs, work: Work, machines: Machines, seed: int = 0) -> Plan:
    """Play all placements through."""

    def best(mode: Mode, of: Machines, with_costs: Costs = costs) -> Outcome | None:
        placement = placed(mode, with_costs, work, of)
        return None if placement is None else play(with_costs, work, placement, seed)

    def over(variants: Sequence[tuple[float, Machines, Costs]]) -> list[tuple[float, Outcome]]:
        found = [(number, best(mode, of, with_costs)) for number, of, with_costs in variants for mode in MODES]
        return [(number, outcome) for number, outcome in found if outcome is not None]

    sizes = sorted({machines.gpus, *(1 << power for power in range(8) if 1 << power < machines.gpus)})
    envs = sorted({max(1, machines.envs // 2), machines.envs, 2 * machines.envs, 4 * machines.envs})
    by_gpus = over([(gpus, replace(machines, gpus=gpus), costs) for gpus in sizes])
    return Plan(
        costs,
        work,
        machines,
        outcomes=sorted((o for gpus, o in by_gpus if gpus == machines.gpus), key=lambda o: -o.episodes_per_second),
        by_gpus=by_gpus,
        by_envs=over([(count, replace(machines, envs=count), costs) for count in envs]),
        by_policy=over([(factor, machines, costs.of_larger_policy(factor)) for factor in (0.25, 1.0, 4.0)]),
    )


def placed(mode: Mode, costs: Costs, work: Work, machines: Machines) -> Placement | None:
    """The placement of a mode; None where it needs more GPUs than there are."""
    gpus, bytes_per_second = machines.gpus, 1e9 * machines.bandwidth
    if mode == "asynchronous" and gpus < 2:
        return None
    training = gpus
    rolling = 0
    if mode == "asynchronous":
        rolling = _rollout_gpus(costs, work, machines)
        training = gpus - rolling
    exchange = 2 * (training - 1) / training * costs.trained_bytes / bytes_per_second
    publish = costs.trained_bytes / bytes_per_second if mode == "asynchronous" else 0.0
    return Placement(mode, gpus, machines.envs, machines.workers, rolling, machines.staleness, exchange, publish)


def _rollout_gpus(costs: Costs, work: Work, machines: Machines) -> int:
    """How many GPUs should roll out, so that rollouts and training are about as fast.

    All environments of a GPU take a decision in as long as the slowest takes of: two batches of half of them, all their
    steps by the processes there are, and one environment's own acting, stepping and share of a reset.
    """
    envs, chunks = machines.envs, float(np.mean(costs.chunks))
    step, workers = float(np.mean(costs.step)), max(1, min(machines.workers, machines.envs))
    reset = float(np.mean(costs.reset)) / chunks
    turn = max(2 * costs.act.of(envs / 2), (step + reset) * envs / workers, costs.act.of(envs / 2) + step + reset)
    decisions, rates = chunks * work.episodes, list[tuple[float, int]]()
    for rolling in range(1, machines.gpus):
        training = machines.gpus - rolling
        learned, _ = learning_seconds(costs, work, [decisions / training] * training, training, 0.0)
        rates.append((max(turn * decisions / envs / rolling, learned + costs.other), rolling))
    return min(rates)[1]


def memory_text(recipe: TrainRecipe, placement: Placement) -> str:
    """What each GPU of a placement must hold, by part, or why that is not known."""
    training = placement.gpus - placement.rollout_gpus
    try:
        each, alone = estimate_apart(recipe, training)
    except (ValueError, OSError) as error:
        return f"memory: {error}"
    if not placement.rollout_gpus:
        return f"each of {training} GPUs:\n{each.text()}"
    rolling = (
        f"each of {placement.rollout_gpus} GPUs that only roll out: {size_text(alone.acting)} "
        f"(weights {size_text(alone.weights)}, acting {size_text(alone.rollout)})"
    )
    return f"each of {training} GPUs that train:\n{each.text()}\n{rolling}"


def show(plan: Plan) -> None:
    """Print the plan for people."""
    work, machines = plan.work, plan.machines
    table = Table(title=f"{work.episodes} episodes an iteration, {machines.gpus} GPUs, {_per_gpu(machines)}")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("placement", "waits for") else "right")
    for outcome in plan.outcomes:
        table.add_row(*cells(outcome))
    print_table(table)
    for title, rows in (
        ("GPUs", plan.by_gpus),
        ("environments per GPU", plan.by_envs),
        ("policy's time, times", plan.by_policy),
    ):
        print_table(_variants(title, rows))
    print(f"best: {plan.best.placement.text}\n")
    if plan.costs.caveat:
        print(f"{plan.costs.caveat}\n")
    print("costs:")
    for stage, source in plan.costs.sources.items():
        print(f"  {stage:<14}{described(plan.costs, stage):<44}{source}")
    print(NOT_IN_IT)
    if plan.memory:
        print(f"\n{plan.memory}")


def write_page(plan: Plan, name: str, file: Path) -> None:
    """Write a page with curves, tables and what they rest on."""

    def chart(title: str, rows: Sequence[tuple[float, Outcome]]) -> str:
        lines = []
        for mode, color in zip(MODES, STAGE_COLORS, strict=False):
            points = [(x, o.episodes_per_second) for x, o in rows if o.placement.mode == mode]
            lines += [Line(mode, points, color, marked=True)] if points else []
        return line_chart(f"episodes/s by {title}", lines, width=640)

    text = page_template(__package__ or "", "page_template.html").render(
        name=name,
        gpus=plan.machines.gpus,
        best=plan.best.placement.text,
        rate=f"{plan.best.episodes_per_second:.3g}",
        charts=[chart("GPUs", plan.by_gpus), chart("environments per GPU", plan.by_envs)],
        columns=COLUMNS,
        rows=[cells(outcome) for outcome in plan.outcomes],
        costs=[(stage, described(plan.costs, stage), source) for stage, source in plan.costs.sources.items()],
        not_in_it=NOT_IN_IT,
        caveat=plan.costs.caveat,
        memory=plan.memory,
    )
    write_text_atomic(file, text)


def _per_gpu(machines: Machines) -> str:
    return f"{machines.envs} environments in {machines.workers or 'no'} processes beside each"


def cells(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.placement.text,
        f"{outcome.episodes_per_second:.3g}",
        *(f"{seconds:.3g}" for seconds in (outcome.seconds, outcome.rollout, outcome.learning)),
        *(f"{100 * share:.0f} %" for share in (outcome.gpu_busy, outcome.env_busy)),
        outcome.waits_for,
    )


def _variants(title: str, rows: Sequence[tuple[float, Outcome]]) -> Any:
    table = Table(title=f"episodes/s, and what is waited for, by {title}")
    table.add_column(title, justify="right")
    modes = [mode for mode in MODES if any(o.placement.mode == mode for _, o in rows)]
    for mode in modes:
        table.add_column(mode)
    for number in dict.fromkeys(number for number, _ in rows):
        by_mode = {o.placement.mode: f"{o.episodes_per_second:.3g}  {o.waits_for}" for n, o in rows if n == number}
        table.add_row(f"{number:g}", *(by_mode.get(mode, "") for mode in modes))
    return table


def described(costs: Costs, stage: str) -> str:
    """A cost in words."""
    value = getattr(costs, stage)
    if stage == "trained_bytes":
        return f"{value / 1e6:.3g} MB of gradients"
    if stage == "active":
        return f"{100 * value:.0f} % of decisions"
    if isinstance(value, float):
        return f"{1000 * value:.3g} ms"
    if isinstance(value, tuple):
        mean = sum(value) / len(value)
        return f"{mean:.3g} decisions" if stage == "chunks" else f"{1000 * mean:.3g} ms, up to {1000 * max(value):.3g}"
    return ", ".join(f"{1000 * seconds:.3g} ms of {size:g}" for size, seconds in value.points)
