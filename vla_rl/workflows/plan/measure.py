"""Measurement of a recipe's costs on this machine: episodes, policy batches, and an update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vla_rl.common.distributed.process_group import resolve_device
from vla_rl.common.progress import Stopwatch
from vla_rl.config import ConfigError
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.recipe.recipe import TrainRecipe
from vla_rl.rollout.runner import collect, evaluation_mode
from vla_rl.types import Episode, Observation
from vla_rl.workflows.plan.costs import ON_CPU, Curve

HERE = "measured here"
LEAST_EPISODES, MOST_EPISODES, REPEATS = 6, 24, 3


@dataclass
class _Timed:
    """An environment that says how long its steps and resets took."""

    env: VecEnv
    step_seconds: list[float] = field(default_factory=list)
    reset_seconds: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, *args: Any) -> Any:
        return _timed(self.step_seconds, lambda: self.env.step(*args))

    def reset(self, *args: Any) -> Any:
        return _timed(self.reset_seconds, lambda: self.env.reset(*args))


def _timed[T](seconds: list[float], call: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - start)
    return result


def simulator(recipe: TrainRecipe) -> VecEnv:
    """One environment of the recipe, in this process.

    Raises:
        ConfigError: the environment is a world model, whose environments are computed together.
    """
    env = recipe.env
    if env.is_imagined:
        raise ConfigError("env: a world model imagines all environments at once; `vla-rl plan` knows simulators alone")
    alone = {"num_workers": 0} if hasattr(env, "num_workers") else {}
    return env.model_copy(update=alone).build(num_envs=1)


def measure_env(recipe: TrainRecipe, chunk_size: int, seconds: float) -> tuple[dict[str, Any], str]:
    """Step one environment with random actions, of a policy that is not here: all episodes run to their horizon.

    Returns:
        Costs of `step`, `reset` and `chunks`, and where they come from.
    """
    env = _Timed(simulator(recipe))
    try:
        spec, rng, chunks = env.spec, np.random.default_rng(recipe.seed), list[int]()
        sampler = recipe.sampling.build(list(spec.tasks), recipe.seed, False)
        started = time.perf_counter()
        while len(chunks) < 2 or (len(chunks) < MOST_EPISODES and time.perf_counter() - started < seconds):
            env.reset(sampler.draw(1), [0])
            chunks.append(0)
            done = False
            while not done:
                low, high = np.clip(spec.action_low, -1, 1), np.clip(spec.action_high, -1, 1)
                actions = rng.uniform(low, high, (1, chunk_size, spec.action_dim)).astype(np.float32)
                done = bool(env.step(actions, [0]).done[0])
                chunks[-1] += 1
    finally:
        env.close()
    values = {"step": tuple(env.step_seconds), "reset": tuple(env.reset_seconds[1:]), "chunks": tuple(chunks)}
    return values, f"{HERE}, with random actions in chunks of {chunk_size}"


def measure(recipe: TrainRecipe, seconds: float = 30.0) -> tuple[dict[str, Any], str]:
    """Run the recipe's rollout and update at small size, for about so long. The recipe's files stay as they are.

    Raises:
        ConfigError: the recipe has no algo section, or a world model as its environment.
    """
    algo = recipe.algo
    if algo is None:
        raise ConfigError("algo: the recipe trains nothing by RL; `vla-rl plan` needs an algo section")
    env = _Timed(simulator(recipe))
    try:
        policy = recipe.policy.build(env.spec, resolve_device(recipe.device), recipe.seed)
        episodes = _episodes(recipe, policy, env, seconds / 2)
    finally:
        env.close()
    success = (sum(e.success for e in episodes) + 1) / (len(episodes) + 2)
    size = algo.rollouts_per_group(recipe.train.group_size)
    skips = algo.skips_zero_advantage and algo.compares_episodes
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    values = {
        "step": tuple(env.step_seconds[1:]),
        "reset": tuple(env.reset_seconds[1:]),
        "chunks": tuple(e.num_chunks for e in episodes),
        "act": _acting(recipe, policy, episodes, (env_size(recipe), max(1, env_size(recipe) // 4))),
        "active": 1 - success**size - (1 - success) ** size if skips else 1.0,
        "trained_bytes": float(trained),
        **_learning(recipe, policy, episodes),
    }
    device = torch.device(resolve_device(recipe.device))
    where = f" on {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ON_CPU
    return values, f"{HERE}{where}, {len(episodes)} episodes"


def env_size(recipe: TrainRecipe) -> int:
    """Environments of a process."""
    return recipe.env.num_envs


def _episodes(recipe: TrainRecipe, policy: Policy, env: Any, seconds: float) -> list[Episode]:
    """Some episodes of the recipe's policy, none lost."""
    sampler = recipe.sampling.build(list(env.spec.tasks), recipe.seed, False)
    episodes, started = list[Episode](), time.perf_counter()
    while len(episodes) < LEAST_EPISODES or (len(episodes) < MOST_EPISODES and time.perf_counter() - started < seconds):
        found = collect(policy, env, sampler.draw(1), temperature=recipe.train.temperature, seed=len(episodes))
        if found[0].lost:
            raise ConfigError("env: an episode was lost while it was timed; look at the simulator's messages")
        episodes += found
    return episodes


def _observations(episodes: Sequence[Episode], count: int) -> Observation:
    """As many observations as asked, from the episodes, some of them again."""
    seen = Observation.concatenate([e.obs for e in episodes])
    return seen.select(np.arange(count) % seen.batch_size)


def _acting(recipe: TrainRecipe, policy: Policy, episodes: Sequence[Episode], sizes: Sequence[int]) -> Curve:
    generator, points = torch.Generator().manual_seed(0), list[tuple[float, float]]()
    with evaluation_mode(policy):
        for size in sorted(set(sizes)):
            obs, seconds = _observations(episodes, size), list[float]()
            for _ in range(1 + REPEATS):  # The first warms up.
                _timed(seconds, lambda obs=obs: policy.act(obs, generator, recipe.train.temperature))
            points.append((float(size), float(np.median(seconds[1:]))))
    return Curve(tuple(points))


def _learning(recipe: TrainRecipe, policy: Policy, episodes: Sequence[Episode]) -> dict[str, Any]:
    """Costs of forward, update, optimizer and other, of updates in whole micro-batches of two sizes."""
    algo = recipe.algo
    assert algo is not None, "measure asks"
    forward, update = dict[float, float](), dict[float, float]()
    optimizer = other = math.inf
    sizes = sorted({smaller(algo.micro_batch_size), algo.micro_batch_size})
    rollout = with_spread(episodes, max(2, sizes[-1]))
    for size in sizes:
        options = {"micro_batch_size": size, "minibatch_size": 10**9, "epochs": 1, "bc_coef": 0.0}
        stopwatch = Stopwatch()
        temperature = recipe.train.temperature
        learner = algo.model_copy(update=options).build(policy, 0, temperature=temperature, stopwatch=stopwatch)
        learner.update(learner.prepare(rollout))  # This one warms up.
        stopwatch.report()
        batch = learner.prepare(rollout)
        forward[size] = stopwatch.seconds["forward_backward"]
        learner.update(batch)
        times = stopwatch.report()
        passes = int(batch.active.sum()) // size
        update[size] = (times["forward_backward"] - forward[size]) / passes
        forward[size] /= passes
        optimizer, other = min(optimizer, times["optimizer"]), min(other, times["other"])
    curves = {
        name: Curve(tuple((float(s), max(t, 0.0)) for s, t in sorted(found.items())))
        for name, found in (("forward", forward), ("update", update))
    }
    return curves | {"optimizer": optimizer, "other": other}


def smaller(size: int) -> int:
    """The largest part of a micro-batch's size, a quarter at most, of which whole ones make it up; 1 or more."""
    return max(part for part in range(1, max(1, size // 4) + 1) if size % part == 0)


def with_spread(episodes: Sequence[Episode], num_decisions: int) -> list[Episode]:
    """A group of the episodes in turn, every second one paid, with so many decisions, 2 or more; the last one is cut.

    Were there more, the last micro-batch would be a small one, and count as a whole one.
    """
    made, left = list[Episode](), num_decisions
    while left:
        episode = episodes[len(made) // 2 % len(episodes)]
        part = _first(episode, min(episode.num_chunks, left if made else left - 1))
        reward = np.zeros_like(part.reward)
        reward[-1, max(part.num_steps[-1] - 1, 0)] = len(made) % 2 == 0
        made.append(replace(part, reward=reward, group=0))
        left -= part.num_chunks
    return made


def _first(episode: Episode, num_chunks: int) -> Episode:
    """The episode up to a decision, as if it had been cut off there."""
    rows = range(num_chunks)
    arrays = {n: getattr(episode, n)[:num_chunks] for n in ("reward", "terminated", "truncated", "num_steps")}
    info = {name: values[:num_chunks] for name, values in episode.info.items()}
    return replace(episode, obs=episode.obs.select(rows), chunks=episode.chunks.select(rows), info=info, **arrays)
