"""Actor that holds environments; any host can resume an episode from its course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vla_rl.config import build_component
from vla_rl.interfaces import VecEnv
from vla_rl.rollout.actors.cluster import Setting, where_here
from vla_rl.types import EpisodeSpec, Observation, StepResult

Question = Literal["expert_action", "expert_remaining", "save_state"]


@dataclass
class Course:
    """Course of an episode so far: enough to bring another environment there.

    Attributes:
        chunks: executed so far, float32 (H, A) each.
        seen: what the environment showed last; None before the first.
        num_moves: times that it was brought to another host.
        has_expert: the expert was asked for an action; what it keeps in mind goes with its host.
        is_lost: it cannot go on.
    """

    spec: EpisodeSpec
    chunks: list[np.ndarray] = field(default_factory=list)
    seen: Observation | None = None
    num_moves: int = 0
    has_expert: bool = False
    is_lost: bool = False


class EnvHost:
    """Holds environments of one config, in blocks that are each a `VecEnv`."""

    def __init__(self, env: Mapping[str, Any], setting: Setting, record_frames: bool = False) -> None:
        setting.enter()
        self._config, self._record_frames = build_component("env", env), record_frames
        if self._config.is_imagined:
            import torch

            torch.set_num_threads(setting.num_threads)
        self._blocks: dict[int, VecEnv] = {}

    def where(self) -> tuple[str, int]:
        """See `where_here`."""
        return where_here()

    def open(self, block: int, num_envs: int) -> None:
        """Start a block of so many environments."""
        if block not in self._blocks:
            self._blocks[block] = self._config.build(num_envs, self._record_frames)

    def close(self, block: int) -> None:
        """End a block."""
        self._blocks.pop(block).close()

    def ask(self, block: int, what: Question, env_ids: Sequence[int]) -> Sequence[Any]:
        """Return what the method of this name says of environments of a block, in their order.

        Raises:
            NotImplementedError: they do not have it.
        """
        env = self._blocks[block]
        if not hasattr(env, what):
            raise NotImplementedError(f"{env.spec.kind} has no {what}")
        return getattr(env, what)(env_ids)

    def turn(
        self,
        block: int,
        starts: Sequence[tuple[int, EpisodeSpec, Sequence[np.ndarray]]],
        env_ids: Sequence[int],
        actions: np.ndarray | None,
    ) -> tuple[Observation | None, StepResult | None]:
        """Begin episodes in some environments of a block, and step others.

        Args:
            starts: environment, spec, and the chunks to execute at once: those of an episode begun elsewhere.
            actions: float32 (B, H, A) for `env_ids`.

        Returns:
            What the first ones show, and the step's result.
        """
        env, seen, result = self._blocks[block], None, None
        if starts:
            seen = env.reset([spec for _, spec, _ in starts], [env_id for env_id, *_ in starts])
            if any(chunks for *_, chunks in starts):
                rows = enumerate(starts)
                replayed = [self._replayed(env, env_id, seen.row(row), chunks) for row, (env_id, _, chunks) in rows]
                seen = Observation.concatenate(replayed)
        if actions is not None and len(env_ids):
            result = env.step(actions, env_ids)
        return seen, result

    def _replayed(self, env: VecEnv, env_id: int, seen: Observation, chunks: Sequence[np.ndarray]) -> Observation:
        for chunk in chunks:
            result = env.step(chunk[None], [env_id])
            seen = result.obs
            if result.done[0]:  # It went another way than the first time, which the caller sees.
                break
        return seen


def is_same(a: Observation, b: Observation) -> bool:
    """Whether two observations are equal to the bit."""
    images = all(np.array_equal(image, b.images[name]) for name, image in a.images.items())
    return images and np.array_equal(a.state, b.state) and a.instruction == b.instruction


def join_results(parts: Sequence[StepResult]) -> StepResult:
    """One result from several with the same cameras and chunk length, in order; a copy, which can be written in."""
    names = ("reward", "terminated", "truncated", "num_steps", "success", "lost")
    info = {
        name: [value for part in parts for value in part.info[name]]
        if isinstance(values, list)
        else np.concatenate([part.info[name] for part in parts])
        for name, values in parts[0].info.items()
    }
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return StepResult(Observation.concatenate([part.obs for part in parts]), **arrays, info=info)


def lost_result(seen: Observation, num_actions: int, info: Mapping[str, Any]) -> StepResult:
    """The result of one environment's step that nobody could take; `info`: of another's, for its names."""
    nothing = {n: v[:1] if isinstance(v, list) else np.zeros(1, v.dtype) for n, v in info.items()}
    flags = (np.zeros((1, num_actions), bool), np.zeros((1, num_actions), bool))
    outcome = (np.zeros(1, np.int64), np.zeros(1, bool), np.ones(1, bool))
    return StepResult(seen, np.zeros((1, num_actions), np.float32), *flags, *outcome, info=nothing)
