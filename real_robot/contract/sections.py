"""Sections of a robot's contract: operator, episode, guard, failure, execution and teleop."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vla_rl.config import Config, ConfigError
from vla_rl.types import PrefixSchedule


class StartCall(Config):
    """A service that is called once, before the first command."""

    service: str = Field(description="Service name, such as /servo_node/start_servo.")
    type: Literal["std_srvs/Trigger", "std_srvs/SetBool"] = Field(description="Service type.")
    data: bool = Field(default=True, description="SetBool: what is said.")


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


class GuardConfig(Config):
    """How `vla-rl robot guard` and a guarded deploy find each other, and when the guard brakes."""

    required: bool = Field(default=False, description="Deploy always drives through the guard, as with --guarded.")
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds: the guard brakes when the newest command is older; null: four control ticks.",
    )


class WatchConfig(Config):
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


class RealTimeChunking(Config):
    """Real-time chunking (Black et al. 2025, arXiv 2506.07339): the policy goes on from the actions under way.

    Options that are null are the checkpoint's own, else LeRobot's defaults.
    """

    execution_horizon: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Actions under way that the new chunk minds; LeRobot's default is 10.",
    )
    max_guidance_weight: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Bound on the pull towards the actions under way; LeRobot's default is 10.",
    )
    prefix_attention_schedule: PrefixSchedule | None = Field(
        default=None,
        description="How the actions under way lose weight after those that will be over: LINEAR (LeRobot's default), "
        "EXP, ONES, ZEROS.",
    )
    num_delays: int = Field(
        default=10, ge=1, le=1000, description="The next chunk is expected as late as the latest of so many last ones."
    )

    @property
    def guidance(self) -> dict[str, Any]:
        """The options that were given."""
        return self.model_dump(exclude={"num_delays"}, exclude_none=True)


class ExecutionConfig(Config):
    """How chunks become a stream of actions."""

    control_hz: float = Field(gt=0, le=1000, description="Control steps per second.")
    kind: Literal["position", "velocity"] = Field(
        default="position",
        description="What a pause leaves behind: position, the last action; velocity (and deltas), standstill.",
    )
    refill_at: int | None = Field(
        default=None,
        ge=0,
        description="Ask for a chunk when so few actions are left; null: whenever the last is there.",
    )
    ensemble: float | None = Field(
        default=None,
        ge=0,
        description="Average all chunks that cover a step, weight exp(-ensemble i), i = 0 the oldest.",
    )
    blend_steps: int = Field(default=4, ge=0, description="Steps over which a change of source fades; 0: at once.")
    unblended: tuple[int, ...] = Field(default=(), description="Numbers of the action that never blend (grippers).")
    max_age: float = Field(
        default=2.0, gt=0, description="Seconds: a chunk whose observation is older when it arrives is thrown away."
    )
    infer_timeout: float = Field(
        default=2.0,
        gt=0,
        le=600,
        description="Seconds that the policy server may take to answer; then it is asked anew.",
    )
    max_blind: float = Field(
        default=0.3,
        gt=0,
        le=600,
        description="Seconds that a chunk is played on after the policy server's last sign of life. A server that "
        "answers no ping while it computes needs more than its inference takes.",
    )
    real_time_chunking: RealTimeChunking | None = Field(
        default=None,
        description="Give the policy the actions under way; true: with its own options. For flow policies (SmolVLA, "
        "pi0, pi0.5).",
    )

    @field_validator("real_time_chunking", mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_real_time_chunking(self) -> ExecutionConfig:
        if self.real_time_chunking is not None:
            if self.ensemble is not None:
                raise ConfigError("execution.ensemble: averages chunks that real_time_chunking makes agree; give one")
            if self.refill_at == 0:
                raise ConfigError(
                    "execution.refill_at: 0 asks when nothing is under way any more, so real_time_chunking has nothing "
                    "to go on from; leave it out (null), or give as many steps as inference takes, and some more"
                )
        return self


class DeviceConfig(Config):
    """A person's device at the robot's own computer, in place of the console's keys. Used with a console alone."""

    kind: Literal["lerobot", "spacemouse"] = Field(description="LeRobot's teleoperators, or a 3Dconnexion SpaceMouse.")
    teleoperator: str = Field(default="", description="LeRobot's name of the device, such as so101_leader or gamepad.")
    id: str = Field(default="", description="LeRobot: the name that it was calibrated under.")
    port: str = Field(default="", description="LeRobot: serial port, such as /dev/ttyACM1; empty: it has none.")
    settings: dict[str, Any] = Field(default={}, description="Other fields of the teleoperator's LeRobot config.")
    modules: tuple[str, ...] = Field(default=(), description="Python modules to import first, as for the transport.")
    names: dict[str, str] = Field(
        default={}, description="The leader's name of a joint -> the contract's, where they differ."
    )
    align_within: float = Field(
        default=0.03,
        gt=0,
        le=0.25,
        description="A leader arm drives once each joint is this near the robot's set-point, as a share of low..high.",
    )
    align: Literal["person", "drive_leader"] = Field(
        default="person",
        description="How a leader arm comes to where the robot is at a take-over. person: by hand, the console says "
        "which joint to move. drive_leader: its own motors bring it there, and let go; where it is held fast, the "
        "person does.",
    )
    align_speed: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="With drive_leader, how fast its joints are driven: shares of low..high a second.",
    )
    phone_reach: float = Field(
        default=0.12, gt=0.01, le=1, description="A phone: meters from where it was pressed that are full deflection."
    )
    phone_turn: float = Field(
        default=0.6, gt=0.05, le=3, description="A phone: radians from how it was held when pressed, likewise."
    )
    read_hz: float = Field(default=60.0, gt=0, le=1000, description="Reads a second.")

    @model_validator(mode="after")
    def _check(self) -> DeviceConfig:
        if (self.kind == "lerobot") != bool(self.teleoperator):
            raise ConfigError("teleop.device: `teleoperator` belongs to kind lerobot, and is required there")
        return self


class TeleopConfig(Config):
    """How a person's axes become a command. What is left out is found by the names in `safety.dimensions`."""

    translation: tuple[int, int, int] | None = Field(
        default=None,
        description="Which numbers of the command move x, y, z. Default: safety.workspace.commands, else those named "
        "x, y, z or vx, vy, vz.",
    )
    rotation: tuple[int, int, int] | None = Field(
        default=None,
        description="Which numbers turn about x, y, z. Default: those named turn_x, ..., wx, ..., or roll, pitch, yaw.",
    )
    gripper: int | None = Field(
        default=None, description="Which number is the gripper. Default: the one named gripper."
    )
    gripper_open: float | None = Field(
        default=None, description="The gripper's value when open. Default: its lower limit."
    )
    gripper_closed: float | None = Field(
        default=None, description="The gripper's value when closed. Default: its upper limit."
    )
    directions: tuple[float, float, float, float, float, float] = Field(
        default=(1, 1, 1, 1, 1, 1),
        description="Factor of each axis, x, y, z, turn_x, turn_y, turn_z: -1 turns one round, so that 'left' is left.",
    )
    device: DeviceConfig | None = Field(default=None, description="A leader arm, gamepad or SpaceMouse.")
    speed: float = Field(
        default=0.5, gt=0, le=1, description="Full deflection, as a share of the speed that the safety limits allow."
    )
    timeout: float = Field(
        default=0.25,
        gt=0,
        le=2,
        description="Seconds without word from the person's device, or with its keys released, after which it holds.",
    )
