"""Trust report (trust.json): every figure with n and interval, and whether it admits RL in imagination."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from vla_rl.common.saved import Saved
from vla_rl.config import Config
from vla_rl.evaluation.signal import Calibration
from vla_rl.evaluation.statistics import Figure
from vla_rl.interfaces import Admission, TrustClip, TrustError, Verdict
from world_model.trust.config import MeasureConfig, Requirement, TrustConfig
from world_model.trust.figures import bound_as_text, figure_info, with_evidence
from world_model.trust.measures.metrics import Curve
from world_model.trust.measures.outcomes import PolicyRates

TRUST_FILE, PAGE_FILE = "trust.json", "trust.html"  # The page is the last file that measuring writes.
EVAL_COMMAND = "vla-rl world-model eval"


class Provenance(Config):
    """What was measured.

    Attributes:
        model: the world model's folder. model_key: its `metadata.content_key`; "" where unknown.
        datasets: of the held-out episodes. dataset_keys: their content keys.
        chunk_frames: frames of the policy's chunk, over which successes were verified.
        command: that made the report.
    """

    model: str = ""
    model_key: str = ""
    datasets: tuple[str, ...] = ()
    dataset_keys: tuple[str, ...] = ()
    chunk_frames: int = 1
    command: str = ""


class TrustReport(Saved):
    """How far a world model can be trusted.

    Attributes:
        figures: by name; see `figures.FIGURES` for what each one is.
        styles: style -> the same figures on episodes that look otherwise.
        curves: by frame: "latent_error", "latent_error_copy", "psnr", "psnr_copy", "psnr_reconstruction", "ssim",
            "real_success", "imagined_success", "outcome_agreement", "outcome_majority".
        calibrations: "imagined" and "real" (frames that the success head saw).
        policies: success of each policy, real and imagined.
        not_measured: figure -> why not.
    """

    WHAT = "trust report"
    ERROR = TrustError
    AGAIN = (
        f"Measure how far the world model can be trusted: `{EVAL_COMMAND}`; or set env.trust.ignore=true to train "
        "without knowing (the run's report will say so)."
    )
    created: str
    provenance: Provenance
    config: MeasureConfig
    frame_steps: int
    figures: dict[str, Figure]
    styles: dict[str, dict[str, Figure]] = Field(default={})
    curves: dict[str, Curve] = Field(default={})
    calibrations: dict[str, Calibration] = Field(default={})
    policies: tuple[PolicyRates, ...] = ()
    clips: tuple[TrustClip, ...] = ()
    not_measured: dict[str, str] = Field(default={})

    def figure(self, name: str) -> Figure | None:
        """A figure by its name, `styles/<style>/<figure>` included; None where it was not measured."""
        if name.startswith("styles/"):
            _, style, inner = name.split("/")
            return self.styles.get(style, {}).get(inner)
        return self.figures.get(name)

    @property
    def trust_horizon(self) -> int | None:
        """Control steps after which imagination should end, 0 where nothing holds; None: it was not measured."""
        measured = self.figure("trust_horizon")
        return None if measured is None else max(int(measured.value), 0)

    def check(self, require: Mapping[str, Requirement]) -> list[Verdict]:
        """Hold the report against requirements, one verdict for each, those that refuse first."""
        verdicts = [self._verdict(name, requirement) for name, requirement in require.items()]
        return sorted(verdicts, key=lambda v: (not v.refuses, v.passed))

    def _verdict(self, name: str, requirement: Requirement) -> Verdict:
        info, measured = figure_info(name), self.figure(name)
        number = requirement.judged(name, measured)
        passed = requirement.reached(number)
        refusing = ("refuse",) if measured is None else ("refuse", "refuse_if_measured")
        refuses = not passed and requirement.otherwise in refusing
        if measured is None:
            found = f"not measured ({self.not_measured.get(name, 'the report lacks it')})"
        elif math.isnan(number):
            found = f"no interval ({self.not_measured.get(name, 'it needs at least two initial states')})"
        else:
            found = with_evidence(measured, info.unit)
        consequence = "reached" if passed else "RL refuses" if refuses else "a warning"
        word, end, wanted = ("at most", "upper", requirement.at_most)
        if requirement.above is not None:
            word, end, wanted = ("above", "lower", requirement.above)
        part = f"the interval's {end} end" if requirement.limit == "interval" and info.interval else "it"
        text = f"{info.title}: {found}; {part} must be {word} {bound_as_text(wanted or 0.0, info.unit)}: {consequence}."
        return Verdict(
            figure=name, value=number, bound=requirement.bound_text(), passed=passed, refuses=refuses, text=text
        )


def admit(config: TrustConfig, default_path: Path, model_key: str = "") -> Admission:
    """Decide whether RL may start in a world model.

    Args:
        config: what is required.
        default_path: the report's place where `config.report` gives none.
        model_key: `metadata.content_key` of the folder that RL will run in; "" skips that check.

    Raises:
        TrustError: the report is missing, is about other weights, or fails a requirement, and is not to be ignored.
    """
    path = config.report or default_path
    verdicts: list[Verdict] = []
    problem, horizon = "", None
    try:
        report = TrustReport.load(path)
        if model_key and report.provenance.model_key != model_key:
            raise TrustError(
                f"{path} is about another world model (key {report.provenance.model_key or 'unknown'}, this one's is "
                f"{model_key}): it was fitted or changed since. Measure again: `{EVAL_COMMAND}`."
            )
        verdicts, horizon = report.check(config.require), report.trust_horizon
        if refusing := [v.text for v in verdicts if v.refuses]:
            raise TrustError(
                "the world model cannot be trusted enough for RL:\n"
                + "\n".join(f"  - {text}" for text in refusing)
                + f"\nReport: {path}. Fit it on more of the policy's own episodes (failures included), change "
                "env.trust.require, or set env.trust.ignore=true to train all the same (the run's report will say so)."
            )
    except TrustError as error:
        if not config.ignore:
            raise
        problem = str(error)
    warnings = tuple(v.text for v in verdicts if not v.passed and not v.refuses)
    return Admission(
        report=str(path),
        verdicts=tuple(verdicts),
        problem=problem,
        ignored=bool(problem),
        warnings=warnings,
        trust_horizon=horizon,
    )
