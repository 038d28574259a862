"""`vla-rl plan`: costs, simulated placements, a table, JSON and a page; episodes that say what RL would learn from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from vla_rl.common.progress import episode_progress
from vla_rl.common.run_folder import RunFolder
from vla_rl.config import ConfigError
from vla_rl.evaluation.evaluate import EvalConfig, evaluate
from vla_rl.evaluation.results import Evaluation
from vla_rl.policies.openvla.options import PRESETS, OpenVLAOptions
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.training.memory import counted_device, sizes_of, skeleton
from vla_rl.training.published_sizes import OPENVLA_7B
from vla_rl.workflows.gpu_bench.large_policy import AUTOREGRESSIVE, PARALLEL
from vla_rl.workflows.gpu_bench.roofline import H200, of_act, of_update
from vla_rl.workflows.plan.costs import Costs, Curve, from_bench, from_run
from vla_rl.workflows.plan.measure import measure, measure_env
from vla_rl.workflows.plan.plan import Machines, Plan, make_plan, memory_text, show, work_of, write_page
from vla_rl.workflows.recipe_parts import build_policy, env_spec

COSTS_FILE, PLAN_FILE, PAGE_FILE = "costs.json", "plan.json", "plan.html"
OF_POLICY, OF_ENV = ("act", "forward", "update"), ("step", "reset", "chunks")
# Where no source knows: nothing of an update but its passes takes time, every decision is learned from.
DEFAULTS: dict[str, Any] = {"optimizer": 0.0, "other": 0.0, "active": 1.0, "trained_bytes": 0.0}


def run(
    recipe: TrainRecipe,
    machines: Machines,
    sources: Sequence[Path],
    *,
    roofline: bool,
    seconds: float,
    output: Path | None,
    as_json: bool,
    say: Callable[[str], None],
) -> Plan:
    """Plan a recipe's run on these machines.

    Args:
        sources: runs' folders, GPU benchmarks' folders, files or folders of costs; of a stage the last one counts.
        roofline: compute what a policy of 7 billion parameters costs on an H200, where no source says it.
        seconds: about how long what no source says is measured here.
        output: a folder for costs.json, plan.json and plan.html; None: nothing is written.
    """
    costs = gather(recipe, sources, roofline=roofline, seconds=seconds, say=say)
    plan = make_plan(costs, work_of(recipe), machines)
    plan = replace(plan, memory=memory_text(recipe, plan.best.placement))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        costs.save(output / COSTS_FILE)
        plan.save(output / PLAN_FILE)
        write_page(plan, recipe.name, output / PAGE_FILE)
    if as_json:
        print(json.dumps(asdict(plan), indent=1))
    else:
        show(plan)
    return plan


def gather(
    recipe: TrainRecipe, sources: Sequence[Path], *, roofline: bool, seconds: float, say: Callable[[str], None]
) -> Costs:
    """Return every stage's cost: from the sources, else computed or measured here.

    Raises:
        ConfigError: a source is nothing of the kind; or what is missing cannot be measured here.
    """
    values: dict[str, Any] = {}
    known: dict[str, str] = {}

    def take(found: tuple[dict[str, Any], str], replace: bool = True) -> None:
        for name, value in found[0].items():
            if replace or name not in values:
                values[name], known[name] = value, found[1]

    for source in sources:
        if source.is_file() or (source / COSTS_FILE).is_file():
            _take_saved(source, values, known)
        else:
            take(_of_source(recipe, source))
    if roofline:
        take(_computed(recipe), replace=False)
    if not all(name in values for name in OF_POLICY):
        say(f"Measuring the stages here, about {seconds:.0f} s ...")
        take(measure(recipe, seconds), replace=False)
    elif not all(name in values for name in OF_ENV):
        say(f"Measuring the environment here, about {seconds:.0f} s ...")
        take(measure_env(recipe, _chunk_size(recipe), seconds), replace=False)
    if "trained_bytes" not in values:
        take(_gradients(recipe), replace=False)
    take((DEFAULTS, "assumed: nothing is known of it"), replace=False)
    return Costs(**values, sources={f.name: known[f.name] for f in fields(Costs) if f.name != "sources"})


def _take_saved(source: Path, values: dict[str, Any], known: dict[str, str]) -> None:
    costs = Costs.load(source if source.is_file() else source / COSTS_FILE)
    values |= {f.name: getattr(costs, f.name) for f in fields(Costs) if f.name != "sources"}
    known |= costs.sources


def _of_source(recipe: TrainRecipe, source: Path) -> tuple[dict[str, Any], str]:
    if RunFolder(source).metrics.is_file():
        return from_run(source)
    if (source / "results.json").is_file():
        _check_is_7b(recipe, f"--costs {source}: `vla-rl bench gpu` measures")
        return from_bench(source, _decoder(recipe))
    raise ConfigError(
        f"--costs {source}: neither a folder of `vla-rl train` (metrics.jsonl) or `vla-rl bench gpu` (results.json) "
        f"nor a file that `vla-rl plan --output` wrote ({COSTS_FILE})"
    )


def _check_is_7b(recipe: TrainRecipe, who: str) -> None:
    """Refuse a policy that is not OpenVLA at its published size, whose costs say nothing of it.

    Args:
        who: is for that size alone, for the message: an option, and what it does.
    """
    config = recipe.policy
    instead = "leave it out, and the stages are measured here"
    if not isinstance(config, OpenVLAOptions):
        raise ConfigError(f"{who} OpenVLA of 7 billion parameters alone, and policy.kind is {config.kind!r}; {instead}")
    try:
        _, architecture, _ = sizes_of(config, recipe.env.env_spec())
    except ConfigError as error:
        raise ConfigError(f"{who} OpenVLA of 7 billion parameters alone, and this may be another: {error}") from None
    found, wanted = architecture.llm, PRESETS["7b"].llm
    if (found.hidden_size, found.num_layers) != (wanted.hidden_size, wanted.num_layers):
        raise ConfigError(
            f"{who} OpenVLA of 7 billion parameters alone, whose language model has {wanted.num_layers} layers of "
            f"width {wanted.hidden_size}; the policy's has {found.num_layers} of {found.hidden_size}; {instead}"
        )


def _decoder(recipe: TrainRecipe) -> str:
    """How OpenVLA's actions are decoded, of a checkpoint that is not read: as the recipe says, or as its name does."""
    policy = cast(OpenVLAOptions, recipe.policy)
    if "decoder" in policy.model_fields_set:
        return "autoregressive" if policy.decoder == "autoregressive" else "parallel"
    return "autoregressive" if str(policy.path).startswith(OPENVLA_7B) else "parallel"


def _chunk_size(recipe: TrainRecipe) -> int:
    """Actions of a chunk, of a policy that is not read."""
    policy = recipe.policy
    if chosen := getattr(policy, "num_actions", None):
        return chosen
    if "chunk_size" in policy.model_fields_set:
        return getattr(policy, "chunk_size", 1)
    return 1 if _decoder(recipe) == "autoregressive" else 8


def _gradients(recipe: TrainRecipe) -> tuple[dict[str, Any], str]:
    """Bytes of what the recipe's policy trains, where its sizes are known without loading it; else nothing."""
    config = recipe.policy
    source = "computed: of the parameters that the recipe trains"
    if not isinstance(config, OpenVLAOptions):
        return {}, source
    try:
        policy = skeleton(config, recipe.env.env_spec(), counted_device(recipe.device))
    except ConfigError:  # A checkpoint that is not here.
        return {}, source
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    return {"trained_bytes": float(trained)}, source


def _computed(recipe: TrainRecipe) -> tuple[dict[str, Any], str]:
    """What acting and learning cost at best on an H200 with OpenVLA's 7 billion parameters and LoRA."""
    _check_is_7b(recipe, "--roofline: computes")
    decoder = PARALLEL if _decoder(recipe) == "parallel" else AUTOREGRESSIVE
    act = Curve(tuple((float(n), of_act(True, decoder, n).eager_seconds) for n in (1, 16, 64)))
    update = Curve(tuple((float(n), of_update(True, n).eager_seconds) for n in (8, 32)))
    values = {"act": act, "update": update, "forward": update.times(0.25)}
    gradients, _ = _gradients(recipe)
    # AdamW reads weight, gradient and two moments and writes all but the gradient, fused in one pass.
    values |= gradients | {"optimizer": 7 * gradients["trained_bytes"] / H200.bandwidth}
    best = "kernels reach 50 to 90 % of it"
    return values, f"computed: OpenVLA 7B with LoRA and one camera on an {H200.name}, by roofline; {best}"


def play_groups(recipe: TrainRecipe, num_episodes: int) -> Evaluation:
    """Play groups of the recipe's size from `train` states, at its temperature, and each state once greedily.

    Args:
        num_episodes: about so many sampled ones, shared by the tasks; at least one group of each is played.
    """
    train, spec = recipe.train, env_spec(recipe)
    config = EvalConfig(
        split="train",
        episodes_per_task=max(1, round(num_episodes / (train.group_size * len(spec.tasks)))),
        samples_per_state=train.group_size,
        temperatures=(0.0, train.temperature),
        approximate=True,
        videos=0,
    )
    policy, env = build_policy(recipe, spec), recipe.rollout.placed(recipe.acting_env)
    return evaluate(policy, env, config, progress=partial(episode_progress, show=True))
