"""Rounds of the closed loop: their folders, real episodes, and the table of them.

Real episodes are counted from what a round left behind, not added up while it runs: so each counts once, however often
the loop was stopped. Those that a kill lost, and that were run again, count once as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rl.common.run_folder import RunFolder, read_metrics
from vla_rl.config import Config, ConfigError
from vla_rl.evaluation.gate import CHECKED, REFERENCE, GateCheck, Verdict, read_gate
from vla_rl.evaluation.results import Evaluation
from vla_rl.recipe.runs import LoopRecipe
from vla_rl.training.config import TrainConfig
from vla_rl.types import EnvSpec
from world_model.trust.report import TRUST_FILE, TrustReport

FIRST_STATE = 100_000  # First initial state of the episodes that the world model is fitted on.
OLD_WEIGHT = 0.5  # A round's episodes count so much in the next refit, its square in the one after.
HELD_OUT_START = 500_000  # Initial states of the held-out episodes; `before` checks that RL and the fit draw others.
TRUST_FIGURES = ("agreement", "auc", "calibration_error", "informedness", "false_success", "skill", "trust_horizon")


@dataclass(frozen=True)
class Round:
    """What one round made, all inside `folder`."""

    folder: Path

    @property
    def rollouts(self) -> Path:
        """Real episodes which the world model is fitted on, of the policy that has been optimized most."""
        return self.folder / "rollouts"

    @property
    def held_out(self) -> Path:
        """Real episodes of the policy that RL starts from, which only trust sees while the round lasts."""
        return self.folder / "held_out"

    @property
    def trust_before(self) -> Path:
        """Trust of the world model before this round's refit, on this round's held-out episodes."""
        return self.folder / "trust_before"

    @property
    def explorer(self) -> Path:
        """Whose real episodes the next world model is fitted on: RL's last policy, even if the gate sent it back."""
        run = RunFolder(self.run)
        return run.rejected if run.rejected.is_dir() else run.policy

    @property
    def is_where_it_began(self) -> bool:
        """The gate sent RL all the way back: the round ended with the policy that it began with."""
        checks = gate_checks(self)
        return bool(checks) and checks[-1].rolled_back and checks[-1].reference == 0

    @property
    def world_model(self) -> Path:
        return RunFolder(self.folder / "fit").world_model

    @property
    def keyframes(self) -> Path:
        """Mined from the rollouts."""
        return self.folder / "keyframes.json"

    @property
    def run(self) -> Path:
        """The RL run's folder."""
        return self.folder / "train"

    @property
    def gate_episodes(self) -> list[Path]:
        """Real episodes of the gate's checks, in order: of the checked and the reference policy, a dataset each."""
        checks = sorted(RunFolder(self.run).gate_episodes.glob("iteration_*"))
        datasets = [check / name for check in checks for name in (CHECKED, REFERENCE)]
        return [dataset for dataset in datasets if dataset.is_dir()]

    @property
    def newest_episodes(self) -> Path | None:
        """Those of RL's last policy, which the last check was of; None where they were not kept."""
        checked = [dataset for dataset in self.gate_episodes if dataset.name == CHECKED]
        return checked[-1] if checked else None

    @property
    def calibrated(self) -> Path:
        """The world model that RL ran in, with thresholds and probabilities chosen on `calibrating`."""
        return RunFolder(self.folder / "calibrated").world_model

    @property
    def calibrating(self) -> list[Path]:
        """What chooses those: no fit has learned from it, nor is it what trust is then measured on.

        With one check, all of it is of the policy that RL began with.
        """
        return [self.held_out, *(dataset for dataset in self.gate_episodes if dataset != self.newest_episodes)]

    @property
    def refusal(self) -> Path:
        """Why this round's RL did not start; there only then."""
        return self.folder / "refused.txt"

    @property
    def finished(self) -> bool:
        """Its RL has ended, its policy is saved, and that has been evaluated; perhaps not filmed."""
        return RunFolder(self.run).evaluation("final").is_file()

    def control(self, name: str) -> Path:
        """The RL run's folder of a negative control."""
        return self.folder / f"train_{name}"


def learned_from(rounds: Sequence[Round], number: int) -> tuple[list[Path], list[float]]:
    """Datasets that the fit of round `number`, from 0, learns from, with their weights; the newest rollouts are last.

    What judged earlier rounds teaches too, except what chooses this fit's threshold (`calibrates`). What judges this
    round does not. A round's weight, OLD_WEIGHT to the power of its age, is split over its datasets by episodes.
    """
    choosing, datasets, weights = calibrates(rounds, number), [], []
    for age, done in zip(range(number, -1, -1), rounds, strict=False):
        own = [done.rollouts]
        if age:
            own = [*([] if done.held_out in choosing else [done.held_out]), *done.gate_episodes, done.rollouts]
        counts = [_collected(dataset) for dataset in own] if len(own) > 1 else [1]
        datasets += own
        weights += [OLD_WEIGHT**age * count / sum(counts) for count in counts]
    return datasets, weights


def calibrates(rounds: Sequence[Round], number: int) -> list[Path]:
    """Episodes of the policy that RL of round `number`, from 0, starts from, for the threshold; none: the newest
    rollouts are the ones, or there are none that no fit has learned from.

    After a rollback the rollouts are the rejected policy's. The held-out episodes of the round before are the kept
    one's, where it is the policy which that round began with.
    """
    before = rounds[number - 1] if number else None
    return [before.held_out] if before is not None and before.is_where_it_began else []


def groups_of_a_round(train: TrainConfig) -> int:
    """Groups that a round's RL draws at most, those drawn again included."""
    return train.iterations * (train.groups + train.resample_budget)


class RealEpisodes(Config):
    """Real episodes of a round.

    Attributes:
        rollouts: to fit the world model on. held_out: for trust. gate: in all checks, of both policies, and of
            imagined episodes' actions. validation: while RL runs.
    """

    rollouts: int = 0
    held_out: int = 0
    gate: int = 0
    validation: int = 0

    @property
    def total(self) -> int:
        return self.rollouts + self.held_out + self.gate + self.validation

    def text(self) -> str:
        """For people: "800 + 500 + 400 gate"."""
        parts = [f"{self.rollouts} to fit on", f"{self.held_out} held out"]
        parts += [f"{self.gate} for the gate"] if self.gate else []
        parts += [f"{self.validation} for validation"] if self.validation else []
        return ", ".join(parts)


def planned_episodes(recipe: LoopRecipe) -> RealEpisodes:
    """The most that a round takes; episodes whose worker breaks are run again and come on top."""
    config, train, gate = recipe.loop, recipe.train, recipe.gate
    spec: EnvSpec = recipe.acting_env.env_spec()
    num_tasks = len(spec.tasks)
    checks = gate.num_checks(train.iterations)
    validations = math.ceil(train.iterations / train.validate_every) if train.validate_every else 0
    return RealEpisodes(
        rollouts=config.episodes * num_tasks,
        held_out=config.held_out * num_tasks,
        gate=checks * gate.pairs * (2 if recipe.env.why_not_executed(recipe.acting_env) else 3),
        validation=validations * recipe.validation.num_episodes(spec),
    )


def check_budget(recipe: LoopRecipe) -> None:
    """All rounds fit into `loop.real_episodes`.

    Raises:
        ConfigError: they do not; the message says what a round takes, and what would fit.
    """
    budget, rounds = recipe.loop.real_episodes, recipe.loop.rounds
    if budget is None:
        return
    one = planned_episodes(recipe)
    if rounds * one.total <= budget:
        return
    fitting = budget // one.total
    remedy = f"set loop.rounds={fitting}, or " if fitting else ""
    raise ConfigError(
        f"loop.real_episodes: got {budget}, too few for {rounds} round{'s' * (rounds > 1)}: each takes up to "
        f"{one.total} ({one.text()}), all of them {rounds * one.total}. Raise it, {remedy}lower loop.episodes, "
        "loop.held_out, gate.pairs or train.validation_episodes."
    )


def counted_episodes(recipe: LoopRecipe, done: Round) -> RealEpisodes:
    """What a round really took, by what it left behind."""
    per_validation = recipe.validation.num_episodes(recipe.acting_env.env_spec())
    metrics = read_metrics(file) if (file := RunFolder(done.run).metrics).is_file() else []
    return RealEpisodes(
        rollouts=_collected(done.rollouts),
        held_out=_collected(done.held_out),
        gate=sum(check.num_episodes for check in gate_checks(done)),
        validation=per_validation * len({row["step"] for row in metrics if "validation/sampled" in row}),
    )


def gate_checks(done: Round) -> list[GateCheck]:
    """The checks of a round's gate, in order."""
    return list(read_gate(RunFolder(done.run).gate).checks)


def _collected(dataset: Path) -> int:
    file = dataset / "collect.json"
    return sum(json.loads(file.read_text(encoding="utf-8"))["attempts"].values()) if file.is_file() else 0


# --- the table of rounds ------------------------------------------------------------------------


class RoundRow(Config):
    """A round in the report.

    Attributes:
        episodes: real ones. total: of all rounds so far.
        num_keyframes: by kind. explorer: success of the rollouts' policy, by task.
        before, after: trust figures ([value, low, high]) at the policy's states, before and after the refit; empty
            where not measured. newest: after RL, at those of RL's last policy, likewise.
        imagined: mean pay of the last iteration's episodes from initial states: success, or its probability; None
            where all began at keyframes. imagined_probability: where it is success, its probability for comparison.
        gate: what each check found.
        verdict: of the gate's last check, "better", "worse" or "undecided"; None without one.
        real: mode -> [success, low, high] on the evaluation's states, after the round.
        refused: why the round's RL did not start; empty where it did.
    """

    number: int
    episodes: RealEpisodes
    total: int
    num_keyframes: dict[str, int]
    explorer: dict[str, float]
    before: dict[str, tuple[float | None, float | None, float | None]]
    after: dict[str, tuple[float | None, float | None, float | None]]
    newest: dict[str, tuple[float | None, float | None, float | None]]
    imagined: float | None
    imagined_probability: float | None = None
    gate: tuple[str, ...]
    verdict: Verdict | None = None
    real: dict[str, tuple[float, float, float]]
    refused: str = ""


class RoundsTable(Config):
    """All rounds, and the real episodes of the control that had as many.

    Attributes:
        online: real episodes that online_grpo learned from; None where it did not run.
        budget: `loop.real_episodes`.
    """

    rows: tuple[RoundRow, ...]
    budget: int | None
    online: int | None = None

    @property
    def total(self) -> int:
        """Real episodes of all rounds."""
        return self.rows[-1].total if self.rows else 0


def rounds_table(recipe: LoopRecipe, rounds: Sequence[Round], online: int | None = None) -> RoundsTable:
    """Read what rounds left behind; a last one that was refused leaves the policy of the one before."""
    rows, total, ended = [], 0, rounds[0]
    for number, done in enumerate(rounds, start=1):
        episodes = counted_episodes(recipe, done)
        total += episodes.total
        ended = done if done.finished else ended
        final = Evaluation.load(RunFolder(ended.run).evaluation("final"))
        steps = read_metrics(RunFolder(done.run).metrics) if done.finished else []
        metrics = [row for row in steps if "train/success" in row]
        last = metrics[-1] if metrics else {}
        trusted = done.world_model if done.world_model.is_dir() else None
        checks = gate_checks(done)
        rows.append(
            RoundRow(
                number=number,
                episodes=episodes,
                total=total,
                num_keyframes=_keyframe_counts(done.keyframes),
                explorer=_json(done.rollouts / "collect.json").get("success_rate", {}),
                before=_trust(done.trust_before),
                after=_trust(trusted) if trusted else {},
                newest=_trust(done.calibrated),
                imagined=_imagined(last),
                imagined_probability=last.get("train/imagined_probability"),
                gate=tuple(check.text() for check in checks),
                verdict=checks[-1].verdict if checks else None,
                real={mode: _rate(final, mode) for mode in final.modes},
                refused="" if done.finished else done.refusal.read_text(encoding="utf-8"),
            )
        )
    return RoundsTable(rows=tuple(rows), budget=recipe.loop.real_episodes, online=online)


def _rate(evaluation: Evaluation, mode: str) -> tuple[float, float, float]:
    found = evaluation.rate(mode)
    return found.rate, found.interval.low, found.interval.high


def _imagined(row: dict[str, Any]) -> float | None:
    """Of an iteration's episodes from initial states."""
    return row.get("train/imagined")


def _trust(folder: Path) -> dict[str, tuple[float | None, float | None, float | None]]:
    file = folder / TRUST_FILE
    figures = TrustReport.load(file).figures if file.is_file() else {}
    return {
        name: (_known(figures[name].value), _known(figures[name].low), _known(figures[name].high))
        for name in TRUST_FIGURES
        if name in figures
    }


def _known(number: float) -> float | None:
    return None if math.isnan(number) else number


def _keyframe_counts(file: Path) -> dict[str, int]:
    kinds = [kind for keyframe in _json(file).get("keyframes", []) for kind in keyframe["kinds"]]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
