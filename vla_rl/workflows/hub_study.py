"""`vla-rl hub measure`: one person's help among several simulated robots, by their number.

Fits the recipe's failure detector where there is none yet, runs the episodes once with nobody to help, then the same
ones with 1, 2, 4 ... robots and one scripted person (`real_robot/operator/hub/sim_fleet.py`). Killed, the same command
with `--resume` goes on with the first number that is not finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real_robot.failure.detector import FailureDetector
from real_robot.operator.hub.sim_fleet import WAITING_ROOM, FleetOptions, run_fleet
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.tables import markdown_table
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, build_env, episode_specs, policy_hash
from vla_rl.evaluation.statistics import Interval, wilson_interval
from vla_rl.interfaces import EnvConfig, Policy
from vla_rl.policies.base import resolve_path
from vla_rl.recipe.checks import HUB
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import HubConfig, HubRecipe
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.failure_detection import fit_failure
from vla_rl.workflows.recipe_parts import build_policy, limit_threads

RESULTS, TABLE = "hub.json", "hub.md"
Show = Callable[[str], None]


def measure_hub(recipe: HubRecipe, folder: Path, show: Show) -> dict[str, Any]:
    """All of it; writes `folder`/hub.json and hub.md, and returns the former.

    Raises:
        ConfigError: the recipe has no section hub, or lacks what its alarm needs.
    """
    limit_threads(recipe)
    config, env = recipe.hub, recipe.acting_env
    policy = build_policy(recipe, env.env_spec())
    make_detector = _detector(recipe, config, folder, show) if config.alarm == "detector" else None
    states = EvalConfig(episodes_per_task=config.episodes_per_task)
    specs = sorted(episode_specs(env.env_spec(), states), key=lambda spec: spec.index)  # The tasks in turn.
    rows = []
    for robots, helped in [(max(config.robots), False), *((n, True) for n in config.robots)]:
        file = folder / (f"robots_{robots}.json" if helped else "alone.json")
        if not file.exists():
            show(f"{len(specs)} episodes, {robots} robots, {'one person' if helped else 'nobody to help'}")
            found = _run(recipe, config, policy, specs, robots, helped, make_detector)
            write_text_atomic(file, json.dumps(found, indent=1) + "\n")
        rows.append(json.loads(file.read_text()))
    alone = {(e["task"], e["index"]): e["success"] for e in rows[0]["episodes"]}
    result = {"rows": [_summarize(row, alone) for row in rows]}
    write_text_atomic(folder / RESULTS, json.dumps(result, indent=1) + "\n")
    write_text_atomic(folder / TABLE, markdown(result))
    return result


def detector_folder(recipe: HubRecipe, config: HubConfig, folder: Path, show: Show) -> Path:
    """Where the detector is; fits it first where it is named and not there."""
    place = Path(config.detector) if "/" in config.detector else folder / "detectors" / config.detector
    if "/" not in config.detector and not place.exists():
        fit_failure(recipe, folder, show)
    return place


def _detector(recipe: HubRecipe, config: HubConfig, folder: Path, show: Show) -> Callable[[], FailureDetector]:
    """How to make the detector for one robot."""
    place = detector_folder(recipe, config, folder, show)
    path: str | None = getattr(recipe.policy, "path", None)
    if path is None:
        raise ConfigError("policy.path: a failure detector belongs to one checkpoint; give its folder")
    hash = policy_hash(resolve_path(path))
    return lambda: FailureDetector.load(place, hash)


def _run(
    recipe: HubRecipe,
    config: HubConfig,
    policy: Policy,
    specs: Sequence[EpisodeSpec],
    robots: int,
    helped: bool,
    make_detector: Callable[[], FailureDetector] | None,
) -> dict[str, Any]:
    """Run the episodes on so many robots; as plain JSON."""
    env_config = recipe.acting_env
    horizons = env_config.env_spec().horizon
    options = FleetOptions(alarm=config.alarm, hand_over=config.hand_over, helped=helped)
    with closing(build_env(_roomy(env_config, horizons, robots))) as env:
        result = run_fleet(
            policy, env, specs, horizons=horizons, options=options, make_detector=make_detector, seed=recipe.seed
        )
    episodes = [{"robot": e.robot, "requests": e.requests} | asdict(e.outcome) for e in result.episodes]
    seconds, helped_for = result.seconds, result.shares
    return {"robots": robots, "helped": helped, "seconds": seconds, "shares": asdict(helped_for), "episodes": episodes}


def _roomy(env: EnvConfig, horizons: dict[str, int], robots: int) -> EnvConfig:
    """The environment with so many robots, and with horizons that leave time to wait."""
    if not {"horizons", "num_envs"} <= set(type(env).model_fields):
        raise ConfigError(f"env: {env.kind} has no options horizons and num_envs, so robots cannot wait in it")
    longer = {task: horizon + WAITING_ROOM for task, horizon in horizons.items()}
    return env.model_copy(update={"horizons": longer, "num_envs": robots, "num_workers": 0})


def _summarize(row: dict[str, Any], alone: dict[tuple[str, int], bool]) -> dict[str, Any]:
    """One line of the table; shares of time, rates with 95 % Wilson intervals."""
    episodes = [e for e in row["episodes"] if not e["lost"]]
    solved, n = sum(e["success"] for e in episodes), len(episodes)
    asked = [e for e in episodes if e["requests"]]
    spent, seconds = row["shares"], row["seconds"]
    return {
        "robots": row["robots"],
        "persons": int(row["helped"]),
        "n": n,
        "lost": len(row["episodes"]) - n,
        "solved": solved,
        "success": solved / max(1, n),
        "interval": list(wilson_interval(solved, n)),
        "person_share": spent["helped"] / seconds,
        "requests_per_episode": sum(e["requests"] for e in episodes) / max(1, n),
        "not_needed": sum(alone[e["task"], e["index"]] for e in asked) / max(1, len(asked)),
        "given_up": sum(e["given_up"] for e in episodes),
        "mean_wait": spent["mean_wait"],
        "max_wait": spent["max_wait"],
        "robots_waiting": spent["waited"] / (seconds * row["robots"]),
        "solved_per_hour": 3600 * solved / seconds,
        "hours": seconds / 3600,
    }


def markdown(result: dict[str, Any]) -> str:
    """The rows as a table."""
    head = (
        *("robots", "persons", "success", "person's share of time", "requests per episode", "of these not needed"),
        *("wait, mean (s)", "wait, longest (s)", "robots' time waiting", "solved per hour"),
    )
    rows = []
    for row in result["rows"]:
        rate = f"{100 * row['success']:.1f} % {Interval(*row['interval']).percent()}, n = {row['n']}"
        asked = (f"{row['requests_per_episode']:.2f}", f"{100 * row['not_needed']:.0f} %")
        share, waiting = (f"{100 * row[name]:.0f} %" for name in ("person_share", "robots_waiting"))
        waits = (f"{row['mean_wait']:.1f}", f"{row['max_wait']:.1f}", waiting)
        share, *waits = (share, *waits) if row["persons"] else "----"
        rows.append((row["robots"], row["persons"], rate, share, *asked, *waits, f"{row['solved_per_hour']:.0f}"))
    return markdown_table(head, rows) + "\n"


def _start(recipe: HubRecipe, folder: Path, _: bool, show: Show) -> list[str]:
    measure_hub(recipe, folder, show)
    return [(folder / TABLE).read_text(), f"written: {folder / RESULTS}"]


RUN = Run("hub measure", HUB, _start)
