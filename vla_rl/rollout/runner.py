"""Episode runner: the one loop behind rollouts, datasets and corrected episodes.

from vla_rl.rollout.runner import collect
episodes = collect(policy, env, [EpisodeSpec("pick_place", "train", i) for i in range(64)])
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vla_rl.common.progress import Stopwatch
from vla_rl.interfaces import Policy, VecEnv, WatchingPolicy
from vla_rl.types import MAX_INPUT_BYTES, ActionChunk, Episode, EpisodeSpec, Observation, StepResult

if TYPE_CHECKING:
    import torch

MAX_RETRIES = 2  # Times that an episode whose worker broke is run again; then it is left out and counted as lost.


_Attempt = tuple[EpisodeSpec | None, int, int]  # Spec, number, which attempt; None: nothing is needed for now.
_PER_STEP = ("frames", "states", "objects")  # Of a `StepResult.info`: of each control step, not of the chunk.
_STEP_ARRAYS = ("reward", "terminated", "truncated", "num_steps")  # Of a `StepResult`; an episode has them in a row.
NO_EPISODE = (
    "no episode to learn from: all {} of the rollout were lost. Look at the simulator's messages above (a worker that "
    "dies or hangs loses its episode)."
)


class Acted(Protocol):
    """What `act` decides for B environments, such as an `ActionChunk`."""

    @property
    def actions(self) -> np.ndarray:
        """float32 (B, H, A), in the environment's units."""
        ...


@dataclass
class RunningEpisode:
    """An episode under way in one environment.

    Attributes:
        number: place of its spec among all, from 0.
        attempt: 1; more where the same spec was lost before.
        seen, row: what the environment showed last, and this episode's row in it; within `on_step`, before the step.
        num_chunks: executed so far.
        inputs: what the policy prepared of what was seen, one row, not copied; None: nothing.
        ended: it goes on no more; `before_step` may set it, to end the episode where it is without another step.
    """

    env_id: int
    spec: EpisodeSpec
    number: int
    attempt: int
    seen: Observation
    row: int
    num_chunks: int = 0
    inputs: Observation | None = None
    ended: bool = False

    @property
    def obs(self) -> Observation:
        """What this episode sees, one row; not copied."""
        return self.seen.row(self.row)


@dataclass
class EpisodeRunner[A: Acted]:
    """Runs an episode for each spec, as many at a time as the environment holds.

    Each turn steps all running environments once, in the order of their ids: `before_step`, `act`, the step, `on_step`
    of each. An environment whose episode has ended takes the next spec at once; with none left it rests, and no
    inference is spent on it.

    Args:
        specs: what to run, in this order. None in it: nothing is needed for now; asked again when an episode ends.
        act: chooses a chunk for each episode given; an `ActionChunk`, or anything else that has `actions`.
        on_step: called for each episode stepped, with its row in what `act` gave, that, and its own row of the step's
            result. `done` and `lost` in it end the episode.
        policy: put in evaluation mode while episodes run: with dropout, the log-probabilities of what was drawn would
            not be those that training finds.
        on_start: called with each episode after its reset.
        before_step: called with all running episodes, which it may end.
        max_attempts: times that the spec of a lost episode is run, before any other.
        stopwatch: counts "simulation" and "inference".
    """

    env: VecEnv
    specs: Iterable[EpisodeSpec | None]
    act: Callable[[list[RunningEpisode]], A]
    on_step: Callable[[RunningEpisode, int, A, StepResult], None]
    policy: Policy | None
    on_start: Callable[[RunningEpisode], None] = lambda _: None
    before_step: Callable[[list[RunningEpisode]], None] = lambda _: None
    max_attempts: int = 1
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _running: dict[int, RunningEpisode] = field(default_factory=dict, init=False)
    _lost: list[_Attempt] = field(default_factory=list, init=False)  # To be run again.

    def run(self) -> None:
        """Run until every episode has ended and there is nothing more to run."""
        attempts = ((spec, number, 1) for number, spec in enumerate(self.specs))
        with evaluation_mode(self.policy):
            self._start(attempts)
            while episodes := [self._running[env_id] for env_id in sorted(self._running)]:
                self.before_step(episodes)
                if going_on := [episode for episode in episodes if not episode.ended]:
                    self._step(going_on)
                self._running = {episode.env_id: episode for episode in episodes if not episode.ended}
                if len(self._running) < len(episodes):
                    self._start(attempts)

    def _start(self, attempts: Iterator[_Attempt]) -> None:
        """Start an episode in each environment that is free, while there are specs."""
        starting: dict[int, tuple[EpisodeSpec, int, int]] = {}
        for env_id in sorted(set(range(self.env.num_envs)) - set(self._running)):
            spec, number, attempt = self._lost.pop(0) if self._lost else next(attempts, (None, 0, 1))
            if spec is None:
                break
            starting[env_id] = spec, number, attempt
        if starting:
            with self.stopwatch.measure("simulation"):
                obs = self.env.reset([spec for spec, _, _ in starting.values()], list(starting))
            for row, (env_id, chosen) in enumerate(starting.items()):
                self._running[env_id] = RunningEpisode(env_id, *chosen, obs, row)
                self.on_start(self._running[env_id])

    def _step(self, episodes: list[RunningEpisode]) -> None:
        with self.stopwatch.measure("inference"):
            acted = self.act(episodes)
        with self.stopwatch.measure("simulation"):
            results = self.env.step(acted.actions, [episode.env_id for episode in episodes])
        for row, episode in enumerate(episodes):
            result = results.row(row)
            self.on_step(episode, row, acted, result)
            episode.seen, episode.row = results.obs, row
            episode.num_chunks += 1
            episode.ended |= bool(result.done[0])
            if result.lost[0] and episode.attempt < self.max_attempts:
                self._lost.append((episode.spec, episode.number, episode.attempt + 1))


def draw_chunk(
    policy: Policy,
    episodes: Sequence[RunningEpisode],
    generator: torch.Generator | None,
    temperature: float,
    obs: Observation | None = None,
) -> ActionChunk:
    """Draw the policy's chunk for each episode, from what is seen now or from `obs`."""
    if isinstance(policy, WatchingPolicy):
        begins = [episode.num_chunks == 0 for episode in episodes]
        policy.watch([e.env_id for e in episodes], begins, [e.spec.task for e in episodes])
    if obs is None:
        obs = episodes[0].seen  # What the environment gave, where all were stepped together and go on.
        if [(id(e.seen), e.row) for e in episodes] != [(id(obs), row) for row in range(obs.batch_size)]:
            obs = Observation.concatenate([episode.obs for episode in episodes])
    inputs = policy.prepare(obs)
    for row, episode in enumerate(episodes if inputs.is_prepared else ()):
        episode.inputs = inputs.row(row)
    return policy.act(inputs, generator, temperature)


@contextmanager
def evaluation_mode(policy: Policy | None) -> Iterator[None]:
    """Dropout and the like off inside the block; each of the policy's modules is put back in its mode afterwards."""
    training = [] if policy is None else [module for module in policy.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


# One environment's: what was seen, done, and came of it; and what was prepared of what was seen, if it is to be kept.
_Step = tuple[Observation, ActionChunk, StepResult, Observation | None]


def collect(
    policy: Policy,
    env: VecEnv,
    specs: Sequence[EpisodeSpec],
    *,
    temperature: float = 1.0,
    seed: int | Sequence[int] = 0,
    groups: Sequence[int] | None = None,
    stopwatch: Stopwatch | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
    keep_inputs: bool = False,
) -> list[Episode]:
    """Run one episode for each spec and return them in this order; those with `lost=True` broke, without an outcome.

    Args:
        temperature: 0 is greedy. stopwatch: counts "simulation" and "inference".
        seed: of the policy's sampling: one, from which all episodes draw in turn, so that the result also depends on
            `env.num_envs`; or one for each spec, whose episode is the same whatever others run, but for rounding.
        groups: group number of each spec (GRPO); by default each episode is its own.
        on_episode: called with each episode as it ends.
        keep_inputs: for learning: episodes carry what the policy prepared, as far as `MAX_INPUT_BYTES` goes.
    """
    steps: defaultdict[int, list[_Step]] = defaultdict(list)
    episodes: dict[int, Episode] = {}
    act, room = _actor(policy, seed, temperature), MAX_INPUT_BYTES if keep_inputs else 0

    def on_step(running: RunningEpisode, row: int, chunk: ActionChunk, result: StepResult) -> None:
        nonlocal room
        number, inputs = running.number, running.inputs if room > 0 else None
        room -= 0 if inputs is None else inputs.nbytes
        steps[number].append((running.obs, chunk.select([row]), result, inputs))
        if result.done[0]:
            episodes[number] = assemble(running.spec, steps.pop(number), groups[number] if groups else number)
            on_episode(episodes[number])

    EpisodeRunner(env, specs, act, on_step, policy, stopwatch=stopwatch or Stopwatch()).run()
    return [episodes[number] for number in range(len(specs))]


def run_episodes(
    policy: Policy,
    env: VecEnv,
    specs: Sequence[EpisodeSpec],
    *,
    temperature: float,
    seed: int | Sequence[int],
    max_retries: int = MAX_RETRIES,
    stopwatch: Stopwatch | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
) -> tuple[list[Episode], int]:
    """`collect`, where episodes whose worker broke are run again, up to `max_retries` times; see `_seeds_again`.

    An episode's `group` is its place in `specs`, in every try.

    Returns:
        Episodes in the order of `specs` (still `lost` where every try broke), and how many were run again.
    """
    episodes = collect(
        policy, env, specs, temperature=temperature, seed=seed, stopwatch=stopwatch, on_episode=on_episode
    )
    num_retried = 0
    for attempt in range(1, max_retries + 1):
        lost = [row for row, episode in enumerate(episodes) if episode.lost]
        if not lost:
            break
        num_retried += len(lost)
        again = collect(
            policy,
            env,
            [replace(specs[row], place=None) for row in lost],  # Imagined otherwise than what broke.
            temperature=temperature,
            seed=_seeds_again(seed, lost, attempt),
            groups=lost,
            stopwatch=stopwatch,
            on_episode=on_episode,
        )
        for row, episode in zip(lost, again, strict=True):
            episodes[row] = episode
    return episodes, num_retried


def _seeds_again(seed: int | Sequence[int], lost: Sequence[int], attempt: int) -> int | list[int]:
    """What lost episodes, by their rows, draw from in a further attempt: seeds of their own first once more.

    So an episode that went down with another one's worker ends as it would have. Drawn anew it might end otherwise, and
    as long episodes go down most often, failures among them, the success rate would rise with every worker that breaks.
    What has broken by itself is given other noise after that.
    """
    if isinstance(seed, int):
        return derived_seed(seed, attempt)
    return [seed[row] if attempt == 1 else derived_seed(seed[row], attempt) for row in lost]


def _actor(policy: Policy, seed: int | Sequence[int], temperature: float) -> Callable[..., ActionChunk]:
    import torch

    if not isinstance(seed, int):
        return _own_noise(policy, seed, temperature)
    return partial(draw_chunk, policy, generator=torch.Generator().manual_seed(seed), temperature=temperature)


def _own_noise(policy: Policy, seeds: Sequence[int], temperature: float) -> Callable[..., ActionChunk]:
    """What draws each episode's chunk by a generator of its own; `seeds`: of each spec."""
    import torch

    from vla_rl.common.row_noise import RowGenerator

    noise, own = RowGenerator(), [torch.Generator().manual_seed(one) for one in seeds]
    noise.manual_seed(derived_seed(*seeds))

    def act(episodes: Sequence[RunningEpisode]) -> ActionChunk:
        """Draw for one instruction at a time: padded to a longer one, a row would be rounded otherwise."""
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for row, episode in enumerate(episodes):
            alike[episode.seen.instruction[episode.row]].append(row)
        chunks = []
        for rows in alike.values():
            noise.rows = [own[episodes[row].number] for row in rows]
            chunks.append(draw_chunk(policy, [episodes[row] for row in rows], noise, temperature))
        return ActionChunk.concatenate(chunks).select(np.argsort(np.concatenate(list(alike.values()))))

    return act


def assemble(spec: EpisodeSpec, steps: Sequence[_Step], group: int) -> Episode:
    """Put an episode together from what was seen, done, and came of it at each decision, one row each."""
    obs, chunks, results, inputs = zip(*steps, strict=True)
    last, lost = results[-1], bool(results[-1].lost[0])
    return Episode(
        spec=spec,
        obs=Observation.concatenate(obs),
        chunks=ActionChunk.concatenate(chunks),
        success=bool(last.success[0]) and not lost,
        final_obs=Observation.concatenate([last.obs]),  # A copy, since a row keeps the memory of all.
        group=group,
        lost=lost,
        info={k: np.array([r.info[k][0] for r in results]) for k in last.info if k not in _PER_STEP},
        inputs=Observation.concatenate(inputs) if all(inputs) else None,
        **{name: np.concatenate([getattr(r, name) for r in results]) for name in _STEP_ARRAYS},
        **(_recorded_frames(results) if "frames" in last.info and not lost else {}),
    )


def _recorded_frames(results: Sequence[StepResult]) -> dict[str, Any]:
    """Return what was seen at every control step: `frames` and `states` of an `Episode`."""
    parts = [r.info["frames"][0] for r in results]
    frames = {camera: np.concatenate([part[camera] for part in parts]) for camera in parts[0]}
    return {"frames": frames, "states": np.concatenate([r.info["states"][0] for r in results])}


def derived_seed(*numbers: int) -> int:
    """Return a seed that differs for each list of numbers, in 0 .. 2^32 - 1."""
    return int(np.random.SeedSequence([n % 2**32 for n in numbers]).generate_state(1)[0])


def usable_episodes(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that were not lost; `ValueError` where none is left."""
    usable = [e for e in episodes if not e.lost]
    if not usable:
        raise ValueError(NO_EPISODE.format(len(episodes)))
    return usable
