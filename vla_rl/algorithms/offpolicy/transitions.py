"""Transitions: episodes as decisions, each with embedding, chunk, successor and outcome."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_rl.algorithms.offpolicy.features import NO_DRAWS, Draws, FeatureCache, Features, compute_features
from vla_rl.data.config import DatasetError
from vla_rl.data.dataset import BCDataset, EpisodeDataset
from vla_rl.interfaces import Policy
from vla_rl.types import CONTROL_SOURCES, HUMAN_SOURCES, Episode

OPTIONAL = ("person", "log_prob", "candidates", "noise")
_DEMONSTRATORS = ("demo", "expert")
_HUMAN = np.isin(CONTROL_SOURCES, HUMAN_SOURCES)


@dataclass(frozen=True)
class Transitions:
    """N decisions of E episodes.

    Attributes:
        embedding: float32 (N, D), the policy's features of what was seen.
        chunk: float32 (N, H, A), the actions that followed; past the episode's end its last one.
        num_steps: int64 (N,), control steps of the chunk that the episode has, 1 .. H.
        following: int64 (N,), the decision after the chunk; -1 where the episode ends within it or none is logged.
        elapsed, remaining: int64 (N,), control steps of the episode before, and from here to its end.
        episode: int64 (N,), 0 .. E - 1. success: bool (E,). task: int64 (E,).
        initial_state: int64 (E,); episodes with the same number began alike.
        person: bool (N,), a person or an expert drove at the decision; None: not recorded, the policy did.
        log_prob: float32 (N,), log-probability of the chunk under who drew it, NaN where not known; None: of none.
        candidates: float32 (N, C, H, A), chunks of the frozen policy there, its greedy one first; None: not drawn.
        noise: float32 (N, C, steps, D), what each candidate was made of; None: not known.
        weight: float64 (N,), how often a critic draws each decision, 1 on average; None: all alike.
    """

    embedding: np.ndarray
    chunk: np.ndarray
    num_steps: np.ndarray
    following: np.ndarray
    elapsed: np.ndarray
    remaining: np.ndarray
    episode: np.ndarray
    success: np.ndarray
    task: np.ndarray
    initial_state: np.ndarray
    person: np.ndarray | None = None
    log_prob: np.ndarray | None = None
    candidates: np.ndarray | None = None
    noise: np.ndarray | None = None
    weight: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.episode)

    def returns(self, discount: float) -> np.ndarray:
        """The discounted outcome from each decision on, float32 (N,): discount^(steps to the end), 0 for a failure."""
        return (self.success[self.episode] * discount ** self.remaining.astype(np.float64)).astype(np.float32)

    @property
    def learned_from(self) -> np.ndarray:
        """Episodes with a decision, int64, ascending: others of a dataset may have none that is learned from."""
        return np.unique(self.episode)

    def check_outcomes_differ(self) -> None:
        """Refuse episodes that all ended alike, of those that are learned from.

        Raises:
            ValueError: they did.
        """
        success = self.success[self.learned_from]
        if success.all() or not success.any():
            kind = "succeeded" if success.all() else "failed"
            raise ValueError(
                f"all {len(success)} logged episodes {kind}, or were recorded without outcomes: none can be told from "
                "another. Log episodes of both kinds (collect.keep=all), and let sft.datasets keep both "
                "(only_successes=false), or clone them all (`vla-rl sft`)"
            )

    def with_shuffled_outcomes(self, seed: int) -> Transitions:
        """The same with outcomes shuffled among each task's episodes that are learned from: a negative control."""
        success, rng, learned = self.success.copy(), np.random.default_rng(seed), self.learned_from
        for task in np.unique(self.task):
            own = learned[self.task[learned] == task]
            success[own] = success[rng.permutation(own)]
        return replace(self, success=success)

    def folds(self, count: int, seed: int) -> np.ndarray:
        """The fold of each decision, int64 (N,), 0 .. count - 1; an initial state lies in one fold.

        Raises:
            ValueError: fewer initial states than folds.
        """
        states = np.unique(self.initial_state[self.learned_from])
        if len(states) < count:
            raise ValueError(f"episodes of {len(states)} initial states; {count} folds need more")
        place = np.searchsorted(states, self.initial_state[self.episode])
        return (np.random.default_rng(seed).permutation(len(states)) % count)[place]


def logged_transitions(
    policy: Policy | None, data: BCDataset, cache: FeatureCache | None = None, draws: Draws = NO_DRAWS
) -> Transitions:
    """The decisions of datasets, as the policy sees them: those frames that cloning learns from, in their order.

    Without a policy embeddings have no numbers: for what asks outcomes alone.

    Args:
        cache: what has been embedded before is read from there, and the rest written there.
        draws: the policy's chunks at each decision, for `candidates`.

    Warns where episodes go on, but nothing is logged where any chunk ends: no decision then follows another.

    Raises:
        DatasetError: a dataset does not record which episodes succeeded, and others than demonstrators drove in it.
        ValueError: the policy has no embeddings.
    """
    _check_outcomes_are_known(data)
    parts = [_of_dataset(policy, part, data.chunk_size, cache, draws) for part in data.parts]
    names = [[d.instructions[t] for t in d.task[d.starts]] for d in data.parts]
    states = [d.state_names(str(i)) for i, d in enumerate(data.parts)]
    found = replace(joined(parts, names, states), weight=_weights(data))
    if policy is not None and (found.following < 0).all() and (found.remaining > found.num_steps).any():
        every = ", ".join(str(number) for number in sorted({part.observed_every for part in data.parts}))
        warnings.warn(
            f"no logged decision follows another: the policy executes {data.chunk_size} actions, and the datasets show "
            f"something every {every} control steps. So critic.targets=td learns from outcomes alone, as monte_carlo "
            "does, and recap.lookahead sees them alone. Execute a multiple of these steps (policy.num_actions), or log "
            "every step (collect.every_frame=true)",
            stacklevel=2,
        )
    return found


def draw(weight: np.ndarray | None, count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` of the numbers 0 .. count - 1, with replacement, as often as their weights say, int64 (size,).

    Args:
        weight: float64 (count,); None: all alike.
    """
    if weight is None:
        return rng.integers(count, size=size)
    until = np.cumsum(weight)
    return np.minimum(np.searchsorted(until, rng.random(size) * until[-1], side="right"), count - 1)


def choose(weight: np.ndarray | None, among: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    """At most `most` of the decisions `among`, int64 (n,), none twice, ascending; likelier by their weights.

    Args:
        weight: float64 (N,), of all decisions; None: all alike.
    """
    if weight is None or most >= len(among):
        return np.sort(rng.permutation(among)[:most])
    share = weight[among]
    return np.sort(rng.choice(among, most, replace=False, p=share / share.sum()))


def _weights(data: BCDataset) -> np.ndarray | None:
    """How often a critic draws each decision of datasets, 1 on average; None: all alike, where there is one dataset.

    A dataset has the share of its episodes times its weight, however many decisions were logged of each. Within one
    all decisions are alike: were its episodes, those of short ones would count more, and success is what ends them
    early, so that every value would come out too high.
    """
    if len(data.parts) == 1:
        return None
    sizes = [len(part.rows) for part in data.parts]
    share = np.array([part.weight * part.num_episodes for part in data.parts])
    weight = np.repeat(share / sizes, sizes)
    return weight / weight.mean()


def _check_outcomes_are_known(data: BCDataset) -> None:
    """A demonstration counts as a success where nobody has said so; what a policy did does not."""
    for part in data.parts:
        others = sorted({CONTROL_SOURCES[code] for code in np.unique(part.source)} - set(_DEMONSTRATORS))
        if not part.has_outcomes and others:
            raise DatasetError(
                f"{part.path}: does not record which episodes succeeded, and holds frames of {', '.join(others)}, all "
                f"of which would count as successes; allowed without outcomes: {' and '.join(_DEMONSTRATORS)}. Record "
                "with outcomes, label the episodes, or leave it out of sft.datasets"
            )


def episode_transitions(
    policy: Policy, episodes: Sequence[Episode], draws: Draws = NO_DRAWS, steered: bool = False
) -> Transitions:
    """The decisions of episodes that have just been run by a policy, in their order. Those that broke are left out.

    Args:
        policy: the frozen one. draws: its chunks at each decision, for `candidates`.
        steered: its noise was chosen, and is the chunks' path: the first candidate is what was executed.

    Raises:
        ValueError: no episode is left, or the policy has no embeddings.
    """
    kept = [episode for episode in episodes if not episode.lost]
    if not kept:
        raise ValueError(f"none of {len(episodes)} episodes has an outcome: every one was lost")
    features = compute_features(policy, (episode.obs for episode in kept), draws)
    counts = np.array([episode.num_chunks for episode in kept])
    ends = np.cumsum(counts)
    number = np.repeat(np.arange(len(kept)), counts)
    steps = np.concatenate([episode.num_steps for episode in kept]).astype(np.int64)
    before = np.concatenate([np.cumsum(e.num_steps) - e.num_steps for e in kept]).astype(np.int64)
    rows = np.arange(len(number))
    if steered:
        assert features.candidates is not None and features.noise is not None, "draws have a noise"
        features.candidates[:, 0] = np.concatenate([episode.chunks.actions for episode in kept])
        features.noise[:, 0] = np.concatenate([_path(episode)[:, 0] for episode in kept])
    return Transitions(
        embedding=features.embedding,
        chunk=np.concatenate([_executed(episode) for episode in kept]),
        num_steps=steps,
        following=np.where(rows + 1 < ends[number], rows + 1, -1),
        elapsed=before,
        remaining=np.array([episode.length for episode in kept])[number] - before,
        episode=number,
        success=np.array([episode.success for episode in kept], bool),
        task=_numbered([episode.obs.instruction[0] for episode in kept]),
        initial_state=_numbered([f"{e.spec.task}/{e.spec.split}/{e.spec.index}" for e in kept]),
        person=np.zeros(len(number), bool),
        log_prob=np.concatenate([_log_prob(episode) for episode in kept]),
        candidates=features.candidates,
        noise=features.noise,
    )


def _executed(episode: Episode) -> np.ndarray:
    """Its chunks, float32 (K, H, A): past the last executed step, the action of that step."""
    actions = episode.chunks.actions.astype(np.float32)
    step = np.minimum(np.arange(actions.shape[1]), episode.num_steps[:, None] - 1)
    return np.take_along_axis(actions, step[..., None], 1)


def _path(episode: Episode) -> np.ndarray:
    assert episode.chunks.path is not None, "a steered policy gives it"
    return episode.chunks.path


def _log_prob(episode: Episode) -> np.ndarray:
    if episode.chunks.log_prob is None:
        return np.full(episode.num_chunks, np.nan, np.float32)
    return episode.chunks.log_prob.reshape(episode.num_chunks, -1).sum(1).astype(np.float32)


def joined(
    parts: Sequence[Transitions], tasks: Sequence[Sequence[str]], initial_states: Sequence[Sequence[str]]
) -> Transitions:
    """Several parts' decisions, one after another.

    Args:
        tasks, initial_states: the names of each part's episodes'; equal names become equal numbers.
    """
    first_row = np.cumsum([0, *(len(part) for part in parts)])
    first_episode = np.cumsum([0, *(len(part.success) for part in parts)])
    required = ("embedding", "chunk", "num_steps", "elapsed", "remaining", "success")
    optional = [name for name in OPTIONAL if all(getattr(part, name) is not None for part in parts)]
    return Transitions(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in (*required, *optional)},
        following=np.concatenate(
            [np.where(p.following < 0, -1, p.following + f) for p, f in zip(parts, first_row, strict=False)]
        ),
        episode=np.concatenate([p.episode + f for p, f in zip(parts, first_episode, strict=False)]),
        task=_numbered([name for part in tasks for name in part]),
        initial_state=_numbered([name for part in initial_states for name in part]),
    )


def _numbered(names: Sequence[str]) -> np.ndarray:
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _of_dataset(
    policy: Policy | None, data: EpisodeDataset, chunk_size: int, cache: FeatureCache | None, draws: Draws
) -> Transitions:
    """One dataset's; tasks and initial states are numbered by the caller."""
    rows = data.rows
    episode = np.searchsorted(data.starts, rows, side="right") - 1
    after = rows + chunk_size
    ends = data.ends[rows]
    place = np.searchsorted(rows, after)
    there = np.append(rows, -1)[np.minimum(place, len(rows))]
    if policy is None:
        features = Features(np.zeros((len(rows), 0), np.float32))
    else:
        features = (cache or FeatureCache(None, "")).of_dataset(policy, data, chunk_size, draws)
    unused = np.zeros(len(data.starts), np.int64)
    return Transitions(
        embedding=features.embedding,
        chunk=data.actions[np.minimum(rows[:, None] + np.arange(chunk_size), ends[:, None] - 1)].astype(np.float32),
        num_steps=np.minimum(chunk_size, ends - rows),
        following=np.where((after < ends) & (there == after), place, -1),
        elapsed=rows - data.starts[episode],
        remaining=ends - rows,
        episode=episode,
        success=data.success.astype(bool),
        task=unused,
        initial_state=unused,
        person=_HUMAN[data.source[rows]],
        candidates=features.candidates,
        noise=features.noise,
    )
