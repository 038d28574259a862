"""A policy server, and the control loop next to a robot that asks it: `serve`, `deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from real_robot.deploy import deploy as deployment
from real_robot.operator.console.access import ConsoleConfig
from real_robot.operator.sim_episodes import VoidRules
from real_robot.serving import hot_swap, server
from real_robot.serving.network import read_token
from vla_rl.cli.options import ContractOverrides, say
from vla_rl.common.errors import ConfigError
from vla_rl.common.next_command import next_command
from vla_rl.config import validate

ConsolePort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Serve the operator console here, in place of terminal keys.")
]
ConsoleHost = Annotated[str, typer.Option("--console-host", help="Its address; beyond loopback a token is required.")]
ConsoleToken = Annotated[
    Path | None, typer.Option("--console-token-file", help="File with the token that takes control.")
]
ConsoleOrigins = Annotated[
    list[str] | None,
    typer.Option("--console-origin", help="A console page that may show this robot too: http://HOST:PORT."),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="A further name by which the console may be addressed."),
]
Certificate = Annotated[
    Path | None, typer.Option(metavar="CERT.pem", help="Encrypt the console (https) with this certificate.")
]
Key = Annotated[Path | None, typer.Option(metavar="KEY.pem", help="Key of --certificate.")]
Authority = Annotated[
    Path | None, typer.Option(metavar="CA.pem", help="Who signed the server's certificate; encrypts (wss).")
]
Device = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="The person's device: gamepad, phone, spacemouse, lerobot:so101_leader."),
]
RecordFolder = Annotated[
    Path | None, typer.Option(help="Record the episodes of --console, or of --episodes, here: a LeRobotDataset.")
]
Results = Annotated[
    Path | None, typer.Option(help="Write how each episode of --episodes, or of --console, ended here, as JSON.")
]
DetectorFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="A failure detector of this policy: detectors/NAME of `failure fit`."),
]
Guarded = Annotated[
    bool, typer.Option("--guarded", help="Send commands to `vla-rl robot guard`, which runs beside the driver.")
]
Synchronous = Annotated[
    bool, typer.Option("--synchronous", help="Infer inside the control tick, play whole chunks: for simulators.")
]
PolicyChange = Annotated[
    bool, typer.Option("--allow-policy-change", help="Go on where the server serves another policy in mid-run.")
]
MaxWithoutAction = Annotated[
    float,
    typer.Option(min=0, max=1, help="An episode of --episodes is void above this share of ticks without an action."),
]
Reruns = Annotated[
    int, typer.Option(min=0, help="How often a void episode of --episodes is run again, after the others.")
]


app = typer.Typer()


@app.command()
def deploy(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    overrides: ContractOverrides = None,
    server: Annotated[str, typer.Option(help="Address of `vla-rl serve`: host, host:port, wss://.")] = "127.0.0.1:8000",
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the server's token.")] = None,
    ca: Authority = None,
    instruction: Annotated[str, typer.Option(help="What the robot is asked to do.")] = "",
    log: Annotated[Path | None, typer.Option(help="Write each tick's commands here, a JSON line each.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the server to be ready.")] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but send commands.")] = False,
    synchronous: Synchronous = False,
    guarded: Guarded = False,
    episodes: Annotated[int, typer.Option(min=0, help="Run so many episodes on `vla-rl robot sim`, then end.")] = 0,
    task: Annotated[list[str] | None, typer.Option(help="Tasks of --episodes, in turn.")] = None,
    split: Annotated[Literal["train", "validation", "eval"], typer.Option(help="Split of --episodes.")] = "eval",
    start: Annotated[bool, typer.Option("--start", help="Start at once; else Enter starts.")] = False,
    results: Results = None,
    console: ConsolePort = None,
    console_host: ConsoleHost = "127.0.0.1",
    console_token_file: ConsoleToken = None,
    console_origin: ConsoleOrigins = None,
    allow_host: AllowHost = None,
    certificate: Certificate = None,
    key: Key = None,
    teleop: Device = "",
    record: RecordFolder = None,
    round: Annotated[int, typer.Option(min=0, help="Round of post-training, written with --record's episodes.")] = 0,
    detector: DetectorFolder = None,
    allow_policy_change: PolicyChange = False,
    max_without_action: MaxWithoutAction = 0.5,
    reruns: Reruns = 1,
) -> None:
    """Drive a robot with a policy server's actions, behind the safety supervisor."""
    served = {
        "port": console,
        "host": console_host,
        "origins": tuple(console_origin or ()),
        "allow_host": tuple(allow_host or ()),
        "certificate": certificate,
        "key": key,
    }
    options = deployment.DeployOptions(
        robot=robot,
        overrides=tuple(overrides or ()),
        server=server,
        token_file=token_file,
        ca=ca,
        instruction=instruction,
        log=log,
        wait=wait,
        dry_run=dry_run,
        synchronous=synchronous,
        guarded=guarded,
        episodes=episodes,
        tasks=tuple(task or ("push_to_zone",)),
        split=split,
        start=start,
        results=results,
        console=_console(served, console_token_file),
        record=record,
        round=round,
        detector=detector,
        teleop=teleop,
        allow_policy_change=allow_policy_change,
        void_rules=VoidRules(max_without_action, reruns),
    )
    deployment.deploy(options, say)
    typer.echo(_after(options))


def _after(options: deployment.DeployOptions) -> str:
    """The line of what comes next: the page of what was recorded; else the same, recorded, with a person beside it."""
    if options.record is not None:
        return next_command("report", options.record, what="what was recorded")
    words: list[object] = ["deploy", options.robot, *options.overrides, "--server", options.server]
    for option, value in (("token-file", options.token_file), ("ca", options.ca), ("instruction", options.instruction)):
        words += [f"--{option}", value] if value else []
    robot = Path(options.robot).stem
    return next_command(*words, "--console", 8080, "--record", f"datasets/{robot}", what="with a person's corrections")


def _console(values: dict[str, Any], token_file: Path | None) -> ConsoleConfig | None:
    if values["port"] is None:
        given = {name: values[name] for name in ("allow_host", "certificate", "key")}
        for name, value in {**given, "console_token_file": token_file, "console_origin": values["origins"]}.items():
            if value:
                raise ConfigError(f"--{name.replace('_', '-')}: is of the console; give --console PORT too")
        return None
    token = {"token": read_token(token_file), "token_file": token_file.name} if token_file else {}
    return validate(ConsoleConfig, values | token, prefix="console")


@app.command()
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
        typer.Option("--follow", help="CHECKPOINT is where `run: hil` publishes policies: take each newer one."),
    ] = False,
) -> None:
    """Serve a policy over WebSocket to robots: openpi's protocol, several clients batched."""
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

    name, equals, key = text.partition("=")
    if not (name and equals and key):
        raise ConfigError(f"--camera {text}: expected NAME=KEY, such as front=images/cam_high")
    return name, key
