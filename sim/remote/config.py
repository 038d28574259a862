"""Options of an environment in a Python of its own: which Python, which class, and what must be known of it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from vla_rl.config import Config
from vla_rl.interfaces import EnvConfig


class EnvFacts(Config):
    """What Gymnasium's interface does not say. Each may stand in the class's own mapping `env_facts` instead.

    A "path" is a key, or keys joined by dots, into what the environment returns.
    """

    name: str | None = Field(default=None, description="Kind of the environment; default: its class's name.")
    tasks: dict[str, str] | None = Field(default=None, description="Task name -> instruction.")
    horizon: PositiveInt | dict[str, PositiveInt] | None = Field(
        default=None, description="Control steps before truncation, or task -> steps."
    )
    cameras: dict[str, str] | None = Field(
        default=None, description='Camera name -> path of its image in the observation, or "render()".'
    )
    state: str | tuple[str, ...] | None = Field(default=None, description="Path or paths of the state's parts.")
    control_hz: float | None = Field(default=None, gt=0, description="Control steps per second of simulated time.")
    success: str | None = Field(
        default=None, description="Path in info of success; default: success or is_success, else `terminated`."
    )
    instruction: str | None = Field(default=None, description="Path in reset's info of the episode's instruction.")
    reward: Literal["success", "environment"] | None = Field(
        default=None, description="1 at success and else 0 (the default), or the environment's own reward."
    )
    action_low: tuple[float, ...] | None = Field(default=None, description="Bounds; default: of its action_space.")
    action_high: tuple[float, ...] | None = Field(default=None, description="Bounds; default: of its action_space.")
    eval_seeds: tuple[int, ...] | None = Field(
        default=None, description="Seeds of a benchmark's official initial states, below 2**29."
    )

    @field_validator("eval_seeds")
    @classmethod
    def _official_seeds(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if any(not 0 <= seed < 2**29 for seed in value or ()):
            raise ValueError("seeds are from 0 to 2**29 - 1; higher ones belong to the splits")
        return value


class RemoteOptions(EnvConfig):
    """The options of `RemoteConfig`, by which a host is started."""

    start_timeout: ClassVar[float] = 300.0  # Seconds for a host's start, and for a reset.

    kind: Literal["remote"] = "remote"
    env: str = Field(description='Class or function that makes one environment: "package.module:Class".')
    kwargs: dict[str, Any] = Field(default={}, description="Arguments to it.")
    facts: EnvFacts = EnvFacts()
    python: str = Field(
        default="", description="The simulator's interpreter; ~ and $VARIABLES are filled in; empty: this one."
    )
    python_path: tuple[str, ...] = Field(default=(), description="Folders it imports from, besides working_dir.")
    working_dir: str = Field(default="", description="Folder that it runs in; empty: this one.")
    num_hosts: PositiveInt = Field(default=1, description="Processes that hold them.")
    devices: tuple[int, ...] = Field(
        default=(), description="GPUs assigned to the hosts in turn, as CUDA_VISIBLE_DEVICES and MUJOCO_EGL_DEVICE_ID."
    )
    hosts: tuple[str, ...] = Field(
        default=(),
        description='Other machines, "name:port", where sim/remote/listen.py waits; the num_hosts processes go '
        "to them in turn. Empty: processes are started here.",
    )
    token_file: str = Field(default="", description="With hosts: file with the secret that listen.py was given.")
    step_timeout: float = Field(default=120.0, gt=0, description="Seconds after which a silent host counts as hung.")

    @field_validator("env")
    @classmethod
    def _check_env(cls, value: str) -> str:
        module, _, name = value.partition(":")
        if not module or not name:
            raise ValueError('expected "package.module:Class"')
        return value

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            name, _, port = host.rpartition(":")
            if not name or not port.isdigit():
                raise ValueError(f'expected "name:port", got {host!r}')
        return value
