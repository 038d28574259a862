"""What an iteration's rollouts came to: success, what was paid for it, and whether groups of them tell anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from vla_rl.types import Episode

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
    paid: defaultdict[int, list[float]] = defaultdict(list)
    for episode in episodes:
        if not episode.lost:
            paid[episode.group].append(payment(episode))
    return sum(max(group) - min(group) > _ROUNDING for group in paid.values()), len(paid)


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
