"""What RL can learn from a policy, told from an evaluation that samples each initial state several times.

print(headroom(Evaluation.load("runs/x/evaluations/policy.json")).text())
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.evaluation.results import Evaluation, EvaluationError
from vla_rl.evaluation.statistics import Figure, figure, wilson_interval
from vla_rl.rollout.success import SILENT

FEW = 0.25  # A share of mixed groups below which most of a rollout teaches nothing.
MANY = 0.5  # A share of groups that taught nothing above which a run's end says what to do.
ADVICE = {
    "all_failed": "clone longer (`vla-rl sft`), or choose easier tasks (env.tasks) or initial states (keyframes)",
    "all_solved": "choose harder tasks or perturbed states (env.perturb)",
    "collapsed": "raise train.temperature, so that a group's episodes differ",
}


@dataclass(frozen=True)
class Headroom:
    """Of S initial states, sampled n times each. GRPO learns from a state only where it is solved and failed: mixed.

    Attributes:
        num_samples: n.
        success: mean success, sampled. greedy: success of the greedy policy on the same states; None if not evaluated.
        mixed, all_failed, all_solved: shares of the states, with Wilson intervals.
        best_of_n: the share of states solved at least once, what a perfect choice among n draws would reach.
    """

    num_samples: int
    success: float
    greedy: float | None
    mixed: Figure
    all_failed: Figure
    all_solved: Figure
    best_of_n: float

    def text(self) -> str:
        """For people, in three lines."""
        n, states = self.num_samples, self.mixed.n
        greedy = "" if self.greedy is None else f", greedy {100 * self.greedy:.1f} %"
        lines = [
            f"success {100 * self.success:.1f} % sampled{greedy}; the best of {n} draws {100 * self.best_of_n:.1f} %",
            f"of {states} groups of {n}: {_share(self.mixed)} mixed, which RL learns from; {_share(self.all_failed)} "
            f"all failed, {_share(self.all_solved)} all solved",
        ]
        return "\n".join([*lines, self.advice()])

    def advice(self) -> str:
        """What to do, by the kind of group that teaches nothing and is the most frequent.

        Over 13 bases none of these figures reliably predicted what RL gained: the rank correlation of `mixed` was .21
        [-.41, .81], and that of `best_of_n` minus success .63 [.20, .90], whose p of .02 is .11 once corrected for five
        predictors (docs/notebook/results_tabletop.md).
        """
        if self.mixed.value >= FEW:
            mixed = f"{100 * self.mixed.value:.0f} of 100 groups are mixed"
            return f"RL has something to learn from: {mixed}, which does not tell how much it gains"
        most = "all_failed" if self.all_failed.value >= self.all_solved.value else "all_solved"
        return f"RL would learn from few groups: {ADVICE[most]}"


def _share(share: Figure) -> str:
    return f"{100 * share.value:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"


def headroom(evaluation: Evaluation, mode: str = "sampled") -> Headroom:
    """Return what RL can learn from; lost episodes are left out, and states of which fewer than two are left.

    Raises:
        EvaluationError: no state was sampled twice in that mode.
    """
    outcomes: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    for episode in evaluation.select(mode):
        if not episode.lost:
            outcomes[episode.task, episode.index].append(episode.success)
    groups = [np.array(group, float) for group in outcomes.values() if len(group) > 1]
    if not groups:
        raise EvaluationError(
            f"{evaluation.meta.name}: no initial state was sampled twice in mode {mode!r} (modes: "
            f"{', '.join(evaluation.modes)}); evaluate with eval.samples_per_state=8"
        )
    rates, num = np.array([group.mean() for group in groups]), len(groups)

    def share(is_counted: np.ndarray) -> Figure:
        count = int(is_counted.sum())
        return figure(count / num, wilson_interval(count, num), num, "groups")

    greedy = [e.success for e in evaluation.select("greedy") if not e.lost]
    return Headroom(
        num_samples=max(map(len, groups)),
        success=float(rates.mean()),
        greedy=float(np.mean(greedy)) if greedy else None,
        mixed=share((rates > 0) & (rates < 1)),
        all_failed=share(rates == 0),
        all_solved=share(rates == 1),
        best_of_n=float((rates > 0).mean()),
    )


def silent_groups(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """What to do where most groups of a run's iterations taught nothing, by what they mostly were; else nothing."""
    rows = [row for row in metrics if "rollout/collapsed_groups" in row]
    shares = {kind: sum(row[f"rollout/{kind}_groups"] for row in rows) / max(len(rows), 1) for kind in SILENT}
    if sum(shares.values()) <= MANY:
        return []
    failed, solved, collapsed = (f"{100 * shares[kind]:.0f} %" for kind in SILENT)
    return [
        f"{100 * sum(shares.values()):.0f} % of the groups taught nothing: {failed} all failed, {solved} all solved, "
        f"{collapsed} had the same actions throughout; {ADVICE[max(SILENT, key=shares.__getitem__)]}"
    ]
