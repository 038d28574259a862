"""What evaluations tell: a verdict of a comparison or a reproduction, and what RL can learn from a policy.

A comparison is better, worse, no difference shown, or too few, by a margin.

print(headroom(Evaluation.load("runs/x/evaluations/policy.json")).text())   # each initial state sampled several times

A published success rate, and the rule by which a reproduction is judged, fixed before its first episode.

claim = Claim(rate=0.945, num_episodes=500)
claim.judge(471, 500)       # "reproduced", "not reproduced" or "undecided"
claim.bounds(500)           # from how many successes, and up to how many
claim.detectable_drop(500)  # the difference that so many episodes tell
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import scipy
from pydantic import Field, PositiveInt
from scipy.special import ndtri

from vla_rl.common.next_command import next_command
from vla_rl.common.run_folder import RunFolder, read_metrics
from vla_rl.config import Config
from vla_rl.evaluation.compare import PairedResult, compare, format_p
from vla_rl.evaluation.gate import read_gate
from vla_rl.evaluation.results import Evaluation, EvaluationError
from vla_rl.evaluation.sequential_compare import SequentialComparison
from vla_rl.evaluation.statistics import Figure, Interval, figure, unpaired_difference_interval, wilson_interval
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


ALPHA = 0.05
MARGIN = 0.05  # Unless the user names one.
Word = Literal["better", "worse", "no difference shown", "too few episodes"]


class Verdict(Config):
    """What a comparison says of b, with two errors bounded.

    "Better" and "worse" need an exact p-value below 5 % and an interval on one side of 0. "No difference shown" needs
    an interval inside the margin on both sides, so that it is wrong of a difference of the margin in at most 2.5 % of
    comparisons; so tight an interval says so whether or not it holds 0. All else is "too few episodes".

    Attributes:
        margin: the smallest difference of success rates that matters, a fraction.
        interval: of the difference, what `word` stands on; it may be wider than the comparison's own, see `verdict`.
        num_states: initial states (pairs of episodes, where nothing is known of states).
        states_needed: about how many would tell, whichever it is; None where it is told.
    """

    word: Word
    mode: str
    margin: float
    difference: float
    interval: Interval
    p_value: float
    num_states: int
    states_needed: int | None = None

    @property
    def exit_code(self) -> int:
        """0: better, or no difference shown. 1: worse. 3: too few episodes."""
        return {"worse": 1, "too few episodes": 3}.get(self.word, 0)

    def text(self, b: str = "b") -> str:
        """One line for people, in percentage points; `b`: what they call what is compared with `a`."""
        found = f"{100 * self.difference:+.1f} points {self.interval.percent('+')}, p {format_p(self.p_value)}"
        margin = f"{100 * self.margin:g} points"
        if self.states_needed is not None:
            return (
                f"{self.mode}: too few episodes: {found}, of {self.num_states} states; about {self.states_needed} "
                f"would tell better, worse, or no difference of {margin}"
            )
        if self.word == "no difference shown":
            return f"{self.mode}: no difference shown: {found}; one of {margin} or more is excluded"
        return f"{self.mode}: {b} is {self.word}: {found}"


def verdict(result: PairedResult | SequentialComparison, margin: float = MARGIN) -> Verdict:
    """Return the verdict on all of a mode's episodes, or on a comparison that stopped by itself.

    A bootstrap cannot resample what no state showed: with few states that differ its interval is too narrow to exclude
    anything. So the interval also holds that of the shares gained and lost, each with its Wilson interval (put together
    as recovered variances: Zou & Donner 2008, Stat. Med. 27:1693-1702). With half the margin to both sides any interval
    excludes either 0 or the margin, which gives the states needed.

    Args:
        margin: the smallest difference that matters, a fraction in 0 .. 1.
    """
    if isinstance(result, SequentialComparison):
        mode, p_value, interval, num_states = "b against a", result.p_value, result.interval, result.num_pairs
        difference, alpha = result.rate_b - result.rate_a, result.alpha
    else:
        mode, p_value, num_states = result.mode, result.p_value_by_state, result.num_states
        difference, alpha = result.difference, ALPHA
        wider = result.bootstrap if result.apart else _of_gained_and_lost(result)
        interval = Interval(min(result.bootstrap.low, wider.low), max(result.bootstrap.high, wider.high))
        shown = result.bootstrap.excludes_zero and p_value < alpha
        interval = result.bootstrap if shown and not _inside(interval, margin) else interval
    needed = None
    if _inside(interval, margin):
        word: Word = "no difference shown"
    elif interval.excludes_zero and p_value < alpha:
        word = "better" if difference > 0 else "worse"
    else:
        word = "too few episodes"
        needed = _rounded_up(num_states * max(((interval.high - interval.low) / margin) ** 2, 1.2))
    return Verdict(
        word=word,
        mode=mode,
        margin=margin,
        difference=difference,
        interval=interval,
        p_value=p_value,
        num_states=num_states,
        states_needed=needed,
    )


def changed_tasks(results: Sequence[PairedResult], mode: str) -> list[tuple[PairedResult, float]]:
    """Tasks whose change is not chance, the greatest loss first, each with its p-value corrected for their number.

    By Holm's rule (1979, Scand. J. Stat. 6:65-70): the chance that any task is named by chance is at most 5 %.
    """
    tasks = sorted((r for r in results if r.mode == mode and r.task is not None), key=lambda r: r.p_value_by_state)
    found, p_value = [], 0.0
    for rank, result in enumerate(tasks):
        p_value = max(p_value, min(1.0, (len(tasks) - rank) * result.p_value_by_state))
        if p_value < ALPHA:
            found.append((result, p_value))
    return sorted(found, key=lambda pair: pair[0].difference)


def _inside(interval: Interval, margin: float) -> bool:
    return -margin < interval.low and interval.high < margin


def _of_gained_and_lost(result: PairedResult) -> Interval:
    """An interval of the difference that is honest where few states differ; a state's samples count as one."""
    n, z2 = result.num_states, float(ndtri(1 - ALPHA / 2)) ** 2
    below, above = [], []
    for count in (result.gained, result.lost):
        share = count / result.num_pairs
        center, half = share + z2 / (2 * n), math.sqrt(z2 * share * (1 - share) / n + (z2 / (2 * n)) ** 2)
        below.append(share - (center - half) / (1 + z2 / n))
        above.append((center + half) / (1 + z2 / n) - share)
    low, high = math.hypot(below[0], above[1]), math.hypot(above[0], below[1])
    return Interval(result.difference - low, result.difference + high)


def _rounded_up(number: float) -> int:
    """To two digits."""
    step = 10 ** max(int(math.log10(number)) - 1, 0)
    return math.ceil(number / step) * step


def outcome(folder: Path) -> list[str]:
    """Return a training run's last lines: whether its policy got better, where it lies, and what to type next."""
    run, lines = RunFolder(folder), []
    before, after = run.evaluation("base"), run.evaluation("final")
    if before.is_file() and after.is_file():
        compared = compare(Evaluation.load(before), Evaluation.load(after))
        lines = [verdict(compared.result(mode)).text("the policy") for mode in compared.modes]
    elif not after.is_file() and not run.action_errors_of("final").is_file():
        unknown = "nothing here says whether it is better"
        lines = [next_command("eval", run.config, f"policy.path={folder}", what=unknown)]
    checks = read_gate(run.gate).checks
    lines += [checks[-1].stop_text] if checks and checks[-1].stop_text else []
    lines += silent_groups(read_metrics(run.metrics)) if run.metrics.is_file() else []
    on_robot = next_command("serve", folder, what="for a robot")
    return [*lines, f"policy: {run.result}", f"report: {run.report}", on_robot]


POWER = 0.8
TEST = (
    "Newcombe's 95 % interval of the difference of two success rates, ours minus the published one, each of episodes "
    "of its own (Stat. Med. 17:873-890, method 10)"
)
Finding = Literal["reproduced", "not reproduced", "undecided"]


class Claim(Config):
    """A published success rate of so many episodes.

    Attributes:
        rate: a fraction. num_episodes: what it rests on, as published.
    """

    rate: float = Field(ge=0, le=1)
    num_episodes: PositiveInt

    @property
    def interval(self) -> Interval:
        """95 % Wilson interval of the published rate."""
        return wilson_interval(self._successes, self.num_episodes)

    @property
    def _successes(self) -> int:
        return round(self.rate * self.num_episodes)

    def difference(self, successes: int, n: int) -> Interval:
        """The interval of `TEST`."""
        return unpaired_difference_interval(_outcomes(self._successes, self.num_episodes), _outcomes(successes, n))

    def judge(self, successes: int, n: int) -> Finding:
        """The decision by `rule`."""
        low, high = self.difference(successes, n)
        return "reproduced" if low > -MARGIN else "not reproduced" if high < 0 else "undecided"

    @property
    def rule(self) -> str:
        """How it is decided, in words."""
        return (
            f"reproduced: the interval excludes a drop of {100 * MARGIN:g} points; else not reproduced: it lies below "
            "0; else undecided"
        )

    def bounds(self, n: int) -> tuple[int, int]:
        """(reproduced from so many successes of n, not reproduced up to so many); n + 1 and -1: it cannot be said."""
        every = range(n + 1)
        reproduced = bisect_left(every, True, key=lambda x: self.judge(x, n) == "reproduced")
        refuted = bisect_left(every, True, key=lambda x: self.judge(x, n) != "not reproduced") - 1
        return reproduced, refuted

    def power(self, n: int) -> float:
        """Probability that n episodes say "reproduced" where the true rate is the published one."""
        return float(scipy.stats.binom.sf(self.bounds(n)[0] - 1, n, self.rate))

    def detectable_drop(self, n: int) -> float | None:
        """The smallest drop below the published rate that n episodes call "not reproduced" with a power of 80 %.

        Returns:
            A fraction, to .001; None: not even a policy that always fails.
        """
        refuted = self.bounds(n)[1]
        rates = np.arange(0, self.rate + 1e-9, 0.001)
        found = rates[scipy.stats.binom.cdf(refuted, n, rates) >= POWER]
        return round(float(self.rate - found.max()), 3) if found.size else None


def _outcomes(successes: int, n: int) -> np.ndarray:
    return np.arange(n) < successes
