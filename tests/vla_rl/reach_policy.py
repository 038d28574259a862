"""A scripted policy for the dummy environment, good or bad as asked, and episodes of a mixed one as a dataset."""

from pathlib import Path

import numpy as np
from torch import nn

from sim.dummy import DummyConfig
from vla_rl.interfaces import Policy
from vla_rl.types import ActionChunk, Observation
from vla_rl.workflows.record_dataset import CollectConfig, collect_dataset

COLORS = {"red": (220, 40, 40), "blue": (40, 70, 220)}


class ReachPolicy(nn.Module, Policy):
    """Moves the dot straight to the square it sees; too slow a one runs out of time from afar.

    Args:
        speed: largest action, of 1. noise: standard deviation of the action noise at temperature 1.
    """

    chunk_size = 4
    action_dim = 7
    cameras = ("agentview",)
    uses_state = True

    def __init__(self, speed: float = 1.0, noise: float = 0.0) -> None:
        super().__init__()
        self.speed, self.noise = speed, noise
        self.num_decisions = 0

    def act(self, obs: Observation, generator=None, temperature: float = 1.0) -> ActionChunk:
        import torch

        actions = np.zeros((obs.batch_size, self.chunk_size, self.action_dim), np.float32)
        for row in range(obs.batch_size):
            image, dot = obs.images["agentview"][row], obs.state[row, :2].astype(np.float64)
            color = next(rgb for name, rgb in COLORS.items() if name in obs.instruction[row])
            y, x = np.nonzero((image == color).all(-1))
            if not len(x):
                continue
            goal = np.array([x.mean() + 0.5, image.shape[0] - y.mean() - 0.5]) * 2 / image.shape[0] - 1
            for step in range(self.chunk_size):
                action = np.clip((goal - dot) / 0.2, -self.speed, self.speed)
                dot = dot + 0.2 * action
                actions[row, step, :2] = action
        if self.noise:
            draw = torch.randn(actions[..., :2].shape, generator=generator).numpy()
            actions[..., :2] += temperature * self.noise * draw
        self.num_decisions += obs.batch_size
        return ActionChunk(actions)


def log_episodes(env: DummyConfig, folder: Path, episodes_per_task: int) -> Path:
    """Write a dataset of a policy that is too slow for half of the states of 11 steps; decisions of 4 steps."""
    config = CollectConfig.model_validate(
        {"source": "policy", "dataset": str(folder), "episodes_per_task": episodes_per_task, "every_frame": False}
    )
    collect_dataset(env, config, policy=ReachPolicy(speed=0.45, noise=0.2), policy_version="reach 0123")
    return folder
