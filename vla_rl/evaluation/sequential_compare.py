"""Sequential comparison: two policies on the same states, batch by batch, until the difference is clear; its tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, cast

import numpy as np
import scipy  # Its `optimize` comes with the first use.
from pydantic import Field, NonNegativeInt, PositiveInt
from scipy.special import betaln, logsumexp

from vla_rl.common.distributed.process_group import ALONE, ProcessGroup
from vla_rl.config import Config, TaskNames
from vla_rl.evaluation.compare import format_p
from vla_rl.evaluation.results import EpisodeJournal, EpisodeRecord, EvaluationError
from vla_rl.evaluation.statistics import Interval
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.rollout.runner import derived_seed, run_episodes
from vla_rl.types import Episode, EpisodeSpec, Split

# Gauss-Legendre nodes and weights on [-1, 1]: exact up to 511 pairs, a valid mixture at any number.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(256)
_EDGE = 1 - 1e-9
Decision = Literal["better", "worse", "no_gain", "undecided"]


def discordant_e_value(gained: int, lost: int, prior: float = 1.0) -> float:
    """Evidence against "a discordant pair is as likely a gain as a loss"; anytime-valid.

    The Bayes factor of a Beta(prior, prior) mixture against 1/2 on the discordant pairs,
    E = 2^n B(prior + gained, prior + lost) / B(prior, prior), a martingale with mean 1 under the
    null, so P(E ever >= 1/alpha) <= alpha (Robbins 1970, Ann. Math. Stat. 41:1397-1409; Ramdas et
    al. 2023, Statist. Sci. 38:576-601). 1/E, capped at 1, is an anytime-valid p-value.
    """
    log_e = (gained + lost) * math.log(2) + betaln(prior + gained, prior + lost) - betaln(prior, prior)
    return float(np.exp(min(log_e, 700.0)))


def difference_e_value(gained: int, lost: int, tied: int, difference: float) -> float:
    """Evidence against "the success rates differ by `difference`" (b minus a); anytime-valid.

    What a gambler with fair odds would have won by betting on each pair's outcome d in {-1, 0, 1}:
    the product of 1 + lambda (d - difference), averaged over the admissible lambda with uniform
    weight (Waudby-Smith & Ramdas 2024, JRSS-B 86:1-27, on betting; Orabona & Jun 2024, IEEE Trans.
    Inf. Theory 70:436-455, on averaging). At difference = 0 this is `discordant_e_value`.
    """
    low, high = -1 / (1 - difference), 1 / (1 + difference)
    bets = low + (high - low) * (_NODES + 1) / 2
    log_wealth = np.log(_WEIGHTS / 2)
    for count, outcome in ((gained, 1), (lost, -1), (tied, 0)):
        log_wealth = log_wealth + count * np.log1p(bets * (outcome - difference))
    return float(np.exp(min(logsumexp(log_wealth), 700.0)))


def difference_confidence_sequence(gained: int, lost: int, tied: int, confidence: float = 0.95) -> Interval:
    """Anytime-valid interval of the difference of success rates, b minus a.

    All differences that `difference_e_value` has not refuted: covers the truth at every n at once with
    the given probability, and excludes 0 just when `discordant_e_value` reaches 1 / (1 - confidence).
    Wider than an interval for a fixed n.
    """
    n = gained + lost + tied
    if n == 0:
        return Interval(-1.0, 1.0)
    center = float(np.clip((gained - lost) / n, -_EDGE, _EDGE))

    def excess(difference: float) -> float:
        return math.log(difference_e_value(gained, lost, tied, difference)) + math.log(1 - confidence)

    def root(edge: float) -> float:
        if excess(edge) < 0 or edge == center:
            return math.copysign(1.0, edge)
        return cast(float, scipy.optimize.brentq(excess, center, edge, xtol=1e-7))

    return Interval(root(-_EDGE), root(_EDGE))


@dataclass
class PairedSequentialTest:
    """Feed pairs as they come and stop when `decision` is no longer "undecided".

    Attributes:
        alpha: probability, over all looks, of calling two equally good policies different.
        min_gain: stop with "no_gain" once b's advantage is below this with confidence 1 - alpha;
            None: never stop for lack of a gain.
        gained, lost, tied: pairs so far.
    """

    alpha: float = 0.05
    min_gain: float | None = None
    gained: int = 0
    lost: int = 0
    tied: int = 0

    def update(self, success_a: bool, success_b: bool) -> None:
        """Count one pair."""
        if success_a == success_b:
            self.tied += 1
        elif success_b:
            self.gained += 1
        else:
            self.lost += 1

    @property
    def num_pairs(self) -> int:
        return self.gained + self.lost + self.tied

    @property
    def e_value(self) -> float:
        return discordant_e_value(self.gained, self.lost)

    @property
    def p_value(self) -> float:
        """Anytime-valid: may be read at any moment. A little larger than a fixed-n p-value."""
        return min(1.0, 1 / self.e_value)

    @property
    def interval(self) -> Interval:
        """Anytime-valid interval of the difference, b minus a."""
        return difference_confidence_sequence(self.gained, self.lost, self.tied, 1 - self.alpha)

    @property
    def decision(self) -> Decision:
        if self.e_value >= 1 / self.alpha:
            return "better" if self.gained > self.lost else "worse"
        if self.min_gain is not None and self.gained - self.lost < self.min_gain * self.num_pairs:
            refuted = difference_e_value(self.gained, self.lost, self.tied, self.min_gain) >= 1 / self.alpha
            return "no_gain" if refuted else "undecided"
        return "undecided"


class SequentialConfig(Config):
    """When to stop comparing two policies."""

    split: Split = Field(default="validation", description="Initial states to use.")
    tasks: TaskNames = Field(default=(), description="Tasks; empty means all of the environment's.")
    start_index: NonNegativeInt = Field(default=0, description="First initial state of the split.")
    temperature: float = Field(default=1.0, ge=0, description="Of the action sampling; 0 is greedy.")
    max_pairs: PositiveInt = Field(
        default=400, description="Give up undecided after this many pairs, those lost with a worker included."
    )
    alpha: float = Field(
        default=0.05, gt=0, lt=1, description="Chance of calling equal policies different, over all looks."
    )
    min_gain: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Stop with 'no_gain' once b's advantage is surely below this; null: never.",
    )
    seed: int = Field(default=0, description="Of the action sampling.")


class SequentialComparison(Config):
    """How a sequential comparison ended.

    Attributes:
        decision: "better" or "worse": b against a, wrong with probability at most alpha; "no_gain": b's
            advantage is below min_gain; "undecided": max_pairs, or the split's states, were used up.
        gained, lost, tied: pairs. num_pairs: their sum. max_pairs: what was allowed.
        num_lost_pairs: left out because a worker broke.
        num_episodes: run in all, of both policies: also those of a last batch that were not needed, and tries again;
            without those that an earlier call had kept.
        rate_a, rate_b: on the pairs run. After an early stop the difference leans away from zero;
            `interval`, valid at any stopping time, does not.
        p_value: anytime-valid.
    """

    decision: Literal["better", "worse", "no_gain", "undecided"]
    gained: int
    lost: int
    tied: int
    num_pairs: int
    max_pairs: int
    num_lost_pairs: int
    num_episodes: int = 0
    rate_a: float
    rate_b: float
    interval: Interval
    p_value: float
    alpha: float

    def text(self) -> str:
        """One line for people."""
        verdict = {
            "better": "b is better than a",
            "worse": "b is worse than a",
            "no_gain": "b has no gain worth looking for",
            "undecided": "undecided",
        }[self.decision]
        return (
            f"{verdict} after {self.num_pairs} of at most {self.max_pairs} pairs: "
            f"{100 * self.rate_a:.1f} % -> {100 * self.rate_b:.1f} %, {self.gained} gained, {self.lost} lost, "
            f"difference between {100 * self.interval.low:+.1f} and {100 * self.interval.high:+.1f} points, "
            f"anytime-valid p {format_p(self.p_value)}"
        )


def compare_sequential(
    policy_a: Policy,
    policy_b: Policy,
    env: VecEnv,
    config: SequentialConfig,
    on_batch: Callable[[int, float], None] | None = None,
    world: ProcessGroup = ALONE,
    test: PairedSequentialTest | None = None,
    on_episodes: Callable[[Sequence[Episode], Sequence[Episode]], None] | None = None,
    journal: EpisodeJournal | None = None,
) -> SequentialComparison:
    """Run both policies on the same states, batch by batch, until the difference is clear.

    Each batch is one round of `env.num_envs` episodes of each policy, in each process; tasks take turns.

    Args:
        on_batch: called with (pairs so far, anytime-valid p-value), for progress.
        world: processes that call this together, each with both policies and an environment; all get the result.
        test: decides; by default at the config's alpha and min_gain.
        on_episodes: called with a batch's episodes of a and of b, this process's own.
        journal: of a process alone; keeps each batch as it ends. One that it holds is not run again, nor told of.
    """
    test = test or PairedSequentialTest(config.alpha, config.min_gain)
    num_lost = num_episodes = 0
    num_successes = np.zeros(2, np.int64)
    states = _states(env, config)
    for batch in range(config.max_pairs):
        left = config.max_pairs - test.num_pairs - num_lost
        specs = list(islice(states, min(env.num_envs * world.size, left)))
        if not specs or test.decision != "undecided":
            break
        outcomes: list[list[bool | None]] = []
        both: list[list[Episode]] = []
        for mode, policy in (("a", policy_a), ("b", policy_b)):
            if known := _kept(journal, mode, specs, batch * env.num_envs):
                outcomes.append(known)
                continue
            episodes, num_retried = _run(policy, env, world.shard(specs), config, batch, world)
            num_episodes += len(specs) + sum(world.gather(num_retried))
            both.append(episodes)
            outcomes.append(world.collect_dealt([None if e.lost else bool(e.success) for e in episodes]))
            _keep(journal, mode, episodes, batch * env.num_envs)
        for success_a, success_b in zip(*outcomes, strict=True):
            if success_a is None or success_b is None:
                num_lost += 1
            elif test.decision == "undecided":
                test.update(success_a, success_b)
                num_successes += (success_a, success_b)
        if on_episodes is not None and len(both) == 2:
            on_episodes(*both)
        if on_batch is not None:
            on_batch(test.num_pairs, test.p_value)
    if test.num_pairs == 0:
        raise EvaluationError("no pair of episodes finished: every one was lost with its worker")
    rate_a, rate_b = num_successes / test.num_pairs
    return SequentialComparison(
        decision=test.decision,
        gained=test.gained,
        lost=test.lost,
        tied=test.tied,
        num_pairs=test.num_pairs,
        max_pairs=config.max_pairs,
        num_lost_pairs=num_lost,
        num_episodes=num_episodes,
        rate_a=float(rate_a),
        rate_b=float(rate_b),
        interval=test.interval,
        p_value=test.p_value,
        alpha=config.alpha,
    )


def _keep(journal: EpisodeJournal | None, mode: str, episodes: Sequence[Episode], first: int) -> None:
    for number, episode in enumerate(episodes, first):
        if journal is not None:
            journal.add(EpisodeRecord.of(mode, episode.spec, number, episode))


def _kept(
    journal: EpisodeJournal | None, mode: str, specs: Sequence[EpisodeSpec], first: int
) -> list[bool | None] | None:
    """Outcomes of a batch, from pair number `first` on, that an earlier call ran whole; None where there is none."""
    if journal is None:
        return None
    records = [journal.of(mode, spec, first + row) for row, spec in enumerate(specs)]
    return None if None in records else [None if r.lost else r.success for r in records if r is not None]


def _run(
    policy: Policy,
    env: VecEnv,
    specs: Sequence[EpisodeSpec],
    config: SequentialConfig,
    batch: int,
    world: ProcessGroup,
) -> tuple[list[Episode], int]:
    """Return a policy's episodes of a batch, this process's own, and how many were run again."""
    with world.unsharded(policy):
        return run_episodes(
            policy,
            env,
            specs,
            temperature=config.temperature,
            seed=derived_seed(config.seed, batch, *world.stream),
        )


def _states(env: VecEnv, config: SequentialConfig) -> Iterator[EpisodeSpec]:
    """State after state, tasks in turn. Official states, being few, come again when sampled."""
    tasks = config.tasks or tuple(env.spec.tasks)
    for task in tasks:
        if task not in env.spec.tasks:
            raise EvaluationError(f"tasks: unknown task {task!r}; {env.spec.kind} has: {', '.join(env.spec.tasks)}")
    official = env.spec.num_eval_states if config.split == "eval" else {}
    rounds = 0
    while True:
        some = False
        for task in tasks:
            index = config.start_index + rounds
            if task in official and index >= official[task]:
                if config.temperature == 0:
                    continue
                index %= official[task]
            some = True
            yield EpisodeSpec(task, config.split, index)
        if not some:
            return
        rounds += 1
