"""The command that serves a policy to robots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A policy's folder, or 'pretrained:NAME'.")],
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback a token is required.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token that clients must send.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="CERT.pem", help="Encrypt (wss) with this certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="KEY.pem", help="Key of --certificate.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="A further name that /healthz answers to.")
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Most requests in one forward pass.")] = 8,
    max_clients: Annotated[int, typer.Option("--max-clients", help="Connections at a time.")] = 16,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    temperature: Annotated[float, typer.Option(help="Of the actions drawn; 0 is greedy.")] = 0.0,
    control_hz: Annotated[
        float | None, typer.Option("--control-hz", help="Told to clients: the rate that the policy was trained at.")
    ] = None,
    action_names: Annotated[
        str | None, typer.Option("--action-names", help="Told to clients: names of the action's numbers, a,b,c.")
    ] = None,
    default_prompt: Annotated[
        str | None, typer.Option("--default-prompt", help="Instruction of requests that hold none.")
    ] = None,
    camera: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=KEY", help="A camera's key in requests, such as front=images/cam_high."),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="CHECKPOINT is where `vla-rl hil` publishes policies: take each newer one."),
    ] = False,
) -> None:
    """Serve a policy over WebSocket to robots: openpi's protocol, several clients batched."""
    from vla_rl.config import ConfigError, validate

    try:
        from real_robot.serving import hot_swap, server
        from real_robot.serving.network import read_token
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve: {error.name} is not installed. Run: pip install 'vla-rl[robot]'") from error
    values = {
        "host": host,
        "port": port,
        "token": None if token_file is None else read_token(token_file),
        "certificate": certificate,
        "key": key,
        "allow_host": tuple(allow_host or ()),
        "max_batch": max_batch,
        "max_clients": max_clients,
        "device": device,
        "temperature": temperature,
        "control_hz": control_hz,
        "action_names": None if action_names is None else tuple(action_names.split(",")),
        "default_prompt": default_prompt,
        "camera_keys": dict(_pair(text) for text in camera or ()),
    }
    run = hot_swap.main if follow else server.main
    run(checkpoint, validate(server.ServeConfig, values), typer.echo)


def _pair(text: str) -> tuple[str, str]:
    from vla_rl.config import ConfigError

    name, equals, key = text.partition("=")
    if not (name and equals and key):
        raise ConfigError(f"--camera {text}: expected NAME=KEY, such as front=images/cam_high")
    return name, key


def register(app: typer.Typer) -> None:
    """Add the command to the `vla-rl` program."""
    app.command()(serve)
