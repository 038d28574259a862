"""What `vla-rl sft`, `collect`, `eval` and `compare` do: build a recipe's parts, show progress, write results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import rich

from vla_rl.common.progress import episode_progress
from vla_rl.config import ConfigError
from vla_rl.recipe.recipe import Recipe, resolve_device

if TYPE_CHECKING:
    from vla_rl.evaluation.compare import SequentialComparison, SequentialConfig
    from vla_rl.evaluation.results import Evaluation
    from vla_rl.interfaces import Policy
    from vla_rl.recipe.collect_config import CollectConfig
    from vla_rl.types import EnvSpec
    from world_model.fit.config import FitConfig


def build_policy(recipe: Recipe, spec: EnvSpec) -> Policy:
    """The recipe's policy for an environment of this spec, on the recipe's device.

    Raises:
        ConfigError: the recipe's policy class builds nothing, or does not fit the environment.
    """
    limit_threads(recipe)
    policy: Any = recipe.policy
    return policy.build(spec, device=resolve_device(recipe.device), seed=recipe.seed)


def limit_threads(recipe: Recipe) -> None:
    """torch's threads, as the recipe says."""
    if recipe.num_threads:
        import torch

        torch.set_num_threads(recipe.num_threads)


def sft(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Behavior cloning of the recipe's policy on its datasets; goes on from the folder's last checkpoint.

    Raises:
        ConfigError: the recipe has no sft section.
    """
    from vla_rl.distributed.process_group import current
    from vla_rl.training.checkpoint import checkpoint_step, latest_checkpoint
    from vla_rl.training.metrics import METRICS_FILE, MetricLogger, SilentLogger
    from vla_rl.training.sft import train_bc

    if recipe.sft is None:
        raise ConfigError("sft: the recipe has no sft section. Give at least sft.datasets=FOLDER (`vla-rl collect`).")
    spec = _env_spec(recipe)
    policy = build_policy(recipe, spec)
    checkpoint = latest_checkpoint(folder / "checkpoints")
    done = checkpoint_step(checkpoint) if checkpoint else 0 if (folder / METRICS_FILE).exists() else None
    run_config = recipe.model_dump(mode="json")
    if current().is_main:
        logger = MetricLogger(folder, recipe.log, resume_step=done, run_config=run_config)
    else:
        logger = SilentLogger()
    with logger:
        return train_bc(policy, recipe.sft, folder, logger.log, recipe.seed, env_spec=spec)


def collect(recipe: Recipe, config: CollectConfig, show: Callable[[str], None]) -> dict[str, Any]:
    """Write the dataset that `config` describes: demonstrations of the expert, or the recipe's policy at work."""
    from vla_rl.recipe.recipe import is_imagined
    from vla_rl.workflows.record_dataset import collect_dataset, finished_dataset

    if config.imagined and not is_imagined(recipe.env):
        raise ConfigError(
            "collect.imagined: the recipe's env is no world model; see configs/tabletop_imagination.yaml for one"
        )
    env_config = recipe.env if config.imagined else recipe.acting_env
    policy, version = None, "expert"
    if config.source == "policy":
        version = _policy_version(recipe)
        if (finished := finished_dataset(env_config, config, version, recipe.seed)) is not None:
            return finished
        policy = build_policy(recipe, env_config.env_spec())  # type: ignore[attr-defined]

    def on_progress(summary: dict[str, Any]) -> None:
        attempts = summary["attempts"]
        num_successes = sum(rate * attempts[task] for task, rate in summary["success_rate"].items())
        success = 100 * num_successes / max(1, sum(attempts.values()))
        show(
            f"{summary['episodes']} of {summary['episodes_wanted']} episodes, {success:.0f} % success, "
            f"{summary['frames_per_second']:.0f} frames/s"
        )

    return collect_dataset(
        env_config, config, policy=policy, policy_version=version, seed=recipe.seed, on_progress=on_progress
    )


def evaluate(recipe: Recipe, folder: Path, name: str = "policy") -> Evaluation:
    """Evaluate the recipe's policy; writes evaluations/NAME.json and .png, videos/ and report.html."""
    from vla_rl.evaluation.evaluate import evaluate as run_evaluation
    from vla_rl.report.report import write_report

    policy = build_policy(recipe, _env_spec(recipe))
    path = _policy_path(recipe)
    with episode_progress(recipe.eval.num_episodes(_env_spec(recipe))) as on_episode:
        evaluation = run_evaluation(
            policy,
            recipe.acting_env,
            recipe.eval,
            name=name,
            policy_path=path,
            video_folder=folder / "videos",
            on_episode=on_episode,
        )
    evaluation.save(folder / "evaluations" / f"{name}.json")
    evaluation.plot(folder / "evaluations" / f"{name}.png")
    write_report(folder, after=name)
    return evaluation


def find_evaluation(path: Path, preferred: str) -> Path:
    """An evaluation's JSON file: the path itself, or in a run's folder the `preferred` one, else the only one.

    Raises:
        ConfigError: no such path, or a folder without evaluations or with several others.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder. Give an evaluation's JSON file, or a run's folder.")
    found = sorted((path / "evaluations").glob("*.json")) or sorted(path.glob("*.json"))
    for file in found:
        if file.stem == preferred or len(found) == 1:
            return file
    names = ", ".join(file.name for file in found) or "none"
    raise ConfigError(f"{path}: which evaluation? It has: {names}. Name the file itself.")


def compare_policies(recipe: Recipe, a: str, b: str, config: SequentialConfig) -> SequentialComparison:
    """Run two saved policies in the recipe's environment until the difference is clear."""
    from rich.console import Console

    from vla_rl.evaluation.compare import compare_sequential
    from vla_rl.evaluation.evaluate import build_env
    from vla_rl.policies.base import load_policy

    device = resolve_device(recipe.device)
    first, second = load_policy(a, device), load_policy(b, device)
    with closing(build_env(recipe.acting_env)) as env, Console(stderr=True).status("comparing") as status:
        return compare_sequential(
            first, second, env, config, lambda pairs, p: status.update(f"{pairs} pairs, anytime-valid p {p:.3g}")
        )


def fit_world_model(
    recipe: Recipe,
    folder: Path,
    datasets: Sequence[Path] = (),
    start_from: str | None = None,
    weights: Sequence[float] | None = None,
    holdout_from: Literal["all", "last"] | None = None,
) -> Path:
    """Fit the recipe's world model, first collecting what `datasets` lacks; goes on from what the folder holds.

    Args:
        datasets: to learn from beside `world_model.datasets`. start_from, holdout_from: in place of
            `world_model`'s. weights: how much each of `datasets` counts, relative to 1; None: all 1.

    Returns:
        the world model's folder, `folder`/world_model.
    """
    from vla_rl.training.metrics import METRICS_FILE, MetricLogger
    from world_model.fit.fit import fit, updates_kept

    limit_threads(recipe)
    section = world_model_section(recipe)
    if (finished := folder / "world_model").is_dir():
        return finished
    for config in recipe.datasets:
        if not Path(config.dataset).is_dir():
            collect(recipe, config, rich.print)
    values = section.model_dump()
    more = [{"path": str(p), "weight": w} for p, w in zip(datasets, weights or [1.0] * len(datasets), strict=True)]
    changes: dict[str, Any] = {"datasets": [*values["datasets"], *more]}
    changes |= {"start_from": start_from} if start_from else {}
    changes |= {"holdout_from": holdout_from} if holdout_from else {}
    section = type(section).model_validate(values | changes)
    resume = updates_kept(section, folder) if (folder / METRICS_FILE).exists() else None
    with MetricLogger(folder, recipe.log, resume_step=resume, run_config=recipe.model_dump(mode="json")) as logger:
        device = resolve_device(recipe.device)
        return fit(section, _env_spec(recipe), folder, seed=recipe.seed, device=device, on_metrics=logger.log)


def measure_world_model(
    recipe: Recipe,
    world_model: Path,
    held_out: Sequence[Path],
    policies: Sequence[str] = (),
    train: Sequence[Path] = (),
    styles: Mapping[str, Path] | None = None,
    folder: Path | None = None,
) -> Path:
    """Measure how far a world model can be trusted; writes trust.json and trust.html into its folder, returns the page.

    Args:
        held_out: datasets of real episodes that it was not fitted on.
        policies: to compare real with imagined success; their real and imagined episodes are run here.
        train: datasets of the same robot for the inverse dynamics, such as those that it was fitted on.
        styles: name -> dataset of episodes with another look (lighting, colors, textures).
        folder: for the report, in place of the world model's.
    """
    from vla_rl.workflows.real_and_imagined import success_in_both
    from world_model.env.config import WorldModelEnvConfig
    from world_model.trust.evaluate import measure_trust

    limit_threads(recipe)
    section = world_model_section(recipe)
    env = recipe.env if isinstance(recipe.env, WorldModelEnvConfig) else None
    outcomes = [success_in_both(recipe, world_model, policy, section.compare_episodes) for policy in policies]
    chunk_size = build_policy(recipe, _env_spec(recipe)).chunk_size
    return measure_trust(
        section.measure,
        world_model,
        held_out,
        outcomes,
        train=train,
        styles=styles,
        imagination=env and env.imagination,
        trust=env and env.trust,
        chunk_size=chunk_size,
        device=resolve_device(recipe.device),
        show=rich.print,
        folder=folder,
    )


def mine_keyframes(recipe: Recipe, world_model: Path, datasets: Sequence[Path], file: Path) -> Path:
    """Mine datasets of the policy's real episodes for moments to start from; writes and returns the file."""
    from world_model.data.keyframes import mine_keyframes as mine

    limit_threads(recipe)
    section = world_model_section(recipe)
    mine(world_model, datasets, section.keyframes, resolve_device(recipe.device)).save(file)
    return file


def show_styles(recipe: Recipe, dataset: Path, file: Path, num_episodes: int, num_styles: int) -> list[str]:
    """Write a picture of a dataset's episodes in the recipe's styles; returns the instructions of those shown."""
    from world_model.data.style_sheet import write_style_sheet

    section = world_model_section(recipe)
    options = {"seed": recipe.seed, "num_episodes": num_episodes, "num_styles": num_styles}
    return write_style_sheet(section.style, section.dataset(dataset), _env_spec(recipe), file, **options)


def world_model_section(recipe: Recipe) -> FitConfig:
    """Return the recipe's `world_model` section.

    Raises:
        ConfigError: there is none, or its class is not one for `vla-rl world-model fit`.
    """
    from world_model.fit.config import FitConfig

    section = recipe.world_model
    if section is None:
        raise ConfigError("world_model: the recipe has none; see configs/tabletop_world_model.yaml for one")
    if not isinstance(section, FitConfig):
        raise ConfigError(f"world_model: got a {type(section).__name__}, must extend world_model.fit.config:FitConfig")
    return section


def _env_spec(recipe: Recipe) -> EnvSpec:
    env: Any = recipe.acting_env
    return env.env_spec()


def _policy_path(recipe: Recipe) -> Path | None:
    from vla_rl.policies.base import resolve_path

    path = getattr(recipe.policy, "path", None)
    return None if path is None else resolve_path(path)


def _policy_version(recipe: Recipe) -> str:
    """What a dataset says of who acted: the policy's path and the hash of its weights."""
    from vla_rl.evaluation.evaluate import policy_hash

    path = _policy_path(recipe)
    return f"fresh, seed {recipe.seed}" if path is None else f"{path.name} {policy_hash(path)[:12]}"
