"""Small sections of a robot's contract: operator topics, services, the guard and the failure detector."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from real_robot.finite_config import FiniteConfig
from vla_rl.config import Config, ConfigError


class StartCall(Config):
    """A service that is called once, before the first command."""

    service: str = Field(description="Service name, such as /servo_node/start_servo.")
    type: Literal["std_srvs/Trigger", "std_srvs/SetBool"] = Field(description="Service type.")
    data: bool = Field(default=True, description="SetBool: what is said.")


class OperatorTopics(FiniteConfig):
    """Topics with which a person, a button or a pedal commands the loop."""

    stop: str = Field(default="", description="std_msgs/Bool: true stops the robot until a reset; empty: none.")
    reset: str = Field(default="", description="std_msgs/String: who resets, after a stop; empty: none.")
    deadman: str = Field(
        default="",
        description="std_msgs/Bool: true while the deadman switch is held, said again and again, within each "
        "safety.deadman_timeout; empty: none. Needs safety.deadman: true.",
    )
    outcome: str = Field(
        default="",
        description="std_msgs/String: success or failure, from a sensor that sees the task solved; ends a person's "
        "episode. Empty: the person says it.",
    )
    stop_timeout: float = Field(
        default=0.0,
        ge=0,
        description="Seconds without a message on the stop topic that stop the robot, for buttons that say false all "
        "the time; 0: the topic may be silent.",
    )

    @model_validator(mode="after")
    def _check_stop(self) -> OperatorTopics:
        if self.stop_timeout and not self.stop:
            raise ConfigError(f"operator.stop_timeout: {self.stop_timeout:g}, but there is no operator.stop; name it")
        return self


class EpisodeServices(Config):
    """Services (std_srvs/Trigger) around a person's episodes, of the robot or of whoever lays its scene out."""

    begin: str = Field(
        default="",
        description="Called when a person starts an episode, which begins once it has answered: a simulator lays its "
        "scene out, an arm drives home. Empty: none.",
    )
    reset: str = Field(
        default="", description="Lays the scene out anew, between episodes: the console's New scene. Empty: none."
    )
    timeout: float = Field(default=10.0, gt=0, le=600, description="Seconds that either has.")


class GuardConfig(FiniteConfig):
    """How `vla-rl robot-guard` and a guarded deploy find each other, and when the guard brakes."""

    required: bool = Field(default=False, description="Deploy always drives through the guard, as with --guarded.")
    suffix: str = Field(
        default="/guarded",
        pattern=r"^[A-Za-z0-9_/]+$",
        description="Appended to each action topic, for the commands to the guard.",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds: the guard brakes when the newest command is older; null: four control ticks.",
    )


class WatchConfig(FiniteConfig):
    """How a robot heeds its failure detector."""

    quiet: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="A rewind ends where the score has fallen to this share of the way from where successes are on "
        "average (the band's center; 0 for a constant band) to the threshold.",
    )
    patience: float = Field(
        default=2.0, gt=0, description="Seconds after which a detector that has not answered is an alarm."
    )
