"""`vla-rl world-model`: fit one, measure how far it can be trusted and what its data hold, rank policies by it.

Ranking of policies by their success in imagination, and its reliability.

    vla-rl world-model rank tabletop_imagination runs/fit/world_model --policy A --policy B ... --output ranking.json

Each policy acts from the same initial states in the world model and in the simulator. Beside the imagined success
stands what the same success head says of the real frames: where that is wrong too, the head is at fault, not the
dynamics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import rich

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import Changed, RunFolder
from vla_rl.config import ConfigError
from vla_rl.data.config import DatasetConfig
from vla_rl.data.dataset import read_notes
from vla_rl.data.keyframes import split_start
from vla_rl.evaluation.evaluate import EvalConfig, build_env, episode_specs, evaluate
from vla_rl.evaluation.executed import outcomes_of_actions
from vla_rl.evaluation.results import EpisodeRecord
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.recipe.checks import FIT
from vla_rl.recipe.recipe import Recipe, Run
from vla_rl.recipe.runs import FitRecipe
from vla_rl.rollout import runner
from vla_rl.training.metrics import MetricLogger
from vla_rl.types import Episode, EpisodeSpec
from vla_rl.workflows.collect import collect
from vla_rl.workflows.recipe_parts import (
    build_policy,
    env_spec,
    imagining,
    limit_threads,
    policy_version,
    world_model_section,
)
from world_model.data.episodes import open_episodes
from world_model.data.keyframes import mine_keyframes as mine
from world_model.data.styled import write_style_sheet
from world_model.env.config import WorldModelEnvConfig
from world_model.fit.fit import fit
from world_model.fit.stage import updates_kept
from world_model.trust.evaluate import PolicySuccess, Ranking, judge_episodes, measure_trust, rank
from world_model.trust.types import PolicyOutcomes

DATASETS_OF_A_FIT = tuple(f"world_model.{name}" for name in ("datasets", "success_datasets", "calibrate_on"))
# What only a fit's threshold, chosen last, depends on: free in a fit that is resumed, as is what is collected for it
# (`datasets`: what is there was collected as the recipe says, or is refused); but see `check_threshold`.
CHOOSE_THE_THRESHOLD = tuple(f"world_model.{name}" for name in ("calibrate_on", "max_false_success", "min_failures"))


def fit_world_model(
    recipe: FitRecipe,
    folder: Path,
    datasets: Sequence[Path] = (),
    start_from: str | None = None,
    weights: Sequence[float] | None = None,
    holdout_from: Literal["all", "last"] | None = None,
    calibrate_on: Sequence[Path] = (),
    needs_threshold: bool | None = None,
) -> Path:
    """Fit the recipe's world model, collecting first what it learns from; goes on from what the folder holds.

    Args:
        datasets: to learn from beside `world_model.datasets`. start_from, holdout_from: in place of
            `world_model`'s. weights: how much each of `datasets` counts, relative to 1; None: all 1.
        calibrate_on: datasets for the threshold, in place of held-out episodes of `datasets`.
        needs_threshold: see `world_model.fit.fit`; None: where RL is paid by it.

    Returns:
        the world model's folder, `folder`/world_model.
    """
    limit_threads(recipe)
    section = world_model_section(recipe)
    run = RunFolder(folder)
    if run.world_model.is_dir():
        return run.world_model
    used = {Path(one.path) for name in DATASETS_OF_A_FIT for one in getattr(section, name.partition(".")[2])}
    for config in recipe.datasets:
        if Path(config.dataset) in used and not Path(config.dataset).is_dir():
            collect(recipe, config, rich.print)
    values = section.model_dump()
    more = [{"path": str(p), "weight": w} for p, w in zip(datasets, weights or [1.0] * len(datasets), strict=True)]
    changes: dict[str, Any] = {"datasets": [*values["datasets"], *more]}
    changes |= {"start_from": start_from} if start_from else {}
    changes |= {"holdout_from": holdout_from} if holdout_from else {}
    changes |= {"calibrate_on": [str(path) for path in calibrate_on], "cross_fit": 0} if calibrate_on else {}
    paid = getattr(getattr(recipe.env, "imagination", None), "reward", "success")
    section = type(section).model_validate(values | changes)
    resume = updates_kept(section, folder) if run.metrics.exists() else None
    with MetricLogger(folder, recipe.log, resume_step=resume, run_config=recipe.model_dump(mode="json")) as logger:
        device = resolve_device(recipe.device)
        return fit(
            section,
            env_spec(recipe),
            folder,
            seed=recipe.seed,
            device=device,
            on_metrics=logger.log,
            needs_threshold=paid == "success" if needs_threshold is None else needs_threshold,
            show=recipe.log.console,
            env=recipe.acting_env,
        )


def check_threshold(recipe: FitRecipe, run: RunFolder, changed: Changed) -> None:
    """Check that a resumed fit can choose its threshold as the recipe says now.

    Args:
        recipe: as it is now. changed: as `run_folder.differences` gives it.

    Raises:
        ConfigError: it is finished, and the threshold was chosen otherwise; or `world_model.calibrate_on` began or
            ceased to be given after the first checkpoint, so that the stages have learned from what is to choose it.
    """
    if run.world_model.is_dir() and (late := sorted(changed.keys() & set(CHOOSE_THE_THRESHOLD))):
        there, here = changed[late[0]]
        raise ConfigError(
            f"{late[0]}: there {there!r}, here {here!r}, but {run.world_model} is finished, and its threshold chosen. "
            f"Choose another in another --output, with world_model.start_from={run.world_model} and steps=0 in the "
            "stages"
        )
    there, here = changed.get("world_model.calibrate_on", ((), ()))
    if bool(there) != bool(here) and updates_kept(world_model_section(recipe), run.path):
        kept = "hold some of world_model.datasets out" if here else "learn from all of world_model.datasets"
        raise ConfigError(
            f"world_model.calibrate_on: there {there!r}, here {here!r}, but the stages so far {kept}; keep it "
            f"{'empty' if here else 'given (it may name other episodes)'}, or fit anew in another --output"
        )


def _begin(recipe: FitRecipe, folder: Path, _: bool, __: Callable[[str], None]) -> list[str]:
    fitted = fit_world_model(recipe, folder)
    words = ("eval", RunFolder(folder).config, fitted, "--held-out", "EPISODES")
    return [f"world model: {fitted}", next_command("world-model", *words, what="on episodes that it has not seen")]


RUN = Run(
    "world-model fit",
    FIT,
    _begin,
    datasets=lambda _: DATASETS_OF_A_FIT,
    free=("datasets", *CHOOSE_THE_THRESHOLD),
    check_changes=check_threshold,
)


NEVER = 1 - 1e-7  # As `stop_probability`: no episode ends by it.


def measure_world_model(
    recipe: FitRecipe,
    world_model: Path,
    held_out: Sequence[Path],
    policies: Sequence[str] = (),
    train: Sequence[Path] = (),
    styles: Mapping[str, Path] | None = None,
    folder: Path | None = None,
    replays: bool = False,
) -> Path:
    """Measure how far a world model can be trusted; writes trust.json and trust.html into its folder, returns the page.

    Args:
        held_out: datasets of real episodes that it was not fitted on.
        policies: to compare real with imagined success; their real and imagined episodes are run here.
        train: datasets of the same robot for the inverse dynamics, such as those that it was fitted on.
        styles: name -> dataset of episodes with another look (lighting, colors, textures).
        folder: for the report, in place of the world model's.
        replays: execute what the policy does in imagination in the simulator of `env.first_frames` as well.
    """
    limit_threads(recipe)
    section = world_model_section(recipe)
    env = recipe.env if isinstance(recipe.env, WorldModelEnvConfig) else None
    outcomes = [success_in_both(recipe, world_model, policy, section.compare_episodes) for policy in policies]
    chunk_size = build_policy(recipe, env_spec(recipe)).chunk_size
    if env is not None:
        rich.print("the policy acts in imagination, from the held-out episodes' initial states")
    return measure_trust(
        section.measure,
        world_model,
        held_out,
        outcomes,
        acting=env and success_as_recorded(recipe, world_model, held_out, replays),
        train=train,
        styles=styles,
        imagination=env and env.imagination,
        trust=env and env.trust,
        chunk_size=chunk_size,
        device=resolve_device(recipe.device),
        show=rich.print,
        folder=folder,
    )


def mine_keyframes(recipe: FitRecipe, world_model: Path, datasets: Sequence[Path], file: Path) -> Path:
    """Mine datasets of the policy's real episodes for moments to start from; writes and returns the file."""
    limit_threads(recipe)
    section = world_model_section(recipe)
    mine(world_model, datasets, section.keyframes, resolve_device(recipe.device)).save(file)
    return file


def show_styles(recipe: FitRecipe, dataset: Path, file: Path, num_episodes: int, num_styles: int) -> list[str]:
    """Write a picture of a dataset's episodes in the recipe's styles; returns the instructions of those shown."""
    section = world_model_section(recipe)
    options = {"seed": recipe.seed, "num_episodes": num_episodes, "num_styles": num_styles}
    return write_style_sheet(section.style, section.dataset(dataset), env_spec(recipe), file, **options)


def imagined_env(recipe: Recipe, world_model: Path) -> WorldModelEnvConfig:
    """Return the recipe's environment with this world model in it, whatever its trust: not limited by its horizon."""
    own = imagining(recipe)
    env = type(own).model_validate(own.model_dump() | {"path": str(world_model), "trust": {"ignore": True}})
    # Success is asked, not reward, nor what a branch is worth at its end; and trust may be measured only after. A
    # probable success ends nothing: actions that are cut short lead nowhere.
    changes: dict[str, Any] = {"action_penalty": 0.0, "branch_frames": None, "stop_probability": NEVER}
    if env.imagination.horizon is None:
        changes["horizon"] = max(env.env_spec().horizon.values())
    return env.model_copy(update={"imagination": env.imagination.model_copy(update=changes)})


def success_in_both(recipe: Recipe, world_model: Path, policy: str, episodes_per_task: int) -> PolicySuccess:
    """Return a policy's name, initial states, and success from each in the real environment and in imagination.

    Initial states are the `validation` split's, each sampled from once; otherwise as the recipe's `eval` says.
    """
    loaded = load_policy(policy, resolve_device(recipe.device))
    wanted = recipe.eval.model_copy(
        update={"split": "validation", "temperatures": (1.0,), "samples_per_state": 1, "videos": 0}
        | {"episodes_per_task": episodes_per_task}
    )
    found = []
    for env_config in (recipe.rollout.placed(recipe.acting_env), imagined_env(recipe, world_model)):
        with closing(build_env(env_config)) as env:
            found.append(evaluate(loaded, env, wanted, name=policy).episodes)
    pairs = paired(*found)
    return policy, [start for start, _, _ in pairs], [r.success for _, r, _ in pairs], [i.success for _, _, i in pairs]


def success_as_recorded(
    recipe: Recipe, world_model: Path, datasets: Sequence[Path], replays: bool = False
) -> PolicyOutcomes | None:
    """Return the recipe's policy's success in its recorded real episodes, and in imagination from where they began.

    Each initial state is begun from as often, at the same temperature. None where no dataset is of this policy's own
    episodes, all from `train` states of the environment.

    Args:
        replays: also what the imagined episodes' actions lead to in the simulator of their first frames, if it is one.
    """
    name, env_config = policy_version(recipe), imagined_env(recipe, world_model)
    spec, states, real, temperatures = env_config.env_spec(), [], [], set()
    for path in datasets:
        notes = read_notes(path)
        if notes.get("policy_version") != name:
            continue
        dataset = open_episodes(DatasetConfig(path=str(path)), spec)
        temperatures.add(float(notes["collect"]["temperature"]))
        ends = dataset.starts + dataset.lengths - 1
        for episode in dataset.episodes.tolist():
            states.append(split_start(dataset.initial_states[episode]))
            real.append(bool(dataset.succeeded[ends[episode]]))
    if len(temperatures) != 1 or any(task not in spec.tasks or split != "train" for task, split, _ in states):
        return None
    specs = [EpisodeSpec(task, "train", index) for task, _, index in states]
    policy = build_policy(recipe, env_spec(recipe))
    with closing(build_env(env_config)) as env:
        imagined = runner.collect(policy, env, specs, temperature=temperatures.pop(), seed=recipe.seed)
    real = [success for success, episode in zip(real, imagined, strict=True) if not episode.lost]
    imagined = [episode for episode in imagined if not episode.lost]
    starts, success = [_start(episode) for episode in imagined], np.array([episode.success for episode in imagined])
    worth = np.array([episode.total_reward for episode in imagined])
    caused = None
    if replays and env_config.first_frames is not None and env_config.first_frames.is_simulator:
        with closing(build_env(recipe.rollout.placed(env_config.first_frames))) as simulator:
            caused = np.array([bool(found) for found in outcomes_of_actions(simulator, imagined)])  # Broken: failed.
    return PolicyOutcomes(name, starts, np.array(real), success, worth, caused)


def paired[E: (Episode, EpisodeRecord)](real: Sequence[E], imagined: Sequence[E]) -> list[tuple[str, E, E]]:
    """Return (initial state, real episode, imagined episode) of each state from which neither was lost."""
    others = {_start(episode): episode for episode in imagined if not episode.lost}
    starts = [(_start(episode), episode) for episode in real if not episode.lost]
    return [(start, episode, others[start]) for start, episode in starts if start in others]


def _start(episode: Episode | EpisodeRecord) -> str:
    spec = episode.spec if isinstance(episode, Episode) else episode
    return f"{spec.task}/{spec.split}/{spec.index}"


WANTED = 6  # Policies below which a correlation says little.


def rank_policies(
    recipe: FitRecipe, world_model: Path, policies: Sequence[str], file: Path, show: Callable[[str], None] = print
) -> Ranking:
    """Run every policy in both, and write the ranking; returns it (see `world_model.trust.evaluate`).

    Initial states are the `validation` split's, `world_model.compare_episodes` per task, each sampled from once.

    Raises:
        ConfigError: fewer than two policies, or one given twice; the recipe has no world_model section.
    """
    if len(policies) < 2 or len(set(policies)) < len(policies):
        raise ConfigError(
            f"--policy: got {', '.join(policies) or 'none'}; ranking needs at least two, each once ({WANTED} or more "
            "to make the correlation worth something)"
        )
    section = world_model_section(recipe)
    limit_threads(recipe)
    device = resolve_device(recipe.device)
    env_config = imagined_env(recipe, world_model)
    outcomes = []
    with (
        closing(build_env(recipe.rollout.placed(recipe.acting_env), record_frames=True)) as real,
        closing(build_env(env_config)) as imagined,
    ):
        for path in policies:
            show(f"{path}: in the simulator and in imagination")
            policy = load_policy(path, device)
            kept = paired(*(_run(policy, env, section.compare_episodes) for env in (real, imagined)))
            judged = judge_episodes(world_model, [r for _, r, _ in kept], env_config.imagination, device)
            success = [r.success for _, r, _ in kept], [i.success for _, _, i in kept]
            outcomes.append((path, [start for start, _, _ in kept], *success, judged))
    ranking = rank(outcomes)
    ranking.save(file)
    return ranking


def _run(policy: Policy, env: VecEnv, num_states: int) -> list[Episode]:
    wanted = EvalConfig(split="validation", episodes_per_task=num_states, temperatures=(1.0,), videos=0)
    episodes, _ = runner.run_episodes(
        policy,
        env,
        episode_specs(env.spec, wanted),
        temperature=1.0,
        seed=wanted.seed,
    )
    return episodes
