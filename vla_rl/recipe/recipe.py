"""A recipe: everything one run needs, from one YAML file.

`run` names the kind of run, whose class (`runs.py`) says which sections a recipe may have. Sections whose class depends
on their `kind` (env, policy, algo) are resolved at run time; see `vla_rl.config`. Each section's class sits beside the
code that it configures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, PositiveFloat, SerializeAsAny, model_validator

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.common.distributed.process_group import check_device_name, resolve_device
from vla_rl.common.run_folder import Changed, RunFolder
from vla_rl.config import (
    RUNS,
    Config,
    ConfigError,
    apply_overrides,
    component,
    find_recipe,
    read_yaml,
    resolve_kind,
    validate,
)
from vla_rl.data.hub import check_datasets
from vla_rl.evaluation.evaluate import EvalConfig, episode_specs
from vla_rl.evaluation.gate import GateConfig
from vla_rl.interfaces import EnvConfig
from vla_rl.policies.base import PolicyConfig, checkpoint_folder
from vla_rl.rollout.recording_plan import CollectConfig
from vla_rl.rollout.source import LocalRolloutConfig, RolloutConfig
from vla_rl.rollout.task_sampling import CLEAN, SamplingConfig
from vla_rl.training.config import SFTConfig, TrainConfig
from vla_rl.training.metrics import LogConfig


class Rule(NamedTuple):
    """A combination of sections that their types permit and a run does not.

    Attributes:
        is_broken: whether the recipe is refused.
        message: names the field, its value and what to do.
    """

    is_broken: Callable[..., object]
    message: Callable[..., str]


class Recipe(Config):
    """What every kind of run has, and all that evaluating and collecting need."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda r: r.real_env is not None and (r.real_env.is_imagined or not r.env.is_imagined),
            lambda r: (
                "real_env: is for a recipe whose env is a world model, and is itself a simulator or robot; got env "
                f"{r.env.kind!r}, real_env {r.real_env.kind!r}"
            ),
        ),
        Rule(
            lambda r: r.eval.approximate and getattr(r.real_env or r.env, "reward", None),
            lambda r: (
                "eval.approximate: got true with env.reward, which would evaluate policies by what a reward says; set "
                "it to false"
            ),
        ),
    )

    run: str = Field(
        default="eval",
        description="The kind of run, which says what further sections there are: train, sft, loop, fit, offline, "
        "online, hil, rac, reward, failure, hub; eval: none.",
    )
    name: str = Field(description="Names the run's folder.")
    description: str = Field(default="", description="What the recipe is for, in a sentence.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Of everything random.")
    device: Annotated[str, AfterValidator(check_device_name)] = Field(
        default="auto", description="auto, cpu, cuda, cuda:N or mps."
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="Several processes: ddp: each holds the whole policy; fsdp: weights, gradients and optimizer state "
        "are cut into one part per process. No meaning with one process.",
    )
    hang_minutes: PositiveFloat = Field(
        default=30.0,
        description="Several processes: one that others wait for, and in which no step of the simulator or pass of the "
        "policy has ended for so long, counts as hung: the run ends and names it. Give more than saving a checkpoint "
        "takes.",
    )
    num_threads: int = Field(default=0, ge=0, description="torch threads on a CPU; 0 leaves torch's choice.")
    env: Annotated[SerializeAsAny[EnvConfig], component("env")]
    real_env: Annotated[SerializeAsAny[EnvConfig] | None, component("env")] = Field(
        default=None,
        description="Where env is a world model: the simulator in which policies are evaluated and gains checked.",
    )
    policy: Annotated[SerializeAsAny[PolicyConfig], component("policy")]
    rollout: Annotated[SerializeAsAny[RolloutConfig], component("rollout")] = Field(
        default_factory=LocalRolloutConfig,
        description="Where the episodes that RL learns from are run (docs/ray.md).",
    )
    collect: CollectConfig | None = None
    datasets: tuple[CollectConfig, ...] = Field(
        default=(),
        description="Datasets that `world-model fit`, `offline`, `online`, `hil`, `reward fit` collect first, where "
        "they are missing.",
    )
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @property
    def acting_env(self) -> EnvConfig:
        """The environment in which episodes count as real: `real_env`, or `env` where that is no world model.

        Without approximations that are for training, unless eval.approximate asks for them.

        Raises:
            ConfigError: env is a world model and there is no real_env.
        """
        if self.real_env is None and self.env.is_imagined:
            raise ConfigError(
                "real_env: the recipe has none, and its env is a world model; evaluating, collecting and the gate need "
                "a real environment: give real_env a section such as env's, or set train.evaluate=never, gate.every=0"
            )
        env = self.real_env or self.env
        return env if self.eval.approximate else env.exact()

    def check_machine(self) -> None:
        """Look for the device and what the environments need; a ConfigError or RenderError says what is not here."""
        resolve_device(self.device)
        for env in filter(None, (self.env, self.real_env)):
            env.check_machine()

    def check_same_robot(self) -> None:
        """Check that the policy meets in `real_env` what it has met in `env`.

        Raises:
            ConfigError: there is no real environment, or it differs in cameras, sizes or control rate, or lacks a task.
        """
        env, real = self.env, self.acting_env
        if real is env:
            return
        imagined, acting = env.env_spec(), real.env_spec()
        for field in ("cameras", "image_size", "state_dim", "action_dim", "control_hz"):
            if getattr(imagined, field) != getattr(acting, field):
                raise ConfigError(
                    f"real_env: its {field} is {getattr(acting, field)}, the world model's {getattr(imagined, field)}; "
                    "set real_env to what the world model was fitted on, or fit it again"
                )
        if lacking := sorted(set(imagined.tasks) - set(acting.tasks)):
            raise ConfigError(f"real_env.tasks: lacks {', '.join(lacking)}, which env has")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if broken := [rule.message(self) for rule in self.rules if rule.is_broken(self)]:
            raise ConfigError("\n".join(broken))
        return self


def _unknown_axes(recipe: TrainRecipe) -> list[str]:
    """Axes along which training episodes cannot be perturbed."""
    axes = recipe.sampling.perturb.axes if recipe.sampling.perturb else ()
    return [axis for axis in axes if axis not in (*recipe.env.perturb_axes, CLEAN)]


def _branch_frames(recipe: TrainRecipe) -> object:
    """After how many frames imagined episodes end, worth a value; None: they go on."""
    return getattr(getattr(recipe.env, "imagination", None), "branch_frames", None)


def _validates_on_states_of_the_gate(recipe: TrainRecipe) -> bool:
    """Whether a check of the gate, in any round of a loop, may begin where an episode of a validation does."""
    train, gate, first = recipe.train, recipe.gate, recipe.eval.start_index
    rounds = getattr(getattr(recipe, "loop", None), "rounds", 1)
    end = gate.start_index + rounds * gate.num_checks(train.iterations) * gate.pairs
    is_same_split = gate.split == recipe.validation.split
    return is_same_split and first < end and gate.start_index < first + train.validation_episodes


class TrainRecipe(Recipe):
    """Reinforcement learning: `vla-rl train`, `ablate`, `sweep`."""

    run: Literal["train"] = "train"
    algo: Annotated[SerializeAsAny[AlgoConfig], component("algo")]
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    sft: SFTConfig | None = Field(
        default=None, description="Demonstrations: of algo.bc_coef, of the control continue_bc, and of `vla-rl sft`."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        *Recipe.rules,
        Rule(
            lambda r: r.gate.every and not r.env.is_imagined,
            lambda r: "gate.every: env is no world model, so every gain is real already; leave gate.every at 0",
        ),
        Rule(
            lambda r: r.gate.every and r.train.keep == "best",
            lambda r: "train.keep: got 'best', but the gate says which policy is kept; set it to last",
        ),
        Rule(
            lambda r: r.train.keep == "best" and not r.train.validate_every,
            lambda r: "train: keep 'best' needs validate_every above 0, which finds it; or set keep=last",
        ),
        Rule(
            lambda r: r.train.validate_every and r.gate.every and _validates_on_states_of_the_gate(r),
            lambda r: (
                f"train.validation_episodes: got {r.train.validation_episodes}, so that validation takes initial "
                f"states {r.eval.start_index} to {r.eval.start_index + r.train.validation_episodes - 1} of each task "
                f"(from eval.start_index on), but the gate takes those from {r.gate.start_index} on; lower it, or set "
                f"gate.start_index to at least {r.eval.start_index + r.train.validation_episodes}"
            ),
        ),
        Rule(
            lambda r: 0 < r.algo.decay_iterations < r.train.iterations,
            lambda r: (
                f"algo.decay_iterations: got {r.algo.decay_iterations}: the last of train.iterations "
                f"({r.train.iterations}) would learn nothing; make it as large, or 0 (a resumed run keeps its "
                "schedule)"
            ),
        ),
        Rule(
            lambda r: r.train.reuse and not r.algo.takes_stale_chunks,
            lambda r: (
                f"train.reuse: got {r.train.reuse}, but algo.kind {r.algo.kind!r} learns only from chunks that the "
                "policy drew as it is now; set it to 0, or use grpo or ppo"
            ),
        ),
        Rule(
            lambda r: r.algo.compares_episodes and r.algo.rollouts_per_group(r.train.group_size) < 2,
            lambda r: (
                f"train.group_size: got {r.train.group_size}, but {r.algo.kind} compares episodes from the same "
                "initial state; set it to at least 2, or use algo.kind=ppo or reinforce_pp"
            ),
        ),
        Rule(
            lambda r: r.train.resample_budget and r.algo.rollouts_per_group(r.train.group_size) < 2,
            lambda r: (
                f"train.resample_budget: got {r.train.resample_budget} with train.group_size {r.train.group_size}: a "
                "group of one episode never has both outcomes, so each rollout would take the whole budget; set it to "
                "0, or train.group_size to at least 2"
            ),
        ),
        Rule(
            lambda r: getattr(r.algo, "bootstrap_truncated", False) and _branch_frames(r),
            lambda r: (
                f"algo.bootstrap_truncated: got true with env.imagination.branch_frames={_branch_frames(r)}, whose "
                "branches are paid the world model's value where they end; the critic's would be counted on top: set "
                "it to false"
            ),
        ),
        Rule(
            lambda r: r.sft is None and r.needs_demonstrations,
            lambda r: (
                "sft: this recipe has none, but algo.bc_coef > 0 and the control continue_bc learn from "
                "demonstrations: name them in sft.datasets"
            ),
        ),
        Rule(
            lambda r: (r.sampling.kind, r.sampling.level, r.sampling.train_states) == ("vade", "state", None),
            lambda r: (
                "sampling: level 'state' needs train_states: states must come back to be judged; set it to a number, "
                "or level=task"
            ),
        ),
        Rule(
            lambda r: r.sampling.perturb and _unknown_axes(r),
            lambda r: (
                f"sampling.perturb.axes: got {_unknown_axes(r)[0]!r}; {r.env.kind} has: "
                f"{', '.join((*r.env.perturb_axes, CLEAN)) if r.env.perturb_axes else 'no perturbations'}"
            ),
        ),
    )

    @property
    def needs_demonstrations(self) -> bool:
        """Whether RL learns from `sft.datasets` too."""
        return self.train.control == "continue_bc" or self.algo.bc_coef > 0

    def check_inputs(self) -> None:
        """Look for what RL acts in, reads and is measured on, before any work; a ValueError names what is amiss."""
        check_stepped(self.env)
        if self.sampling.keyframe_share:
            self.sampling.check_keyframes()
        self.check_given()

    def check_given(self) -> None:
        """Look for demonstrations, the checkpoint, what real episodes are run in and their initial states."""
        if self.needs_demonstrations and self.sft is not None:
            check_datasets(dataset.path for dataset in self.sft.datasets)
        if self.policy.path:
            checkpoint_folder(self.policy)
        evaluations = [self.eval] if self.train.evaluate != "never" else []
        evaluations += [self.validation] if self.train.validate_every else []
        if evaluations or self.gate.every:
            self.check_same_robot()
            check_stepped(self.acting_env)
        for evaluation in evaluations:
            check_states(self, evaluation)

    @property
    def validation(self) -> EvalConfig:
        """What each validation of RL runs: the `eval` section's, on the validation split, greedy and as sampled."""
        train = self.train
        changes = {"split": "validation", "episodes_per_task": train.validation_episodes}
        return self.eval.model_copy(update=changes | {"temperatures": (0.0, train.temperature)})


def check_stepped(env: EnvConfig) -> None:
    """Raise `ConfigError` where nothing in the environment answers an action."""
    if env.not_stepped:
        raise ConfigError(env.not_stepped)


def check_states(recipe: Recipe, evaluation: EvalConfig) -> None:
    """Check that the initial states of an evaluation are there, and that no mode comes twice.

    Raises:
        ValueError: they are not.
    """
    evaluation.modes()
    episode_specs(recipe.acting_env.env_spec(), evaluation)


# --- what a command asks of a recipe, and makes of it -------------------------------------------


@dataclass(frozen=True)
class Command[R: Recipe]:
    """What a command asks of a recipe.

    Attributes:
        kind: of run that it is for. example: a shipped recipe that is one. looks: raise where something that the recipe
            names is not there.
    """

    kind: type[R]
    example: str = ""
    looks: tuple[Callable[[R], object], ...] = ()


@dataclass(frozen=True)
class Run[R: Recipe]:
    """What is a kind of run's own; `vla_rl.cli.running.run` does the rest.

    Attributes:
        name: as it is typed behind `vla-rl`.
        command: which recipes it takes.
        start: runs it in its folder, resumed or not, saying what it does, and returns lines to print at its end.
        datasets: `SECTION.FIELD`s of datasets that it reads; those of the Hub are taken by their commit.
        free: patterns of options that may change where it is resumed, such as its length.
        check_changes: the `check` of `open_run`.
    """

    name: str
    command: Command[R]
    start: Callable[[R, Path, bool, Callable[[str], None]], Sequence[str]]
    datasets: Callable[[R], Sequence[str]] = lambda _: ()
    free: tuple[str, ...] = ()
    check_changes: Callable[[R, RunFolder, Changed], None] | None = None


def check[R: Recipe](recipe: Recipe, command: Command[R]) -> R:
    """Return a recipe of the kind that the command runs; a ConfigError says what would fail later."""
    if not isinstance(recipe, command.kind):
        raise _other_kind(recipe, command)
    for look in command.looks:
        look(recipe)
    return recipe


def _other_kind(recipe: Recipe, command: Command[Any]) -> ConfigError:
    wanted = command.kind.model_fields["run"].default
    return ConfigError(
        f"run: got {recipe.run!r}, and this command is for recipes of run {wanted!r}; "
        f"`vla-rl config {command.example}` is one"
    )


ANY = Command(Recipe)
TRAIN = Command(TrainRecipe, "tabletop_grpo", (TrainRecipe.check_inputs,))


# --- from a file and the command line -----------------------------------------------------------


def read_recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of these values, of the kind of run that they name; see `load_recipe`."""
    if "run" not in values:
        raise ConfigError(f"run: the recipe does not say what it is for; add one of: {', '.join(RUNS)}")
    recipe_class: type[Any] = resolve_kind("run", str(values["run"]))
    if unknown := sorted(values.keys() - recipe_class.model_fields.keys()):
        _check_sections(str(values["run"]), unknown)
    return validate(recipe_class, dict(values))


def _check_sections(own: str, unknown: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: of the sections unknown to recipes of `own` kind, some are those of other kinds.
    """
    faults = []
    for name in unknown:
        if kinds := [run for run in RUNS if name in resolve_kind("run", run).model_fields]:
            faults.append(
                f"{name}: a recipe of run {own!r} has no such section; run {', '.join(kinds)} has. Leave it "
                "out, or set run"
            )
    if faults:
        raise ConfigError("\n".join(faults))


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge, override and validate a recipe, by path or by the name of a shipped one, else a ConfigError."""
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: got the text {overrides!r}; give a list of such texts: [{overrides!r}]")
    return read_recipe(apply_overrides(read_yaml(find_recipe(name)), overrides))
