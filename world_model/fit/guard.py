"""Refit guard: AUC before and after a stage, on the newest policy's episodes; what made it worse is undone.

A fit that starts from a world model may make it worse: too few episodes, too high a learning rate, outcomes that were
recorded wrongly. What is judged is the order of successes and failures among the episodes that choose the thresholds,
none of which was fitted on, imagined with the same noise before and after each part is fitted. A part that clearly
lost is put back as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from vla_rl.config import Config
from vla_rl.evaluation.signal import auc, auc_draws, auc_figure, interval_of
from vla_rl.evaluation.statistics import Figure, figure
from world_model.fit.replay import replay_logits
from world_model.model.world_model import WorldModel, load_world_model
from world_model.types import LoggedEpisode

JUDGED = 200  # Episodes imagined before and after each part, at most: enough for what is clear.
log = logging.getLogger(__name__)


class Logits(NamedTuple):
    """Both success networks' at each imagined frame of E episodes; see `replay_logits`."""

    success: list[np.ndarray]
    clip: list[np.ndarray]

    @property
    def score(self) -> np.ndarray:
        """The highest over each episode's frames of the lower of the two, float64 (E,); NaN where one is not finite."""
        pairs = zip(self.success, self.clip, strict=True)
        found = [np.minimum(*pair).max() if np.isfinite(pair).all() else np.nan for pair in pairs]
        return np.array(found, np.float64)


class Refit(Config):
    """What fitting a part did to the order of successes and failures.

    Attributes:
        before, after: AUC; 0.5 where the part gave NaN or infinity afterwards. change: after minus before, with a
            paired bootstrap interval over initial states.
        put_back: the part is as it was before.
    """

    before: Figure
    after: Figure
    change: Figure
    put_back: bool


class RefitGuard:
    """Guard of a fit's stages, which puts back what they made clearly worse.

    Args:
        world_model: under way, now as it was at the start.
        start_from: the start's folder; None: fitted from scratch, or in a way that leaves nothing to compare.
        episodes: the policy's newest, that the thresholds are chosen on.
        seed: of the noise.

    Attributes:
        refits: by part, "dynamics", "success", or both at once. logits: to choose thresholds on, of parts that have not
            seen the episodes; None where those of the world model as it is do.
    """

    def __init__(
        self, world_model: WorldModel, start_from: str | None, episodes: Sequence[LoggedEpisode], seed: int
    ) -> None:
        self.world_model, self.start_from, self.episodes, self.seed = world_model, start_from, episodes, seed
        self.refits: dict[str, Refit] = {}
        self.logits: Logits | None = None
        self.score: np.ndarray | None = None  # Of the episodes that are judged, by the world model as it is.
        self.real = np.array([episode.succeeded for episode in episodes])
        self.groups = np.array([episode.start for episode in episodes])

    def watch(self, part: str, networks: Sequence[str], stage: Callable[[], None]) -> None:
        """Run a stage that fits `networks`, attributes of the world model, and keep them as they were if they lost."""
        if self.start_from is None:
            stage()
            return
        some = np.random.default_rng(self.seed).permutation(len(self.episodes))[:JUDGED]
        before = self._replayed(some).score if self.score is None else self.score
        stage()
        self.score = self._replayed(some).score
        if self._holds(part, before, self.score, some):
            return
        self.score, start = before, load_world_model(self.start_from)
        for name in networks:
            network: nn.Module = getattr(self.world_model, name)
            network.load_state_dict(getattr(start, name).state_dict())
            network.eval()

    def admits(self, cross_fitted: Logits) -> bool:
        """Whether the parts are worth fitting on all episodes, by what parts fitted without them say of each.

        False: the world model stays as it was. Either way `logits` are honest: of parts that have not seen the episode.
        """
        if self.start_from is None:
            self.logits = cross_fitted
            return True
        every = np.arange(len(self.episodes))
        before = self._replayed(every)
        held = self._holds("dynamics and success", before.score, cross_fitted.score, every)
        self.logits = cross_fitted if held else before
        return held

    def _replayed(self, rows: np.ndarray) -> Logits:
        return Logits(*replay_logits(self.world_model, [self.episodes[row] for row in rows], self.seed))

    def _holds(self, part: str, before: np.ndarray, after: np.ndarray, rows: np.ndarray) -> bool:
        """Note what became of the order of the episodes at `rows`, and say so where it was lost."""
        refit = compare_order(before, after, self.real[rows], self.groups[rows])
        self.refits[part] = refit
        if refit.put_back:
            log.warning(
                "world_model.%s: the fit made it worse at telling successes from failures on %d episodes of the newest "
                "policy (AUC %.2f before, %.2f after), so it stays as it was before; fit it on more episodes, or with "
                "a lower optim.lr",
                *(part, len(rows), refit.before.value, refit.after.value),
            )
        return not refit.put_back


def compare_order(before: np.ndarray, after: np.ndarray, real: np.ndarray, groups: np.ndarray) -> Refit:
    """Hold the order by two scores of the same episodes against each other; put back where the 95 % interval of the
    change lies below 0, or the second is not finite.

    Args:
        before, after: float (E,). real: bool (E,), outcomes. groups: (E,), initial states.
    """
    finite = bool(np.isfinite(after).all())
    usable = after if finite else np.zeros_like(before)  # No order at all.
    change = auc(usable, real) - auc(before, real)
    draws = auc_draws(usable, real, groups) - auc_draws(before, real, groups)
    interval = interval_of(draws)
    first, second = (auc_figure(score, real, groups) for score in (before, usable))
    return Refit(
        before=first,
        after=second,
        change=figure(change, interval, first.n, first.of),
        put_back=not finite or interval.high < 0,
    )
