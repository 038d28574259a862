"""The failure detector: reset, update with each embedding, and an alarm when its score is too high; how it is fitted.

    detector = FailureDetector.load("runs/failure/detectors/safe_mlp", policy_hash)
    detector.reset("put the red block on the plate")
    score = detector.update(policy.embed(obs)[0].float().cpu().numpy())
    if score.alarm: ...

A detector belongs to one checkpoint of a policy: another one's embeddings mean something else, and so do its failures.
It needs numpy and safetensors (FLOAT also POT), not torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from real_robot.failure.conformal import MIN_SHAPE, Band, CalibrationError, FailureConfig, Shape, successes_needed
from real_robot.failure.float_ot import FloatOT
from real_robot.failure.learned_scorers import RND, SAFELSTM, SAFEMLP, LogpZO
from real_robot.failure.scorer import Scorer
from vla_rl.common.atomic import atomic_folder, write_text_atomic
from vla_rl.data.embeddings import EmbeddedEpisodes

CONFIG_FILE, TENSORS_FILE = "detector.json", "tensors.safetensors"
FORMAT = 1
DETECTORS, EPISODES_FILE = "detectors", "episodes.json"
MIN_SUCCESSES = 10  # To fit a score on.


class DetectorError(ValueError):
    """A detector that is missing, damaged or made for another policy; the message says what to do."""


@dataclass(frozen=True)
class Score:
    """What a detector says of an episode up to one chunk.

    Attributes:
        value, threshold: the score and what it may rise to at this chunk.
        alarm: value above threshold, or no trustworthy value at all (see `reason`).
        number: of the chunk in the episode, from 0.
        reason: why there is an alarm without a value; empty otherwise.
        center: of the band at this chunk: where successes are on average, 0 for a constant band.
    """

    value: float
    threshold: float
    alarm: bool
    number: int
    reason: str = ""
    center: float = 0.0

    def is_quiet(self, share: float) -> bool:
        """No alarm, and at most that share of the way from the band's center to the threshold."""
        return not self.alarm and self.value <= self.center + share * (self.threshold - self.center)


@dataclass(frozen=True)
class Identity:
    """What a detector was made for and from.

    Attributes:
        policy_hash, policy_name: of the policy's checkpoint.
        dim: D, size of its embeddings.
        every: control steps from one embedding to the next.
    """

    policy_hash: str
    policy_name: str
    dim: int
    every: int


def scorer_classes() -> dict[str, type[Scorer]]:
    """kind -> class, of every score there is."""
    return {scorer.kind: scorer for scorer in (FloatOT, RND, LogpZO, SAFEMLP, SAFELSTM)}


class FailureDetector:
    """A score and the band that it is held against. Not thread-safe; see `DetectorThread` for use beside a robot."""

    def __init__(self, scorer: Scorer, band: Band, identity: Identity) -> None:
        self.scorer, self.band, self.identity = scorer, band, identity
        self.reset("")

    @property
    def kind(self) -> str:
        """The score's name."""
        return self.scorer.kind

    @property
    def num_chunks(self) -> int:
        """Chunks of the present episode so far."""
        return len(self._embeddings)

    def reset(self, instruction: str) -> None:
        """A new episode begins."""
        self._instruction = instruction
        self._embeddings: list[np.ndarray] = []
        self.scorer.start()

    def update(self, embedding: np.ndarray, action_chunk: np.ndarray | None = None, number: int | None = None) -> Score:
        """The score after one more chunk.

        Args:
            embedding: float (D,), of the observation that the chunk was drawn from. NaN or infinity is an alarm.
            action_chunk: float32 (H, A), the chunk; no score here uses it.
            number: of the chunk in the episode, from 0; None: the next. Where some were left out, this embedding
                stands for them too, so that scores that add up stay in step with their threshold.

        Raises:
            ValueError: an embedding of another size, or a chunk that is already over.
        """
        embedding = np.asarray(embedding, np.float32)
        if embedding.shape != (self.identity.dim,):
            raise ValueError(
                f"embedding has shape {embedding.shape}, detector {self.kind!r} was fitted on ({self.identity.dim},) "
                f"of policy {self.identity.policy_name!r}"
            )
        following = len(self._embeddings)
        number = following if number is None else number
        if number < following:
            raise ValueError(f"chunk number {number} is over; the next is {following}. Call reset for a new episode")
        threshold = self.band.threshold(number, self._instruction)
        center = self.band.center(number, self._instruction)
        if not np.isfinite(embedding).all():
            return Score(math.inf, threshold, True, number, "the policy's embedding holds NaN or infinity", center)
        value = math.nan
        for _ in range(following, number + 1):
            value = self.scorer.step(embedding)
            self._embeddings.append(embedding)
        return Score(value, threshold, not value <= threshold, number, center=center)

    def rewind(self, num_chunks: int) -> Score | None:
        """Forget the last chunks, as when the robot goes back along its path; the score there, None at the start.

        Raises:
            ValueError: fewer chunks than that so far.
        """
        if not 0 <= num_chunks <= len(self._embeddings):
            raise ValueError(f"rewind by {num_chunks} chunks: the episode has {len(self._embeddings)} so far")
        kept = self._embeddings[: len(self._embeddings) - num_chunks]
        self.reset(self._instruction)
        score = None
        for embedding in kept:
            score = self.update(embedding)
        return score

    def save(self, folder: Path) -> None:
        """Write safetensors and JSON; the folder appears whole or not at all, and replaces one of the same name."""
        shapes = list(self.band.shapes.items())
        tensors = {f"scorer.{name}": array for name, array in self.scorer.tensors().items()}
        for number, (_, shape) in enumerate(shapes):
            tensors |= {f"band.{number}.center": shape.center, f"band.{number}.modulation": shape.modulation}
        config: dict[str, Any] = {
            "format": FORMAT,
            "kind": self.kind,
            "policy": {"hash": self.identity.policy_hash, "name": self.identity.policy_name},
            "dim": self.identity.dim,
            "every": self.identity.every,
            "options": self.scorer.options(),
            "band": {
                "q": self.band.q,
                "alpha": self.band.alpha,
                "num_successes": self.band.num_successes,
                "instructions": [name for name, _ in shapes],
            },
        }
        with atomic_folder(Path(folder), what="failure detector", replace=True) as partial:
            save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, partial / TENSORS_FILE)
            (partial / CONFIG_FILE).write_text(json.dumps(config, indent=1))

    @classmethod
    def load(cls, folder: Path | str, policy_hash: str) -> Self:
        """The detector in a folder, for the policy whose checkpoint has this hash.

        Raises:
            DetectorError: missing, damaged, or fitted for another checkpoint.
            ConfigError: it needs a package that is not installed.
        """
        folder = Path(folder)
        if several := sorted(str(path.parent) for path in folder.glob(f"detectors/*/{CONFIG_FILE}")):
            raise DetectorError(f"{folder} holds several detectors; choose one: {', '.join(several)}")
        try:
            config = json.loads((folder / CONFIG_FILE).read_text())
            tensors = load_file(folder / TENSORS_FILE)
            made_for = config["policy"]
            identity = Identity(made_for["hash"], made_for["name"], int(config["dim"]), int(config["every"]))
            values = config["band"]
            shapes = {
                name: Shape(tensors[f"band.{i}.center"], tensors[f"band.{i}.modulation"])
                for i, name in enumerate(values["instructions"])
            }
            band = Band(shapes, float(values["q"]), float(values["alpha"]), int(values["num_successes"]))
            own = {name.removeprefix("scorer."): array for name, array in tensors.items() if name.startswith("scorer.")}
            scorer = scorer_classes()[config["kind"]].restore(own, config["options"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DetectorError(
                f"{folder}: not a readable failure detector ({type(error).__name__}: {error}). `vla-rl failure fit` "
                "makes one; if this is such a folder, copy it again"
            ) from error
        if identity.policy_hash != policy_hash:
            raise DetectorError(
                f"{folder}: this detector was calibrated for policy {identity.policy_name!r} "
                f"({identity.policy_hash[:12]}), the policy now is {policy_hash[:12] or 'unknown'}. Its alarms would "
                "mean nothing: use that checkpoint, or fit a detector for this one (`vla-rl failure fit`)"
            )
        scorer.check_installed()
        return cls(scorer, band, identity)


def fit(
    config: FailureConfig,
    train: EmbeddedEpisodes,
    calibration: EmbeddedEpisodes,
    folder: Path,
    *,
    policy_name: str,
    seed: int = 0,
    show: Callable[[str], None] | None = None,
) -> list[Path]:
    """Write one detector for each of `config.detectors` into `folder`/detectors; returns their folders.

    Scores that learn from failures are left out, and said so, where fewer than `config.min_failures` are recorded.

    Raises:
        CalibrationError: too few successes for alpha, or from too few initial states; there is no detector then.
        ValueError: the two sets share initial states, or differ in the policy.
    """
    say = show or (lambda text: None)
    check_disjoint(train, calibration, "failure.fit_on", "failure.calibrate_on")
    EmbeddedEpisodes.concatenate([train.select(np.arange(1)), calibration.select(np.arange(1))])  # Of one policy.
    num_successes = int(train.success.sum())
    needed = successes_needed(config.alpha) + MIN_SHAPE
    successes = calibration.select(calibration.success)
    if num_successes < MIN_SUCCESSES or len(successes) < needed:
        raise CalibrationError(
            f"the policy succeeded in {num_successes} of {len(train)} episodes to fit on and {len(successes)} of "
            f"{len(calibration)} to calibrate on; a detector needs {MIN_SUCCESSES} and, for alpha={config.alpha:g}, "
            f"{needed}. Record more episodes, or accept more false alarms (failure.alpha); a policy that never "
            "succeeds has no detector."
        )
    num_states = len(set(successes.initial_states))
    if num_states < needed:
        raise CalibrationError(
            f"the {len(successes)} successes to calibrate on begin in {num_states} initial states; those of one state "
            f"go together, so that alpha={config.alpha:g} needs {needed} states. Record from more of them, or accept "
            "more false alarms (failure.alpha)"
        )
    for kind in config.detectors:
        scorer_classes()[kind].check_installed()
    identity = Identity(train.policy_hash, policy_name, train.dim, train.every)
    used = {"fit_on": sorted(set(train.initial_states)), "calibrate_on": sorted(set(calibration.initial_states))}
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / EPISODES_FILE, json.dumps(used, indent=1))
    written = []
    for number, kind in enumerate(config.detectors):
        scorer_class = scorer_classes()[kind]
        num_failures = len(train) - num_successes
        if scorer_class.needs_failures and num_failures < config.min_failures:
            say(f"{kind}: left out, it learns from failures; {num_failures} recorded, needs {config.min_failures}")
            continue
        scorer = scorer_class.fit(train, seed + number)
        curves, states = scorer.curves(successes), successes.initial_states
        shape = "constant" if scorer_class.needs_failures else config.band
        band = Band.fit(curves, successes.instructions, config.alpha, seed, kind=shape, states=states)
        target = folder / DETECTORS / kind
        FailureDetector(scorer, band, identity).save(target)
        written.append(target)
        seen, failures = _share_of_alarms(scorer, band, calibration), len(calibration) - len(successes)
        say(
            f"{kind}: fitted on {len(train)} episodes, threshold from {band.num_successes} successes"
            + (f"; alarms in {100 * seen:.0f} % of the {failures} failures to calibrate on" if failures else "")
        )
    if not written:
        raise CalibrationError("failure.detectors: none could be fitted; add one that learns from successes alone")
    return written


def _share_of_alarms(scorer: Scorer, band: Band, episodes: EmbeddedEpisodes) -> float:
    """Share of the failures that have an alarm: what an alpha costs, without looking at held-out episodes."""
    failures = episodes.select(~episodes.success)
    pairs = zip(scorer.curves(failures), failures.instructions, strict=True)
    alarms = [band.standing(curve, instruction).max() > band.q for curve, instruction in pairs]
    return float(np.mean(alarms)) if alarms else 0.0


def check_disjoint(a: EmbeddedEpisodes, b: EmbeddedEpisodes, name_a: str, name_b: str) -> None:
    """Raise ValueError if two sets hold episodes from the same initial state."""
    if shared := sorted(set(a.initial_states) & set(b.initial_states)):
        raise ValueError(
            f"{name_a} and {name_b} share {len(shared)} initial states, such as {shared[0]}; thresholds and figures "
            "would be too good. Give them other datasets, or another start_index or split"
        )
