"""The simulated bodies of imagined episodes: what they tell of the robot's state stands, the rest is imagined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vla_rl.data.keyframes import RECORDED
from vla_rl.rollout.body import Body
from vla_rl.types import EpisodeSpec, Keyframe
from world_model.env.saved import KIND
from world_model.model.world_model import WorldModel

PREFIX, ENV = "body.", "body_env"  # Names of a keyframe's arrays that hold the body's own.


class Bodies:
    """One body for each of `num_envs` environments."""

    def __init__(self, body: Body, world_model: WorldModel, num_envs: int) -> None:
        self._body, self._world_model = body, world_model
        self._now: list[Keyframe | None] = [None] * num_envs

    def begin(self, ids: Sequence[int], specs: Sequence[EpisodeSpec]) -> None:
        """Put the bodies of `ids` where their episodes begin.

        Raises:
            ValueError: a keyframe that does not say where the body is.
        """
        imagined = {i: spec.keyframe for i, spec in zip(ids, specs, strict=True) if _is(spec, KIND)}
        if any(_is(spec, RECORDED) for spec in specs):
            raise ValueError(
                "keyframe: is of a recorded episode, which holds what the policy sees of the robot and not its joints; "
                "set env.body=learned, or begin at initial states alone (sampling.keyframe_share=0)"
            )
        real = [i for i in ids if i not in imagined]
        begun = self._body.begin([spec for spec in specs if not _is(spec, KIND)])
        for i, body in zip(real, begun, strict=True):
            self._now[i] = body
        for i, keyframe in imagined.items():
            assert keyframe is not None, "it has a kind"
            self._now[i] = _saved(keyframe)

    def step(self, ids: Sequence[int], actions: np.ndarray, planned: np.ndarray) -> torch.Tensor:
        """Move the bodies of `ids` by a chunk, float32 (B, H, A), of which `planned`, int64 (B,), are executed.

        Returns:
            States of the F frames, normalized, float32 (B, F, S); NaN in what the body does not tell.
        """
        now = [body for i in ids if (body := self._now[i]) is not None]
        after, states = self._body.step(now, actions)
        for i, body in zip(ids, after, strict=True):
            self._now[i] = body
        model = self._world_model
        ends = np.arange(model.frame_steps, actions.shape[1] + model.frame_steps, model.frame_steps)
        last = np.minimum(ends, planned[:, None]) - 1
        told = torch.from_numpy(states[np.arange(len(now))[:, None], last]).to(model.device)
        return (told - model.state_mean) / model.state_std

    def arrays(self, env_id: int) -> dict[str, np.ndarray]:
        """Of the body of `env_id`, for a keyframe."""
        body = self._now[env_id]
        assert body is not None, "an environment runs, so its body has begun"
        return {ENV: np.frombuffer(body.env.encode(), np.uint8)} | {PREFIX + n: a for n, a in body.arrays.items()}

    def close(self) -> None:
        """Close the body."""
        self._body.close()


def _is(spec: EpisodeSpec, kind: str) -> bool:
    return spec.keyframe is not None and spec.keyframe.env == kind


def _saved(keyframe: Keyframe) -> Keyframe:
    if ENV not in keyframe.arrays:
        raise ValueError(
            "keyframe: was saved with env.body=learned, and does not say where the robot's joints are; save it with "
            "env.body=simulated, or set env.body=learned"
        )
    arrays = {n.removeprefix(PREFIX): array for n, array in keyframe.arrays.items() if n.startswith(PREFIX)}
    return Keyframe(keyframe.arrays[ENV].tobytes().decode(), keyframe.task, keyframe.step, arrays)
