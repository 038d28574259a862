"""`vla-rl eval` where nothing answers an action: a policy held against recorded episodes that it has not learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.common.distributed.process_group import current
from vla_rl.common.run_folder import RunFolder, command_line
from vla_rl.config import ConfigError, read_yaml
from vla_rl.evaluation.evaluate import policy_hash
from vla_rl.evaluation.recorded import ActionErrors, action_errors, predict, write_page
from vla_rl.recipe.checks import EVAL, held_out_of
from vla_rl.recipe.recipe import Recipe, check
from vla_rl.training.bc_trainer import open_bc_dataset
from vla_rl.training.config import SFTConfig
from vla_rl.workflows.recipe_parts import build_policy, env_spec, policy_path


def evaluate_recorded(
    recipe: Recipe, folder: Path, name: str, show: Callable[[str], None] = lambda _: None
) -> ActionErrors:
    """Measure the recipe's policy on held-out episodes; writes action_errors/NAME.json and NAME/report.html.

    Raises:
        ConfigError: no episodes are held out, or the policy is known to have learned from them.
        DatasetError: a dataset is missing, damaged or does not fit.
    """
    check(recipe, EVAL)
    if current().size > 1:
        raise ConfigError("eval: action errors are measured in one process; start it without a launcher")
    datasets, fraction = held_out_of(recipe)
    path, spec = policy_path(recipe), env_spec(recipe)
    unseen = _unseen(recipe, path, [one.path for one in datasets], fraction)
    policy = build_policy(recipe, spec)
    sft: SFTConfig = getattr(recipe, "sft", None) or SFTConfig(datasets=tuple(datasets))
    data = open_bc_dataset(sft.model_copy(update={"datasets": tuple(datasets)}), policy, spec)
    if fraction < 1:
        data = data.hold_out(fraction, recipe.seed)[1]
    tracks = predict(
        policy,
        data.parts,
        recipe.eval.episodes_per_task,
        recipe.eval.seed,
        lambda done, total: show(f"episode {done + 1} of {total}"),
    )
    result, tracks = action_errors(
        tracks,
        data.parts[0].action_names,
        name=name,
        policy=f"fresh, seed {recipe.seed}" if path is None else str(path),
        policy_hash="" if path is None else policy_hash(path),
        datasets=tuple(one.path for one in datasets),
        unseen=unseen,
        control_hz=spec.control_hz,
    )
    run = RunFolder(folder)
    file = run.action_errors_of(name)
    result.save(file)
    write_page(result, tracks, file.with_suffix("") / run.report.name, command_line())
    return result


def _unseen(recipe: Recipe, policy: Path | None, paths: Sequence[str], fraction: float) -> str:
    """Why a policy has not learned from what is held out; "" where its folder does not say how it was made.

    Raises:
        ConfigError: its run's own recipe says that it has.
    """
    if policy is None:
        return "The policy is fresh: it has learned nothing."
    file = RunFolder(policy.parent).config
    made: Mapping[str, Any] = read_yaml(file) if file.is_file() else {}
    learned = made.get("sft") or {}
    known = [str(one["path"]) for one in learned.get("datasets") or () if isinstance(one, Mapping) and "path" in one]
    if not known:
        return ""
    if fraction == 1:
        if both := [path for path in paths if _resolved(path) in map(_resolved, known)]:
            raise ConfigError(
                f"eval.datasets: {both[0]} is one of the datasets that {policy} was cloned from ({file}); name "
                "recordings that it has not learned, or clone with sft.validation_fraction and leave eval.datasets out"
            )
        return "None of these datasets is among those that the policy was cloned from."
    own = {
        "seed": (made.get("seed"), recipe.seed),
        "sft.validation_fraction": (learned.get("validation_fraction"), fraction),
        "sft.datasets": ([*map(_resolved, known)], [*map(_resolved, paths)]),
    }
    for option, (then, now) in own.items():
        if then != now:
            raise ConfigError(
                f"{option}: got {now}, and {policy} was cloned with {then} ({file}): the episodes held out here are "
                "not those that were held out there. Use the same, or name others in eval.datasets"
            )
    return "They were held out when the policy was cloned."


def _resolved(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if Path(path).expanduser().is_dir() else path
