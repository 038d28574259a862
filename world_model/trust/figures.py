"""Every trust figure by name: what it is, its unit, and how to read it in plain words, as the page shows it."""

from __future__ import annotations

import difflib
import math
from typing import Literal, NamedTuple

from vla_rl.evaluation.statistics import Figure

Unit = Literal["rate", "points", "gap", "dB", "times", "steps", "number", "mm"]


class FigureInfo(NamedTuple):
    """What a figure is.

    Attributes:
        group: part of the page. title: a few words. unit: see `as_text`.
        meaning: one or two plain sentences, how to read it included.
        interval: it comes with a 95 % interval.
    """

    group: str
    title: str
    unit: Unit
    meaning: str
    interval: bool = True


OUTCOMES, POLICIES, VIDEO, ACTIONS, HORIZON = (
    "Success and failure",
    "Several policies",
    "Images",
    "Following actions",
    "How far",
)
GROUPS = (OUTCOMES, HORIZON, ACTIONS, VIDEO, POLICIES)

MAX_AUC_FRAMES = 4  # Of `auc_after_N`.
MAX_OBJECT_FRAMES = 4  # Of `object_error_N`.

FIGURES: dict[str, FigureInfo] = {
    "agreement": FigureInfo(
        OUTCOMES,
        "Outcome agreement",
        "rate",
        "Share of episodes whose logged actions, imagined from the first frame on, end as they did in reality: success "
        "or failure.",
    ),
    "majority": FigureInfo(
        OUTCOMES,
        "Majority guess",
        "rate",
        "What always guessing the commoner outcome would get right. Agreement below it is worth nothing.",
    ),
    "agreement_over_majority": FigureInfo(
        OUTCOMES,
        "Agreement above the majority guess",
        "points",
        "Agreement minus the majority guess, on the same episodes. It depends on how often the policy succeeds.",
    ),
    "informedness": FigureInfo(
        OUTCOMES,
        "Successes told from failures",
        "points",
        "Recall minus false successes (informedness, Youden's J). 0 for any way of guessing, 100 for a perfect judge, "
        "however often the policy succeeds; agreement can lie below the majority guess where most episodes succeed.",
    ),
    "false_success": FigureInfo(
        OUTCOMES,
        "False successes",
        "rate",
        "Share of the episodes that really failed which the world model calls successes. RL learns to exploit these; "
        "look at the upper end of the interval.",
    ),
    "missed_success": FigureInfo(
        OUTCOMES,
        "Missed successes",
        "rate",
        "Share of the episodes that really succeeded which the world model calls failures. It slows learning, but "
        "misleads it less.",
    ),
    "precision": FigureInfo(
        OUTCOMES, "Precision", "rate", "Share of the imagined successes that really were successes."
    ),
    "recall": FigureInfo(
        OUTCOMES, "Recall", "rate", "Share of the real successes that were imagined as successes: 1 minus missed."
    ),
    "real_success": FigureInfo(OUTCOMES, "Real success", "rate", "Success rate of the logged episodes."),
    "imagined_success": FigureInfo(
        OUTCOMES, "Imagined success", "rate", "Success rate of the same actions in imagination."
    ),
    "imagined_minus_real": FigureInfo(
        OUTCOMES,
        "Imagined minus real success",
        "points",
        "Above zero the world model flatters. Rates can agree while every episode is wrong: read agreement first.",
    ),
    "acting_gap": FigureInfo(
        OUTCOMES,
        "Imagined minus real success, the policy acting",
        "points",
        "The policy that RL starts from acts in imagination, from where its held-out episodes began. Far above zero it "
        "is shown an easier world than the real one, and learns what does not carry over.",
    ),
    "acting_auc": FigureInfo(
        OUTCOMES,
        "Order of successes and failures, the policy acting (AUC)",
        "number",
        "The policy acts in imagination, and a simulator executes the same actions: of an episode that succeeds there "
        "and one that fails, how often is the first paid more? Logged actions follow what the policy saw, and so tell "
        "the outcome; these follow what was imagined.",
    ),
    "acting_order": FigureInfo(
        OUTCOMES,
        "Order within an initial state, the policy acting",
        "number",
        "Correlation of what imagination pays with what the same actions lead to in a simulator, among episodes of the "
        "same initial state: what GRPO learns from. 1 is as good as the truth, 0 is noise.",
    ),
    "auc": FigureInfo(
        OUTCOMES,
        "Order of successes and failures (AUC)",
        "number",
        "Of a success and a failure, how often has the success the higher probability in imagination (its highest of "
        "the episode)? 0.5 is guessing, 1 always. No threshold has a part in it.",
    ),
    "group_correlation": FigureInfo(
        OUTCOMES,
        "Order within an initial state, probability",
        "number",
        "Correlation of the imagined probability with the real outcome among episodes of the same initial state: what "
        "GRPO learns from when it is paid the probability. 1 is as good as the truth, 0 is noise.",
    ),
    "group_correlation_verdict": FigureInfo(
        OUTCOMES,
        "Order within an initial state, verdict",
        "number",
        "The same of the verdict by threshold: success or failure.",
    ),
    "outcome_flips": FigureInfo(
        OUTCOMES,
        "Outcomes that other noise flips",
        "rate",
        "Share of episodes that end otherwise when imagined again with other noise: outcomes the world model does not "
        "know.",
    ),
    "disagreement": FigureInfo(
        OUTCOMES,
        "Disagreement of futures",
        "number",
        "How far the futures of env.imagination.ensemble spread (standard deviation of the latents, whose variance is "
        "about 1).",
    ),
    "disagreement_auc": FigureInfo(
        OUTCOMES,
        "Disagreement where the verdict is wrong (AUC)",
        "number",
        "Of an episode whose outcome is imagined wrongly and one that is imagined rightly, how often do the futures of "
        "the first disagree more? 0.5: disagreement says nothing of where the world model errs.",
    ),
    "calibration_error": FigureInfo(
        OUTCOMES,
        "Calibration error",
        "gap",
        "How far probability and outcome lie apart on average (expected calibration error): an episode's highest "
        "probability in imagination, up to its logged end or env.imagination.horizon, against what really happened. 0 "
        "is perfect; with few episodes chance alone gives some.",
    ),
    "head_agreement": FigureInfo(
        OUTCOMES,
        "Agreement on real frames",
        "rate",
        "The success head's verdict on the real frames. Where it is much higher than the agreement in imagination, the "
        "imagined frames are at fault, else the head.",
    ),
    "head_false_success": FigureInfo(
        OUTCOMES,
        "False successes on real frames",
        "rate",
        "Share of really failed episodes that the success head calls successes when it sees their real frames.",
    ),
    "head_calibration_error": FigureInfo(
        OUTCOMES,
        "Calibration error on real frames",
        "gap",
        "The same when the success networks see the real frames.",
    ),
    "head_auc": FigureInfo(
        HORIZON,
        "AUC on real frames",
        "number",
        "Order of successes and failures where the success networks see the real frames: 0 frames imagined.",
    ),
    **{
        f"auc_after_{frames}": FigureInfo(
            HORIZON,
            f"AUC {frames} frame{'s' * (frames > 1)} after a real one",
            "number",
            "The same where each frame is imagined from the real frames up to so many before it: how far a branch from "
            "a real frame may imagine.",
        )
        for frames in range(1, MAX_AUC_FRAMES + 1)
    },
    "object_error_0": FigureInfo(
        HORIZON,
        "Object's place on the real first frame, error",
        "mm",
        "How far the probe reads the handled object's place off the real first frame, horizontally. Measured where the "
        "held-out episodes recorded poses and the world model has the objects part.",
    ),
    **{
        f"object_error_{frames}": FigureInfo(
            HORIZON,
            f"Object's place {frames} frame{'s' * (frames > 1)} later, error",
            "mm",
            "The same where the objects part has rolled it from there by the actions alone, of objects that have moved "
            "by more than 1 cm.",
        )
        for frames in range(1, MAX_OBJECT_FRAMES + 1)
    },
    **{
        f"picture_object_error_{frames}": FigureInfo(
            HORIZON,
            f"Object's place in the imagined picture {frames} frame{'s' * (frames > 1)} later, error",
            "mm",
            "The same read off the imagined picture by the probe: what contact has done to the pictures.",
        )
        for frames in range(1, MAX_OBJECT_FRAMES + 1)
    },
    "trust_horizon": FigureInfo(
        HORIZON,
        "Trust horizon",
        "steps",
        "Control steps up to which both the images and the outcomes below hold. Imagination should end there.",
        interval=False,
    ),
    "image_horizon": FigureInfo(
        HORIZON,
        "Images hold up to",
        "steps",
        "Up to here, at every frame, imagination is nearer to the real frame than repeating the first one would be.",
        interval=False,
    ),
    "outcome_horizon": FigureInfo(
        HORIZON,
        "Outcomes hold up to",
        "steps",
        "Up to here, at every frame, “has it succeeded by now?” tells successes from failures (or, while too few have "
        "succeeded or failed to tell, or where a later frame holds, is not clearly worse than a guess).",
        interval=False,
    ),
    "action_gain": FigureInfo(
        ACTIONS,
        "Action gain",
        "times",
        "Error of the imagined frames with another episode's actions, relative to the error with the true ones. 1: the "
        "actions make no difference, so RL has nothing to learn from.",
    ),
    "action_gain_zero": FigureInfo(
        ACTIONS, "Action gain, zero actions", "times", "The same with all actions set to zero."
    ),
    "action_gain_random": FigureInfo(
        ACTIONS,
        "Action gain, random actions",
        "times",
        "The same with actions drawn at random from all logged ones, step by step.",
    ),
    "action_response": FigureInfo(
        ACTIONS,
        "Response to other actions",
        "times",
        "How far the imagined frames move when the actions are swapped and the noise is kept, relative to the error "
        "with the true actions. 0: ignored.",
    ),
    "inverse_error_real": FigureInfo(
        ACTIONS,
        "Actions read off real frames, error",
        "number",
        "A small network guesses the mean action between two frames. Squared error on real frames it has not seen; 1 "
        "is guessing the mean.",
    ),
    "inverse_error_imagined": FigureInfo(
        ACTIONS,
        "Actions read off imagined frames, error",
        "number",
        "The same network's error on imagined frames, against the actions that were fed.",
    ),
    "inverse_error_ratio": FigureInfo(
        ACTIONS,
        "Imagined over real",
        "times",
        "The second divided by the first. Near 1: imagined motion shows the actions as clearly as real motion.",
    ),
    "spread": FigureInfo(
        VIDEO,
        "Spread of futures over their error",
        "times",
        "Distance (root mean square, of latents) of two futures of the same actions, divided by that of one from what "
        "happened. 1: futures scatter as much as they err, as draws of the truth would; well below 1 they lie near "
        "their mean, and what differs between episodes that begin alike is imagined away.",
    ),
    "skill": FigureInfo(
        VIDEO,
        "Skill over copying",
        "number",
        "Share of the error (of latents) of repeating the first frame that imagination removes. 1 is perfect, 0 no "
        "better than a still image, below 0 worse.",
    ),
    "latent_error": FigureInfo(
        VIDEO,
        "Latent error",
        "number",
        "Mean squared error of the imagined latents; their variance is about 1. What the policy's world is made of.",
    ),
    "state_error": FigureInfo(
        VIDEO, "State error", "number", "Mean squared error of the normalized proprioception; its variance is about 1."
    ),
    "psnr": FigureInfo(VIDEO, "PSNR", "dB", "Pixel likeness of imagined and real images; 20 is rough, 30 is good."),
    "psnr_reconstruction": FigureInfo(
        VIDEO,
        "PSNR of the autoencoder",
        "dB",
        "Real images encoded and decoded: the best that imagination could reach.",
    ),
    "psnr_copy": FigureInfo(
        VIDEO, "PSNR of copying", "dB", "The first frame, encoded and decoded, held still: what imagination must beat."
    ),
    "ssim": FigureInfo(
        VIDEO, "SSIM", "number", "Likeness of local structure, 1 is equal. Blur lowers it more than PSNR."
    ),
    "lpips": FigureInfo(
        VIDEO,
        "LPIPS",
        "number",
        "Distance of images in a network's features (AlexNet), nearer to how people judge; 0 is equal.",
    ),
    "fvd": FigureInfo(
        VIDEO,
        "Fréchet video distance",
        "number",
        "Distance between imagined and real videos as two crowds, in features of R3D-18; 0 is equal. Not comparable "
        "with papers' I3D numbers, nor between numbers of episodes.",
        interval=False,
    ),
    "pearson": FigureInfo(
        POLICIES,
        "Pearson correlation",
        "number",
        "Of real with imagined success rate over the policies. Near 1: what is better in imagination is better in "
        "reality, in proportion.",
    ),
    "spearman": FigureInfo(
        POLICIES,
        "Spearman rank correlation",
        "number",
        "Of the order of the policies in reality with that in imagination. 1: the same order; 0: none.",
    ),
    "mmrv": FigureInfo(
        POLICIES,
        "Mean maximum rank violation",
        "gap",
        "For each policy, the largest real gap to another one that imagination puts in the wrong order; averaged. 0: "
        "no pair is swapped.",
    ),
    "policy_agreement": FigureInfo(
        POLICIES,
        "Agreement, policies acting",
        "rate",
        "Share of initial states from which a policy, acting in each of the two, ends the same way, over all policies.",
    ),
    "policy_gap": FigureInfo(
        POLICIES,
        "Imagined minus real, policies acting",
        "points",
        "Success in imagination minus success in reality, over all policies.",
    ),
}


def figure_info(name: str) -> FigureInfo:
    """What the figure `name` is; for `styles/<style>/<figure>` the figure's.

    Raises:
        ValueError: there is no such figure; the message gives the nearest name.
    """
    parts = name.split("/")
    known = parts[-1] if len(parts) == 3 and parts[0] == "styles" else name
    if known in FIGURES:
        return FIGURES[known]
    nearest = difflib.get_close_matches(known, FIGURES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(
        f"no trust figure is called {name!r}.{hint} Allowed: {', '.join(sorted(FIGURES))}; "
        "for another style: styles/<style>/<figure>"
    )


# How a unit is shown: what the number is multiplied with, its format, and what follows it.
_SHOWN: dict[Unit, tuple[float, str, str]] = {
    "rate": (100, ".1f", " %"),
    "points": (100, "+.1f", " points"),
    "gap": (100, ".1f", " points"),
    "dB": (1, ".1f", " dB"),
    "times": (1, ".2f", " ×"),
    "steps": (1, ".0f", " steps"),
    "number": (1, ".3f", ""),
    "mm": (1000, ".1f", " mm"),
}


def as_text(value: float, unit: Unit) -> str:
    """A figure's value for people: "12.3 %", "+4.5 points", "24.1 dB", "1.80 ×", "48 steps", "0.930"."""
    return f"{_number(value, unit)}{_SHOWN[unit][2]}" if not math.isnan(value) else "–"


def bound_as_text(bound: float, unit: Unit) -> str:
    """A bound for people, with no more digits than it needs: "10 %", "0 points", "1.2 ×"."""
    scale, _, suffix = _SHOWN[unit]
    return f"{scale * bound:g}{suffix}".replace("-", "−")


def evidence(measured: Figure, unit: Unit) -> str:
    """Interval and n for people: "[8.1, 18.0], n = 120 failed episodes"."""
    count = f"n = {measured.n} {measured.of}"
    if math.isnan(measured.low) or math.isnan(measured.high):
        return count
    return f"[{_number(measured.low, unit)}, {_number(measured.high, unit)}], {count}"


def with_evidence(measured: Figure, unit: Unit) -> str:
    """Value, interval and n for people: "12.3 % [8.1, 18.0], n = 120 failed episodes"."""
    text = evidence(measured, unit)
    return f"{as_text(measured.value, unit)}{' ' if text.startswith('[') else ', '}{text}"


def _number(value: float, unit: Unit) -> str:
    scale, form, _ = _SHOWN[unit]
    if unit == "times" and value >= 1000:
        return "over 1000"
    return format(scale * value, form).replace("-", "−")
