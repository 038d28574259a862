"""Commands beside the robot: deploy, sim-robot, import-bags, ros."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vla_rl.cli.options import say

if TYPE_CHECKING:
    from real_robot.operator.console.access import ConsoleConfig

# Of a robot's contract, not of a recipe.
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example rate=10")]
SimOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example task=pick_place speed=0.5"),
]

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
    bool, typer.Option("--guarded", help="Send commands to `vla-rl robot-guard`, which runs beside the driver.")
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


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command()(deploy)
    app.command(name="robot-guard")(robot_guard)
    app.command(name="sim-robot")(sim_robot)
    app.command(name="import-bags")(import_bags)
    ros = typer.Typer(no_args_is_help=True, help="ROS 1 without a ROS installation.")
    ros.command(name="install")(ros_install)
    ros.command(name="package")(ros_package)
    ros.command(name="master")(ros_master)
    app.add_typer(ros, name="ros")


def deploy(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    overrides: Overrides = None,
    server: Annotated[str, typer.Option(help="Address of `vla-rl serve`: host, host:port, wss://.")] = "127.0.0.1:8000",
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the server's token.")] = None,
    ca: Authority = None,
    instruction: Annotated[str, typer.Option(help="What the robot is asked to do.")] = "",
    log: Annotated[Path | None, typer.Option(help="Write each tick's commands here, a JSON line each.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the server to be ready.")] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but send commands.")] = False,
    synchronous: Synchronous = False,
    guarded: Guarded = False,
    episodes: Annotated[int, typer.Option(min=0, help="Run so many episodes on `vla-rl sim-robot`, then end.")] = 0,
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
    from real_robot.deploy import deploy as deployment
    from real_robot.operator.sim_episodes import VoidRules

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


def _console(values: dict[str, Any], token_file: Path | None) -> ConsoleConfig | None:
    from vla_rl.config import ConfigError, validate

    if values["port"] is None:
        given = {name: values[name] for name in ("allow_host", "certificate", "key")}
        for name, value in {**given, "console_token_file": token_file, "console_origin": values["origins"]}.items():
            if value:
                raise ConfigError(f"--{name.replace('_', '-')}: is of the console; give --console PORT too")
        return None
    from real_robot.operator.console.access import ConsoleConfig
    from real_robot.serving.network import read_token

    token = {"token": read_token(token_file), "token_file": token_file.name} if token_file else {}
    return validate(ConsoleConfig, values | token, prefix="console")


def robot_guard(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    overrides: Overrides = None,
) -> None:
    """Beside the robot's driver: forward what `deploy --guarded` sends, and brake when it stops coming."""
    from real_robot.contract.load import load_contract
    from real_robot.guard.robot_guard import run_guard

    run_guard(load_contract(robot, overrides or ()), say)


def sim_robot(
    overrides: SimOverrides = None,
    master: Annotated[
        str, typer.Option(help="ROS master: an address, or 'new' to start one on port 11311.")
    ] = "http://127.0.0.1:11311",
) -> None:
    """A simulated robot as a ROS 1 node around the tabletop, to try `vla-rl deploy` on."""
    from real_robot.bridge.sim_robot import SimRobotConfig, run_sim_robot
    from vla_rl.config import apply_overrides, validate

    values = apply_overrides({"env": {"kind": "tabletop"}}, overrides or ())
    run_sim_robot(validate(SimRobotConfig, values, prefix="sim-robot"), master)


def import_bags(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    bags: Annotated[list[Path], typer.Argument(metavar="BAG...", help="MCAP or .bag files, or rosbag2 folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The dataset's folder; must not exist.")],
    instruction: Annotated[str, typer.Option(help="What the robot was asked to do.")],
    failures: Annotated[bool, typer.Option("--failures", help="These recordings show failures.")] = False,
) -> None:
    """Recordings of a robot into a LeRobotDataset, an episode each, read by its contract."""
    from real_robot.contract.load import load_contract
    from vla_rl.config import ConfigError

    contract = load_contract(robot)
    try:
        from real_robot.bridge.bags import import_bags as run_import
    except ModuleNotFoundError as error:
        raise ConfigError(f"import-bags: {error.name} is not installed. Run: pip install 'vla-rl[ros]'") from error
    done = run_import(contract, bags, output, instruction, not failures, say)
    typer.echo(f"dataset: {output}  ({done['episodes']} episodes, {done['frames']} frames)")


def ros_install() -> None:
    """Unpack ROS 1's Python packages (rospy, rosmaster, messages) beside the virtual environment. Needs no root."""
    from real_robot.transports.ros.install import install

    typer.echo(f"ROS 1: {install(report=say)}")


def ros_package(
    sources: Annotated[Path, typer.Argument(metavar="WORKSPACE/src", help="The src folder of a ROS 2 workspace.")],
) -> None:
    """Copy the ROS 2 package vla_rl_bridge (node, launch file, parameters) into a workspace, for colcon to build."""
    from real_robot.deploy.ament import copy_package

    typer.echo(f"package: {copy_package(sources)}")


def ros_master(
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 11311,
) -> None:
    """Run a ROS 1 master until Ctrl-C or SIGTERM."""
    import signal
    import time

    from real_robot.transports.ros.master import Master

    master = Master(port)
    signal.signal(signal.SIGTERM, lambda *_: master.process.terminate())
    typer.echo(f"ROS master: {master.uri}", err=True)
    try:
        # Not wait(): it would sleep on where a signal comes just before its system call.
        while master.process.poll() is None:
            time.sleep(0.1)
    finally:
        master.close()
