"""How simulated episodes ended: solved, failed, or void, which says nothing about the policy; what may be claimed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vla_rl.evaluation.statistics import wilson_interval

Outcome = Literal["solved", "failed", "void", "not run"]


class EpisodesIncomplete(RuntimeError):
    """Episodes that were asked for have no outcome; the message says why, and what to do."""


@dataclass(frozen=True)
class EpisodeResult:
    """One attempt at a simulated episode.

    Attributes:
        outcome: solved or failed by the policy; void, it could not act as itself; not run, the run ended before.
        reason: why it is void, or was not run.
        attempt: 1, and one more for each time that it was void and run again.
        without_action: share of the ticks at which the policy had no action in time.
        policy: the one that acted, as its server names it.
        alarm: the simulator's step at the failure detector's first alarm; None without one.
    """

    task: str
    split: str
    index: int
    outcome: Outcome
    steps: int = 0
    reason: str = ""
    attempt: int = 1
    without_action: float = 0.0
    policy: str = ""
    alarm: int | None = None

    @property
    def success(self) -> bool:
        return self.outcome == "solved"

    @property
    def counts(self) -> bool:
        """It says something about the policy."""
        return self.outcome in ("solved", "failed")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "success": self.success}


def final(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """The last attempt at each episode."""
    return list({(r.task, r.split, r.index): r for r in results}.values())


def report(results: Sequence[EpisodeResult], with_alarms: bool) -> Iterator[str]:
    """Lines for a person. A rate and its interval only where every episode has an outcome, of one policy.

    Which episodes are void may go with how they would have ended (a policy that is late when it sees much, say), so
    that the rate of the others is a selection, and no interval covers it.
    """
    for task in dict.fromkeys(r.task for r in results):
        attempts = [r for r in results if r.task == task]
        last = final(attempts)
        count = Counter(r.outcome for r in last)
        again = sum(r.outcome == "void" for r in attempts) - count["void"]
        told = f"{task}: {count['solved']} solved, {count['failed']} failed, {count['void']} void"
        told += f", {count['not run']} not run" if count["not run"] else ""
        yield told + (f" ({again} were void and run again)" if again else "")
        for (outcome, reason), number in Counter((r.outcome, r.reason) for r in last if not r.counts).items():
            yield f"{task}: {number} {outcome}: {reason}"
        late = [r.without_action for r in last if r.outcome != "not run"]
        if late:
            yield f"{task}: no action in time at {100 * sum(late) / len(late):.1f} % of the ticks"
        counted = [r for r in last if r.counts]
        policies = list(dict.fromkeys(r.policy for r in counted))
        if len(counted) < len(last):
            yield f"{task}: no rate and no interval: the other {len(counted)} of {len(last)} episodes are a selection"
            continue
        for policy in policies:
            who = f" by {policy}" if len(policies) > 1 else ""
            yield f"{task}{who}: {_rate([r for r in counted if r.policy == policy])}"
        if with_alarms:
            yield f"{task}: {_alarms(counted)}"


def _rate(counted: Sequence[EpisodeResult]) -> str:
    solved = sum(r.success for r in counted)
    low, high = wilson_interval(solved, len(counted))
    return f"{100 * solved / len(counted):.1f} % [{100 * low:.1f}, {100 * high:.1f}], n = {len(counted)}"


def _alarms(counted: Sequence[EpisodeResult]) -> str:
    told = []
    for success, what in ((True, "successes"), (False, "failures")):
        alarms = [r.alarm is not None for r in counted if r.success == success]
        told.append(f"{sum(alarms)} of {len(alarms)} {what}")
    return "alarms in " + ", ".join(told)


def check_complete(results: Sequence[EpisodeResult]) -> None:
    """
    Raises:
        EpisodesIncomplete: an episode is void, or was not run.
    """
    last = final(results)
    missing = [r for r in last if not r.counts]
    if missing:
        raise EpisodesIncomplete(
            f"{len(missing)} of {len(last)} episodes have no outcome ({missing[-1].reason}); mend that, then run all "
            "of them anew"
        )
