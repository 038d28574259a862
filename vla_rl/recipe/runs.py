"""The kinds of run beside RL: which sections a recipe of each may have, and which combinations of them it refuses.

What one section alone can tell (a number out of range) is in that section's class; what only a look at files or facts
of an environment can tell is in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from vla_rl.algorithms.offpolicy.config import OnlineConfig
from vla_rl.algorithms.offpolicy.offline import OfflineConfig
from vla_rl.config import component
from vla_rl.interfaces import EnvConfig, FailureDetectionConfig, WorldModelFitConfig
from vla_rl.recipe.recipe import Recipe, Rule, TrainRecipe, check_stepped
from vla_rl.recipe.sections import HilConfig, HubConfig, LoopConfig, RacConfig
from vla_rl.rewards.config import RewardFitConfig
from vla_rl.rollout.source import LocalRolloutConfig
from vla_rl.training.config import SFTConfig


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
