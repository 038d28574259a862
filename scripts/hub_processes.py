"""Study of the hub over the real programs, each a process, in real time: what `vla-rl hub measure` has in lockstep.

    python scripts/hub_processes.py tabletop_hub hub.robots=[1,2,4] hub.episodes_per_task=10 -o runs/hub   # needs ROS 1

For each number of robots: as many ROS masters, `vla-rl robot sim` and `vla-rl deploy` with the failure detector, one
`vla-rl serve`, one `vla-rl hub serve`, and a scripted person at the hub's socket
(`scripted_person.py`). What is counted is what the programs themselves have written: the hub's
log and each deploy's `--results`. A row is run in pieces; each finished piece is kept, so that `--resume` goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from scripted_person import PersonOptions, ScriptedPerson, run_person
from sim_observer import SceneObserver

from real_robot.bridge.sim_robot import SCALES
from real_robot.operator.hub.hub_log import read_log, shares
from real_robot.operator.hub.sim_fleet import FleetOptions
from real_robot.transports.ros.master import Master, free_port
from vla_rl.cli.options import PROGRAM, Output, Overrides, OwnRecipe, Resume
from vla_rl.cli.running import run
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.child_process import end_child, start_child
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, episode_specs
from vla_rl.evaluation.statistics import wilson_interval
from vla_rl.recipe.checks import HUB
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import HubRecipe
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.hub_study import Show, detector_folder

RESULTS, TABLE = "hub_processes.json", "hub_processes.md"
SPEED = 0.5  # Times real time that the robots run.
# How fast the person drives, as a share of the expert's own speed. The hands are two to three control steps behind what
# they see; from about 0.5 on they overshoot.
HANDS = 0.25
PIECE = 25  # Episodes after which the programs are started anew.
# Times its horizon that a policy may drive without asking for help, until the person comes and ends the episode.
WAITS = 3.0
START_SECONDS = 180.0  # that a program may take to start on a busy machine
ENDLESS = 10**6  # control steps: an episode ends when it is solved or given up
SLACK = 0.5  # seconds that a message may be old: a busy machine needs more than a robot's computer
PATIENCE = 120.0  # seconds for one episode, at most, on the average of a piece


def measure_processes(recipe: HubRecipe, folder: Path, show: Show, program: Sequence[str]) -> dict[str, Any]:
    """All of it; writes `folder`/hub_processes.json and hub_processes.md, and returns the former.

    Args:
        program: the command that runs `vla-rl`.

    Raises:
        ConfigError: the recipe has no section hub, asks by anything else than a detector, or its policy is no folder.
        RosInstallError: ROS 1 is not there. RuntimeError: a program ended by itself; its last lines are in the message.
    """
    if recipe.hub.alarm != "detector":
        raise ConfigError("hub_processes: needs the recipe's section hub with alarm: detector; see tabletop_hub.yaml")
    config, env = recipe.hub, recipe.acting_env
    detector = detector_folder(recipe, config, folder, show)
    states = EvalConfig(episodes_per_task=config.episodes_per_task)
    specs = sorted(episode_specs(env.env_spec(), states), key=lambda spec: spec.index)  # The tasks in turn.
    rows = []
    for robots in config.robots:
        pieces = []
        for first in range(0, len(specs), PIECE):
            place = folder / "processes" / f"robots_{robots}" / f"from_{first}"
            file = place / "piece.json"
            if not file.exists():
                part = specs[first : first + PIECE]
                show(f"{robots} robots: episodes {first} to {first + len(part) - 1}")
                found = run_piece(recipe, part, robots, detector, Programs(place, program))
                write_text_atomic(file, json.dumps(found, indent=1) + "\n")
            pieces.append(json.loads(file.read_text()))
        rows.append(summarize(robots, pieces))
    result = {"speed": SPEED, "rows": rows}
    write_text_atomic(folder / RESULTS, json.dumps(result, indent=1) + "\n")
    write_text_atomic(folder / TABLE, markdown(result))
    return result


class Programs:
    """The programs of one piece, each with its output in a file; the last started is ended first.

    Args:
        folder: also for what the programs write. program: the command that runs `vla-rl`.
    """

    def __init__(self, folder: Path, program: Sequence[str]) -> None:
        self.folder, self._program = folder, program
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, *arguments: str) -> None:
        """Start `vla-rl` with these arguments."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with (self.folder / f"{name}.log").open("wb") as output:
            process = start_child([*self._program, *arguments], stdout=output, stderr=output, env=env)
            self._started.append((name, process))

    def output(self, name: str) -> str:
        """What a program has said so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def check(self) -> None:
        """
        Raises:
            RuntimeError: a program has ended.
        """
        for name, process in self._started:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with exit code {process.returncode}:\n{self.output(name)[-2000:]}")

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for what programs do when they start.

        Raises:
            RuntimeError: a program ended, or it took too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not within {START_SECONDS:.0f} s; see {self.folder}")
            time.sleep(0.1)

    def close(self) -> None:
        """Ask each to end (SIGTERM), the last started first, and wait: deploys write their results."""
        for _, process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        for _, process in reversed(self._started):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                end_child(process, seconds=5)


def run_piece(
    recipe: HubRecipe, specs: Sequence[EpisodeSpec], robots: int, detector: Path, programs: Programs
) -> dict[str, Any]:
    """Run these episodes on so many robots; as plain JSON.

    Raises:
        RosInstallError: ROS 1 is not there. RuntimeError: a program ended by itself, or the work was not done in time.
    """
    folder, names = programs.folder, [f"robot_{i + 1}" for i in range(robots)]
    for old in (*folder.glob("*.jsonl"), *folder.glob("*.json")):
        old.unlink()  # of a run that was killed
    server, page = free_port(), free_port()
    with ExitStack() as stack:
        masters = {name: stack.enter_context(closing(Master())) for name in names}  # Each closed if a later one fails.
        observers = {name: stack.enter_context(closing(SceneObserver(master.uri))) for name, master in masters.items()}
        stack.callback(programs.close)
        programs.start("server", "serve", str(getattr(recipe.policy, "path", "")), "--port", str(server))
        consoles = {name: free_port() for name in names}
        for name, master in masters.items():
            programs.start(f"{name}_sim", *_sim(recipe, master.uri))
            options = _deploy(recipe, name, master.uri, folder)
            wires = ("--server", f"127.0.0.1:{server}", "--console", str(consoles[name]), "--detector", str(detector))
            programs.start(f"{name}_deploy", *options, *wires)
        for name in names:
            programs.until(lambda name=name: "console: http" in programs.output(f"{name}_deploy"), f"{name}'s console")
        lines = [word for name in names for word in ("--robot", f"{name}=ws://127.0.0.1:{consoles[name]}")]
        log = folder / "hub.jsonl"
        programs.start("hub", "hub", "serve", *lines, "--port", str(page), "--log", str(log))
        programs.until(lambda: "hub: http" in programs.output("hub"), "the hub")
        person = ScriptedPerson(observers, specs, person_options(recipe))
        began = time.monotonic()
        asyncio.run(run_person(f"ws://127.0.0.1:{page}/socket", person, PATIENCE * len(specs), programs.check))
        seconds = time.monotonic() - began
    told = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    return {
        "robots": robots,
        "seconds": seconds,
        "shares": asdict(shares(read_log(log))),
        "interrupted": person.interrupted,
        "refused": person.refused[:50],
        "episodes": match_episodes(person.journal, told),
    }


def _sim(recipe: HubRecipe, master: str) -> list[str]:
    """The simulated robot's command line: the recipe's environment, whose episodes end when they are solved."""
    config = recipe.acting_env
    env = config.model_dump(mode="json", exclude_defaults=True) | {"kind": config.kind, "steps_after_success": 0}
    env["horizons"] = dict.fromkeys(config.env_spec().tasks, ENDLESS)
    told = [f"env={json.dumps(env)}", f"speed={SPEED}", "publish_expert=true", "image_format=png"]
    return ["robot", "sim", *told, "--master", master]


def _deploy(recipe: HubRecipe, name: str, master: str, folder: Path) -> list[str]:
    """A robot's command line. Time-outs are as many control steps as the shipped contract's, at this speed."""
    rate = recipe.acting_env.env_spec().control_hz * SPEED
    contract = [
        f"name={name}",
        f"transport.master={master}",
        f"rate={rate:g}",
        f"pace_timeout={2 / rate:g}",
        "silence=60",
        f"observation.max_age={SLACK:g}",
        f"safety.observation_timeout={SLACK:g}",
        f"safety.command_timeout={SLACK:g}",
        "episode={begin: '', reset: ''}",  # The person lays each scene out from afar: see `SceneObserver.lay_out`.
        f"teleop.speed={HANDS:g}",
        f"teleop.timeout={SLACK:g}",
    ]
    written = ["--results", str(folder / f"{name}.json"), "--log", str(folder / f"{name}_ticks.jsonl")]
    return ["deploy", "sim_robot", *contract, *written]


def person_options(recipe: HubRecipe) -> Any:
    """How the person works, at the speed at which the robots run."""
    config, spec = recipe.hub, recipe.acting_env.env_spec()
    step = 1 / (spec.control_hz * SPEED)
    return PersonOptions(
        hand_over=config.hand_over / SPEED,
        patience=round(FleetOptions.patience / HANDS),
        operator_steps=round(FleetOptions.operator_steps / HANDS),
        horizon={task: steps * step * WAITS for task, steps in spec.horizon.items()},
        settle=3 * step,
        full=SCALES,
    )


def match_episodes(journal: Sequence[dict[str, Any]], told: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each deploy has written of its episodes, in their order, with the initial states that they began from.

    Raises:
        RuntimeError: a deploy knows of other episodes than were started.
    """
    episodes = []
    for name, entries in told.items():
        started = [entry for entry in journal if entry["robot"] == name]
        if len(started) != len(entries):
            raise RuntimeError(f"{name}: {len(started)} episodes were started, {len(entries)} are in its results")
        episodes += [start | entry for start, entry in zip(started, entries, strict=True)]
    return episodes


def summarize(robots: int, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table; shares of time, rates with 95 % Wilson intervals, seconds of the wall clock."""
    episodes = [episode for piece in pieces for episode in piece["episodes"]]
    shares = [piece["shares"] for piece in pieces]
    n, solved = len(episodes), sum(e["outcome"] == "success" for e in episodes)
    seconds, served = sum(s["seconds"] for s in shares), sum(s["served"] for s in shares)
    driven = sum(e["driven"].get(who, 0.0) for e in episodes for who in ("recovery", "correction"))
    return {
        "robots": robots,
        "n": n,
        "solved": solved,
        "success": solved / n,
        "interval": list(wilson_interval(solved, n)),
        "alone": sum(e["outcome"] == "success" and not e["interventions"] for e in episodes),
        "person_share": sum(s["helped"] for s in shares) / seconds,
        "driving_share": driven / seconds,
        "requests": sum(s["requests"] for s in shares) / n,
        "interventions": sum(e["interventions"] for e in episodes) / n,
        "interrupted": sum(piece["interrupted"] for piece in pieces),
        "mean_wait": sum(s["mean_wait"] * s["served"] for s in shares) / max(1, served),
        "max_wait": max(s["max_wait"] for s in shares),
        "robots_waiting": sum(s["waited"] for s in shares) / (seconds * robots),
        "solved_per_hour": 3600 * solved / seconds,
        "late_ticks": sum(e["late"] for e in episodes) / max(1, sum(e["ticks"] for e in episodes)),
        "seconds": seconds,
    }


def markdown(result: dict[str, Any]) -> str:
    """The rows as a table."""
    lines = [
        "| robots | success | person's share of time | of it driving | requests per episode | interventions per episode"
        " | wait, mean (s) | wait, longest (s) | robots' time waiting | solved per hour | late ticks |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        low, high = row["interval"]
        rate = f"{100 * row['success']:.1f} % [{100 * low:.1f}, {100 * high:.1f}], n = {row['n']}"
        shares = f"{100 * row['person_share']:.0f} % | {100 * row['driving_share']:.0f} %"
        asked = f"{row['requests']:.2f} | {row['interventions']:.2f}"
        waits = f"{row['mean_wait']:.1f} | {row['max_wait']:.1f} | {100 * row['robots_waiting']:.0f} %"
        last = f"{row['solved_per_hour']:.0f} | {100 * row['late_ticks']:.1f} %"
        lines.append(f"| {row['robots']} | {rate} | {shares} | {asked} | {waits} | {last} |")
    return "\n".join(lines) + "\n"


def start(recipe: HubRecipe, folder: Path, _: bool, show: Show) -> list[str]:
    """Make the run, or go on with it; return what is printed at its end."""
    measure_processes(recipe, folder, show, PROGRAM)
    return [(folder / TABLE).read_text(), f"written: {folder / RESULTS}"]


def main(recipe: OwnRecipe = None, overrides: Overrides = None, output: Output = None, resume: Resume = False) -> None:
    """Measure one person's help over the real programs, by the number of robots."""
    run(Run("hub measure", HUB, start), recipe, overrides, output, resume)


if __name__ == "__main__":
    typer.run(main)
