"""The `rollout` section of kind ray. Imports no Ray."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import SerializeAsAny, model_serializer

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import component
from vla_rl.interfaces import EnvConfig, VecEnv
from vla_rl.rollout.actors.config import RayOptions
from vla_rl.rollout.source import EpisodeSource, RolloutPlan
from vla_rl.types import EnvSpec


class HostedEnvConfig(EnvConfig):
    """The section `env`, built at the hosts that `rollout` describes. Written down, it is `env`: the figures are."""

    kind: str = "hosted"
    env: Annotated[SerializeAsAny[EnvConfig], component("env")]
    rollout: RayOptions

    @model_serializer
    def _as_env(self) -> dict[str, Any]:
        return self.env.model_dump(mode="json")

    def env_spec(self) -> EnvSpec:
        return self.env.env_spec()

    def build(self, num_envs: int | None = None, record_frames: bool = False) -> VecEnv:
        from vla_rl.rollout.actors.vec_env import connected

        return connected(self.env, self.rollout, num_envs or self.env.num_envs, record_frames)


class RayRolloutConfig(RayOptions):
    """Episodes run by Ray's actors: environments in hosts, the policy in workers, on this machine or a cluster."""

    def placed(self, env: EnvConfig) -> EnvConfig:
        return env if env.is_imagined else HostedEnvConfig(num_envs=env.num_envs, env=env, rollout=self)

    def build(self, plan: RolloutPlan, env: VecEnv, world: ProcessGroup) -> EpisodeSource:
        self.check(plan, world)
        from vla_rl.rollout.actors.ahead import AheadSource
        from vla_rl.rollout.actors.cluster import connect, wait_for_room
        from vla_rl.rollout.actors.source import LockstepSource

        connection = connect(self)
        try:
            wait_for_room(self, world.size)
            return (AheadSource if self.staleness else LockstepSource)(plan, self, connection)
        except BaseException:
            connection.end()
            raise
