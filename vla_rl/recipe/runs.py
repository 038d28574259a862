"""The kinds of run beside RL, and the sections that they alone have: `rac`, `hil`, `loop`, `hub`.

A kind says which sections a recipe of it may have, and which combinations of them it refuses. What one section alone
can tell (a number out of range) is in that section's class; what only a look at files or facts of an environment can
tell is in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from vla_rl.algorithms.offpolicy.config import ChooseBy, OnlineConfig, ReplayLearningConfig
from vla_rl.algorithms.offpolicy.offline import OfflineConfig
from vla_rl.config import Config, component
from vla_rl.data.config import Frames
from vla_rl.interfaces import EnvConfig, FailureDetectionConfig, WorldModelFitConfig
from vla_rl.recipe.recipe import Recipe, Rule, TrainRecipe, check_stepped
from vla_rl.rewards.config import RewardFitConfig
from vla_rl.rollout.source import LocalRolloutConfig
from vla_rl.training.config import SFTConfig

FIRST_STATE = 500_000  # First initial state of the train split that a person is beside the policy in.
RacControl = Literal["new_states", "same_states"]


class ScriptedPersonConfig(Config):
    """The person beside a policy in a simulator: its scripted expert, and when it takes over."""

    alarm: Literal["progress", "clock"] = Field(
        default="progress",
        description="What interrupts the policy. progress: for `patience` steps what the scripted expert would still "
        "have to do has not become less, or the horizon has passed; the simulator must say what remains (the tabletop "
        "does). clock: 80 % of the horizon have passed.",
    )
    patience: PositiveInt = Field(default=10, description="Control steps without progress that are an alarm.")
    temperature: NonNegativeFloat = Field(default=0.0, description="Of the policy while it collects; 0 is greedy.")


class RacConfig(Config):
    """Recover and correct (RaC, arXiv 2509.07953) in a simulator, with its scripted expert as the person."""

    person: ScriptedPersonConfig = ScriptedPersonConfig()
    rounds: PositiveInt = Field(default=2, description="Times that episodes are collected and the policy is trained.")
    episodes_per_task: PositiveInt = Field(default=12, description="Episodes of each task in a round.")
    frames: Frames = Field(default="rac", description="Which frames of the rounds to learn from.")
    weight: PositiveFloat = Field(
        default=1.0, description="Share of all rounds together in each batch, relative to sft.datasets' weights."
    )
    controls: tuple[RacControl, ...] = Field(
        default=("new_states", "same_states"),
        description="After the last round, also train controls: cloning of as many additional full demonstrations as "
        "there were interventions of each task, with the same share of each batch and as many updates. new_states: "
        "from initial states of their own, which is what recording without the policy would give; same_states: from "
        "the interventions' initial states, so that they profit from the policy having shown which are hard.",
    )


class PracticeConfig(Config):
    """Autonomous practice: a task and the one that undoes it in turn, in the scene as the last episode has left it."""

    reset_task: str = Field(
        description="The task that undoes the other one of env.tasks, in the same scene; in the tabletop take_off, "
        "which undoes pick_place."
    )
    attempts: PositiveInt = Field(
        default=3, description="Failures in a row in one scene, after which a person resets it."
    )


class HilConfig(ReplayLearningConfig):
    """A frozen policy improved while it acts with a person beside it (HIL-SERL, arXiv 2410.21845)."""

    method: Literal["best_of_n", "edits"] = Field(
        default="best_of_n",
        description="What acts. best_of_n: of the policy's chunks, the one of largest Q (IDQL); edits: a small "
        "policy's changes of them stand for choice too (EXPO).",
    )
    choose_by: ChooseBy = Field(
        default="value",
        description="Which chunk the critic prefers. value: that of the largest Q, the smallest of the ensemble's; "
        "lead: the greedy one, unless all networks of the ensemble prefer another one.",
    )
    actor: Literal["simulator", "recordings"] = Field(
        default="simulator",
        description="Who runs episodes. simulator: a process of this command's, with the simulator's scripted expert "
        "as the person; recordings: `vla-rl deploy --record`, with a person at the console.",
    )
    recordings: str = Field(
        default="",
        description="actor=recordings: the folder in which these are made, as in `deploy --record FOLDER/NAME`.",
    )
    episodes: PositiveInt = Field(default=200, description="Episodes of the run, of all tasks in turn.")
    updates_per_episode: PositiveInt = Field(
        default=10, description="Updates that each episode pays for; the learner waits for more when they are made."
    )
    publish_every: PositiveInt = Field(
        default=20, description="Episodes learned from until the policy is published, and a checkpoint saved."
    )
    warm_updates: NonNegativeInt = Field(
        default=1500, description="Updates on the logged episodes alone, first; 0 with prior=none: no dataset is read."
    )
    interventions: NonNegativeInt | None = Field(
        default=None,
        description="actor=simulator: the person's budget; once it is spent, an episode that needs help has failed. "
        "0: nobody takes over. Empty: there is no bound.",
    )
    practice: PracticeConfig | None = Field(
        default=None,
        description="actor=simulator: go on in the scene that the last episode has left; empty: the scene is reset "
        "before every episode.",
    )
    person: ScriptedPersonConfig = Field(
        default=ScriptedPersonConfig(temperature=1.0),
        description="actor=simulator: the scripted one. The policy is at temperature 1, if nothing is said: it has to "
        "try what it would not do by itself, and one that chooses among chunks draws the same ones each time at 0.",
    )

    @model_validator(mode="after")
    def _fits_actor(self) -> HilConfig:
        if (self.actor == "recordings") != bool(self.recordings):
            raise ValueError(
                f"recordings: got {self.recordings!r} with actor={self.actor}; name the folder of the recordings with "
                "actor=recordings, and none with actor=simulator"
            )
        if self.practice is not None and self.actor != "simulator":
            raise ValueError(
                f"practice: got a section with actor={self.actor}; on a robot a person resets the scene between "
                "episodes, so leave it out"
            )
        return self


class LoopConfig(Config):
    """How many real episodes a round may take, and which controls run beside it."""

    rounds: PositiveInt = Field(default=1, description="Times: real episodes, fit, trust, RL in imagination.")
    real_episodes: PositiveInt | None = Field(
        default=None,
        description="Real episodes that all rounds together may take, the gate's and validation's included (not those "
        "of the final evaluation); null: as many as the rounds ask for.",
    )
    episodes: PositiveInt = Field(default=60, description="Real episodes per task and round to fit the world model on.")
    held_out: PositiveInt = Field(
        default=40, description="Real episodes per task and round for trust; later rounds learn from them."
    )
    held_out_group: PositiveInt = Field(
        default=1,
        description="Held-out episodes from each initial state, see collect.group_size; fewer states make wider "
        "intervals of the other figures.",
    )
    every_frame: bool = Field(
        default=True,
        description="Record what is seen after each control step of these episodes, see collect.every_frame; false "
        "where rendering is slow.",
    )
    refit: bool = Field(
        default=True,
        description="Co-evolution: each round fits the world model again, on the new policy's episodes too. false: the "
        "later rounds stay in the first round's (an ablation).",
    )
    controls: tuple[Literal["shuffled_rewards", "continue_bc", "online_grpo"], ...] = Field(
        default=(),
        description="shuffled_rewards, continue_bc: negative controls of RL, each in a process of its own beside it. "
        "online_grpo: at the end, the recipe's RL in the real simulator with as many real episodes as the loop took.",
    )

    @property
    def negative_controls(self) -> tuple[str, ...]:
        """Those that run beside RL, in the same imagination."""
        return tuple(name for name in self.controls if name != "online_grpo")


class HubConfig(Config):
    """How many robots, which episodes, what asks for help, and how long the person needs."""

    robots: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 4), min_length=1, description="Numbers of robots to measure, each with one person."
    )
    episodes_per_task: PositiveInt = Field(default=40, description="Episodes of each task, the same for each number.")
    alarm: Literal["detector", "progress"] = Field(
        default="detector",
        description="What asks for help. detector: the failure detector `hub.detector`, fitted first by the recipe's "
        "failure section. progress: for 20 steps what the scripted expert would still have to do has not become less, "
        "which only a simulator can tell.",
    )
    detector: str = Field(
        default="safe_lstm", description="Name of the detector, one of failure.detectors, or a detector's folder."
    )
    hand_over: NonNegativeFloat = Field(
        default=3.0, description="Seconds from when the person turns to a robot until it moves."
    )


class SFTRecipe(Recipe):
    """Behavior cloning: `vla-rl sft`."""

    run: Literal["sft"] = "sft"
    sft: SFTConfig


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

    def check_inputs(self) -> None:
        """Look for what the loop begins with, before any work; it makes the world model and keyframes itself."""
        check_stepped(self.acting_env)
        self.check_given()

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
