"""What an iteration's rollouts came to: success, and in a world model what those from initial states were paid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from vla_rl.types import Episode

# In `Episode.info`: what was taken off each chunk's reward, which says nothing of success; and where the reward is a
# verdict, the highest probability of success in each chunk.
PENALTY, PROBABILITY = "penalty", "probability"


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
        paid = [e.total_reward + float(np.sum(e.info.get(PENALTY, 0.0))) for e in from_start]
        found["train/imagined"] = float(np.mean(paid))
        likely = [e.info[PROBABILITY].max() for e in from_start if PROBABILITY in e.info]
        if len(likely) == len(from_start):
            found["train/imagined_probability"] = float(np.mean(likely))
    return found
