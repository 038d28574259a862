"""Rollout metrics: success, reward, and the share of informative groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from vla_rl.rollout.runner import usable_episodes
from vla_rl.types import Episode

# Why a group teaches nothing: "rollout/KIND_groups" in the log is its share.
SILENT = ("all_failed", "all_solved", "collapsed")
# In `Episode.info`: had the task really been carried out, by the end of each chunk, where a reward model judges?
TRUE_SUCCESS = "true_success"
# In `Episode.info`: what was taken off each chunk's reward, which says nothing of success; and where the reward is a
# verdict, the highest probability of success in each chunk.
PENALTY, PROBABILITY = "penalty", "probability"
_ROUNDING = 1e-5  # By which payments may differ that are the same.


def payment(episode: Episode) -> float:
    """What an episode was paid: its total reward, without the penalties that were taken off it."""
    return episode.total_reward + float(np.sum(episode.info.get(PENALTY, 0.0)))


def count_informative(episodes: Iterable[Episode]) -> tuple[int, int]:
    """How many of the episodes' groups were not all paid the same, and how many groups there are; lost ones aside.

    With rewards of 0 and 1 these are the groups with both a success and a failure.
    """
    kinds = _group_kinds(episodes)
    return kinds["informative"], kinds.total()


def _group_kinds(episodes: Iterable[Episode]) -> Counter[str]:
    """How many groups are informative, and why the others, all paid the same, are not; lost episodes aside.

    "collapsed" come first: all of their episodes had the same actions, where these are known (`gather_outcomes`).
    """
    groups: defaultdict[int, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if not episode.lost:
            groups[episode.group].append(episode)
    return Counter(map(_kind, groups.values()))


def _kind(group: Sequence[Episode]) -> str:
    paid, actions = [payment(e) for e in group], group[0].chunks.actions
    if max(paid) - min(paid) > _ROUNDING:
        return "informative"
    if len(group) > 1 and actions.size and all(np.array_equal(e.chunks.actions, actions) for e in group):
        return "collapsed"
    return "all_solved" if group[0].success else "all_failed"


def success_metrics(episodes: Sequence[Episode], tasks: Iterable[str], is_imagined: bool) -> dict[str, float]:
    """Metrics of an iteration's E episodes, lost ones included, by their names in the log.

    Success from keyframes is not to be compared with the real one, which is from initial states; so "train/imagined" is
    of these alone, and missing where there are none.
    """
    played = [e for e in episodes if not e.lost]
    from_start = [e for e in played if e.spec.keyframe is None]
    found: dict[str, float] = {
        "train/success": float(np.mean([e.success for e in played])),
        "train/episodes": len(played),
        "train/lost": len(episodes) - len(played),
        "train/steps": float(np.mean([e.length for e in played])),
    }
    for task in tasks:
        outcomes = [e.success for e in played if e.spec.task == task]
        if outcomes:
            found[f"train/success/{task}"] = float(np.mean(outcomes))
    if len(from_start) < len(played):
        found["train/success_from_keyframes"] = float(np.mean([e.success for e in played if e.spec.keyframe]))
        if from_start:
            found["train/success_from_start"] = float(np.mean([e.success for e in from_start]))
    if is_imagined and from_start:  # What they were paid: 1 for a success, or its probability; without penalties.
        found["train/imagined"] = float(np.mean([payment(e) for e in from_start]))
        likely = [e.info[PROBABILITY].max() for e in from_start if PROBABILITY in e.info]
        if len(likely) == len(from_start):
            found["train/imagined_probability"] = float(np.mean(likely))
    return found


def rollout_metrics(episodes: Sequence[Episode], compares_episodes: bool = False) -> dict[str, float]:
    """Return success, length and group statistics of a rollout, by name.

    Args:
        compares_episodes: the algorithm learns from differences within a group, so `SILENT` ones are counted by kind.
    """
    usable = usable_episodes(episodes)
    kinds = _group_kinds(usable)
    named = ("informative", *SILENT) if compares_episodes else ("informative",)
    return {
        "rollout/success_rate": float(np.mean([e.success for e in usable])),
        "rollout/reward": float(np.mean([e.total_reward for e in usable])),
        "rollout/length": float(np.mean([e.length for e in usable])),
        "rollout/num_episodes": float(len(usable)),
        "rollout/num_lost": float(len(episodes) - len(usable)),
        **{f"rollout/{kind}_groups": kinds[kind] / kinds.total() for kind in named},
    }


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """How success as it was paid compares with the truth, of episodes that broke not; none where the simulator paid.

    False successes: of the episodes that really failed, those that counted. Missed: of the others, those that did not.
    """
    if not episodes or TRUE_SUCCESS not in episodes[0].info:
        return {}
    truth = np.array([bool(e.info[TRUE_SUCCESS][-1]) for e in episodes])
    paid = np.array([e.success for e in episodes])
    logged = {"train/success_by_simulator": float(truth.mean())}
    if not truth.all():
        logged["reward/false_success"] = float(paid[~truth].mean())
    if truth.any():
        logged["reward/missed_success"] = float((~paid)[truth].mean())
    return logged
