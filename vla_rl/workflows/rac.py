"""`run: rac`: rounds of corrections and cloning in a simulator.

Each round runs the newest policy with a scripted person beside it, trains the first policy on its own demonstrations
and on all rounds so far, and evaluates it. The controls get full demonstrations in place of interventions: as many,
from other initial states or from the same ones, with the same share of each batch and as many updates; they are trained
once, after the last round. Killed at any moment, the same command resumes with the first step that is not finished.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from real_robot.operator.recorder import Recording
from real_robot.operator.recording_folder import discard
from real_robot.operator.sim_interventions import OperatorOptions, run_interventions
from vla_rl.common.atomic import write_text_atomic
from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.run_folder import RunFolder
from vla_rl.common.tables import markdown_table
from vla_rl.config import ConfigError, validate
from vla_rl.data.config import DatasetConfig, Frames
from vla_rl.data.selection import frames_in
from vla_rl.data.source import LeRobotSource
from vla_rl.evaluation.compare import compare, format_p
from vla_rl.evaluation.evaluate import build_env, evaluate, policy_hash
from vla_rl.evaluation.results import Evaluation
from vla_rl.evaluation.statistics import Interval, wilson_interval
from vla_rl.interfaces import EnvConfig, Policy
from vla_rl.policies.load import load_policy
from vla_rl.recipe.checks import RAC
from vla_rl.recipe.recipe import Run
from vla_rl.recipe.runs import FIRST_STATE, RacConfig, RacControl, RacRecipe, ScriptedPersonConfig
from vla_rl.types import EpisodeSpec
from vla_rl.workflows.collect import clone, collect
from vla_rl.workflows.recipe_parts import build_policy, limit_threads

# Share of the horizon after which alarm=clock interrupts; earlier, more episodes that were going well are interrupted.
ALARM_FRACTION = 0.8
OPERATOR_STEPS = 48  # Control steps that an episode with a person beside it has beyond its horizon.


def operator_options(
    config: ScriptedPersonConfig, demonstrate: bool = False, budget: int | None = None
) -> OperatorOptions:
    """How the scripted person works; `budget`: interventions that it still gives."""
    return OperatorOptions(
        alarm=config.alarm,
        patience=config.patience,
        alarm_fraction=ALARM_FRACTION,
        demonstrate=demonstrate,
        temperature=config.temperature,
        budget=budget,
    )


def longer(env: EnvConfig, horizons: dict[str, int], steps: int) -> EnvConfig:
    """The environment with horizons that leave the person `steps` control steps.

    Args:
        horizons: the environment's own, task -> control steps.

    Raises:
        ConfigError: it has no such option, or its simulator ends episodes before.
    """
    options, lengths = type(env).model_fields, set(horizons.values())
    if "horizons" in options:
        changes: dict[str, object] = {"horizons": {task: horizon + steps for task, horizon in horizons.items()}}
    elif "horizon" in options and len(lengths) == 1:
        changes = {"horizon": lengths.pop() + steps}
    else:
        raise ConfigError(f"env: {env.kind} has no option horizon or horizons, so there is no room for a person")
    try:
        return validate(type(env), env.model_dump() | changes, "env")
    except ConfigError as error:
        raise ConfigError(
            f"{error} The person has {steps} control steps beyond the policy's horizon; lower that."
        ) from None


RESULTS, TABLE = "rac.json", "rac.md"
Show = Callable[[str], None]


def run_rac(recipe: RacRecipe, folder: Path, show: Show) -> dict[str, Any]:
    """All rounds of the recipe's `rac` section; writes `folder`/rac.json and rac.md, and returns the former.

    Raises:
        ConfigError: a section is missing, or the environment has no horizons to lengthen.
        DatasetError: one of `sft.datasets` is missing or damaged.
    """
    limit_threads(recipe)
    rounds = _Rounds(recipe, recipe.rac, folder, show)  # First: a policy that is missing is said at once.
    if recipe.collect is not None and not Path(recipe.collect.dataset).exists():
        show(f"collecting {recipe.collect.dataset}")
        collect(recipe, recipe.collect, show)
    for dataset in recipe.sft.datasets:
        LeRobotSource(dataset.path)  # A missing one is said before anything is collected with the policy.
    evaluations = {"base": rounds.evaluation("base", _base_policy(recipe), None)}
    rows = [rounds.run(number, evaluations) for number in range(1, recipe.rac.rounds + 1)]
    result = {"rounds": rows, "comparisons": _comparisons(evaluations)}
    write_text_atomic(folder / RESULTS, json.dumps(result, indent=1) + "\n")
    write_text_atomic(folder / TABLE, markdown(result))
    return result


class _Rounds:
    """What the rounds share, and one round at a time."""

    def __init__(self, recipe: RacRecipe, config: RacConfig, folder: Path, show: Show) -> None:
        self.recipe, self.config, self.folder, self.show = recipe, config, folder, show
        self.spec = recipe.acting_env.env_spec()
        self.env = longer(recipe.acting_env, self.spec.horizon, OPERATOR_STEPS)
        self.newest = _base_policy(recipe)

    def run(self, number: int, evaluations: dict[str, Evaluation]) -> dict[str, Any]:
        """Collect, train, evaluate. Returns the round's row; adds to `evaluations`."""
        config, place = self.config, self.folder / f"round_{number}"
        first = FIRST_STATE + (number - 1) * config.episodes_per_task
        specs = [
            EpisodeSpec(t, "train", i) for t in self.spec.tasks for i in range(first, first + config.episodes_per_task)
        ]
        outcomes = self.collect(place / "episodes", specs, number, demonstrate=False)
        row = _summarize(number, outcomes)
        self.show(f"round {number}: {row['interventions']} interventions in {row['episodes']} episodes")
        arms: list[tuple[str, str, Frames]] = [("rac", "episodes", config.frames)]
        for control in config.controls:
            dataset = f"demonstrations_{control}"
            if row["interventions"]:
                self.collect(place / dataset, self.control_states(control, outcomes, number), number, demonstrate=True)
            if number == config.rounds:  # Before that nothing hangs on it.
                arms.append((f"control_{control}", dataset, "all"))
        for arm, dataset, frames in arms:
            recordings = [self.folder / f"round_{n}" / dataset for n in range(1, number + 1)]
            recordings = [r for r in recordings if r.exists()]
            if arm != "rac" and not recordings:
                continue  # There was no intervention in any round.
            path = self.train(place / arm, recordings, frames)
            name = f"{arm}_{number}"
            evaluations[name] = self.evaluation(name, self.load(path), path)
            row[f"{arm}_success"] = _rate(evaluations[name])
            if arm == "rac":
                self.newest = self.load(path)
        return row

    def control_states(self, control: RacControl, outcomes: Sequence[dict], number: int) -> list[EpisodeSpec]:
        """Where a control's demonstrations of a round begin: as many of each task as there were interventions."""
        helped = [(o["task"], o["index"]) for o in outcomes if o["intervened"] and not o["lost"]]
        if control == "new_states":  # Beyond the states of all rounds.
            config = self.config
            first = FIRST_STATE + (config.rounds + number - 1) * config.episodes_per_task
            counts = Counter(task for task, _ in helped)
            helped = [(task, first + i) for task, count in counts.items() for i in range(count)]
        return [EpisodeSpec(task, "train", index) for task, index in helped]

    def load(self, path: Path) -> Policy:
        return load_policy(path, resolve_device(self.recipe.device))

    def collect(self, dataset: Path, specs: Sequence[EpisodeSpec], number: int, demonstrate: bool) -> list[dict]:
        """Run and record episodes with the scripted person; their outcomes, from the file where it is done already."""
        file = dataset.with_name(f"{dataset.name}.json")
        if dataset.exists() and file.exists():
            return json.loads(file.read_text())

        options = operator_options(self.config.person, demonstrate)
        discard(dataset)  # What a killed call has left; episodes depend on each other's sampling.
        dataset.parent.mkdir(parents=True, exist_ok=True)
        placed = self.recipe.rollout.placed
        with closing(build_env(placed(self.env))) as env, Recording(dataset, env.spec.control_hz, env.spec.kind) as to:
            outcomes = run_interventions(
                None if demonstrate else self.newest,
                env,
                specs,
                to,
                horizons=self.spec.horizon,
                options=options,
                policy_version="" if demonstrate else f"round {number - 1}",
                round=number,
                seed=self.recipe.seed + number,
            )
            rows = [asdict(o) for o in outcomes]
            write_text_atomic(file, json.dumps(rows, indent=1) + "\n")
        return rows

    def train(self, folder: Path, recordings: Sequence[Path], frames: Frames) -> Path:
        """The first policy, trained on its demonstrations and the recordings. Returns the policy's folder."""
        if (policy := RunFolder(folder).policy).exists():
            return policy
        sft = self.recipe.sft
        usable = [r for r in recordings if _has_frames(r, frames)]
        if not usable:
            raise ConfigError("rac: no frame to learn from in any round; raise rac.episodes_per_task")
        share = self.config.weight / len(usable)
        added = tuple(DatasetConfig(path=str(r), weight=share, frames=frames) for r in usable)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = self.recipe.model_copy(update={"sft": sft.model_copy(update={"datasets": (*sft.datasets, *added)})})
        return Path(clone(recipe, folder)["policy"])

    def evaluation(self, name: str, policy: Policy, path: Path | None) -> Evaluation:
        """The evaluation of a policy, from its file where it is done already with these weights."""
        file = RunFolder(self.folder).evaluation(name)
        if file.exists():
            found = Evaluation.load(file)
            if path is None or found.meta.policy_hash == policy_hash(path):
                return found
        self.show(f"evaluating {name}")
        config = self.recipe.eval.model_copy(update={"videos": 0})
        env = self.recipe.rollout.placed(self.recipe.acting_env)
        return evaluate(
            policy, env, config, name=name, policy_path=path, on_result=lambda found: found.save(file), file=file
        )


def _base_policy(recipe: RacRecipe) -> Policy:
    return build_policy(recipe, recipe.acting_env.env_spec())


def _has_frames(dataset: Path, frames: Frames) -> bool:
    """Whether a recording holds a frame to learn from: with few episodes and a weak policy it may not."""
    return frames_in(dataset, frames) > 0


def _rate(evaluation: Evaluation) -> dict[str, float]:
    rate = evaluation.rate(evaluation.modes[0])
    return {"rate": rate.rate, "low": rate.interval.low, "high": rate.interval.high, "n": rate.num_episodes}


def _summarize(number: int, outcomes: Sequence[dict]) -> dict[str, Any]:
    """A round's row: counts, and shares with 95 % Wilson intervals."""
    counted = [o for o in outcomes if not o["lost"]]
    interventions = sum(o["intervened"] for o in counted)
    alone = sum(o["success"] and not o["intervened"] for o in counted)
    recovery, correction = (sum(o[f"{name}_frames"] for o in counted) for name in ("recovery", "correction"))
    return {
        "round": number,
        "episodes": len(counted),
        "lost": len(outcomes) - len(counted),
        "interventions": interventions,
        "interventions_per_episode": interventions / max(1, len(counted)),
        "interventions_interval": list(wilson_interval(interventions, len(counted))),
        "beyond_help": sum(o["given_up"] and not o["intervened"] for o in counted),
        "solved_alone": alone,
        "solved": sum(o["success"] for o in counted),
        "recoveries": sum(o["recoveries"] for o in counted),
        "recovery_frames": recovery,
        "correction_frames": correction,
        "corrections_per_recovery_frame": correction / recovery if recovery else None,
    }


def _comparisons(evaluations: dict[str, Evaluation]) -> list[dict[str, Any]]:
    """Paired on equal initial states: each arm's last round against the base, and RaC against the controls."""
    last = {name.rpartition("_")[0]: name for name in evaluations if name != "base"}
    controls = [name for arm, name in last.items() if arm != "rac"]
    pairs = [("base", name) for name in last.values()] + [(name, last["rac"]) for name in controls]
    rows = []
    for a, b in pairs:
        comparison = compare(evaluations[a], evaluations[b])
        for mode in comparison.modes:
            rows.append({"a": a, "b": b} | comparison.result(mode).model_dump(mode="json"))
    return rows


def markdown(result: dict[str, Any]) -> str:
    """The rounds and the comparisons as tables."""
    arms = {"rac": "RaC"} | {f"control_{c}": f"control, {c.replace('_', ' ')}" for c in get_args(RacControl)}
    head = ("round", "interventions per episode", "beyond help", "solved alone", "recoveries", "recovery : correction")
    rounds = []
    for row in result["rounds"]:
        low, high = row["interventions_interval"]
        ratio = row["corrections_per_recovery_frame"]
        rounds.append(
            (
                row["round"],
                f"{row['interventions_per_episode']:.3f} [{low:.3f}, {high:.3f}], n = {row['episodes']}",
                *(row[name] for name in ("beyond_help", "solved_alone", "recoveries")),
                "-" if ratio is None else f"1 : {ratio:.2f}",
                *(_percent(row.get(f"{arm}_success")) for arm in arms),
            )
        )
    compared = [
        (
            *(row[name] for name in ("a", "b", "mode", "num_pairs")),
            f"{100 * row['rate_a']:.1f} -> {100 * row['rate_b']:.1f}",
            f"{100 * row['difference']:+.1f} {Interval(*row['bootstrap']).percent('+')}",
            format_p(row["p_value_by_state"]),
        )
        for row in result["comparisons"]
    ]
    by_state = any(row["num_states"] < row["num_pairs"] for row in result["comparisons"])
    p_name = "p by state" if by_state else "McNemar p"
    table = markdown_table(("from", "to", "mode", "n", "success", "difference, points", p_name), compared)
    return f"{markdown_table((*head, *arms.values()), rounds)}\n\n{table}\n"


def _percent(rate: dict[str, float] | None) -> str:
    if rate is None:
        return "-"
    return f"{100 * rate['rate']:.1f} {Interval(rate['low'], rate['high']).percent()}, n = {rate['n']}"


def _start(recipe: RacRecipe, folder: Path, _: bool, show: Show) -> list[str]:
    run_rac(recipe, folder, show)
    return [(folder / TABLE).read_text(), f"written: {folder / RESULTS}"]


RUN = Run("train", RAC, _start, datasets=lambda _: ("sft.datasets",))
