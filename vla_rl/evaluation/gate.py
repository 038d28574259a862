"""Gate on gains made in imagination: paired episodes in the real environment, at set intervals.

Each check compares the policy with the reference policy, the last one that was found better, on fresh initial states,
pair by pair. The evidence is that of all pairs since then (`evaluation.pooled`). Its verdict is "better", which makes
it the reference; "worse", which sends the run back to the reference, and RL ends; or "undecided": RL continues, and
what the last check leaves undecided is kept, its gain not shown. RL also ends where imagination surely flatters the
policy by more than trust allows (`evaluation.executed`).

`power_text` says what the checks can tell; docs/closed_loop.md has a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from vla_rl.common.distributed.process_group import ALONE, ProcessGroup
from vla_rl.config import Config, ConfigError, read_written
from vla_rl.evaluation.evaluate import build_env
from vla_rl.evaluation.executed import Executed
from vla_rl.evaluation.pooled import PooledEvidence, PooledTest, power_text
from vla_rl.evaluation.sequential_compare import SequentialComparison, SequentialConfig, compare_sequential
from vla_rl.interfaces import EnvConfig, Policy, VecEnv
from vla_rl.policies.load import load_policy
from vla_rl.rollout.source import with_steps_after_success
from vla_rl.types import EnvSpec, Episode

Verdict = Literal["better", "worse", "undecided"]
# Control steps for which real episodes that a world model learns from go on after success, a chunk: it judges an
# episode by what is seen then, too.
STEPS_AFTER_SUCCESS = 8
OF_OTHERS = "Use the version of vla-rl in versions.json beside it; or move the file away, and do without what it says"
REFERENCE, CHECKED = "reference", "checked"  # A check's datasets.


class GateConfig(Config):
    """When gains are checked in the real environment, and how surely."""

    every: NonNegativeInt = Field(default=0, description="Iterations between checks; 0: no gate.")
    pairs: PositiveInt = Field(
        default=150,
        description="Real episodes of each policy that one check may take. Beside a simulator, it also executes the "
        "actions of as many imagined episodes, and RL stops where imagination surely flatters the policy by more than "
        "env.trust.require.acting_gap allows.",
    )
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="Chance of calling better what is no better, over all checks since the last that found a policy "
        "better; and as much of calling worse what is no worse.",
    )
    split: Literal["train", "validation"] = Field(
        default="validation",
        description="Initial states of the checks; those of eval are for the final claim, not for choosing a policy.",
    )
    start_index: NonNegativeInt = Field(
        default=1000, description="First initial state, beyond those of `train.validation_episodes`."
    )
    keep_episodes: Literal["none", "decisions", "frames"] = Field(
        default="none",
        description="Whether the checks' real episodes are written into the run's gate_episodes/, a folder a check "
        "with the datasets `reference` and `checked`. decisions: with what was seen before each action chunk; frames: "
        "after each control step. A loop chooses for itself: trust after RL and the next round's fit read them.",
    )

    def build_env(self, real: EnvConfig) -> VecEnv:
        """Start the checks' environment, which records what is to be kept."""
        steps = 0 if self.keep_episodes == "none" else STEPS_AFTER_SUCCESS
        return build_env(with_steps_after_success(real, steps), record_frames=self.keep_episodes == "frames")

    def num_checks(self, iterations: int, done: int = 0) -> int:
        """Checks of a run of so many iterations that come after the first `done` of them; the last counts."""
        if not self.every:
            return 0
        return -(-iterations // self.every) - done // self.every if done < iterations else 0

    def power(self, iterations: int) -> str:
        """Say what the checks of a run of so many iterations can tell (see `evaluation.pooled.power_text`)."""
        return power_text(self.pairs, self.num_checks(iterations), self.alpha)


class Pooled(Config):
    """All pairs since the reference policy, whichever policies were checked.

    Attributes:
        num_checks: with this one. gained, lost, num_pairs: theirs.
        better, worse: evidence for each: what 1 became by fair bets; never at `needed` by chance, but with alpha.
    """

    num_checks: int
    gained: int
    lost: int
    num_pairs: int
    better: float
    worse: float
    needed: float


class GateCheck(Config):
    """One check.

    Attributes:
        iteration: finished when it was made. reference: the iteration of the policy compared with (0: the base policy).
        comparison: a is the reference policy, b the one checked; real episodes, sampled, this check's alone.
        pooled: all pairs since the reference policy, which decide.
        imagined: of the checked policy, in this iteration's rollouts from initial states: its success, or the mean
            probability paid for it; None where all of them began at keyframes.
        executed: what those episodes' actions lead to in the simulator; or why that is not known.
        verdict: "better" or "worse" than the reference policy; "undecided": the pairs do not tell.
        rolled_back: the run went back to the reference policy.
        is_last: no later check can decide.
    """

    iteration: int
    reference: int
    comparison: SequentialComparison
    pooled: Pooled
    imagined: float | None
    executed: Executed | str = ""
    verdict: Verdict
    rolled_back: bool
    is_last: bool = False

    def text(self) -> str:
        """Return one line for people."""
        c = self.comparison
        consequence = ", RL continues"
        if self.verdict == "better":
            consequence = ""
        elif self.rolled_back:
            consequence = ", rolled back"
        elif self.is_last:
            consequence = ", kept though its gain is not shown"
        return (
            f"gate at iteration {self.iteration}: {self.verdict}{consequence}; real success {100 * c.rate_a:.0f} % -> "
            f"{100 * c.rate_b:.0f} % in {c.num_pairs} pairs against the policy of iteration {self.reference}, "
            f"difference between {100 * c.interval.low:+.0f} and {100 * c.interval.high:+.0f} points; "
            f"{self._imagined_text()}{self._pooled_text()}"
            f"{self.stop_text and '; '}{self.stop_text}"
        )

    @property
    def stop_text(self) -> str:
        """Why RL ends here, whatever the verdict: what it learns from is surely not so. Empty where that is not so."""
        return "" if isinstance(self.executed, str) else self.executed.stop_text

    @property
    def num_episodes(self) -> int:
        """Real ones that it took, in all."""
        executed = 0 if isinstance(self.executed, str) else self.executed.num_episodes
        return self.comparison.num_episodes + executed

    def metrics(self) -> dict[str, float]:
        """What is logged, by name."""
        found = {"gate/real": self.comparison.rate_b, "gate/real_confirmed": self.comparison.rate_a}
        if isinstance(self.executed, Executed):
            done = self.executed
            found |= {"gate/imagined": done.imagined, "gate/executed": done.caused, "gate/gap": done.gap.value}
            found |= {} if done.order is None else {"gate/order": done.order.value}
        return found

    def _imagined_text(self) -> str:
        if self.imagined is None:
            return "imagined from initial states: not known, all began at keyframes"
        known = self.executed if isinstance(self.executed, str) else self.executed.text()
        asked = "actions not executed: " if isinstance(self.executed, str) and known else ""
        return f"imagined {100 * self.imagined:.0f} %{'; ' if known else ''}{asked}{known}"

    def _pooled_text(self) -> str:
        pooled, earlier = self.pooled, ""
        if pooled.num_checks > 1:
            points = 100 * (pooled.gained - pooled.lost) / max(pooled.num_pairs, 1)
            earlier = f" of {pooled.num_checks} checks together, {points:+.0f} points in {pooled.num_pairs} pairs"
        return (
            f"; evidence{earlier}: {pooled.better:.2g} for better, {pooled.worse:.2g} for worse, "
            f"{pooled.needed:.3g} decides"
        )


class GateFile(BaseModel):
    """What is read of a run's gate.json; the rest is the run's own. `power`: what the checks can tell."""

    power: str = ""
    checks: tuple[GateCheck, ...] = ()


def read_gate(file: Path) -> GateFile:
    """Read a run's gate.json; empty where there is none.

    Raises:
        ConfigError: it is damaged, or of a version that wrote other fields.
    """
    return read_written(GateFile, file, OF_OTHERS) if file.is_file() else GateFile()


def verdict_of(comparison: SequentialComparison) -> Verdict:
    """Return what a comparison of the policy checked (b) with the reference policy (a) says of it."""
    return "undecided" if comparison.decision == "no_gain" else comparison.decision


class KeptEpisodes:
    """Real episodes of a check, of both policies, written as they come: none stays in memory.

    Args:
        folder: for the check's datasets. spec: of the real environment.
        reference, iteration: of the policies.
    """

    def __init__(self, folder: Path, spec: EnvSpec, reference: int, iteration: int) -> None:
        from vla_rl.rollout.episode_recording import RolloutWriter

        notes = {"gate": {"reference": reference, "iteration": iteration}}
        self._writers = [
            RolloutWriter(folder / name, spec, f"iteration {number}", notes)
            for name, number in ((REFERENCE, reference), (CHECKED, iteration))
        ]

    def add(self, reference: Sequence[Episode], checked: Sequence[Episode]) -> None:
        """Write a batch of each."""
        for writer, episodes in zip(self._writers, (reference, checked), strict=True):
            writer.add(episodes)

    def finish(self) -> None:
        """Make the datasets."""
        for writer in self._writers:
            writer.finish()


class Gate:
    """Gate that compares a policy with its reference, the last one found better, kept in a folder by its iteration.

    Args:
        folder: for the policies that became the reference policy.
        policy: what the run starts from, the reference policy of iteration 0.
        world: processes that check together; the first one writes.
        episodes: folder for the datasets of `config.keep_episodes`, which needs it; in a folder a check, by iteration.

    Raises:
        ConfigError: several processes are to keep episodes.
    """

    def __init__(
        self,
        config: GateConfig,
        folder: Path,
        policy: Any,
        world: ProcessGroup = ALONE,
        episodes: Path | None = None,
    ) -> None:
        if config.keep_episodes != "none" and world.size > 1:
            raise ConfigError(
                f"gate.keep_episodes: got {config.keep_episodes!r} with {world.size} processes, each of which has a "
                "part of the episodes; set it to none, or run one process"
            )
        self.config, self.folder, self.world, self.episodes = config, Path(folder), world, episodes
        self.reference = 0
        self.checks: list[GateCheck] = []
        self.evidence = PooledEvidence(config.alpha)
        if not world.broadcast_from_main(self.confirmed.is_dir):
            self._confirm(policy)

    @property
    def confirmed(self) -> Path:
        """Folder of the reference policy."""
        return self.folder / f"iteration_{self.reference:05d}"

    def _confirm(self, policy: Any) -> None:
        with self.world.saving(policy):
            if self.world.is_main:
                policy.save(self.confirmed)
        self.world.wait()

    @property
    def is_closed(self) -> bool:
        """The last check sent the run back, or is flattered: RL in this world model must not go on."""
        return bool(self.checks) and (self.checks[-1].rolled_back or bool(self.checks[-1].stop_text))

    def check(
        self,
        policy: Any,
        env: VecEnv,
        *,
        iteration: int,
        imagined: float | None,
        temperature: float,
        seed: int,
        checks_left: int,
        executed: Executed | str = "",
        on_batch: Callable[[int, float], None] | None = None,
    ) -> GateCheck:
        """Compare the policy with the reference in the real environment, and make it the reference if it is better.

        Args:
            checks_left: that the run can still make, this one included; bets are made for as many.
            imagined, executed: see `GateCheck`.
        """
        kept = self._kept_episodes(env.spec, iteration)
        confirmed: Policy = self.world.load(lambda: load_policy(self.confirmed, policy.device))
        used = sum(check.comparison.num_pairs + check.comparison.num_lost_pairs for check in self.checks)
        self.evidence.begin(self.config.pairs, checks_left)
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
                seed=seed,
            ),
            on_batch,
            self.world,
            PooledTest(self.config.alpha, evidence=self.evidence),
            on_episodes=kept.add if kept else None,
        )
        if kept:
            kept.finish()
        verdict = verdict_of(comparison)
        check = GateCheck(
            iteration=iteration,
            reference=self.reference,
            comparison=comparison,
            pooled=self._pooled(comparison),
            imagined=imagined,
            executed=executed,
            verdict=verdict,
            rolled_back=verdict == "worse",
            is_last=checks_left <= 1 or (isinstance(executed, Executed) and executed.stop_text != ""),
        )
        self.checks.append(check)
        if verdict == "better":
            self.reference = iteration
            self.evidence = PooledEvidence(self.config.alpha)
            self._confirm(policy)
        return check

    def _kept_episodes(self, spec: EnvSpec, iteration: int) -> KeptEpisodes | None:
        if self.config.keep_episodes == "none":
            return None
        assert self.episodes is not None, "given with config.keep_episodes"
        return KeptEpisodes(self.episodes / f"iteration_{iteration:05d}", spec, self.reference, iteration)

    def _pooled(self, newest: SequentialComparison) -> Pooled:
        earlier = [check.comparison for check in self.checks if check.reference == self.reference]
        comparisons = [*earlier, newest]
        better, worse = self.evidence.evidence.tolist()
        return Pooled(
            num_checks=len(comparisons),
            gained=sum(each.gained for each in comparisons),
            lost=sum(each.lost for each in comparisons),
            num_pairs=sum(each.num_pairs for each in comparisons),
            better=better,
            worse=worse,
            needed=1 / self.config.alpha,
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "reference": self.reference,
            "checks": [check.model_dump(mode="json") for check in self.checks],
            "evidence": self.evidence.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.reference = int(state["reference"])
        self.checks = [GateCheck.model_validate(check) for check in state["checks"]]
        self.evidence.load_state(state["evidence"])
