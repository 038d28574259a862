"""The kinds of run: which sections a recipe of each may have, and which combinations of them it refuses.

What one section alone can tell (a number out of range) is in that section's class; what only a look at files or facts
of an environment can tell is in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, SerializeAsAny

from vla_rl.algorithms.base import AlgoConfig
from vla_rl.algorithms.offpolicy.config import OnlineConfig
from vla_rl.algorithms.offpolicy.offline import OfflineConfig
from vla_rl.config import Config, component
from vla_rl.evaluation.evaluate import EvalConfig
from vla_rl.evaluation.gate import GateConfig
from vla_rl.interfaces import EnvConfig, FailureDetectionConfig, WorldModelFitConfig
from vla_rl.recipe.hil_config import HilConfig
from vla_rl.recipe.loop_config import LoopConfig
from vla_rl.recipe.rac_config import RacConfig
from vla_rl.recipe.recipe import Recipe, Rule
from vla_rl.rewards.config import RewardFitConfig
from vla_rl.rollout.source import LocalRolloutConfig
from vla_rl.rollout.task_sampling import CLEAN, SamplingConfig
from vla_rl.training.config import SFTConfig, TrainConfig
from vla_rl.types import Split


def _unknown_axes(recipe: TrainRecipe) -> list[str]:
    """Axes along which training episodes cannot be perturbed."""
    perturb = recipe.sampling.perturb
    return [axis for axis in perturb.axes if axis not in (*recipe.env.perturb_axes, CLEAN)] if perturb else []


def _branch_frames(recipe: TrainRecipe) -> object:
    """After how many frames imagined episodes end, worth a value; None: they go on."""
    return getattr(getattr(recipe.env, "imagination", None), "branch_frames", None)


def _validates_on_states_of_the_gate(recipe: TrainRecipe) -> bool:
    """Whether a check of the gate, in any round of a loop, may begin where an episode of a validation does."""
    train, gate, first = recipe.train, recipe.gate, recipe.eval.start_index
    rounds = recipe.loop.rounds if isinstance(recipe, LoopRecipe) else 1
    end = gate.start_index + rounds * gate.num_checks(train.iterations) * gate.pairs
    is_same_split = gate.split == recipe.validation.split
    return is_same_split and first < end and gate.start_index < first + train.validation_episodes


class SFTRecipe(Recipe):
    """Behavior cloning: `vla-rl sft`."""

    run: Literal["sft"] = "sft"
    sft: SFTConfig


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
            _unknown_axes,
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

    @property
    def validation(self) -> EvalConfig:
        """What each validation of RL runs: the `eval` section's, on the validation split, greedy and as sampled."""
        train = self.train
        changes = {"split": "validation", "episodes_per_task": train.validation_episodes}
        return self.eval.model_copy(update=changes | {"temperatures": (0.0, train.temperature)})


class FitRecipe(Recipe):
    """Fitting and measuring a world model: `vla-rl world-model ...`."""

    run: Literal["fit"] = "fit"
    world_model: Annotated[SerializeAsAny[WorldModelFitConfig], component("world_model")]


class LoopRecipe(TrainRecipe, FitRecipe):
    """The closed loop of world model and policy: `vla-rl loop`; also its RL and its fit alone."""

    run: Literal["loop"] = "loop"
    real_env: Annotated[SerializeAsAny[EnvConfig], component("env")] = Field(
        description="The simulator in which policies are evaluated and gains checked."
    )
    loop: LoopConfig = Field(default_factory=LoopConfig)

    rules: ClassVar[tuple[Rule, ...]] = (
        *TrainRecipe.rules,
        Rule(
            lambda r: r.sft is None and "continue_bc" in r.loop.controls,
            lambda r: "sft: this recipe has none, but the control continue_bc learns from it: name sft.datasets",
        ),
    )

    def training(self, **changes: Any) -> TrainRecipe:
        """Return the recipe of the loop's RL alone, with other sections in place of those named."""
        shared = {name: getattr(self, name) for name in TrainRecipe.model_fields if name != "run"}
        return TrainRecipe(**(shared | changes))


class OfflineRecipe(Recipe):
    """Learning from logged episodes alone: `run: offline`."""

    run: Literal["offline"] = "offline"
    offline: Annotated[SerializeAsAny[OfflineConfig], component("offline")]
    sft: SFTConfig = Field(description="Its datasets are the logged episodes, its other options the cloning's.")

    rules: ClassVar[tuple[Rule, ...]] = (
        *Recipe.rules,
        Rule(lambda r: r.offline.refuses(r.sft), lambda r: r.offline.refuses(r.sft)),
        Rule(
            lambda r: r.sft.validation_fraction,
            lambda r: (
                f"sft.validation_fraction: got {r.sft.validation_fraction:g}; `offline` judges decisions by critics "
                "that have not seen them, and holds nothing else out: set it to 0"
            ),
        ),
    )


class OnlineRecipe(Recipe):
    """A frozen policy improved by a critic of its own episodes: `run: online`."""

    run: Literal["online"] = "online"
    online: OnlineConfig
    sft: SFTConfig | None = Field(default=None, description="Its datasets are logged episodes to learn from.")

    rules: ClassVar[tuple[Rule, ...]] = (
        *Recipe.rules,
        Rule(
            lambda r: r.sft is None and r.online.reads_datasets,
            lambda r: (
                "sft: logged episodes are learned from; name them in sft.datasets. Without any: "
                "online.prior=none online.warm_updates=0"
            ),
        ),
    )


class HilRecipe(Recipe):
    """A policy improved while it acts with a person beside it: `run: hil`."""

    run: Literal["hil"] = "hil"
    rollout: LocalRolloutConfig = Field(default_factory=LocalRolloutConfig)
    hil: HilConfig
    sft: SFTConfig | None = Field(default=None, description="Its datasets are logged episodes to learn from.")

    rules: ClassVar[tuple[Rule, ...]] = (
        *Recipe.rules,
        Rule(
            lambda r: r.sft is None and r.hil.reads_datasets,
            lambda r: (
                "sft: logged episodes are learned from; name them in sft.datasets. Without any: "
                "hil.prior=none hil.warm_updates=0"
            ),
        ),
        Rule(
            lambda r: (
                r.hil.actor == "recordings" and getattr(getattr(r.env, "reward", None), "kind", "") == "simulator"
            ),
            lambda r: (
                "env.reward.kind: got 'simulator' with hil.actor=recordings, where no simulator says who succeeded; "
                "leave env.reward out (the recordings say so), or name a learned reward"
            ),
        ),
    )


class RacRecipe(Recipe):
    """Rounds of corrections by a scripted person: `run: rac`."""

    run: Literal["rac"] = "rac"
    rac: RacConfig
    sft: SFTConfig


class RewardRecipe(Recipe):
    """A reward learned from recorded episodes: `vla-rl reward ...`."""

    run: Literal["reward"] = "reward"
    reward: RewardFitConfig


class FailureRecipe(Recipe):
    """Detectors of failure: `vla-rl failure ...`."""

    run: Literal["failure"] = "failure"
    failure: Annotated[SerializeAsAny[FailureDetectionConfig], component("failure")]


class HubRecipe(FailureRecipe):
    """Several simulated robots and one person: `vla-rl hub measure`."""

    run: Literal["hub"] = "hub"
    rollout: LocalRolloutConfig = Field(default_factory=LocalRolloutConfig)
    hub: HubConfig


class HubProcesses(Config):
    """How `--processes` runs the real programs, in real time."""

    speed: PositiveFloat = Field(default=0.5, le=20, description="How many times faster than real time the robots run.")
    hands: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="How fast the person drives, as a share of the expert's own speed (the console's teleop.speed). "
        "The hands are two to three control steps behind what they see; from about 0.5 on they overshoot.",
    )
    piece: PositiveInt = Field(default=25, description="Episodes after which the programs are started anew.")
    waits: PositiveFloat = Field(
        default=3.0,
        description="Times its horizon that a policy may drive without asking for help, until the person comes and "
        "ends the episode.",
    )


class HubConfig(Config):
    """How many robots, which episodes, what asks for help, and how long the person needs."""

    robots: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4), min_length=1, description="Numbers of robots to measure, each with one person."
    )
    episodes_per_task: PositiveInt = Field(default=40, description="Episodes of each task, the same for each number.")
    split: Split = Field(default="eval", description="Split of the initial states.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split that is used.")
    alarm: Literal["detector", "progress"] = Field(
        default="detector",
        description="What asks for help. detector: the failure detector `hub.detector`, fitted first by the recipe's "
        "failure section. progress: for `patience` steps what the scripted expert would still have to do has not "
        "become less, which only a simulator can tell.",
    )
    detector: str = Field(
        default="safe_lstm", description="Name of the detector, one of failure.detectors, or a detector's folder."
    )
    patience: PositiveInt = Field(
        default=20, description="Control steps without progress after which the person gives up (and an alarm comes)."
    )
    operator_steps: PositiveInt = Field(
        default=96, description="Control steps that the person drives in an episode, at most."
    )
    hand_over: NonNegativeFloat = Field(
        default=3.0, description="Seconds from when the person turns to a robot until it moves."
    )
    head_start: NonNegativeFloat = Field(
        default=30.0,
        description="Seconds that a robot whose score is twice its threshold counts as if it had waited longer.",
    )
    processes: HubProcesses = Field(default=HubProcesses(), description="For `vla-rl hub measure --processes`.")
    temperature: NonNegativeFloat = Field(default=0.0, description="Of the policy's sampling; 0 is greedy.")
