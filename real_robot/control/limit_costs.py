"""GRPO that also pays for each command that the robot's safety limits would have changed or held.

The contract's own limiter and workspace are played over an episode's actions, and the states that it saw before its
chunks, on an exact clock of control ticks. Success and these costs are each normalized within their group and then
added (GDPO, Liu et al. 2026, arXiv 2601.05242): success by episodes, costs by actions, since which action was held is
known. The costs' price is a Lagrange multiplier: it rises while an episode's mean count is above its target, and falls
below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from pydantic import Field

from real_robot.contract.load import load_contract
from real_robot.contract.safety import SafetyConfig
from real_robot.control.limiter import Limiter, WorkspaceGuard
from real_robot.types import RobotObservation
from vla_rl.algorithms.base import GroupConfig, episode_batch, shuffled_episodes
from vla_rl.algorithms.batch import Batch, Evaluate, decisions, has_spread, rows_by_group
from vla_rl.algorithms.grpo import group_relative
from vla_rl.algorithms.learner import ExtraLoss, Learner
from vla_rl.algorithms.options import LearnerOptions
from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy
from vla_rl.types import Episode

ROUNDING = 1e-5  # of a number's range: what the limiter may change without being counted
HELD = "limits/held_per_episode"


class LimitsGRPOConfig(GroupConfig):
    """GRPO on success and on the control steps at which a robot's limits would have changed or held the command."""

    kind: str = "real_robot.control.limit_costs:LimitsGRPOConfig"
    contract: str = Field(
        description="The robot's contract (YAML), or the name of a shipped one. Its commands are the environment's "
        "actions, number by number, and its rate is the environment's."
    )
    target: float = Field(ge=0, description="Control steps of an episode, on average, that may be changed or held.")
    price_rate: float = Field(
        default=0.1, ge=0, description="What the price rises by after an iteration, for each step above the target."
    )
    price: float = Field(default=0.0, ge=0, description="Weight of the normalized costs in the first iteration.")
    shuffle_costs: bool = Field(
        default=False, description="Negative control: costs are dealt to other chunks of the rollout."
    )

    def make_batch(
        self, episodes: list[Episode], evaluate: Evaluate, shuffle: np.random.Generator | None, world: ProcessGroup
    ) -> Batch:
        """Make a batch whose advantages are GRPO's of success, less those of the costs at their price.

        The sum is divided by 1 + price, so that a step does not grow with it. `shuffle` deals costs anew too.
        """
        safety = self.limits(episodes[0].chunks.actions.shape[-1])
        rewards, groups = np.array([e.total_reward for e in episodes]), np.array([e.group for e in episodes])
        success, included = group_relative(rewards, groups), np.ones(len(episodes), bool)
        if self.filter_groups and self.price == 0:
            included = has_spread(rewards, groups)
        if shuffle is not None:
            success, included = shuffled_episodes(success, included, shuffle, world)
        held, (episode, chunk, _, valid) = [held_steps(safety, e) for e in episodes], decisions(episodes)
        costs = np.concatenate(held)
        if self.shuffle_costs or shuffle is not None:
            costs = costs[np.random.default_rng(len(costs)).permutation(len(costs))]
        paid = cost_advantages(costs, valid, groups[episode], chunk)
        advantage = (success[episode][:, None] - self.price * paid) / (1 + self.price)
        batch = episode_batch(self, episodes, advantage, included, evaluate, world)
        parts = world.gather([int(costs.sum()), len(episodes), sum(e.length for e in episodes)])
        total, num, steps = (sum(column) for column in zip(*parts, strict=True))
        batch.metrics |= {"limits/price": self.price, HELD: total / num, "limits/held_share": total / steps}
        return batch

    def limits(self, action_dim: int) -> SafetyConfig:
        """Return the contract's safety section.

        Raises:
            ConfigError: there is no such contract, or it is of other actions.
        """
        safety = load_contract(self.contract).safety
        if len(safety.dimensions) != action_dim:
            raise ConfigError(
                f"algo.contract: {self.contract} has {len(safety.dimensions)} numbers in a command "
                f"({', '.join(d.name for d in safety.dimensions)}), but the policy's actions have {action_dim}; name "
                "the contract of the robot that the environment simulates"
            )
        return safety

    def build(self, policy: Policy, seed: int = 0, **options: Unpack[LearnerOptions]) -> LimitsLearner:
        """Make the learner of `policy`; `seed` is that of minibatch order and of the shuffled control."""
        self.limits(policy.action_dim)
        return LimitsLearner(self, policy, seed, **options)


def cost_advantages(held: np.ndarray, valid: np.ndarray, groups: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """Return how much more than others an action costs in its chunk, in deviations of its group, float64 (N, H).

    What an action costs is the steps held from it to its chunk's end: the limiter looks back, not ahead. It is compared
    with the actions at the same place of the group's episodes, which were as long under way.

    Args:
        held, valid: bool (N, H); actions that are not valid have no part and get 0.
        groups, chunk: int (N,), of each chunk: its episode's group, and which of the episode's chunks it is.
    """
    costs = held[:, ::-1].cumsum(1)[:, ::-1].astype(np.float64)
    result = np.zeros(held.shape)
    for rows in rows_by_group(groups):
        for same in rows_by_group(chunk[rows]):
            at = rows[same]
            mean = (costs[at] * valid[at]).sum(0) / np.maximum(valid[at].sum(0), 1)
            result[at] = (costs[at] - mean) * valid[at]
        square = (result[rows] ** 2).sum() / max(valid[rows].sum() - 1, 1)
        result[rows] /= np.sqrt(square) + 1e-6
    return result


def held_steps(safety: SafetyConfig, episode: Episode) -> np.ndarray:
    """Return at which control steps the limits would have changed or held the command, bool (K, H).

    The robot is taken to go where it is told; it is seen before each chunk. So bounds, speed, acceleration, jerk and
    workspace count; checks of what a robot reports (forces, errors in following) do not. Where it would have been
    stopped for leaving its limits, the rest of the episode is held.

    Raises:
        ConfigError: the contract measures numbers that the episode's state does not have.
    """
    limiter, guard = Limiter(safety), WorkspaceGuard(safety)
    states, size = episode.obs.state.astype(np.float64), max(limiter.state_size, guard.state_size)
    if states.shape[1] < size:
        raise ConfigError(
            f"algo.contract: its safety limits read {size} numbers of the state, but the environment's has "
            f"{states.shape[1]}; name the contract of the robot that the environment simulates"
        )
    slack, tick = ROUNDING * np.array([d.high - d.low for d in safety.dimensions]), 1.0 / safety.control_hz
    actions, now = episode.chunks.actions.astype(np.float64), 0.0
    held = np.arange(actions.shape[1]) < episode.num_steps[:, None]
    is_known = limiter.seed(states[0]) is None
    for chunk, num_steps in enumerate(episode.num_steps):
        seen = RobotObservation({}, states[chunk], "", now)
        if not is_known or guard.left(seen) is not None:
            break
        for step in range(num_steps):
            sent, _ = limiter.move(actions[chunk, step], tick, guard.room(seen, gain=1.0, delay=0.0))
            guard.remember(limiter.values, now)
            held[chunk, step] = (np.abs(sent - actions[chunk, step]) > slack).any()
            now += tick
    return held


class LimitsLearner(Learner):
    """A learner whose config holds the price of the next batch, which a checkpoint keeps."""

    config: LimitsGRPOConfig

    def update(self, batch: Batch, extra_loss: ExtraLoss | None = None) -> dict[str, float]:
        """Improve the policy on the batch, then move the price by how far its episodes were from the target."""
        metrics = super().update(batch, extra_loss)
        config = self.config
        self._set_price(max(0.0, config.price + config.price_rate * (metrics[HELD] - config.target)))
        return metrics

    def _set_price(self, price: float) -> None:
        self.config = self.config.model_copy(update={"price": price})

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, state = super().state()
        return tensors, state | {"price": self.config.price}

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        super().load_state(tensors, state)
        self._set_price(float(state["price"]))
