"""Simulated robot body: a MuJoCo simulator stepped without collisions with movable objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from vla_rl.types import EnvSpec, EpisodeSpec, Keyframe


class Collisions(Protocol):
    """What is used of a `mujoco.MjModel`, which has no types."""

    body_jntnum: np.ndarray
    body_dofnum: np.ndarray
    body_rootid: np.ndarray
    geom_bodyid: np.ndarray
    geom_contype: np.ndarray
    geom_conaffinity: np.ndarray


class EmbodiedEnv(Protocol):
    """What a `sim.single_env.SingleEnv` tells besides, so that its robot can be simulated alone."""

    spec: EnvSpec
    num_steps: int

    @property
    def model(self) -> Collisions:
        """Of the current episode's scene, MuJoCo's own."""
        ...

    def begin(self, spec: EpisodeSpec) -> None:
        """`reset`, without drawing anything."""
        ...

    def apply(self, action: np.ndarray) -> bool: ...

    def proprioception(self) -> np.ndarray:
        """The state that `observe` gives, float32 (S,)."""
        ...

    def save_state(self) -> Keyframe: ...

    def close(self) -> None: ...


class SimulatedBody:
    """See `vla_rl.rollout.body.Body`. Fixtures stay; what moves freely is fallen through, from the first step on.

    Args:
        env: of its own, closed with this one.
    """

    def __init__(self, env: EmbodiedEnv) -> None:
        self._env, self._task = env, ""

    def begin(self, specs: Sequence[EpisodeSpec]) -> tuple[list[Keyframe], np.ndarray]:
        """See `Body.begin`: as the whole simulator has it, settled."""
        states = np.zeros((len(specs), self._env.spec.state_dim), np.float32)
        bodies = []
        for row, spec in enumerate(specs):
            bodies.append(self._begun(spec))
            states[row] = self._env.proprioception()
        return bodies, states

    def _begun(self, spec: EpisodeSpec) -> Keyframe:
        self._env.begin(spec)
        self._task = spec.task
        return self._env.save_state()

    def step(self, bodies: Sequence[Keyframe], actions: np.ndarray) -> tuple[list[Keyframe], np.ndarray]:
        """See `Body.step`."""
        actions = np.clip(actions, self._env.spec.action_low, self._env.spec.action_high)
        states = np.zeros((*actions.shape[:2], self._env.spec.state_dim), np.float32)
        after = [self._moved(body, actions[row], states[row]) for row, body in enumerate(bodies)]
        return after, states

    def _moved(self, body: Keyframe, actions: np.ndarray, states: np.ndarray) -> Keyframe:
        """Move one body by a chunk (H, A); what it tells goes into `states` (H, S)."""
        if body.task != self._task:
            self._begun(EpisodeSpec(body.task))  # Loads the task's scene.
        with untouchable(self._env.model):
            self._env.begin(EpisodeSpec(body.task, keyframe=body))
            for step, action in enumerate(actions):
                self._env.apply(action)
                self._env.num_steps += 1
                states[step] = self._env.proprioception()
            return self._env.save_state()

    def close(self) -> None:
        """See `Body.close`."""
        self._env.close()
        self._task = ""


@contextmanager
def untouchable(model: Collisions) -> Iterator[None]:
    """Within, nothing collides with a MuJoCo model's freely moving bodies; afterwards as before."""
    free = (model.body_jntnum == 1) & (model.body_dofnum == 6)
    geoms = free[model.body_rootid[model.geom_bodyid]]
    before = model.geom_contype.copy(), model.geom_conaffinity.copy()
    try:
        model.geom_contype[geoms] = model.geom_conaffinity[geoms] = 0
        yield
    finally:
        model.geom_contype[:], model.geom_conaffinity[:] = before
