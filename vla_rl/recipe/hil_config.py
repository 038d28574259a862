"""Options of `run: hil`: a learner, and an actor with a person beside it, as two processes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from vla_rl.algorithms.offpolicy.config import ChooseBy, ReplayLearningConfig
from vla_rl.config import Config
from vla_rl.recipe.rac_config import ScriptedPersonConfig


class PracticeConfig(Config):
    """Autonomous practice: a task and the one that undoes it in turn, in the scene as the last episode has left it."""

    reset_task: str = Field(
        description="The task that undoes the other one of env.tasks, in the same scene; in the tabletop take_off, "
        "which undoes pick_place."
    )
    attempts: PositiveInt = Field(
        default=3, description="Failures in a row in one scene, after which a person resets it."
    )


class HilPersonConfig(ScriptedPersonConfig):
    """The person beside a policy that learns, which has to try what it would not do by itself."""

    temperature: NonNegativeFloat = Field(
        default=1.0,
        description="Of the policy while it collects. 0: greedy; a policy that chooses among chunks then draws them "
        "with the same noise at every decision, and never tries others.",
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
    episodes_per_turn: PositiveInt = Field(
        default=20, description="actor=simulator: episodes with one policy; then it takes the newest published one."
    )
    updates_per_episode: PositiveInt = Field(
        default=10, description="Updates that each episode pays for; the learner waits for more when they are made."
    )
    publish_every: PositiveInt = Field(
        default=20, description="Episodes learned from until the policy is published, and a checkpoint saved."
    )
    start_index: NonNegativeInt = Field(
        default=500_000, description="actor=simulator: first initial state of the train split."
    )
    prior_share: float = Field(
        default=0.5, ge=0, lt=1, description="Share of each batch from the prior: logged episodes and interventions."
    )
    warm_updates: NonNegativeInt = Field(
        default=1500, description="Updates on the logged episodes alone, first; 0 with prior=none: no dataset is read."
    )
    takeover: Literal["continues", "failure"] = Field(
        default="continues",
        description="What a takeover means for what the policy did before it. continues: the person's success is its "
        "own, only later (HIL-SERL); failure: its part ends there, as failed (RLIF).",
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
    wait: PositiveFloat = Field(
        default=0.5, description="Seconds from one look for new episodes to the next, where nothing is to be learned."
    )
    person: HilPersonConfig = Field(default_factory=HilPersonConfig, description="actor=simulator: the scripted one.")

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
