"""Synthetic policy inputs of the right shapes, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vla_rl.types import EnvSpec, Observation

INSTRUCTIONS = (
    "pick up the red block and place it on the plate",
    "push the blue block to the zone",
    "stack the green block on the yellow block, then open the gripper",
)


def fake_env_spec(
    cameras: Sequence[str] = ("agentview",), image_size: int = 64, state_dim: int = 8, action_dim: int = 7
) -> EnvSpec:
    """The spec of an environment that does not exist."""
    tasks = {f"task_{i}": text for i, text in enumerate(INSTRUCTIONS)}
    return EnvSpec(
        kind="fake",
        tasks=tasks,
        horizon=dict.fromkeys(tasks, 48),
        cameras=tuple(cameras),
        image_size=(image_size, image_size),
        state_dim=state_dim,
        action_dim=action_dim,
        action_low=-np.ones(action_dim, dtype=np.float32),
        action_high=np.ones(action_dim, dtype=np.float32),
        control_hz=20.0,
    )


def fake_observation(
    spec: EnvSpec, batch_size: int, seed: int = 0, instructions: Sequence[str] | None = None
) -> Observation:
    """Random images and states; the instructions in turn, the spec's own by default."""
    rng = np.random.default_rng(seed)
    texts = list(instructions or spec.tasks.values())
    return Observation(
        images={
            camera: rng.integers(0, 256, (batch_size, *spec.image_size, 3), dtype=np.uint8) for camera in spec.cameras
        },
        state=rng.uniform(-1.2, 1.2, (batch_size, spec.state_dim)).astype(np.float32),
        instruction=[texts[i % len(texts)] for i in range(batch_size)],
    )


def fake_statistics(size: int, gripper: bool = True) -> dict[str, list[float] | list[bool]]:
    """Statistics for `set_norm_stats`: mean 0, deviation 1, bounds -1 and 1; the last dimension a gripper."""
    bounds = {name: [value] * size for name, value in (("q01", -1.0), ("q99", 1.0), ("min", -1.0), ("max", 1.0))}
    return {**bounds, "mean": [0.0] * size, "std": [1.0] * size, "mask": [True] * (size - 1) + [not gripper]}
