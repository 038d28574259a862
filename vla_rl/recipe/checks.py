"""What a recipe is refused for before any work: one rule each, read from the recipe, from files' names and from facts.

No rule builds an environment or a policy. A rule for no command holds wherever a recipe is read. What one section
alone can tell (a number out of range) is in that section's class; a new rule of several belongs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from vla_rl.common.devices import check_name
from vla_rl.config import ConfigError
from vla_rl.data.config import AugmentConfig
from vla_rl.data.dataset_check import check_datasets
from vla_rl.evaluation.evaluate import episode_specs
from vla_rl.policies.base import checkpoint_folder

if TYPE_CHECKING:
    from vla_rl.evaluation.evaluate import EvalConfig
    from vla_rl.recipe.recipe import Recipe
    from vla_rl.types import EpisodeSpec


class Rule(NamedTuple):
    """Something that a recipe must not be.

    Attributes:
        commands: that it is checked for; none: all, when the recipe is read.
        is_broken: whether the recipe is refused; may raise an error of its own instead, which says why.
        message: names the field, its value and what to do.
    """

    commands: tuple[str, ...]
    is_broken: Callable[[Recipe], object]
    message: Callable[[Recipe], str] = lambda recipe: ""


_NO_DEMONSTRATIONS = (
    "sft: this recipe has none, but algo.bc_coef > 0 and the control continue_bc learn from demonstrations: name them "
    "in sft.datasets"
)
_RL = ("train", "loop")  # `ablate` runs `train`.

RULES = (
    Rule((), lambda r: check_name(r.device)),
    # Sections that contradict one another.
    Rule(
        (),
        lambda r: r.real_env is not None and (r.real_env.is_imagined or not r.env.is_imagined),
        lambda r: (
            "real_env: is for a recipe whose env is a world model, and is itself a simulator or robot; got env "
            f"{r.env.kind!r}, real_env {r.real_env.kind!r}"  # type: ignore[union-attr]
        ),
    ),
    Rule(
        (),
        lambda r: r.gate.every and not r.env.is_imagined,
        lambda r: "gate.every: env is no world model, so every gain is real already; leave gate.every at 0",
    ),
    Rule(
        (),
        lambda r: r.gate.every and r.gate.split == "eval",
        lambda r: (
            "gate.split: got 'eval', whose initial states are for the final claim, but the gate says which policy is "
            "kept, and a loop's next world model learns from its episodes; set it to validation"
        ),
    ),
    Rule(
        (),
        lambda r: r.gate.every and r.train.keep == "best",
        lambda r: "train.keep: got 'best', but the gate says which policy is kept; set it to last",
    ),
    Rule(
        (),
        lambda r: r.algo is not None and 0 < r.algo.decay_iterations < r.train.iterations,
        lambda r: (
            f"algo.decay_iterations: got {r.algo.decay_iterations}: the last of train.iterations "  # type: ignore[union-attr]
            f"({r.train.iterations}) would learn nothing; make it as large, or 0 (a resumed run keeps its schedule)"
        ),
    ),
    Rule(
        (),
        lambda r: r.train.reuse and r.algo is not None and not r.algo.takes_stale_chunks,
        lambda r: (
            f"train.reuse: got {r.train.reuse}, but algo.kind {r.algo.kind!r} learns only from "  # type: ignore[union-attr]
            "chunks that the policy drew as it is now; set it to 0, or use grpo, mc_grpo, rloo, reinforce_pp or ppo"
        ),
    ),
    Rule(
        (),
        lambda r: r.train.keep == "best" and not r.train.validate_every,
        lambda r: "train.keep: got 'best' with validate_every 0; set validate_every above 0, or keep=last",
    ),
    Rule(
        (),
        lambda r: (r.sampling.kind, r.sampling.level, r.sampling.train_states) == ("vade", "state", None),
        lambda r: (
            "sampling.level: got 'state' with train_states null; states must come back to be judged: set train_states "
            "to a number, or level to task"
        ),
    ),
    Rule(
        (),
        lambda r: bool(_unknown_axes(r)),
        lambda r: (
            f"sampling.perturb.axes: got {_unknown_axes(r)[0]!r}; {r.env.kind} has: "
            f"{', '.join((*r.env.perturb_axes, 'clean')) if r.env.perturb_axes else 'no perturbations'}"
        ),
    ),
    Rule(
        (),
        lambda r: r.eval.approximate and getattr(r.real_env or r.env, "reward", None),
        lambda r: (
            "eval.approximate: got true with env.reward, which would evaluate policies by what a reward says; set it "
            "to false"
        ),
    ),
    # What RL needs.
    Rule(
        _RL,
        lambda r: r.algo is None,
        lambda r: "algo: this recipe has none, and RL needs one; see docs/algorithms.md",
    ),
    Rule(
        _RL,
        lambda r: r.algo and r.algo.compares_episodes and r.algo.rollouts_per_group(r.train.group_size) < 2,
        lambda r: (
            f"train.group_size: got {r.train.group_size}, but {r.algo.kind} compares episodes from the same "  # type: ignore[union-attr]
            "initial state; set it to at least 2, or use algo.kind=ppo or reinforce_pp"
        ),
    ),
    Rule(
        _RL,
        lambda r: r.algo and r.train.resample_budget and r.algo.rollouts_per_group(r.train.group_size) < 2,
        lambda r: (
            f"train.resample_budget: got {r.train.resample_budget} with train.group_size {r.train.group_size}: a group "
            "of one episode never has both outcomes, so each rollout would take the whole budget; set it to 0, or "
            "train.group_size to at least 2"
        ),
    ),
    Rule(
        _RL,
        lambda r: getattr(r.algo, "bootstrap_truncated", False) and _branch_frames(r),
        lambda r: (
            f"algo.bootstrap_truncated: got true with env.imagination.branch_frames={_branch_frames(r)}, whose "
            "branches are paid the world model's value where they end; the critic's would be counted on top: set it to "
            "false"
        ),
    ),
    Rule(_RL, lambda r: r.sft is None and learns_from_demonstrations(r), lambda r: _NO_DEMONSTRATIONS),
    Rule(_RL, lambda r: r.sft and learns_from_demonstrations(r) and check_datasets(d.path for d in r.sft.datasets)),
    Rule(
        ("train",),
        lambda r: r.sampling.keyframe_share and r.sampling.keyframes is None,
        lambda r: (
            f"sampling.keyframes: is null, but sampling.keyframe_share is {r.sampling.keyframe_share:g}; name the file "
            "that `vla-rl world-model keyframes` wrote, or set sampling.keyframe_share=0"
        ),
    ),
    Rule(
        ("train",),
        lambda r: r.sampling.keyframe_share and r.sampling.keyframes and not r.sampling.keyframes.is_file(),
        lambda r: f"sampling.keyframes: no file {r.sampling.keyframes}; `vla-rl world-model keyframes` writes one",
    ),
    Rule(
        _RL,
        lambda r: (r.train.evaluate, r.train.validate_every, r.gate.every) != ("never", 0, 0) and r.check_same_robot(),
    ),
    Rule(
        _RL,
        lambda r: r.train.validate_every and r.gate.every and _validates_on_states_of_the_gate(r),
        lambda r: (
            f"train.validation_episodes: got {r.train.validation_episodes}, so that validation takes initial states "
            f"{r.eval.start_index} to {r.eval.start_index + r.train.validation_episodes - 1} of each task (from "
            f"eval.start_index on), but the gate takes those from {r.gate.start_index} on; lower it, or set "
            f"gate.start_index to at least {r.eval.start_index + r.train.validation_episodes}"
        ),
    ),
    Rule(_RL, lambda r: r.train.evaluate != "never" and not _states(r, r.eval)),
    Rule(_RL, lambda r: r.train.validate_every and not _states(r, r.validation)),
    Rule(
        ("hil", "study", "hub"),
        lambda r: r.rollout.kind != "local",
        lambda r: (
            f"rollout.kind: got {r.rollout.kind!r}, but this command runs all episodes in its own process; use "
            "rollout.kind=local (docs/ray.md says which commands use a cluster)"
        ),
    ),
    # What a loop needs besides.
    Rule(
        ("loop",),
        lambda r: r.world_model is None or r.real_env is None,
        lambda r: (
            "loop: the recipe needs an env of kind world_model, and sections real_env, world_model and algo; "
            "`vla-rl config show tabletop_imagination` has them"
        ),
    ),
    Rule(
        ("loop",),
        lambda r: r.train.evaluate != "before_and_after",
        lambda r: f"train.evaluate: got {r.train.evaluate!r}; the loop says what it gained: set it to before_and_after",
    ),
    Rule(("loop",), lambda r: r.sft is None and "continue_bc" in r.loop.controls, lambda r: _NO_DEMONSTRATIONS),
    *(
        Rule(
            ("loop",),
            lambda r, field=field: bool(getattr(r.world_model, field, None)),
            lambda r, field=field, none=none, why=why: (
                f"world_model.{field}: got {_short(getattr(r.world_model, field))}, but {why}; set it to {none}"
            ),
        )
        for field, none, why in (
            ("start_from", "null", "a loop's first fit starts from env.path, and each later one from the round before"),
            ("calibrate_on", "[]", "a loop chooses each round's threshold on the policy's own episodes of that round"),
            ("success_datasets", "[]", "the success networks would learn nothing from a loop's own episodes"),
        )
    ),
    # What the other commands need.
    *(
        Rule(
            (command,),
            lambda r, sections=sections: any(getattr(r, section) is None for section in sections),
            lambda r, sections=sections, example=example: (
                f"{sections[0]}: the recipe needs a section {' and a section '.join(sections)}; "
                f"see `vla-rl config show {example}`"
            ),
        )
        for command, sections, example in (
            ("fit", ("world_model",), "tabletop_world_model"),
            ("reward", ("reward",), "tabletop_reward"),
            ("failure", ("failure",), "tabletop_failure"),
            ("rac", ("rac", "sft"), "tabletop_rac"),
            ("hub", ("hub",), "tabletop_hub"),
        )
    ),
    Rule(
        ("sft",),
        lambda r: r.sft is None,
        lambda r: "sft: the recipe has no sft section. Give at least sft.datasets=FOLDER (`vla-rl collect`).",
    ),
    Rule(
        ("offline",),
        lambda r: r.offline is None or r.sft is None,
        lambda r: (
            "offline: the recipe needs an offline and an sft section: sft.datasets are the logged episodes; "
            "`vla-rl config show tabletop_offline` has both"
        ),
    ),
    Rule(
        ("offline",),
        lambda r: r.offline and getattr(r.policy, "path", None) is None,
        lambda r: (
            "policy.path: learning from logged episodes improves a checkpoint; give its folder or pretrained:NAME"
        ),
    ),
    Rule(
        ("offline",),
        lambda r: r.offline and r.offline.method == "ppo" and (r.algo is None or r.algo.kind != "grpo"),
        lambda r: (
            f"algo.kind: got {r.algo.kind if r.algo else None!r}; offline.method=ppo makes the `algo` section's "
            "updates, with its lr, epochs and bounds of the ratio, and has a critic of its own: set algo.kind=grpo "
            "algo.lr=..."
        ),
    ),
    Rule(
        ("offline",),
        lambda r: r.offline and r.offline.method == "ppo" and _idle_of_ppo(r),
        lambda r: (
            f"algo.{_idle_of_ppo(r)}: got {getattr(r.algo, _idle_of_ppo(r)):g}, which offline.method=ppo makes no use "  # type: ignore[arg-type]
            "of: it learns from no episodes' rewards or demonstrations, and makes steps smaller by offline.ppo.shrink; "
            "leave it at 0"
        ),
    ),
    Rule(
        ("hil",),
        lambda r: (
            r.hil and r.hil.actor == "recordings" and getattr(getattr(r.env, "reward", None), "kind", "") == "simulator"
        ),
        lambda r: (
            "env.reward.kind: got 'simulator' with hil.actor=recordings, where no simulator says who succeeded; leave "
            "env.reward out (the recordings say so), or name a learned reward"
        ),
    ),
    Rule(
        ("offline",),
        lambda r: r.sft and r.sft.validation_fraction,
        lambda r: (
            f"sft.validation_fraction: got {r.sft.validation_fraction:g}; `offline` judges decisions by critics that "  # type: ignore[union-attr]
            "have not seen them, and holds nothing else out: set it to 0"
        ),
    ),
    Rule(
        ("offline",),
        lambda r: (
            _learns_preferences(r) and r.sft and (r.sft.precision != "policy" or r.sft.augment != AugmentConfig())
        ),
        lambda r: (
            "offline.method=preferences: compares likelihoods with those of the first policy, so images and precision "
            "stay as they are: leave out sft.precision and sft.augment"
        ),
    ),
    Rule(
        ("online",),
        lambda r: r.online is None or (r.sft is None and r.online.reads_datasets),
        lambda r: (
            "online: the recipe needs an online section, and for logged episodes an sft section: sft.datasets are "
            "these; `vla-rl config show tabletop_online` has both. Without any: online.prior=none online.warm_updates=0"
        ),
    ),
    Rule(
        ("hil",),
        lambda r: r.hil is None or (r.sft is None and r.hil.reads_datasets),
        lambda r: (
            "hil: the recipe needs a hil section, and for logged episodes an sft section: sft.datasets are these; "
            "`vla-rl config show tabletop_hil` has both. Without any: hil.prior=none hil.warm_updates=0"
        ),
    ),
    Rule(
        ("online", "hil"),
        lambda r: getattr(r.policy, "path", None) is None or r.policy.kind == "value_guided",
        lambda r: (
            "policy.path: learning online improves a checkpoint that stays as it is; give its folder or "
            "pretrained:NAME (of a value_guided policy: its base)"
        ),
    ),
    Rule(("hil",), lambda r: r.hil and r.hil.practice and _check_practice(r, r.hil.practice.reset_task)),
    Rule(("sft",), lambda r: r.sft and check_datasets(d.path for d in r.sft.datasets)),
    Rule(("eval",), lambda r: not _states(r, r.eval)),
    Rule(("collect",), lambda r: _acts(r) and r.policy.path and not checkpoint_folder(r.policy)),
    Rule(("offline",), lambda r: r.offline and r.offline.evaluate != "never" and not _states(r, r.eval)),
    Rule(("online",), lambda r: r.online and r.online.evaluate != "never" and not _states(r, r.eval)),
    Rule(("hil",), lambda r: r.hil and r.hil.evaluate != "never" and not _states(r, r.eval)),
    Rule(
        (*_RL, "sft", "offline", "online", "hil", "eval"), lambda r: r.policy.path and not checkpoint_folder(r.policy)
    ),
)


def check(recipe: Recipe, command: str = "") -> None:
    """Refuse what would fail later, perhaps after hours; `command`: about to run; empty: what holds for all.

    Raises:
        ConfigError: every rule that is broken, a line each; or another ValueError, where something is not there.
    """
    wanted = [rule for rule in RULES if (command in rule.commands if command else not rule.commands)]
    if broken := [rule for rule in wanted if rule.is_broken(recipe)]:
        raise ConfigError("\n".join(rule.message(recipe) for rule in broken))


def _short(value: object) -> str:
    """A field's value, of datasets their paths."""
    return repr(value) if isinstance(value, str) else str([getattr(one, "path", one) for one in value])  # type: ignore[attr-defined]


def learns_from_demonstrations(recipe: Recipe) -> bool:
    """Whether `train` needs the recipe's `sft.datasets`."""
    return recipe.train.control == "continue_bc" or (recipe.algo is not None and recipe.algo.bc_coef > 0)


def _learns_preferences(recipe: Recipe) -> bool:
    return recipe.offline is not None and recipe.offline.method == "preferences"


def _idle_of_ppo(recipe: Recipe) -> str:
    """The first option of `algo` that is set and does nothing in offline.method=ppo; "" if there is none."""
    names = ("kl_coef", "bc_coef", "decay_iterations")
    return next((name for name in names if getattr(recipe.algo, name, 0)), "")


def _check_practice(recipe: Recipe, reset_task: str) -> None:
    """
    Raises:
        ConfigError: the environment's tasks are not a task and the one that undoes it.
    """
    pairs = recipe.env.reset_tasks
    if reset_task not in pairs:
        there = ", ".join(f"{reset} (undoes {forward})" for reset, forward in pairs.items()) or "none"
        raise ConfigError(f"hil.practice.reset_task: got {reset_task!r}; reset tasks of {recipe.env.kind}: {there}")
    tasks = list(recipe.env.env_spec().tasks)
    if sorted(tasks) != sorted((reset_task, pairs[reset_task])):
        raise ConfigError(
            f"env.tasks: got {', '.join(tasks)}; with hil.practice they are a task and the one that undoes it in the "
            f"same scene: set env.tasks=[{pairs[reset_task]},{reset_task}]"
        )


def _unknown_axes(recipe: Recipe) -> list[str]:
    """Axes along which training episodes cannot be perturbed."""
    perturb = recipe.sampling.perturb
    return [axis for axis in perturb.axes if axis not in (*recipe.env.perturb_axes, "clean")] if perturb else []


def _branch_frames(recipe: Recipe) -> object:
    """After how many frames imagined episodes end, worth a value; None: they go on."""
    return getattr(getattr(recipe.env, "imagination", None), "branch_frames", None)


def _validates_on_states_of_the_gate(recipe: Recipe) -> bool:
    """Whether a check of the gate, in any round of a loop, may begin where an episode of a validation does."""
    train, gate, first = recipe.train, recipe.gate, recipe.eval.start_index
    end = gate.start_index + recipe.loop.rounds * gate.num_checks(train.iterations) * gate.pairs
    is_same_split = gate.split == recipe.validation.split
    return is_same_split and first < end and gate.start_index < first + train.validation_episodes


def _acts(recipe: Recipe) -> bool:
    return recipe.collect is not None and recipe.collect.source == "policy"


def _states(recipe: Recipe, evaluation: EvalConfig) -> list[EpisodeSpec]:
    """The initial states of an evaluation; an error of its own where they are not there, or a mode comes twice."""
    evaluation.modes()
    return episode_specs(recipe.acting_env.env_spec(), evaluation)
