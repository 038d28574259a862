"""The topics with which people, buttons and sensors command a robot's control loop."""

from __future__ import annotations

from pydantic import Field, model_validator

from vla_rl.config import Config, ConfigError


class OperatorTopics(Config):
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
        description="std_msgs/String: success or failure, from a sensor that sees the task solved; ends the episode, "
        "with --console. Empty: a person says it.",
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
