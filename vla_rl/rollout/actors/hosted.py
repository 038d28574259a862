"""Config of environments held by Ray's hosts, for evaluations."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import SerializeAsAny, model_serializer

from vla_rl.config import component
from vla_rl.interfaces import EnvConfig, VecEnv
from vla_rl.rollout.actors.config import RayOptions
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
