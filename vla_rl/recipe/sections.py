"""Sections that recipes of one kind alone have: `rac`, `hil`, `loop`, `hub`."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from vla_rl.algorithms.offpolicy.config import ChooseBy, ReplayLearningConfig
from vla_rl.config import Config
from vla_rl.data.config import Frames

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
    episodes_per_turn: PositiveInt = Field(
        default=20, description="actor=simulator: episodes with one policy; then it takes the newest published one."
    )
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
    steps_after_success: NonNegativeInt = Field(
        default=8,
        description="Control steps for which these episodes go on after success, a chunk: else the world model "
        "never sees what the rest of a chunk does.",
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
