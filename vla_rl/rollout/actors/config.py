"""Options of rollouts by Ray's actors. Imports no Ray."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import ConfigError
from vla_rl.interfaces import EnvConfig, VecEnv
from vla_rl.rollout.source import LaterEnv, RolloutConfig, RolloutPlan

LEAST_STORE_MB = 75
WORKER_CPUS = 1.0  # That Ray reserves for a worker.


class RayOptions(RolloutConfig):
    """What `RayRolloutConfig` takes, as its hosts, workers and sources know it."""

    kind: Literal["ray"] = "ray"
    address: str | None = Field(
        default=None, description="The cluster: auto, or HOST:PORT; null: a Ray of its own on this machine."
    )
    hosts: PositiveInt = Field(
        default=2, description="Processes that hold a worker's environments, env.num_envs of them in even parts."
    )
    workers: PositiveInt = Field(
        default=1, description="Processes that hold the policy and act; each has hosts, and env.num_envs, of its own."
    )
    staleness: NonNegativeInt = Field(
        default=0,
        description="A group counts only if its oldest chunk was drawn at most so many updates ago. 0: rollout and "
        "update by turns, with the numbers of kind local; above 0: episodes go on while the policy is updated.",
    )
    timeout_s: PositiveFloat = Field(
        default=120.0,
        description="Seconds after which a silent host is replaced; a worker that is silent, or gets nothing done, "
        "after start_timeout_s more.",
    )
    start_timeout_s: PositiveFloat = Field(
        default=300.0,
        description="Seconds that starting a host or worker may take; others take over after that. Where there is no "
        "host at all, or no machine with room, the run ends then.",
    )
    host_cpus: NonNegativeFloat = Field(default=1.0, description="CPUs that Ray reserves for a host.")
    host_gpus: NonNegativeFloat = Field(default=0.0, description="GPUs, or a part of one, for a host (rendering).")
    worker_gpus: NonNegativeFloat = Field(default=0.0, description="GPUs, or a part of one, for a worker.")
    object_store_mb: NonNegativeInt = Field(
        default=0, description="address null: memory for episodes under way, MiB, at least 75; 0 leaves it to Ray."
    )

    @field_validator("object_store_mb")
    @classmethod
    def _as_ray_takes_it(cls, size: int) -> int:
        if 0 < size < LEAST_STORE_MB:
            raise ValueError(f"Ray takes {LEAST_STORE_MB} or more, or 0 for its own choice")
        return size

    def build_env(self, env: EnvConfig) -> VecEnv:
        return env.build_elsewhere() if env.is_imagined else LaterEnv(env)

    def check(self, plan: RolloutPlan, world: ProcessGroup) -> None:
        """Refuse what cannot work before anything starts.

        Raises:
            ConfigError: several training processes that would not share a cluster, or too many hosts.
        """
        if world.size > 1 and self.address is None:
            raise ConfigError(
                f"rollout.address: is null with {world.size} training processes, which must share one Ray; start it "
                "(`ray start --head`) and give address=auto"
            )
        if self.staleness and plan.groups % world.size:
            raise ConfigError(
                f"train.groups: got {plan.groups}; with rollout.staleness above 0 it must be a multiple of the "
                f"{world.size} training processes"
            )
        if plan.env.num_envs < self.hosts:
            raise ConfigError(
                f"rollout.hosts: got {self.hosts} for env.num_envs={plan.env.num_envs}; each host holds at least one"
            )
