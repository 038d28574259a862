"""Commands beside the robot: deploy, sim-robot, import-bags, ros."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example rate=10")]


def register(app: typer.Typer) -> None:
    """Add this file's commands to the program."""
    app.command()(deploy)
    app.command(name="sim-robot")(sim_robot)
    app.command(name="import-bags")(import_bags)
    ros = typer.Typer(no_args_is_help=True, help="ROS 1 without a ROS installation.")
    ros.command(name="install")(ros_install)
    ros.command(name="master")(ros_master)
    app.add_typer(ros, name="ros")


def deploy(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    overrides: Overrides = None,
    server: Annotated[str, typer.Option(help="Address of `vla-rl serve`, host:port or ws://.")] = "127.0.0.1:8000",
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File with the server's token.")] = None,
    instruction: Annotated[str, typer.Option(help="What the robot is asked to do.")] = "",
    log: Annotated[Path | None, typer.Option(help="Write each tick's commands here, a JSON line each.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the server to be ready.")] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but send commands.")] = False,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Infer inside the control tick, play whole chunks: for simulators.")
    ] = False,
    episodes: Annotated[int, typer.Option(min=0, help="Run so many episodes on `vla-rl sim-robot`, then end.")] = 0,
    task: Annotated[list[str] | None, typer.Option(help="Tasks of --episodes, in turn.")] = None,
    split: Annotated[str, typer.Option(help="Split of --episodes.")] = "eval",
    start: Annotated[bool, typer.Option("--start", help="Start at once; else Enter starts.")] = False,
    results: Annotated[Path | None, typer.Option(help="Write the outcome of --episodes here, as JSON.")] = None,
    console: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve the operator console here, in place of terminal keys.")
    ] = None,
    console_host: Annotated[
        str, typer.Option("--console-host", help="Its address; beyond loopback a token is required.")
    ] = "127.0.0.1",
    console_token_file: Annotated[
        Path | None, typer.Option("--console-token-file", help="File with the token that takes control.")
    ] = None,
    console_origin: Annotated[
        list[str] | None,
        typer.Option("--console-origin", help="A console page that may show this robot too: http://HOST:PORT."),
    ] = None,
    teleop: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="The person's device: lerobot:so101_leader, lerobot:gamepad, spacemouse."),
    ] = "",
    record: Annotated[
        Path | None, typer.Option(help="Record the episodes of --console, or of --episodes, here: a LeRobotDataset.")
    ] = None,
    round: Annotated[int, typer.Option(min=0, help="Round of post-training, written with --record's episodes.")] = 0,
    detector: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A failure detector of this policy: detectors/NAME of `failure fit`."),
    ] = None,
) -> None:
    """Drive a robot with a policy server's actions, behind the safety supervisor."""
    module: Any = importlib.import_module("real_robot.control.deploy")
    console_config = None
    if console is not None:
        from vla_rl.config import validate

        values = {
            "host": console_host,
            "port": console,
            "token": module.read_token(console_token_file) if console_token_file else None,
            "origins": tuple(console_origin or ()),
        }
        console_config = validate(module.ConsoleConfig, values, prefix="console")
    options = module.DeployOptions(
        robot=robot,
        overrides=tuple(overrides or ()),
        server=server,
        token_file=token_file,
        instruction=instruction,
        log=log,
        wait=wait,
        dry_run=dry_run,
        synchronous=synchronous,
        episodes=episodes,
        tasks=tuple(task or ("push_to_zone",)),
        split=split,
        start=start,
        results=results,
        console=console_config,
        record=record,
        round=round,
        detector=detector,
        teleop=teleop,
    )
    module.deploy(options, lambda text: typer.echo(text, err=True))


def sim_robot(
    overrides: Overrides = None,
    master: Annotated[
        str, typer.Option(help="ROS master: an address, or 'new' to start one on port 11311.")
    ] = "http://127.0.0.1:11311",
) -> None:
    """A simulated robot as a ROS 1 node around the tabletop, to try `vla-rl deploy` on."""
    from vla_rl.config import apply_overrides, validate

    module: Any = importlib.import_module("real_robot.bridge.sim_robot")
    config = validate(
        module.SimRobotConfig, apply_overrides({"env": {"kind": "tabletop"}}, overrides or ()), prefix="sim-robot"
    )
    module.run_sim_robot(config, master)


def import_bags(
    robot: Annotated[str, typer.Argument(metavar="ROBOT", help="A contract (YAML), or the name of a shipped one.")],
    bags: Annotated[list[Path], typer.Argument(metavar="BAG...", help="MCAP or .bag files, or rosbag2 folders.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The dataset's folder; must not exist.")],
    instruction: Annotated[str, typer.Option(help="What the robot was asked to do.")],
    failures: Annotated[bool, typer.Option("--failures", help="These recordings show failures.")] = False,
) -> None:
    """Recordings of a robot into a LeRobotDataset, an episode each, read by its contract."""
    from vla_rl.config import ConfigError

    load_contract: Any = importlib.import_module("real_robot.bridge.contract").load_contract
    contract = load_contract(robot)
    try:
        module: Any = importlib.import_module("real_robot.bridge.bags")
    except ModuleNotFoundError as error:
        raise ConfigError(f"import-bags: {error.name} is not installed. Run: pip install 'vla-rl[ros]'") from error
    done = module.import_bags(
        contract, bags, output, instruction, not failures, lambda text: typer.echo(text, err=True)
    )
    typer.echo(f"dataset: {output}  ({done['episodes']} episodes, {done['frames']} frames)")


def ros_install() -> None:
    """Unpack ROS 1's Python packages (rospy, rosmaster, messages) beside the virtual environment. Needs no root."""
    module: Any = importlib.import_module("real_robot.bridge.ros.install")
    typer.echo(f"ROS 1: {module.install(report=lambda text: typer.echo(text, err=True))}")


def ros_master(
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 11311,
) -> None:
    """Run a ROS 1 master until Ctrl-C or SIGTERM."""
    import signal

    module: Any = importlib.import_module("real_robot.bridge.ros.master")
    master = module.Master(port)
    signal.signal(signal.SIGTERM, lambda *_: master.process.terminate())
    typer.echo(f"ROS master: {master.uri}", err=True)
    try:
        master.process.wait()
    finally:
        master.close()
