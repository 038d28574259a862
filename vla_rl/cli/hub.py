"""`vla-rl hub serve | measure`: several robots, one person."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.hub.hub_server import load_hub, run_hub
from real_robot.serving.network import read_token
from vla_rl.cli.options import Output, Overrides, OwnRecipe, Resume, say
from vla_rl.cli.running import run
from vla_rl.config import validate
from vla_rl.workflows.hub_study import RUN

app = typer.Typer(no_args_is_help=True, help="Several robots, one person: a queue of requests for help.")


@app.command()
def serve(
    file: Annotated[Path | None, typer.Argument(metavar="[HUB.yaml]", help="Robots and how they are reached.")] = None,
    robot: Annotated[
        list[str] | None, typer.Option(metavar="NAME=ADDRESS", help="A robot's console, such as left=ws://bench1:8080.")
    ] = None,
    port: Annotated[int, typer.Option(help="Serve the hub's page here; 0 takes a free port.")] = 8090,
    host: Annotated[str, typer.Option(help="Its address; beyond loopback a token is required.")] = "127.0.0.1",
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token that a person gives to take control.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", help="A further name by which browsers may address it.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="CERT.pem", help="Encrypt the page (https) with this certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="KEY.pem", help="Key of --certificate.")] = None,
    log: Annotated[Path | None, typer.Option(help="Write who helped whom and when here, a JSON line each.")] = None,
) -> None:
    """One page for the consoles of several robots: who asks for help, in which order, and a person with one of them."""
    values = {
        "host": host,
        "port": port,
        "token": read_token(token_file) if token_file else None,
        "token_file": token_file.name if token_file else "",
        "allow_host": tuple(allow_host or ()),
        "certificate": certificate,
        "key": key,
    }
    run_hub(load_hub(file, robot or ()), validate(ConsoleConfig, values, prefix="hub"), log, say)


@app.command()
def measure(
    recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False
) -> None:
    """In a simulator, with a scripted person: success, waiting and the person's share of time by number of robots."""
    run(RUN, recipe, overrides, output, resume)
