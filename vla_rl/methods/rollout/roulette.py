"""Hopeless episodes end early, by Russian roulette: fewer simulated steps, and no bias whatever the probe gets wrong.

A logistic probe on `Policy.embed` and the elapsed share of the horizon, fitted on the run's own earlier rollouts, says
how likely an episode under way is to succeed. The first time that it says less than a threshold, the episode goes on
with probability q, the rewards that then come counting 1/q, and else ends without them. Their expectation is the same
(Arvo & Kirk 1990, "Particle transport and image synthesis"), and with the return that of every policy gradient whose
baseline does not look at the episode itself (`rloo`; `grpo` up to what it divides by). The price is variance: of a
success that goes on by luck, 1/q as much. Those that go on also tell what share of successes the probe stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from vla_rl.common.distributed.process_group import ProcessGroup
from vla_rl.common.progress import Stopwatch
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.rollout.runner import derived_seed
from vla_rl.rollout.source import GroupOrder, LocalRolloutConfig, LocalSource, RolloutPlan
from vla_rl.training.optimizers import is_critic
from vla_rl.types import Episode, EpisodeSpec, Keyframe, Observation, StepResult

_SEEN, _WEIGHT = "roulette/seen", "roulette/weight"  # Of `Episode.info`, on the way from the environment to the fit.
# Share of the successes that may be called hopeless, at most: the probe's threshold is their conformal quantile, on
# initial states that the probe was not fitted on.
MAX_STOPPED = 0.05
GOING_ON = 0.2  # q, the probability with which a hopeless episode goes on all the same.
_RIDGE = 30.0  # Episodes' worth of pull towards the probe before.
_STREAM = 7  # Of random numbers, beside the policy's sampling.


class RouletteConfig(LocalRolloutConfig):
    """Episodes run in the training process; those that a probe calls hopeless end early. For algorithms of groups."""

    kind: Literal["roulette"] = "roulette"

    def build(self, plan: RolloutPlan, env: VecEnv, world: ProcessGroup) -> RouletteSource:
        return RouletteSource(env, plan.temperature)


@dataclass(frozen=True)
class Probe:
    """P(success) = sigmoid(design(embedding, elapsed) @ weights).

    Attributes:
        center, scale: of the embeddings in the first rollout, D numbers each. weights: 2 (D + 1) numbers.
        threshold: an episode with less is called hopeless; 0: none is.
    """

    center: list[float]
    scale: list[float]
    weights: list[float]
    threshold: float = 0.0

    def design(self, seen: np.ndarray) -> np.ndarray:
        """Rows of [1, e, z, z e] from embeddings and elapsed shares, float (N, D + 1); z standardized, e in -1 .. 1."""
        z = (seen[:, :-1] - self.center) / self.scale
        e = 2 * seen[:, -1:] - 1
        return np.concatenate([np.ones_like(e), e, z, z * e], axis=1)

    def probability(self, seen: np.ndarray) -> np.ndarray:
        """float64 (N,), of embeddings with the elapsed share of the horizon behind them, (N, D + 1)."""
        return expit(self.design(seen) @ np.asarray(self.weights))


@dataclass(frozen=True)
class Told:
    """What an episode that ran to its end tells.

    Attributes:
        seen: float32 (n, D + 1), embeddings and elapsed shares where the probe was or would have been asked.
        success: how it ended. weight: 1/q of one that went on though hopeless, else 1.
        fits: the probe may be fitted on it; else the threshold is chosen on it.
    """

    seen: np.ndarray
    success: bool
    weight: float
    fits: bool


def fitted(told: Sequence[Told], before: Probe | None) -> Probe:
    """Fit a probe by weighted maximum likelihood, with a ridge towards the one before (or to 0), its threshold kept."""
    seen = np.concatenate([t.seen for t in told]).astype(np.float64)
    if before is None:
        center, scale = seen[:, :-1].mean(0), seen[:, :-1].std(0) + 1e-6
        before = Probe(center.tolist(), scale.tolist(), [0.0] * (2 * seen.shape[1]))
    x, start = before.design(seen), np.asarray(before.weights)
    y = np.concatenate([np.full(len(t.seen), float(t.success)) for t in told])
    weight = np.concatenate([np.full(len(t.seen), t.weight) for t in told])

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        z, moved = x @ weights, weights - start
        value = (weight * (np.logaddexp(0.0, z) - y * z)).sum() + 0.5 * _RIDGE * (moved**2).sum()
        return float(value), x.T @ (weight * (expit(z) - y)) + _RIDGE * moved

    return replace(before, weights=minimize(loss, start, jac=True, method="L-BFGS-B").x.tolist())


def chosen_threshold(lowest: np.ndarray, weight: np.ndarray, max_stopped: float) -> float:
    """Return the threshold below which a fresh success falls with probability `max_stopped` at most; 0: too few.

    The conformal quantile: of n successes of weight 1 the floor(max_stopped (n + 1))-th smallest.

    Args:
        lowest: float (n,), the least that the probe said of each success. weight: float (n,), how many it stands for.
    """
    order = np.argsort(lowest)
    below = np.cumsum(weight[order])
    allowed = max_stopped * (below[-1] + 1) if len(below) else 0.0
    place = int(np.searchsorted(1 + below, allowed + 1e-9, side="right"))  # The first with 1 + below > allowed.
    return float(lowest[order][place]) if allowed >= 1 - 1e-9 else 0.0


class RouletteEnv(VecEnv):
    """An environment that plays roulette for each hopeless episode; see the module.

    Attributes:
        probe: None: none is called hopeless. policy: whose embeddings it reads.
    """

    def __init__(self, env: VecEnv, going_on: float) -> None:
        self.env, self.num_envs, self.spec, self.going_on = env, env.num_envs, env.spec, going_on
        self.probe: Probe | None = None
        self.policy: Policy | None = None
        self.rng = np.random.default_rng(0)
        self._weight, self._share = np.ones(env.num_envs), np.zeros(env.num_envs)  # Share: of the horizon, elapsed.
        self._horizon = np.ones(env.num_envs)

    def reset(self, specs: Sequence[EpisodeSpec], env_ids: Sequence[int] | None = None) -> Observation:
        """See `VecEnv.reset`."""
        ids = list(range(self.num_envs) if env_ids is None else env_ids)
        self._horizon[ids] = [self.spec.horizon[spec.task] for spec in specs]
        self._weight[ids], self._share[ids] = 1.0, [0 if s.keyframe is None else s.keyframe.step for s in specs]
        self._share[ids] /= self._horizon[ids]
        return self.env.reset(specs, ids)

    def step(self, actions: np.ndarray, env_ids: Sequence[int] | None = None) -> StepResult:
        """See `VecEnv.step`. `info` tells what the probe saw, NaN where it was not asked, and 1/q where it is due."""
        assert self.policy is not None, "publish comes first"
        ids = np.arange(self.num_envs) if env_ids is None else np.asarray(env_ids)
        result = self.env.step(actions, list(ids))
        reward = (result.reward * self._weight[ids][:, None]).astype(np.float32)
        self._share[ids] += result.num_steps / self._horizon[ids]
        ended = np.zeros(len(ids), bool)
        asked = np.flatnonzero(~result.done & (self._weight[ids] == 1))
        read = asked if len(asked) else np.zeros(1, np.int64)  # For their number at least.
        embedding = self.policy.embed(result.obs.select(read)).float().cpu().numpy()
        seen = np.full((len(ids), embedding.shape[1] + 1), np.nan, np.float32)
        if len(asked):
            seen[asked] = np.concatenate([embedding, self._share[ids[asked], None]], axis=1)
            ended[asked] = self._plays(seen[asked], ids[asked])
        last = np.arange(actions.shape[1]) == result.num_steps[:, None] - 1
        info = {_SEEN: [*seen], _WEIGHT: np.where(ended, 0.0, self._weight[ids])}
        truncated = result.truncated | (ended[:, None] & last)
        return replace(result, reward=reward, truncated=truncated, info=result.info | info)

    def _plays(self, seen: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Play for the episodes that are hopeless now; return those that end, bool (N,)."""
        if self.probe is None:
            return np.zeros(len(ids), bool)
        hopeless = self.probe.probability(seen) < self.probe.threshold
        lives = self.rng.random(len(ids)) < self.going_on
        self._weight[ids[hopeless & lives]] = 1 / self.going_on
        return hopeless & ~lives

    def save_state(self, env_ids: Sequence[int] | None = None) -> list[Keyframe]:
        """See `VecEnv.save_state`: without what roulette has said."""
        return self.env.save_state(env_ids)

    def expert_action(self, env_ids: Sequence[int] | None = None) -> np.ndarray:
        """See `VecEnv.expert_action`."""
        return self.env.expert_action(env_ids)

    def close(self) -> None:
        """See `VecEnv.close`."""
        self.env.close()


class RouletteSource(LocalSource):
    """Runs episodes here, and after each rollout fits the probe of the next."""

    def __init__(self, env: VecEnv, temperature: float) -> None:
        self.roulette = RouletteEnv(env, GOING_ON)
        super().__init__(self.roulette, temperature)
        self._waiting: list[Told] = []  # Until they hold enough successes for a threshold.
        self._metrics: dict[str, float] = {}

    def publish(self, policy: Policy, version: int) -> None:
        """See `EpisodeSource.publish`.

        Raises:
            ConfigError: the policy has a critic.
        """
        if any(is_critic(name) for name, _ in policy.named_parameters()):
            raise ConfigError(
                "rollout.kind: got 'roulette', but the policy has a value head: a critic would not know which rewards "
                "count more. Set policy.value_head=false and take grpo or rloo, or rollout.kind=local"
            )
        super().publish(policy, version)
        self.roulette.policy = policy

    def collect(
        self, order: GroupOrder, stopwatch: Stopwatch, on_episode: Callable[[Episode], None] = lambda _: None
    ) -> list[Episode]:
        """See `EpisodeSource.collect`. An episode's rewards may be 1/q times the environment's."""
        self.roulette.rng = np.random.default_rng(derived_seed(order.seed, _STREAM))
        episodes = super().collect(order, stopwatch, on_episode)
        rows = [(e.info.pop(_SEEN), e.info.pop(_WEIGHT), e) for e in episodes]
        self._metrics = measured([float(w[-1]) for _, w, _ in rows], [e.success for *_, e in rows])
        self._waiting += [
            Told(seen[~np.isnan(seen).any(1)], e.success, float(weight[-1]), fits=e.group % 2 == 0)
            for seen, weight, e in rows
            if weight[-1] > 0 and not e.lost and not np.isnan(seen).all()
        ]
        self._learn()
        return episodes

    def _learn(self) -> None:
        """Fit the probe on one half of what waits and choose its threshold on the other, once it has enough."""
        told, held = [t for t in self._waiting if t.fits], [t for t in self._waiting if t.success and not t.fits]
        if not told or sum(t.weight for t in held) + 1 < 1 / MAX_STOPPED:
            return
        probe = fitted(told, self.roulette.probe)
        lowest = np.array([probe.probability(t.seen).min() for t in held])
        weight = np.array([t.weight for t in held])
        threshold = chosen_threshold(lowest, weight, MAX_STOPPED)
        self.roulette.probe, self._waiting = replace(probe, threshold=threshold), []

    def metrics(self) -> dict[str, float]:
        """See `EpisodeSource.metrics`."""
        return self._metrics

    def state(self) -> dict[str, Any]:
        """The probe, and what waits."""
        waiting = [asdict(t) | {"seen": t.seen.tolist()} for t in self._waiting]
        return {"probe": self.roulette.probe and asdict(self.roulette.probe), "waiting": waiting}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """See `EpisodeSource.load_state`."""
        self.roulette.probe = Probe(**state["probe"]) if state.get("probe") else None
        waiting = state.get("waiting", ())
        self._waiting = [Told(**{**t, "seen": np.array(t["seen"], np.float32)}) for t in waiting]


def measured(weight: Sequence[float], success: Sequence[bool]) -> dict[str, float]:
    """Return what the log says of a rollout.

    Args:
        weight: of each episode: 0 where it was ended, 1/q where it went on though hopeless, else 1.
        success: how it ended; one that was ended has none.
    """
    w, s = np.asarray(weight), np.asarray(success)
    good = float((w * s).sum())
    stopped = float((w * s)[w > 1].sum())
    return {
        "roulette/hopeless": float((w != 1).mean()),
        "roulette/ended": float((w == 0).mean()),
        "roulette/success": good / len(w),  # Unbiased, where train/success counts those that were ended as failures.
        "roulette/stopped_successes": stopped / good if good else 0.0,
    }


METHOD = RouletteConfig
