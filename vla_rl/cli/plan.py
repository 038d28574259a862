"""What a run will need, how fast this machine is, and what was published: `plan`, `bench`, `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vla_rl.cli.options import Overrides, RecipeName, Resume, check_writable, say
from vla_rl.cli.running import load, load_run, start
from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import next_command
from vla_rl.evaluation.verdict import headroom
from vla_rl.recipe.checks import PLAN
from vla_rl.recipe.recipe import ANY
from vla_rl.training.memory import estimate
from vla_rl.workflows.plan.command import play_groups, run
from vla_rl.workflows.plan.fit import fit_text
from vla_rl.workflows.plan.plan import Machines
from vla_rl.workflows.reproduce import description, listing, packet_of, run_of

app = typer.Typer()


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=1024, help="GPUs in all; by default 8, with --memory 1.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Only print the memory that each GPU will need, by part; measures nothing.")
    ] = False,
    preflight: Annotated[
        int | None, typer.Option(min=16, max=4096, help="Only play so many episodes; say what RL would learn from.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Only compute how many updates of its world model fit into --minutes.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_000, help="Of a card, with --fit.")] = 6.0,
    envs: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Environments per GPU that rolls out; by default env.num_envs.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=1024, help="Processes (cores) that step them, per GPU; by default env.num_workers, or 16."
        ),
    ] = None,
    staleness: Annotated[
        int, typer.Option(min=0, max=64, help="Updates that asynchronous rollouts may be ahead of.")
    ] = 1,
    bandwidth: Annotated[float, typer.Option(min=0.01, help="GB/s between GPUs.")] = 25.0,
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Where stages' costs are: a run's folder, one of `vla-rl bench gpu`, or a costs.json. Of several that "
            "know a stage the last counts; what none knows is measured here."
        ),
    ] = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Compute acting and learning of OpenVLA's 7 billion parameters (H200).")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="About how long to measure here.")] = 30.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder for costs.json, plan.json and plan.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Simulate a recipe's run on more GPUs from what its stages cost: synchronous, asynchronous.

    Every figure of the plan is simulated; every cost says where it was measured, or that it is computed.
    """
    if memory or preflight or fit:
        others = envs or workers or costs or roofline or output or as_json
        if others or bool(memory) + bool(preflight) + fit > 1 or (gpus and not memory):
            raise ConfigError(
                "--memory, --preflight, --fit: one at a time; they simulate no run, so of the other options --memory "
                "takes --gpus alone, --fit --minutes, --preflight none"
            )
        typer.echo("\n".join(_without_a_run(recipe, overrides, preflight, minutes if fit else None, gpus or 1)))
        return
    check_writable(output)
    loaded = load(recipe, overrides, PLAN, runs=False)
    own = getattr(loaded.env, "num_workers", 0)
    machines = Machines(
        gpus or 8, envs or loaded.env.num_envs, (own or 16) if workers is None else workers, staleness, bandwidth
    )
    run(loaded, machines, costs or (), roofline=roofline, seconds=seconds, output=output, as_json=as_json, say=say)


def _without_a_run(
    recipe: str, overrides: list[str] | None, preflight: int | None, minutes: float | None, gpus: int
) -> list[str]:
    """Lines of what a few episodes say of RL, or minutes of a fit; without them, of the memory that each GPU needs."""
    if minutes:
        return [fit_text(load(recipe, overrides, ANY, runs=False), minutes)]
    if preflight:
        found = headroom(play_groups(load(recipe, overrides, PLAN), preflight))
        return [found.text(), next_command("train", recipe, *(overrides or ()))]
    return [estimate(load(recipe, overrides, ANY, runs=False), gpus).text()]


# No help option of click's: behind WHAT, --help belongs to the benchmark; `bench` answers it where there is none.
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}


@app.command(context_settings=PASSES_ON)
def bench(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="env: steps/s; imagination: frames/s; gpu: a GPU."),
    ] = "env",
) -> None:
    """Measure speed on this machine. Further arguments go to the benchmark: `vla-rl bench env --help` lists its own."""
    if what in ("-h", "--help"):
        typer.echo(context.get_help())
        return
    if what == "env":
        from sim.bench import main
    elif what == "imagination":
        from world_model.imagination.bench import main
    elif what == "gpu":
        from vla_rl.workflows.gpu_bench.command import main
    else:
        raise ConfigError(f"bench: got {what!r}, allowed: env, imagination, gpu")
    raise typer.Exit(main(context.args))


@app.command()
def reproduce(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A published result; without it: a list.")
    ] = None,
    overrides: Overrides = None,
    is_run: Annotated[bool, typer.Option("--execute", help="Run it; else say what it costs and can tell.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder; by default runs/NAME.")
    ] = None,
    resume: Resume = False,
) -> None:
    """Repeat a published result: what it takes and tells; with --execute also a verdict, and a row to send back.

    What is claimed, of how many episodes, and the rule of the decision are in claim.json before the first episode.
    """
    if name is None:
        typer.echo("\n".join([*listing(), next_command("reproduce", "NAME", what="what it takes")]))
        return
    packet, folder, typed = packet_of(name), output or Path("runs") / name, overrides or []
    if is_run and resume:
        loaded = load_run(None, typed, folder, resume)
    else:
        loaded = load(packet.recipe, [*packet.overrides, *typed], ANY, runs=is_run)
    if is_run:
        start(run_of(name), loaded, folder, resume)
    else:
        typer.echo("\n".join(description(name, loaded, typed)))
