"""Policy ranking by imagined success against the simulator's, and the success head on real frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field

from vla_rl.common.saved import Saved
from vla_rl.config import Config
from vla_rl.evaluation.outcomes import rate_figure
from vla_rl.evaluation.statistics import Figure
from vla_rl.types import Episode
from world_model.config import ImaginationConfig
from world_model.model.world_model import load_world_model
from world_model.trust.figures import as_text
from world_model.trust.measures.outcomes import policy_figures
from world_model.trust.subject import OpenLoop
from world_model.trust.types import PolicyOutcomes

EPISODES_AT_ONCE = 64
FIGURES = ("pearson", "spearman", "mmrv", "policy_gap")
Outcomes = tuple[str, Sequence[str], Sequence[bool], Sequence[bool], Sequence[bool]]


class RankedPolicy(Config):
    """Success rates of one policy.

    Attributes:
        real: in the simulator. imagined: in the world model. judged: the simulator's episodes, by the success head.
    """

    name: str
    real: Figure
    imagined: Figure
    judged: Figure


class Ranking(Saved):
    """Policies, the best in imagination first.

    Attributes:
        imagined: figures of imagined against real success; see `trust.figures`. judged: of judged against real.
        num_states: initial states, the same for all.
    """

    WHAT = "ranking"
    AGAIN = "Rank again with `vla-rl world-model rank`."
    policies: tuple[RankedPolicy, ...]
    imagined: dict[str, Figure]
    judged: dict[str, Figure]
    num_states: int = Field(description="Initial states that each policy started from.")

    def text(self) -> str:
        """A table for people, and how far to believe it."""
        width = max(len(policy.name) for policy in self.policies)
        rows = [f"{'policy':<{width}}  imagined                real                    head on real frames"]
        for policy in self.policies:
            cells = (f"{_rate(figure):<22}" for figure in (policy.imagined, policy.real, policy.judged))
            rows.append(f"{policy.name:<{width}}  {'  '.join(cells)}".rstrip())
        for name, figures in (("imagined against real", self.imagined), ("head on real frames", self.judged)):
            rows.append(f"{name}: " + ", ".join(f"{key} {_number(figures[key])}" for key in FIGURES))
        return "\n".join(rows)


def judge_episodes(
    world_model: Path, episodes: Sequence[Episode], imagination: ImaginationConfig, device: str = "cpu"
) -> list[bool]:
    """Whether the success head says, of the real frames of each episode, that it succeeded.

    Args:
        episodes: with recorded frames.

    Raises:
        ValueError: an episode without frames.
    """
    loaded = OpenLoop(load_world_model(world_model, device).compute_in(imagination.precision), imagination)
    cameras, verdicts = loaded.world_model.metadata.cameras, []
    for start in range(0, len(episodes), EPISODES_AT_ONCE):
        seen = [_frames_of(e, cameras, loaded.frame_steps) for e in episodes[start : start + EPISODES_AT_ONCE]]
        longest = max(len(states) for _, states in seen)
        rows = [np.minimum(np.arange(longest), len(states) - 1) for _, states in seen]
        images = np.stack([images[row] for (images, _), row in zip(seen, rows, strict=True)])
        states = np.stack([states[row] for (_, states), row in zip(seen, rows, strict=True)])
        text = [e.obs.instruction[0] for e in episodes[start : start + EPISODES_AT_ONCE]]
        scores = loaded.score(loaded.encode(images, states), text)
        verdicts += [bool(row[len(states) - 1]) for row, (_, states) in zip(scores.success, seen, strict=True)]
    return verdicts


def _frames_of(episode: Episode, cameras: Sequence[str], frame_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (T, V, height, width, 3) and states float32 (T, S): the first, one every G steps, the last."""
    if episode.frames is None or episode.states is None:
        raise ValueError("judging real episodes needs their frames: build the environment with record_frames=True")
    length = len(episode.states)
    steps = np.unique([*range(frame_steps - 1, length, frame_steps), length - 1])
    views = [np.concatenate([episode.obs.images[name][:1], episode.frames[name][steps]]) for name in cameras]
    return np.stack(views, 1), np.concatenate([episode.obs.state[:1], episode.states[steps]])


def rank(outcomes: Sequence[Outcomes]) -> Ranking:
    """Order policies by imagined success. Only initial states that all of them finished count.

    Args:
        outcomes: name, names of initial states, real, imagined and judged success from each.

    Raises:
        ValueError: fewer than two policies, or no initial state that all finished.
    """
    common = sorted(set.intersection(*(set(starts) for _, starts, *_ in outcomes)))
    if not common:
        raise ValueError("ranking: no initial state was finished by every policy; every episode of some was lost")
    tables = []
    for name, starts, *columns in outcomes:
        at = {start: i for i, start in enumerate(starts)}
        rows = [at[start] for start in common]
        tables.append((name, *(np.asarray(column, bool)[rows] for column in columns)))
    groups = np.array(common)
    policies = [
        RankedPolicy(
            name=name,
            real=rate_figure(real, groups),
            imagined=rate_figure(imagined, groups),
            judged=rate_figure(judged, groups),
        )
        for name, real, imagined, judged in tables
    ]
    figures = {
        what: policy_figures([PolicyOutcomes(t[0], common, t[1], t[column]) for t in tables])
        for what, column in (("imagined", 2), ("judged", 3))
    }
    return Ranking(
        policies=tuple(sorted(policies, key=lambda policy: -policy.imagined.value)),
        imagined={name: figures["imagined"][name] for name in FIGURES},
        judged={name: figures["judged"][name] for name in FIGURES},
        num_states=len(common),
    )


def _rate(figure: Figure) -> str:
    return f"{as_text(figure.value, 'rate')} [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"


def _number(figure: Figure) -> str:
    return f"{figure.value:.2f} [{figure.low:.2f}, {figure.high:.2f}]"
