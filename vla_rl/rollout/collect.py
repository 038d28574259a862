"""Run a policy in a `VecEnv`, simulator, world model or robot alike, and return finished episodes.

from vla_rl.rollout.collect import collect
episodes = collect(policy, env, [EpisodeSpec("pick_place", "train", i) for i in range(64)])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_rl.common.timing import Stopwatch
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.rollout.runner import EpisodeRunner, RunningEpisode, draw_chunk
from vla_rl.types import ActionChunk, Episode, EpisodeSpec, Observation, StepResult


@dataclass
class _Steps:
    """What an episode has been so far: one entry per chunk."""

    obs: list[Observation] = field(default_factory=list)
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
    steps: defaultdict[int, _Steps] = defaultdict(_Steps)
    episodes: dict[int, Episode] = {}

    def act(running: list[RunningEpisode]) -> ActionChunk:
        return draw_chunk(policy, running, generator, temperature)

    def on_step(running: RunningEpisode, row: int, chunk: ActionChunk, result: StepResult) -> None:
        number = running.number
        steps[number].obs.append(running.obs)
        steps[number].chunks.append(chunk.select([row]))
        steps[number].results.append(result)
        if result.done[0]:
            group = groups[number] if groups is not None else number
            episodes[number] = _assemble(running.spec, steps.pop(number), group)
            if on_episode is not None:
                on_episode(episodes[number])

    EpisodeRunner(env, specs, act, on_step, policy, stopwatch=stopwatch or Stopwatch()).run()
    return [episodes[number] for number in range(len(specs))]


def _assemble(spec: EpisodeSpec, steps: _Steps, group: int) -> Episode:
    results = steps.results
    lost = bool(results[-1].lost[0])
    frames, states = None, None
    if not lost and "frames" in results[0].info:
        parts = [r.info["frames"][0] for r in results]
        frames = {camera: np.concatenate([p[camera] for p in parts]) for camera in parts[0]}
        states = np.concatenate([r.info["states"][0] for r in results])
    return Episode(
        spec=spec,
        obs=Observation.concatenate(steps.obs),
        chunks=ActionChunk.concatenate(steps.chunks),
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
