"""Run a policy in a `VecEnv`, simulator, world model or robot alike, and return finished episodes.

from vla_rl.rollout import collect
episodes = collect(policy, env, [EpisodeSpec("pick_place", "train", i) for i in range(64)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_rl.common.timing import Stopwatch
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation, StepResult


@dataclass
class _Running:
    """An episode under way in one environment: one entry per chunk."""

    index: int
    obs: list[Observation]
    chunks: list[ActionChunk] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)


def collect(
    policy: Policy,
    env: VecEnv,
    specs: Sequence[EpisodeSpec],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    groups: Sequence[int] | None = None,
    stopwatch: Stopwatch | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Run one episode for each spec, as many at a time as the environment holds.

    A finished environment takes the next spec at once; with none left it rests, and no
    inference is spent on it. With the same policy, seed, specs and `env.num_envs` the
    result is the same.

    Args:
        temperature: 0 is greedy.
        seed: of the policy's sampling.
        groups: group number of each spec (GRPO); by default each episode is its own.
        stopwatch: counts "simulation" and "inference".
        on_episode: called with each episode as it ends, for progress.

    Returns:
        Episodes in the order of `specs`. Those with `lost=True` broke and carry no outcome.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    watch = stopwatch or Stopwatch()
    finished: list[Episode | None] = [None] * len(specs)
    running: dict[int, _Running] = {}
    next_spec = 0
    watch_episodes = getattr(policy, "watch", None)  # See `WatchingPolicy`.

    def start(env_ids: Sequence[int]) -> None:
        nonlocal next_spec
        env_ids = list(env_ids)[: len(specs) - next_spec]
        if not env_ids:
            return
        indices = range(next_spec, next_spec + len(env_ids))
        with watch.measure("simulation"):
            obs = env.reset([specs[i] for i in indices], env_ids)
        for row, (env_id, index) in enumerate(zip(env_ids, indices, strict=True)):
            running[env_id] = _Running(index, [obs.select([row])])
        next_spec += len(env_ids)

    start(range(env.num_envs))
    while running:
        env_ids = sorted(running)
        obs = Observation.concatenate([running[i].obs[-1] for i in env_ids])
        with watch.measure("inference"):
            if watch_episodes is not None:
                watch_episodes(env_ids, [not running[i].chunks for i in env_ids])
            chunk = policy.act(obs, generator, temperature)
        with watch.measure("simulation"):
            result = env.step(chunk.actions, env_ids)
        ended = []
        for row, env_id in enumerate(env_ids):
            episode = running[env_id]
            episode.chunks.append(chunk.select([row]))
            episode.results.append(_row(result, row))
            episode.obs.append(episode.results[-1].obs)
            if result.done[row]:
                ended.append(env_id)
        for env_id in ended:
            done = running.pop(env_id)
            group = groups[done.index] if groups is not None else done.index
            finished[done.index] = _assemble(specs[done.index], done, group)
            if on_episode is not None:
                on_episode(finished[done.index])  # type: ignore[arg-type]
        start(ended)
    episodes = [e for e in finished if e is not None]
    assert len(episodes) == len(specs), "every spec ends in exactly one episode"
    return episodes


def _row(result: StepResult, row: int) -> StepResult:
    """The part of a step result that belongs to one environment."""
    rows = [row]
    return StepResult(
        obs=result.obs.select(rows),
        reward=result.reward[rows],
        terminated=result.terminated[rows],
        truncated=result.truncated[rows],
        num_steps=result.num_steps[rows],
        success=result.success[rows],
        lost=result.lost[rows],
        info={key: [values[row]] for key, values in result.info.items()},
    )


def _assemble(spec: EpisodeSpec, running: _Running, group: int) -> Episode:
    results = running.results
    lost = bool(results[-1].lost[0])
    frames, states = None, None
    if not lost and "frames" in results[0].info:
        parts = [r.info["frames"][0] for r in results]
        frames = {camera: np.concatenate([p[camera] for p in parts]) for camera in parts[0]}
        states = np.concatenate([r.info["states"][0] for r in results])
    return Episode(
        spec=spec,
        obs=Observation.concatenate(running.obs[:-1]),
        chunks=ActionChunk.concatenate(running.chunks),
        reward=np.concatenate([r.reward for r in results]),
        terminated=np.concatenate([r.terminated for r in results]),
        truncated=np.concatenate([r.truncated for r in results]),
        num_steps=np.concatenate([r.num_steps for r in results]),
        success=bool(results[-1].success[0]) and not lost,
        final_obs=results[-1].obs,
        group=group,
        lost=lost,
        frames=frames,
        states=states,
        info={k: np.array([r.info[k][0] for r in results]) for k in results[0].info if k not in ("frames", "states")},
    )
