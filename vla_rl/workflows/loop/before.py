"""Checks of a closed loop before any real episode: what its rounds would find out only at their end."""

from __future__ import annotations

from collections.abc import Iterator

from vla_rl.config import ConfigError
from vla_rl.evaluation.probability import failures_needed
from vla_rl.recipe.checks import LOOP
from vla_rl.recipe.recipe import check
from vla_rl.recipe.runs import LoopRecipe
from vla_rl.workflows.loop.rounds import HELD_OUT_START, groups_of_a_round
from vla_rl.workflows.recipe_parts import imagining, world_model_section
from world_model.config import WorldModelConfig
from world_model.env.config import WorldModelEnvConfig
from world_model.fit.config import FitConfig
from world_model.imagination.reward import check_depth
from world_model.metadata import WorldModelMetadata, read_metadata, resolve_path


def check_loop(recipe: LoopRecipe) -> None:
    """Refuse a recipe that a loop cannot run; builds nothing, and reads the first world model's metadata.

    Raises:
        ConfigError: a line for each thing that RL or a fit asks for, and neither the first world model has nor a fit
            can give; or what `check` of "loop" says.
    """
    check(recipe, LOOP)
    section = world_model_section(recipe)
    if refused := [*_unfit_options(recipe, section)]:
        raise ConfigError("\n".join(refused))
    if not isinstance(recipe.env, WorldModelEnvConfig):  # One of your own says what it lacks when it is built.
        return
    config, metadata = read_metadata(resolve_path(recipe.env.path))
    lacking = _lacking_parts(recipe, recipe.env, section, config, metadata)
    lacking += [*_lacking_episodes(recipe, section), *_shared_states(recipe)]
    if lacking:
        raise ConfigError("\n".join(lacking))


def _unfit_options(recipe: LoopRecipe, section: FitConfig) -> Iterator[str]:
    """What RL or a fit alone may be told, and a loop may not."""
    if (evaluate := recipe.train.evaluate) != "before_and_after":
        yield f"train.evaluate: got {evaluate!r}; the loop says what it gained: set it to before_and_after"
    for field, none, why in (
        ("start_from", "null", "a loop's first fit starts from env.path, and each later one from the round before"),
        ("calibrate_on", "[]", "a loop chooses each round's threshold on the policy's own episodes of that round"),
        ("success_datasets", "[]", "the success networks would learn nothing from a loop's own episodes"),
    ):
        if value := getattr(section, field):
            got = repr(value) if isinstance(value, str) else str([dataset.path for dataset in value])
            yield f"world_model.{field}: got {got}, but {why}; set it to {none}"


def _lacking_parts(
    recipe: LoopRecipe,
    env: WorldModelEnvConfig,
    section: FitConfig,
    config: WorldModelConfig,
    metadata: WorldModelMetadata,
) -> list[str]:
    imagination, objects, lacking = env.imagination, section.objects, []
    if imagination.reward == "objects" and not objects.steps and config.objects is None:
        lacking.append(
            f"env.imagination.reward: got 'objects', but {env.path} has no objects part and world_model.objects.steps "
            "is 0; set it above 0, or use reward=success or probability"
        )
    if imagination.action_penalty and not section.inverse.steps and metadata.inverse_errors is None:
        lacking.append(
            f"env.imagination.action_penalty: got {imagination.action_penalty:g}, but {env.path} has no inverse "
            "dynamics and world_model.inverse.steps is 0; set it above 0, or use action_penalty=0"
        )
    if objects.steps and objects.network is None and config.objects is None:
        lacking.append(
            f"world_model.objects.network: got null with steps={objects.steps}, and {env.path} has no objects part; "
            "say which objects it has, network={slots: [[NAME, ...], ...]}, or set world_model.objects.steps=0"
        )
    if isinstance(imagination.branch_frames, int):
        try:
            check_depth(imagination.branch_frames, config.frame_steps, imagination)
        except ConfigError as error:
            lacking.append(str(error))
    if metadata.value_probability is None and not section.value.steps:
        remedy = f"but {env.path} has no value and world_model.value.steps is 0; set it above 0, or"
        if imagination.branch_frames is not None:
            lacking.append(
                f"env.imagination.branch_frames: got {imagination.branch_frames!r}, {remedy} set branch_frames=null"
            )
        if recipe.sampling.keyframe_share and "uncertain" in section.keyframes.kinds:
            lacking.append(f"world_model.keyframes.kinds: got 'uncertain', {remedy} leave that kind out")
    return lacking


def _shared_states(recipe: LoopRecipe) -> list[str]:
    """What draws initial states of which trust judges the world model, in any round."""
    loop, sampling = recipe.loop, recipe.sampling
    groups = groups_of_a_round(recipe.train)
    drawn = {
        "sampling.first_state": (sampling.first_state, sampling.train_states or loop.rounds * groups),
    }
    end = HELD_OUT_START + loop.rounds * loop.held_out
    return [
        f"{name}: got {first}, from which on states up to {first + count - 1} may be drawn, but {HELD_OUT_START} to "
        f"{end - 1} are those of the held-out episodes; keep it below, or set it to {end}"
        for name, (first, count) in drawn.items()
        if first < end and first + count > HELD_OUT_START
    ]


def _lacking_episodes(recipe: LoopRecipe, section: FitConfig) -> list[str]:
    lacking = []
    if section.cuts > 1 and section.dynamics.steps and not (recipe.loop.every_frame or section.needs_structure):
        lacking.append(
            f"world_model.cuts: got {section.cuts} with loop.every_frame=false, which records no picture between the "
            "frames that other cuts begin at; set loop.every_frame=true, or world_model.cuts=1"
        )
    if imagining(recipe).imagination.reward == "success":
        rollouts = recipe.loop.episodes * len(recipe.acting_env.env_spec().tasks)
        held = rollouts if section.cross_fit else round(section.holdout * rollouts)
        needed = max(section.min_failures, failures_needed(section.max_false_success))
        if held < needed:
            lacking.append(
                f"loop.episodes: got {recipe.loop.episodes}, of which world_model.holdout={section.holdout:g} leaves "
                f"{held} episodes to choose the threshold of success on, all tasks together; {needed} of them must "
                f"fail to bound the false-success rate at {section.max_false_success:.0%}. Raise either, set "
                "world_model.cross_fit=2, or use env.imagination.reward=probability"
            )
    return lacking
