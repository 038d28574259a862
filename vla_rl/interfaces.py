"""The two contracts everything stands on: `VecEnv` and `Policy`.

A simulator, the learned world model and a robot are all a `VecEnv`; every policy family is a
`Policy`. Conformance tests run over each implementation (`tests/test_conformance.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from vla_rl.types import ActionChunk, ActionPrefix, EnvSpec, EpisodeSpec, Keyframe, Observation, StepResult

if TYPE_CHECKING:
    import torch


class TrustError(ValueError):
    """A learned environment's trust is missing, unreadable or too low; the message says which figure and what to do."""


@runtime_checkable
class VecEnv(Protocol):
    """`num_envs` environments stepped together; each ends, and is reset, on its own.

    Methods take `env_ids`, the environments meant, in the order of the batch rows; None means
    all. A finished environment may simply be left out of the next `step`, so no inference or
    simulation is spent on it.
    """

    num_envs: int
    spec: EnvSpec

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """Start one episode in each given environment. Returns their first observation (B rows).

        Raises:
            ValueError: unknown task or split, or an index outside the split.
        """
        ...

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """Execute a chunk, float32 (B, H, A) in the environment's units, in each given environment.

        Actions outside the bounds are clipped. NaN raises ValueError, as does stepping an
        environment whose episode has ended.
        """
        ...

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """Full state of each given environment, for `EpisodeSpec.keyframe`."""
        ...

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """The scripted expert's next action, float32 (B, A), from privileged state.

        Raises:
            NotImplementedError: the environment has no expert for the task.
        """
        ...

    def close(self) -> None:
        """Release workers and renderers. May be called twice."""
        ...


class PolicyOutput(Protocol):
    """What `Policy.evaluate` returns, torch tensors with gradient (see policies/base.py)."""

    log_prob: torch.Tensor  # (B, H, A), at the temperature given
    entropy: torch.Tensor  # (B, H, A)
    value: torch.Tensor | None  # (B,)


class Policy(Protocol):
    """A vision-language-action policy. Implementations are also `torch.nn.Module`s."""

    chunk_size: int  # H
    action_dim: int  # A
    cameras: tuple[str, ...]
    uses_state: bool

    def act(self, obs: Observation, generator: torch.Generator | None = None, temperature: float = 1.0) -> ActionChunk:
        """Draw one chunk per environment; `temperature=0` is greedy. No gradient."""
        ...

    def evaluate(self, obs: Observation, chunk: ActionChunk, temperature: float = 1.0) -> PolicyOutput:
        """Log-probability, entropy and value of given chunks, with gradient."""
        ...

    def bc_loss(
        self, obs: Observation, actions: np.ndarray, valid: np.ndarray | None = None, keyframe: np.ndarray | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Behavior-cloning loss on actions float32 (B, H, A) in environment units.

        `valid`: bool (B, H), False where a chunk runs past its episode's end.
        `keyframe`: float32 (B, 3), meters, where the end effector will be at the gripper's next change or the
        episode's end, NaN where unknown: the target of an auxiliary loss, for policies that have one.
        """
        ...

    def embed(self, obs: Observation) -> torch.Tensor:
        """Features (B, D) for failure detection. No gradient."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights (safetensors) and config (JSON) so that `load_policy(folder)` restores it."""
        ...


class ContinuingPolicy(Policy, Protocol):
    """A policy that can go on from actions under way: real-time chunking. For robots; RL draws chunks by `act`."""

    def act_with_prefix(
        self, obs: Observation, prefix: ActionPrefix, generator: torch.Generator | None = None
    ) -> ActionChunk:
        """A chunk per environment, greedy, that follows the prefix where it is frozen and leaves it smoothly."""
        ...


class WatchingPolicy(Policy, Protocol):
    """A policy that remembers the episodes it is in, such as one that plans with a world model."""

    def watch(self, env_ids: Sequence[int], begins: Sequence[bool]) -> None:
        """Called before each `act`: the environment of each row, and whether its episode begins."""
        ...
