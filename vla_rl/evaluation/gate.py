"""Is a gain made in imagination real? Paired episodes in the real environment, at set intervals, decide.

Each check compares the policy with the last confirmed one on fresh initial states, pair by pair, by a
sequential test (`sequential_compare.compare_sequential`). Its verdict is "confirmed": a real gain, which moves
the mark; "refuted": worse, or surely no gain worth having, which sends the run back to the mark; or "undecided": the
pairs did not tell. RL then continues to the next check; what the last check leaves undecided is sent back as well.

Undecided says little: the gate's power is low. Where the policies differ in 45 of 100 pairs, one check of 200 pairs
confirms a true gain of 5 points in 6 % of cases, of 9 in 21, of 10 in 27, of 15 in 65
(`scripts/gate_power.py`; the table is in docs/closed_loop.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from vla_rl.config import Config
from vla_rl.distributed.process_group import ALONE, ProcessGroup
from vla_rl.evaluation.sequential_compare import SequentialComparison, SequentialConfig, compare_sequential
from vla_rl.interfaces import Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.types import Split

Verdict = Literal["confirmed", "refuted", "undecided"]


class GateConfig(Config):
    """When gains are checked in the real environment, and how surely."""

    every: NonNegativeInt = Field(default=0, description="Iterations between checks; 0: no gate.")
    pairs: PositiveInt = Field(default=150, description="Real episodes of each policy that one check may take.")
    alpha: float = Field(default=0.05, gt=0, lt=1, description="Chance of confirming no gain, in one check.")
    min_gain: float = Field(
        default=0.02, gt=0, lt=1, description="A check ends as refuted once the gain is surely below this."
    )
    split: Split = Field(default="validation", description="Initial states of the checks.")
    start_index: NonNegativeInt = Field(
        default=1000, description="First initial state, beyond those of `train.validation_episodes`."
    )


class GateCheck(Config):
    """One check.

    Attributes:
        iteration: finished when it was made. mark: the iteration of the confirmed policy (0: the base policy).
        comparison: a is the confirmed policy, b the one checked; real episodes, sampled.
        imagined: success of the checked policy in imagination, this iteration's rollouts.
        verdict: "confirmed": a real gain; "refuted": worse, or the gain is surely below `GateConfig.min_gain`;
            "undecided": the pairs do not tell which.
        rolled_back: the run went back to the confirmed policy: refuted, or undecided with no later check to decide.
    """

    iteration: int
    mark: int
    comparison: SequentialComparison
    imagined: float
    verdict: Verdict
    rolled_back: bool

    @model_validator(mode="before")
    @classmethod
    def _read_outcome(cls, values: Any) -> Any:
        """Read files that say "confirmed", "open" or "rolled back" in place of a verdict."""
        if not isinstance(values, dict) or "outcome" not in values:
            return values
        read = dict(values)
        comparison = SequentialComparison.model_validate(read["comparison"])
        read.update(verdict=verdict_of(comparison), rolled_back=read.pop("outcome") == "rolled back")
        return read

    def text(self) -> str:
        """Return one line for people."""
        c = self.comparison
        consequence = {
            ("refuted", True): ", rolled back",
            ("undecided", True): " at the last check, rolled back",
            ("undecided", False): ", RL continues",
        }.get((self.verdict, self.rolled_back), "")
        return (
            f"gate at iteration {self.iteration}: {self.verdict}{consequence}; real success {100 * c.rate_a:.0f} % -> "
            f"{100 * c.rate_b:.0f} % in {c.num_pairs} pairs against the policy of iteration {self.mark}, difference "
            f"between {100 * c.interval.low:+.0f} and {100 * c.interval.high:+.0f} points; "
            f"imagined {100 * self.imagined:.0f} %"
        )


def verdict_of(comparison: SequentialComparison) -> Verdict:
    """Return what a comparison of the policy checked (b) with the confirmed one (a) says of the gain."""
    if comparison.decision == "better":
        return "confirmed"
    return "undecided" if comparison.decision == "undecided" else "refuted"


class Gate:
    """Checks a policy against the last confirmed one, which it keeps in a folder named by its iteration.

    Args:
        folder: for the confirmed policies.
        policy: what the run starts from, confirmed as iteration 0.
        world: processes that check together; the first one writes.
    """

    def __init__(self, config: GateConfig, folder: Path, policy: Any, world: ProcessGroup = ALONE) -> None:
        self.config, self.folder, self.world = config, Path(folder), world
        self.mark = 0
        self.checks: list[GateCheck] = []
        if not world.broadcast_from_main(self.confirmed.is_dir):
            self._confirm(policy)

    @property
    def confirmed(self) -> Path:
        """Folder of the last confirmed policy."""
        return self.folder / f"iteration_{self.mark:05d}"

    def _confirm(self, policy: Any) -> None:
        with self.world.saving(policy):
            if self.world.is_main:
                policy.save(self.confirmed)
        self.world.wait()

    @property
    def is_closed(self) -> bool:
        """The last check sent the run back: RL in this world model must not go on."""
        return bool(self.checks) and self.checks[-1].rolled_back

    def check(
        self,
        policy: Any,
        env: VecEnv,
        *,
        iteration: int,
        imagined: float,
        temperature: float,
        seed: int,
        is_last: bool,
        on_batch: Callable[[int, float], None] | None = None,
    ) -> GateCheck:
        """Compare the policy with the confirmed one in the real environment, and move the mark if it is better.

        Args:
            is_last: no later check can decide: what stays undecided is rolled back.
        """
        confirmed: Policy = self.world.load(lambda: load_policy(self.confirmed, policy.device))
        used = sum(check.comparison.num_pairs for check in self.checks)
        comparison = compare_sequential(
            confirmed,
            policy,
            env,
            SequentialConfig(
                split=self.config.split,
                start_index=self.config.start_index + used,
                temperature=temperature,
                max_pairs=self.config.pairs,
                alpha=self.config.alpha,
                min_gain=self.config.min_gain,
                seed=seed,
            ),
            on_batch,
            self.world,
        )
        verdict = verdict_of(comparison)
        check = GateCheck(
            iteration=iteration,
            mark=self.mark,
            comparison=comparison,
            imagined=imagined,
            verdict=verdict,
            rolled_back=verdict == "refuted" or (verdict == "undecided" and is_last),
        )
        self.checks.append(check)
        if verdict == "confirmed":
            self.mark = iteration
            self._confirm(policy)
        return check

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"mark": self.mark, "checks": [check.model_dump(mode="json") for check in self.checks]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.mark = int(state["mark"])
        self.checks = [GateCheck.model_validate(check) for check in state["checks"]]
