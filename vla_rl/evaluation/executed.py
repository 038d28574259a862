"""Imagined episodes' actions, executed in a simulator from the same initial states: how far imagination flatters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from vla_rl.common.distributed.process_group import ALONE, ProcessGroup
from vla_rl.config import Config
from vla_rl.evaluation.signal import difference_figure, group_correlation
from vla_rl.evaluation.statistics import Figure
from vla_rl.interfaces import VecEnv
from vla_rl.rollout.success import payment
from vla_rl.types import Episode

OF_A_STATE = 4  # Episodes: enough for their order, and leaves others to tell how initial states differ.


class Executed(Config):
    """Imagined episodes and what their actions lead to.

    Attributes:
        num_episodes: executed, lost ones included.
        imagined: their mean pay, which is success or its probability. caused: success of the same actions.
        gap: imagined less caused, with its interval over initial states.
        order: correlation within an initial state of pay and what it leads to; None where no state has several.
        at_most: RL in imagination stops where the gap surely exceeds it; None: never.
    """

    num_episodes: int
    imagined: float
    caused: float
    gap: Figure
    order: Figure | None
    at_most: float | None

    @property
    def stop_text(self) -> str:
        """Why RL stops: the whole interval of the gap lies above the bound; empty where it does not."""
        if self.at_most is None or not self.gap.low > self.at_most:
            return ""
        flattery = f"imagined success surely exceeds that of the same actions by over {100 * self.at_most:g} points"
        return f"RL stops: {flattery}"

    def text(self) -> str:
        """Return a few words for people."""
        gap, within = self.gap, ""
        if (order := self.order) is not None:
            within = f", order within a state {order.value:.2f} [{order.low:.2f}, {order.high:.2f}]"
        return (
            f"of {gap.n} imagined episodes {100 * self.imagined:.0f} %, the same actions executed "
            f"{100 * self.caused:.0f} %: {100 * gap.value:+.0f} points [{100 * gap.low:+.0f}, {100 * gap.high:+.0f}]"
            f"{within}"
        )


def execute(
    env: VecEnv, episodes: Sequence[Episode], most: int, at_most: float | None, world: ProcessGroup = ALONE
) -> Executed | str:
    """Execute imagined episodes from initial states, a few of each; or say why there is nothing to tell.

    Args:
        env: a simulator. most: episodes, in all processes. at_most: see `Executed`.
        world: processes that call this together, each with its own part of the episodes; all get the result.
    """
    share, taken, chosen = world.share(most), Counter[str](), list[Episode]()
    for episode in episodes:
        start = start_of(episode)
        usable = not episode.lost and episode.spec.keyframe is None
        if usable and taken[start] < OF_A_STATE and len(chosen) < share.stop - share.start:
            chosen.append(episode)
            taken[start] += 1
    outcomes = zip(chosen, outcomes_of_actions(env, chosen), strict=True)
    found = world.gather([(start_of(e), payment(e), outcome) for e, outcome in outcomes])
    rows = [row for part in found for row in part]
    known = [row for row in rows if row[2] is not None]
    if not known:
        return "every one was lost" if rows else "none of the newest episodes began at an initial state"
    starts, caused = (np.array([row[column] for row in known]) for column in (0, 2))
    paid = np.array([row[1] for row in known], np.float64)
    return Executed(
        num_episodes=len(rows),
        imagined=float(paid.mean()),
        caused=float(caused.mean()),
        gap=difference_figure(caused, paid, starts),
        order=group_correlation(paid, caused, starts),
        at_most=at_most,
    )


def outcomes_of_actions(env: VecEnv, episodes: Sequence[Episode]) -> list[bool | None]:
    """Execute each episode's actions in an environment, from its initial state; whether that succeeds, None: it broke.

    What is seen there changes nothing of what is done.
    """
    success, lost = np.zeros((2, len(episodes)), bool)
    for begin in range(0, len(episodes), env.num_envs):
        part = episodes[begin : begin + env.num_envs]
        going = list(range(len(part)))
        env.reset([episode.spec for episode in part], going)
        for number in range(max(episode.num_chunks for episode in part)):
            going = [i for i in going if number < part[i].num_chunks]
            if not going:
                break
            result = env.step(np.stack([part[i].chunks.actions[number] for i in going]), going)
            rows = [begin + i for i in going]
            success[rows] |= result.success
            lost[rows] |= result.lost
            going = [i for i, done in zip(going, result.done, strict=True) if not done]
    return [None if broke else bool(good) for good, broke in zip(success, lost, strict=True)]


def start_of(episode: Episode) -> str:
    """Name the initial state."""
    return f"{episode.spec.task}/{episode.spec.split}/{episode.spec.index}"
