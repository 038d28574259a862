"""The `rollout` section of kind ray. Imports no Ray."""

from __future__ import annotations

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.interfaces import EnvConfig, VecEnv
from vla_rl.rollout.actors.config import RayOptions
from vla_rl.rollout.actors.hosted import HostedEnvConfig
from vla_rl.rollout.source import EpisodeSource, RolloutPlan


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
